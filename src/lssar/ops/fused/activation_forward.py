"""Forward of any activation phi under l1 or a fixed divisor, and of its re-weighting.

That is every mechanism except re-centring. Without re-weighting one pass over the keys is enough: the output is divided
by the l1 sum at the end, as in softmax, and for exp without l1 it is multiplied by the exponential of the shift. With
re-weighting a first pass gives each row's sum and largest activation, and weights are max(slope a + intercept, 0)^P, as
in forward.py. P is a constant if it is an integer, else 0, and `exponent` holds the power.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.activations import activate, fixed_divisor, row_numbers, weight_line
from lssar.ops.fused.primitives import (
    HIDDEN,
    dot,
    head_and_block,
    keep_visible,
    load_tile,
    not_finite,
    power,
    saturate,
    store_tile,
    visible_keys,
    without_broken_rows,
)


@triton.jit
def _row_statistics(
    q, k_ptr, k_stride, lo, hi, row_start, row_stop, key_stop, factor, bias, columns,
    ACTIVATION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum |a|, largest a, largest s, all [M]; a = exp(s - largest s) for exp."""
    offsets = tl.arange(0, N)
    total = tl.zeros([M], tl.float32)
    a_max = tl.full([M], HIDDEN, tl.float32)
    s_max = tl.full([M], HIDDEN, tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride, offsets, columns, D, True)  # [N, D]
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        keys = (start + offsets)[None, :]
        seen = (keys >= row_start[:, None]) & (keys < row_stop[:, None])
        higher = tl.maximum(s_max, tl.max(tl.where(seen, s, HIDDEN), 1))
        a = tl.where(seen, activate(s, higher[:, None], ACTIVATION), 0.0)
        if ACTIVATION == "exp":
            total *= tl.exp(s_max - higher)
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(tl.where(seen, a, HIDDEN), 1))
        s_max = higher
    if ACTIVATION == "exp":
        a_max = tl.where(s_max > HIDDEN, 1.0, HIDDEN)
    return total, a_max, s_max


@triton.jit
def _careful_values(
    q, k_ptr, k_stride, v_ptr, v_stride, lo, hi, row_start, row_stop, key_stop, factor, bias, shift, slope, intercept,
    columns, P, REWEIGHT: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Sums of weights times v [M, D] for values that are not finite: NaN in rows that see such a value, and in others
    what it would be without that key."""
    offsets = tl.arange(0, N)
    o = tl.zeros([M, BLOCK_D], tl.float32)
    spoiled = tl.zeros([M], tl.int32)
    for start in tl.range(lo, hi, N, num_stages=1):
        k = load_tile(k_ptr, start, key_stop, k_stride, offsets, columns, D, True)  # [N, D]
        v, broken = without_broken_rows(load_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, True))
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        keys = (start + offsets)[None, :]
        s = keep_visible(s, keys, row_start[:, None], row_stop[:, None], HIDDEN)
        a = activate(s, shift[:, None], ACTIVATION)
        if REWEIGHT:
            a = power(tl.maximum(a * slope[:, None] + intercept[:, None], 0.0), P)
        a = keep_visible(a, keys, row_start[:, None], row_stop[:, None], 0.0)
        o = dot(saturate(a, v.dtype), v, o, PRECISION=DOT)
        here = keep_visible(tl.broadcast_to(broken[None, :], [M, N]), keys, row_start[:, None], row_stop[:, None], 0)
        spoiled = tl.maximum(spoiled, tl.max(here, 1))
    return tl.where((spoiled > 0)[:, None], float("nan"), o)


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output, and four values of each row: factor of the weights, shift of exp, slope and intercept."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)  # head: b * Hq + h
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h

    rows = first_row + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    factor, bias = row_numbers(n, SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, tl.arange(0, BLOCK_M), columns, D, True)  # [M, D]
    lo, hi = tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)  # of what is normalised: activations, or re-weighted ones
    shift = tl.full([BLOCK_M], HIDDEN, tl.float32)
    slope, intercept = total, total
    if REWEIGHT:
        sums, a_max, s_max = _row_statistics(
            q, k_ptr, k_stride_l, lo, hi, row_start, row_stop, key_stop, factor, bias, columns,
            ACTIVATION, D, BLOCK_M, BLOCK_N, DOT, STAGES,
        )  # fmt: skip
        slope, intercept = weight_line(sums, a_max, s_max, factor, n, ACTIVATION, COSINE)
        shift = s_max
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        masked = (start < full_lo) | (start + BLOCK_N > full_hi)
        keys = (start + offsets)[None, :]
        if ACTIVATION == "exp":
            if masked:
                s = keep_visible(s, keys, row_start[:, None], row_stop[:, None], HIDDEN)
            if not REWEIGHT:
                higher = tl.maximum(shift, tl.max(s, 1))
                shrink = tl.exp(shift - higher)
                o, total, shift = o * shrink[:, None], total * shrink, higher
        a = activate(s, shift[:, None], ACTIVATION)
        if REWEIGHT:
            a = power(tl.maximum(a * slope[:, None] + intercept[:, None], 0.0), P if P > 0 else exponent)
        if masked:
            a = keep_visible(a, keys, row_start[:, None], row_stop[:, None], 0.0)
        weight = saturate(a, v.dtype)
        if DIVISOR == "l1":  # the sum of what is multiplied: of one key alone the output is then v to the bit
            total += tl.sum(tl.abs(weight.to(tl.float32)), 1)
        o = dot(weight, v, o, PRECISION=DOT)
    if tl.max(tl.max(not_finite(o).to(tl.int32), 1), 0) > 0:
        o = _careful_values(
            q, k_ptr, k_stride_l, v_ptr, v_stride_l, lo, hi, row_start, row_stop, key_stop, factor, bias, shift, slope,
            intercept, columns, P if P > 0 else exponent, REWEIGHT, ACTIVATION, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT,
        )  # fmt: skip
    divisor = total if DIVISOR == "l1" else fixed_divisor(n, DIVISOR, GAMMA, LENGTH)
    inverse = tl.where(divisor > 0, SIGN / tl.where(divisor > 0, divisor, 1.0), 0.0)
    if ACTIVATION == "exp" and DIVISOR != "l1":
        inverse *= tl.exp(shift)
    store_tile(o_ptr, o * inverse[:, None], first_row, Lq, o_stride_l, tl.arange(0, BLOCK_M), columns, D)
    at = rows_ptr + head.to(tl.int64) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    tl.store(at, inverse, mask=rows < Lq)
    if ACTIVATION == "exp":
        tl.store(at + row_plane, shift, mask=rows < Lq)
    if REWEIGHT:
        tl.store(at + 2 * row_plane, slope, mask=rows < Lq)
        tl.store(at + 3 * row_plane, intercept, mask=rows < Lq)
