"""dq of short windows (see window.py), and what the dk, dv kernel needs of each row: this kernel runs first."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    LN2,
    LOG2E,
    USE_PTX,
    dot,
    ex2,
    keys_of_rows,
    lane_sum,
    load_tile,
    not_finite,
    saturate,
    visible_keys,
)
from lssar.ops.fused.window import (
    EXP,
    FAR,
    REWEIGHTED,
    head_source,
    key_tile,
    near_one,
    read_head,
    scale_near_one,
    score_factor,
    steep_rows,
    weight_power,
)
from lssar.ops.fused.window_gradients import (
    GAIN_PLANE,
    STEEP_PLANE,
    finite_entries,
    hide_both,
    orthogonal_part,
    program_numbers,
    rest_of_norm,
    root_and_twice_sigma,
    store_gradient,
)


@triton.jit
def saved_numbers(at, row_plane, inside, KIND: tl.constexpr, COSINE: tl.constexpr):
    """Three numbers a row of the forward, [M]: shift, log2 Z and 0 for EXP, else slope, intercept and Z. Rows past the
    last have no weight."""
    if KIND == EXP:
        first = tl.load(at, mask=inside, other=FAR)
        second = first * 0.0
        if not COSINE:
            second = tl.load(at + row_plane, mask=inside, other=FAR)
        return first, second, first * 0.0
    else:
        first = tl.load(at, mask=inside, other=0.0)
        second = tl.load(at + row_plane, mask=inside, other=0.0)
        return first, second, tl.load(at + 2 * row_plane, mask=inside, other=0.0)


@triton.jit
def _exp_weight(x, key_scale, row_factor, shift, log_z, COSINE: tl.constexpr):
    """Normalised weights of EXP; arguments are broadcast against x."""
    if COSINE:
        return ex2(x * row_factor * key_scale - shift)
    else:
        return ex2(tl.minimum((x - shift) * row_factor - log_z, 0.0))


@triton.jit
def _awaited(product):
    """product, awaited here. Left to run on into the next step of the loop, it makes the ptxas of Triton 3.6 serialise
    all wgmma of the kernel (C7515) at head size 64."""
    if USE_PTX:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [product], tl.float32, True, 1)
    else:
        return product


@triton.jit
def query_terms(
    x, dp, key_scale, row_factor, first, second, delta, steep, p, keys, row_start, row_stop, masked,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Of a tile, g and 2 sigma, [M, N], with cosine times key_scale: for EXP the former is the gradient of scores (and
    the latter too), else their product is. All arguments are broadcast."""
    if KIND == EXP:
        g = dp - delta
        g *= _exp_weight(x, key_scale, row_factor, first, second, COSINE)
        if masked:  # values of hidden keys may be anything
            g = tl.where((keys >= row_start) & (keys < row_stop), g, 0.0)
        if COSINE:
            g *= key_scale
        return g, g
    else:
        x = x * key_scale * row_factor
        root, sigma = root_and_twice_sigma(x, key_scale, first, second, steep, LOG_DEGREE, STEEP)
        g = dp - delta
        if KIND == REWEIGHTED:
            g *= weight_power(root, p, P, 1)
        return hide_both(g, sigma, keys, row_start, row_stop, masked)


