"""Forward: pass 1 over K gives each row's threshold and spread, pass 2 over K and V its output.

Per row it saves (slope, intercept, Z): the unnormalised weight of a key is max(slope * 2a + intercept, 0)^p with
2a = 2 log2(1 + 2^x), and Z is their sum. A flat row is slope 0, intercept 1; a row that sees nothing is all zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    FLAT_TOLERANCE,
    HIDDEN,
    LN2,
    LOG2E,
    dot,
    ex2,
    full_tiles,
    lane_compound,
    lane_max,
    lane_sum,
    load_tile,
    log2_1p,
    power,
    score_scale,
    sigmoid2,
    softplus2,
    store_tile,
    visible_keys,
)


@triton.jit
def _scores(q, k_ptr, start, key_stop, offsets, columns, D: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr):
    k = load_tile(k_ptr, start, key_stop, D, offsets, columns, D, MASKED)  # [N, D]
    return dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]


@triton.jit
def _row_statistics(
    total, lost, largest, q, k_ptr, lo, hi, row_start, row_stop, key_stop, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 1 over keys lo..hi: sum of 2a (Kahan: total, lost) and largest x, all [M, 4] partial results."""
    offsets = tl.arange(0, N)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        x = _scores(q, k_ptr, start, key_stop, offsets, columns, D, MASKED, DOT)  # [M, N]
        if MASKED:
            keys = (start + offsets)[None, :]
            x = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), x, HIDDEN)
        t = ex2(-tl.abs(x))
        if LOG_DEGREE == 0:
            part = lane_sum(2.0 * log2_1p(t, True) + (x + tl.abs(x)), M, N)
        else:  # a sum of logarithms is the logarithm of a product
            part = 2.0 * log2_1p(lane_compound(t, M, N), False) + lane_sum(x + tl.abs(x), M, N)
        largest = tl.maximum(largest, lane_max(x, M, N))
        part = part - lost
        new_total = total + part
        lost = (new_total - total) - part
        total = new_total
    return total, lost, largest


