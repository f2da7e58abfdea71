"""Backward of activation_forward.py: a kernel over row blocks for dq, then one over key blocks for dk and dv."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.activations import activate, row_numbers, slope_of
from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    HIDDEN,
    dot,
    head_and_block,
    keep_visible,
    load_tile,
    not_finite,
    power,
    rows_of_keys,
    saturate,
    store_tile,
    visible_keys,
    without_broken_rows,
)


@triton.jit
def _load_row_numbers(at, row_plane, inside, ACTIVATION: tl.constexpr, REWEIGHT: tl.constexpr):
    """inverse, shift, slope, intercept [M, 1], zeros for rows past the last; those not needed are copies of inverse."""
    row_plane = tl.cast(row_plane, tl.int64)
    inverse = tl.load(at, mask=inside, other=0.0)
    shift, slope, intercept = inverse, inverse, inverse
    if ACTIVATION == "exp":
        shift = tl.load(at + row_plane, mask=inside, other=0.0)
    if REWEIGHT:
        slope = tl.load(at + 2 * row_plane, mask=inside, other=0.0)
        intercept = tl.load(at + 3 * row_plane, mask=inside, other=0.0)
    return inverse[:, None], shift[:, None], slope[:, None], intercept[:, None]


@triton.jit
def _inverse_of_gradients(inverse, row_start, row_stop, DIVISOR: tl.constexpr):
    """inverse, but 0 for rows with one key under l1: the weight is 1 or -1 whatever the score. Its computed gradient
    would be the rounding error of a difference of equal sums, divided by an activation that may be tiny."""
    return tl.where(row_stop - row_start > 1, inverse, 0.0) if DIVISOR == "l1" else inverse


@triton.jit
def _sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))


@triton.jit
def _terms(
    qk, dp, factor, bias, inverse, shift, slope, intercept, delta, row_start, row_stop, keys, masked,
    P, ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, REWEIGHT: tl.constexpr,
):  # fmt: skip
    """From products q.k and dO.v [M, N], row numbers [M, 1]: weights; g; phi'; sign(a).

    Without re-weighting g phi' are the gradients of scores. With it they are kappa (g - mean sign(a)) phi', where mean
    is the sum of g over n_i (0 in the first rows) and kappa = P slope inverse (of gradients): see docs/derivations.md.
    """
    s = qk * factor + bias
    if ACTIVATION == "exp":  # noqa: SIM102 (the outer one is decided when compiling)
        if masked:  # exp(s - shift) of a hidden key may overflow
            s = tl.where((keys >= row_start) & (keys < row_stop), s, HIDDEN)
    a = activate(s, shift, ACTIVATION)
    phi = slope_of(s, a, ACTIVATION)
    sign = _sign(a)
    if REWEIGHT:
        z = tl.maximum(a * slope + intercept, 0.0)
        y = power(z, P - 1)
        weight = y * z * inverse
        g = (dp - delta) * y
    else:
        weight = a * inverse
        moving = _inverse_of_gradients(inverse, row_start, row_stop, DIVISOR)
        g = dp * moving
        if DIVISOR == "l1":
            g -= tl.abs(moving) * delta * sign
    if masked:
        seen = (keys >= row_start) & (keys < row_stop)
        weight, g, phi = tl.where(seen, weight, 0.0), tl.where(seen, g, 0.0), tl.where(seen, phi, 0.0)
    return weight, g, phi, sign


@triton.jit
def _query_sums(
    q, do, k_ptr, k_stride, v_ptr, v_stride, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, factor, bias,
    inverse, shift, slope, intercept, delta, columns, P, REWEIGHT: tl.constexpr, ACTIVATION: tl.constexpr,
    DIVISOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum of g phi' k [M, D]; of sign(a) phi' k, which the mean of g multiplies later; of g [M].

    CAREFUL: without keys that are not finite. Rows that see those are NaN by their delta.
    """
    offsets = tl.arange(0, N)
    dq = tl.zeros([M, BLOCK_D], tl.float32)
    sign_k = tl.zeros([M, BLOCK_D], tl.float32)
    g_sum = tl.zeros([M], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, True)  # [N, D]
        if CAREFUL:
            k, _ = without_broken_rows(k)
        qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        _, g, phi, sign = _terms(
            qk, dp, factor[:, None], bias[:, None], inverse, shift, slope, intercept, delta[:, None],
            row_start[:, None], row_stop[:, None], (start + offsets)[None, :], masked, P, ACTIVATION, DIVISOR, REWEIGHT,
        )  # fmt: skip
        dq = dot(saturate(g * phi, k.dtype), k, dq, PRECISION=DOT)
        if REWEIGHT:
            sign_k = dot(saturate(sign * phi, k.dtype), k, sign_k, PRECISION=DOT)
            g_sum += tl.sum(g, 1)
    return dq, sign_k, g_sum


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, rows_ptr, delta_ptr, mean_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h

    row_offsets = tl.arange(0, BLOCK_M)
    rows = first_row + row_offsets
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    factor, bias = row_numbers(n, SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    at = head.to(tl.int64) * Lq + rows
    inverse, shift, slope, intercept = _load_row_numbers(rows_ptr + at, row_plane, rows < Lq, ACTIVATION, REWEIGHT)
    delta = tl.load(delta_ptr + at, mask=rows < Lq, other=0.0)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
    lo, hi = tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop)
    dq, sign_k, g_sum = _query_sums(
        q, do, k_ptr, k_stride_l, v_ptr, v_stride_l, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, factor,
        bias, inverse, shift, slope, intercept, delta, columns, P if P > 0 else exponent,
        REWEIGHT, ACTIVATION, DIVISOR, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT, STAGES, False,
    )  # fmt: skip
    if tl.max(tl.max(not_finite(dq + sign_k).to(tl.int32), 1), 0) > 0:
        dq, sign_k, g_sum = _query_sums(
            q, do, k_ptr, k_stride_l, v_ptr, v_stride_l, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop,
            factor, bias, inverse, shift, slope, intercept, delta, columns, P if P > 0 else exponent,
            REWEIGHT, ACTIVATION, DIVISOR, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT, 1, True,
        )  # fmt: skip
    if REWEIGHT:
        mean = tl.where(n > FIRST_ROWS, g_sum / tl.maximum(n, 1.0), 0.0)
        moving = _inverse_of_gradients(inverse, row_start[:, None], row_stop[:, None], DIVISOR)
        dq = (dq - sign_k * mean[:, None]) * ((P if P > 0 else exponent) * slope * moving)
        tl.store(mean_ptr + at, mean, mask=rows < Lq)
    store_tile(dq_ptr, dq * factor[:, None], first_row, Lq, dq_stride_l, row_offsets, columns, D)