@triton.jit
def _query_sums(
    q, do, k_source, v_source, key_scale_ptr, k_stride, v_stride, lo, hi, full_lo, full_hi, row_start, row_stop,
    key_stop, row_factor, first, second, delta, steep, p, columns,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, STEEP: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum of ds k (for EXP) or of 2 g sigma k, sum of 2 sigma k, both [M, D], sum of g [M].

    AGAIN: entries of k that are not finite count as 0, since rows that do not see them multiply them by 0.
    """
    offsets = tl.arange(0, N)
    gk = tl.zeros([M, BLOCK_D], tl.float32)
    sk = gk
    g_sum = tl.zeros([M, 4], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k, key_scale = key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, TMA)
        v = read_head(v_source, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        dp = dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        keys = (start + offsets)[None, :]
        operand = finite_entries(k) if AGAIN else k
        if WIDE:
            operand = operand.to(tl.float32)
        g, sigma = query_terms(
            x, dp, key_scale[None, :], row_factor[:, None], first[:, None], second[:, None], delta[:, None], steep, p,
            keys, row_start[:, None], row_stop[:, None], masked, KIND, P, COSINE, LOG_DEGREE, STEEP,
        )  # fmt: skip
        if KIND == EXP:
            gk = dot(g.to(operand.dtype), operand, gk, PRECISION=DOT)
            if BLOCK_D <= 64:
                gk = _awaited(gk)
        else:
            gk = dot((g * sigma).to(operand.dtype), operand, gk, PRECISION=DOT)
            if KIND == REWEIGHTED:
                g_sum += lane_sum(g, M, N)
                sk = dot(sigma.to(operand.dtype), operand, sk, PRECISION=DOT)
    return gk, sk, tl.sum(g_sum, 1)


@triton.jit
def _store_three(ptr, row_plane, inside, first, second, third):
    tl.store(ptr, first, mask=inside)
    tl.store(ptr + row_plane, second, mask=inside)
    tl.store(ptr + 2 * row_plane, third, mask=inside)


@triton.jit
def _store_line(
    to_keys_ptr, row_plane, inside, slope, intercept, z, inverse, to_score, delta, mean, p,
    KIND: tl.constexpr, LOG_DEGREE: tl.constexpr,
):  # fmt: skip
    """Of rows of SOFTPLUS and REWEIGHTED: slope and intercept of weights, what makes products scores, delta, the mean's
    part of the gradient of scores, and 1 / Z.

    For half types slope and intercept contain the 1 / Z: float32 would lose by it in rows whose spread is small.
    """
    if KIND == REWEIGHTED:
        if LOG_DEGREE != 0:
            root = tl.where(z > 0, tl.exp2(-tl.log2(tl.where(z > 0, z, 1.0)) / p), 0.0)  # Z^(-1/p)
            slope, intercept, inverse = slope * root, intercept * root, inverse * 0.0 + 1.0
        tl.store(to_keys_ptr + 3 * row_plane, intercept, mask=inside)
        tl.store(to_keys_ptr + 4 * row_plane, mean, mask=inside)
        tl.store(to_keys_ptr + 5 * row_plane, inverse, mask=inside)
    else:
        slope = slope * inverse
    _store_three(to_keys_ptr, row_plane, inside, slope, to_score, delta)


@triton.jit
def store_for_keys(
    ptr, row_plane, inside, first, second, z, raw_factor, up, delta, g_sum, n, steep, p,
    KIND: tl.constexpr, COSINE: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Stores what key_terms takes of rows; returns the mean of g and what the sums of a row are multiplied by, [M]."""
    if KIND == EXP:
        if COSINE:
            _store_three(ptr, row_plane, inside, first, raw_factor, delta * raw_factor)
        else:
            shift = tl.minimum(tl.maximum(first * up, -FAR), FAR)
            _store_three(ptr, row_plane, inside, shift, second, delta)
        return g_sum, g_sum
    else:
        mean = tl.where(n > FIRST_ROWS, g_sum / tl.maximum(n, 1.0), 0.0)
        inverse = tl.where(z > 0, 1.0 / tl.where(z > 0, z, 1.0), 0.0)
        power_factor = p if KIND == REWEIGHTED else 1.0
        half = LOG2E * power_factor * first * inverse
        kappa = 2.0 * half
        _store_line(
            ptr, row_plane, inside, first, second, z, inverse, raw_factor, delta,
            saturate(mean * kappa * LN2, tl.float32), p,
            KIND, LOG_DEGREE,
        )  # fmt: skip
        if STEEP:
            tl.store(ptr + STEEP_PLANE * row_plane, tl.where(steep, 1.0, 0.0), mask=inside)
        return mean, half


@triton.jit
def query_block(
    block, h, b, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p,
    row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, k_tiles, v_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes dq of a block of rows and what the dk, dv kernel needs of them; returns whether dq is not finite.

    AGAIN: the same for a block that was not finite. Entries of k that are not finite count as 0. dq is NaN in rows
    whose delta is not finite: these are all that see an infinity or NaN, since o is NaN there, or have one in dO.
    """
    PRECISE: tl.constexpr = LOG_DEGREE == 0
    first_row, h_kv = block * BLOCK_M, h // GROUP
    k_source = head_source(k_ptr + b.to(tl.int64) * k_stride_b + h_kv.to(tl.int64) * k_stride_h, k_tiles, b, h_kv, TMA)
    v_source = head_source(v_ptr + b.to(tl.int64) * v_stride_b + h_kv.to(tl.int64) * v_stride_h, v_tiles, b, h_kv, TMA)
    b, h, h_kv = b.to(tl.int64), h.to(tl.int64), h_kv.to(tl.int64)
    q_ptr += b * q_stride_b + h * q_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h
    key_scale_ptr += (b * Hkv + h_kv) * Lk

    row_offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    rows = first_row + row_offsets
    q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
    o = load_tile(o_ptr, first_row, Lq, o_stride_l, row_offsets, columns, D, True)  # [M, D]
    at = (b * Hq + h) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    first, second, z = saved_numbers(rows_ptr + at, row_plane, rows < Lq, KIND, COSINE)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    lo, hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED, BLOCK_M, 1
    )
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # [M]
    gain = tl.load(gain_ptr + h).to(tl.float32) if GAIN else 1.0
    factor = score_factor(n, gain, SCALE, LOG_N, PRECISE)
    if COSINE:
        inverse_norm = tl.load(rows_ptr + at + (1 if KIND == EXP else 3) * row_plane, mask=rows < Lq, other=0.0)
        down = scale_near_one(inverse_norm, SMALL)
        q = q_raw.to(tl.float32) * down[:, None]
        raw_factor = tl.minimum(tl.maximum(factor * LOG2E * inverse_norm, -FAR), FAR)  # for products with q as it is
        row_factor = factor * LOG2E * rest_of_norm(inverse_norm, SMALL)
        up = down
    else:
        q, down, up = near_one(q_raw.to(tl.float32), SMALL, False)
        row_factor = tl.minimum(tl.maximum(factor * LOG2E * up, 1.0 / FAR), FAR)
        raw_factor, inverse_norm = factor, factor
    inside = rows < Lq
    SHORT: tl.constexpr = STEEP and not AGAIN
    steep, line_slope, line_intercept, row_factor = steep_rows(first, second, row_factor, inside, p, P, SHORT)
    gk, sk, g_sum = _query_sums(
        q.to(q_raw.dtype), do, k_source, v_source, key_scale_ptr, k_stride_l, v_stride_l, lo // BLOCK_N * BLOCK_N, hi,
        full_lo, full_hi, row_start, row_stop, key_stop, row_factor, line_slope, line_intercept, delta, steep, p,
        columns,
        KIND, P, COSINE, D, BLOCK_D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, WIDE, STAGES, TMA, SHORT, AGAIN,
    )  # fmt: skip

    mean, half = store_for_keys(
        to_keys_ptr + at, row_plane, inside, first, second, z, raw_factor, up, delta, g_sum, n, steep, p,
        KIND, COSINE, LOG_DEGREE, STEEP,
    )  # fmt: skip
    if KIND == EXP:
        grad = gk
    else:
        grad = (gk - sk * mean[:, None]) * half[:, None] if KIND == REWEIGHTED else gk * half[:, None]
    if COSINE:
        q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True, True).to(tl.float32)
        grad, along = orthogonal_part(grad, q_raw * inverse_norm[:, None], inverse_norm * factor)
        if GAIN:
            along *= score_factor(n, 1.0, SCALE, LOG_N, PRECISE)
            tl.store(to_keys_ptr + at + GAIN_PLANE * row_plane, along, mask=inside)
    else:
        grad = grad * factor[:, None]
    if AGAIN:
        grad = tl.where(not_finite(delta)[:, None], float("nan"), grad)
    store_gradient(dq_ptr, grad, first_row, Lq, dq_stride_l, row_offsets, columns, D)
    return not_finite(tl.sum(along) if COSINE else tl.sum(grad))


@triton.jit(do_not_specialize=["Lq", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    o_stride_b, o_stride_h, do_stride_b, do_stride_h, dq_stride_b, dq_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, k_tiles, v_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    O_STEP: tl.constexpr, DO_STEP: tl.constexpr, DQ_STEP: tl.constexpr,
):  # fmt: skip
    """dq, and what the dk, dv kernel needs of each row. WIDE: ds and k are multiplied as float32, not in k's dtype.
    k_tiles, v_tiles: descriptors, with TMA.
    STEEP: blocks of steep rows take the short forms, and the dk, dv kernel is told which these are.

    Q_STEP and so on: strides of rows and keys. As constants they save the registers that hold addresses."""
    broken = True
    for AGAIN in tl.static_range(2):
        if broken:
            block, h, b = program_numbers(AGAIN)
            broken = query_block(
                block, h, b, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr,
                gain_ptr, p, row_plane, q_stride_b, q_stride_h, Q_STEP, k_stride_b, k_stride_h, K_STEP, v_stride_b,
                v_stride_h, V_STEP, o_stride_b, o_stride_h, O_STEP, do_stride_b, do_stride_h, DO_STEP,
                dq_stride_b, dq_stride_h, DQ_STEP, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr,
                doc_stop_ptr, k_tiles, v_tiles,
                KIND, P, COSINE, LOG_N, GAIN, SCALE, SMALL, GROUP, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                LOG_DEGREE, DOT, WIDE, STEEP, BLOCK_M, 16 if AGAIN and COSINE else BLOCK_N, 1 if AGAIN else STAGES,
                TMA and not AGAIN, AGAIN,
            )  # fmt: skip