@triton.jit
def _weighted_values(
    o, z, q, k_ptr, v_ptr, v_stride, lo, hi, row_start, row_stop, key_stop, slope, intercept, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, REWEIGHT: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 2 over keys lo..hi: o [M, D] += weights V, z [M, 4] += sums of weights."""
    offsets = tl.arange(0, N)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        x = _scores(q, k_ptr, start, key_stop, offsets, columns, D, MASKED, DOT)  # [M, N]
        v = load_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, MASKED)  # [N, D]
        weight = softplus2(x, LOG_DEGREE)
        if REWEIGHT:
            weight = tl.maximum(weight * slope[:, None] + intercept[:, None], 0.0)
            if v.dtype == tl.float16:  # rounding may leave a weight above 1, and fp16 has no room for its power
                weight = tl.minimum(weight, 1.0)
            weight = power(weight, P)
        if MASKED:
            keys = (start + offsets)[None, :]
            weight = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), weight, 0.0)
        z += lane_sum(weight, M, N)
        o = dot(weight.to(v.dtype), v, o, PRECISION=DOT)
    return o, z


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, slope_ptr, intercept_ptr, z_ptr,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, row_stride, Hq, Hkv,
    Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N1: tl.constexpr, BLOCK_N: tl.constexpr, STAGES1: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q, k: normalised copies, contiguous. One program a block of rows; the longest rows of a head go first."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    head = program // blocks  # b * Hq + h
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    b = head // Hq
    h_kv = head % Hq // (Hq // Hkv)
    q_ptr += head.to(tl.int64) * Lq * D
    k_ptr += (b * Hkv + h_kv).to(tl.int64) * Lk * D
    v_ptr += b.to(tl.int64) * v_stride_b + h_kv.to(tl.int64) * v_stride_h
    o_ptr += b.to(tl.int64) * o_stride_b + (head % Hq).to(tl.int64) * o_stride_h

    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    key_lo, key_hi = tl.min(row_start), tl.max(row_stop)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    ragged_start: tl.constexpr = WINDOWED or PACKED
    n = (row_stop - row_start).to(tl.float32)
    q = load_tile(q_ptr, first_row, Lq, D, offsets, columns, D, True)  # [M, D]

    if REWEIGHT:
        total = tl.zeros([BLOCK_M, 4], tl.float32)
        lost = tl.zeros([BLOCK_M, 4], tl.float32)
        largest = tl.full([BLOCK_M, 4], HIDDEN, tl.float32)
        lo, full_a, full_b, hi = full_tiles(key_lo, key_hi, full_lo, full_hi, BLOCK_N1)
        if ragged_start:
            total, lost, largest = _row_statistics(
                total, lost, largest, q, k_ptr, lo, full_a, row_start, row_stop, key_stop, columns,
                D, BLOCK_M, BLOCK_N1, LOG_DEGREE, DOT, True, STAGES1,
            )  # fmt: skip
        total, lost, largest = _row_statistics(
            total, lost, largest, q, k_ptr, full_a, full_b, row_start, row_stop, key_stop, columns,
            D, BLOCK_M, BLOCK_N1, LOG_DEGREE, DOT, False, STAGES1,
        )  # fmt: skip
        total, lost, largest = _row_statistics(
            total, lost, largest, q, k_ptr, full_b, hi, row_start, row_stop, key_stop, columns,
            D, BLOCK_M, BLOCK_N1, LOG_DEGREE, DOT, True, STAGES1,
        )  # fmt: skip
        x_max = tl.max(largest, 1)  # [M]
        two_tau = tl.sum(total - lost, 1) / tl.maximum(n, 1.0)
        two_tau = tl.where(n > FIRST_ROWS, two_tau, 0.0)
        two_a_max = x_max + tl.abs(x_max) + 2.0 * log2_1p(tl.exp2(-tl.abs(x_max)), LOG_DEGREE == 0)
        spread = two_a_max - two_tau
        c = score_scale(n, LOG_D) * LN2
        tolerance = FLAT_TOLERANCE * 2 * LOG2E * (1.0 + c) * sigmoid2(x_max, two_a_max, LOG_DEGREE)
        flat = (n > FIRST_ROWS) & (spread <= tolerance)
        live = (n > 0) & (flat == 0)
        slope = tl.where(live, 1.0 / tl.where(live, spread, 1.0), 0.0)
        intercept = tl.where(flat, 1.0, -two_tau * slope)
    else:
        slope = tl.where(n > 0, 1.0, 0.0)
        intercept = slope * 0.0

    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    z = tl.zeros([BLOCK_M, 4], tl.float32)
    lo, full_a, full_b, hi = full_tiles(key_lo, key_hi, full_lo, full_hi, BLOCK_N)
    if ragged_start:
        o, z = _weighted_values(
            o, z, q, k_ptr, v_ptr, v_stride_l, lo, full_a, row_start, row_stop, key_stop, slope, intercept, columns,
            D, BLOCK_M, BLOCK_N, P, REWEIGHT, LOG_DEGREE, DOT, True, STAGES,
        )  # fmt: skip
    o, z = _weighted_values(
        o, z, q, k_ptr, v_ptr, v_stride_l, full_a, full_b, row_start, row_stop, key_stop, slope, intercept, columns,
        D, BLOCK_M, BLOCK_N, P, REWEIGHT, LOG_DEGREE, DOT, False, STAGES,
    )  # fmt: skip
    o, z = _weighted_values(
        o, z, q, k_ptr, v_ptr, v_stride_l, full_b, hi, row_start, row_stop, key_stop, slope, intercept, columns,
        D, BLOCK_M, BLOCK_N, P, REWEIGHT, LOG_DEGREE, DOT, True, STAGES,
    )  # fmt: skip
    z_row = tl.sum(z, 1)  # [M]
    o = o / tl.where(z_row > 0, z_row, 1.0)[:, None]
    store_tile(o_ptr, o, first_row, Lq, o_stride_l, offsets, columns, D)
    at = head.to(tl.int64) * row_stride + rows
    tl.store(slope_ptr + at, slope, mask=rows < Lq)
    tl.store(intercept_ptr + at, intercept, mask=rows < Lq)
    tl.store(z_ptr + at, z_row, mask=rows < Lq)