@triton.jit
def _key_sums(
    k, v, q_ptr, q_stride_h, q_stride_l, do_ptr, do_stride_h, do_stride_l, rows_ptr, delta_ptr, mean_ptr, row_plane,
    first_row_head, first_head, group, lo, hi, full_lo, full_hi, keys, key_stop, Lq, Lk, window, doc_start_ptr,
    doc_stop_ptr, columns, P, REWEIGHT: tl.constexpr, ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr,
    SCALE: tl.constexpr, LOG_N: tl.constexpr, BIAS: tl.constexpr, LOG_LENGTH: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """dk and dv [N, D] over rows lo..hi of a group's heads. CAREFUL: without queries and dO that are not finite."""
    offsets = tl.arange(0, M)
    dk = tl.zeros([N, BLOCK_D], tl.float32)
    dv = tl.zeros([N, BLOCK_D], tl.float32)
    for member in range(group):
        q_head = q_ptr + (first_head + member) * q_stride_h
        do_head = do_ptr + (first_head + member) * do_stride_h
        row_at = (first_row_head + member) * Lq
        for start in tl.range(lo, hi, M, num_stages=STAGES):
            rows = start + offsets
            inside = rows < Lq
            q = load_tile(q_head, start, Lq, q_stride_l, offsets, columns, D, True)  # [M, D]
            do = load_tile(do_head, start, Lq, do_stride_l, offsets, columns, D, True)  # [M, D]
            if CAREFUL:
                q, _ = without_broken_rows(q)
                do, _ = without_broken_rows(do)
            inverse, shift, slope, intercept = _load_row_numbers(
                rows_ptr + row_at + rows, row_plane, inside, ACTIVATION, REWEIGHT
            )  # rows past the last have no weight
            delta = tl.load(delta_ptr + row_at + rows, mask=inside, other=0.0)
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )  # [M]
            factor, bias = row_numbers((row_stop - row_start).to(tl.float32), SCALE, LOG_N, BIAS, LOG_LENGTH)
            qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
            masked = (start < full_lo) | (start + M > full_hi)
            weight, g, phi, sign = _terms(
                qk, dp, factor[:, None], bias[:, None], inverse, shift, slope, intercept, delta[:, None],
                row_start[:, None], row_stop[:, None], keys, masked, P, ACTIVATION, DIVISOR, REWEIGHT,
            )  # fmt: skip
            if REWEIGHT:
                mean = tl.load(mean_ptr + row_at + rows, mask=inside, other=0.0)
                moving = _inverse_of_gradients(inverse, row_start[:, None], row_stop[:, None], DIVISOR)
                g = (g - mean[:, None] * sign) * (P * slope * moving)
            ds = g * phi
            if masked:  # the row may not be finite
                ds = keep_visible(ds, keys, row_start[:, None], row_stop[:, None], 0.0)
            dv = dot(tl.trans(saturate(weight, do.dtype)), do, dv, PRECISION=DOT)
            dk = dot(tl.trans(saturate(ds * factor[:, None], q.dtype)), q, dk, PRECISION=DOT)
    return dk, dv


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, rows_ptr, delta_ptr, mean_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them."""
    blocks = tl.cdiv(Lk, BLOCK_N)
    head_kv, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lq // (Hq // Hkv))
    first_key = block * BLOCK_N
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(tl.int64), h_kv.to(tl.int64)
    k_ptr += b64 * k_stride_b + h64 * k_stride_h
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h

    key_offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    k = load_tile(k_ptr, first_key, key_stop, k_stride_l, key_offsets, columns, D, True)  # [N, D]
    v = load_tile(v_ptr, first_key, key_stop, v_stride_l, key_offsets, columns, D, True)  # [N, D]
    keys = (first_key + key_offsets)[None, :]
    q_ptr, do_ptr = q_ptr + b64 * q_stride_b, do_ptr + b64 * do_stride_b
    dk, dv = _key_sums(
        k, v, q_ptr, q_stride_h, q_stride_l, do_ptr, do_stride_h, do_stride_l, rows_ptr, delta_ptr, mean_ptr, row_plane,
        b64 * Hq + h64 * group, h64 * group, group, row_lo // BLOCK_M * BLOCK_M, row_hi, full_lo, full_hi, keys,
        key_stop, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, columns, P if P > 0 else exponent,
        REWEIGHT, ACTIVATION, DIVISOR, SCALE, LOG_N, BIAS, LOG_LENGTH, CAUSAL, WINDOWED, PACKED,
        D, BLOCK_D, BLOCK_M, BLOCK_N, DOT, STAGES, False,
    )  # fmt: skip
    if tl.max(tl.max((not_finite(dk) | not_finite(dv)).to(tl.int32), 1), 0) > 0:
        dk, dv = _key_sums(
            k, v, q_ptr, q_stride_h, q_stride_l, do_ptr, do_stride_h, do_stride_l, rows_ptr, delta_ptr, mean_ptr,
            row_plane, b64 * Hq + h64 * group, h64 * group, group, row_lo // BLOCK_M * BLOCK_M, row_hi, full_lo,
            full_hi, keys, key_stop, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, columns, P if P > 0 else exponent,
            REWEIGHT, ACTIVATION, DIVISOR, SCALE, LOG_N, BIAS, LOG_LENGTH, CAUSAL, WINDOWED, PACKED,
            D, BLOCK_D, BLOCK_M, BLOCK_N, DOT, 1, True,
        )  # fmt: skip
    store_tile(dk_ptr, dk, first_key, Lk, dk_stride_l, key_offsets, columns, D)
    store_tile(dv_ptr, dv, first_key, Lk, dv_stride_l, key_offsets, columns, D)
