"""Forward: pass 1 over K gives each row's threshold and spread, pass 2 over K and V its output.

Per row it saves (slope, intercept, Z): the unnormalised weight of a key is max(slope * 2a + intercept, 0)^p with
2a = 2 log2(1 + 2^x), and Z is their sum. A flat row is slope 0, intercept 1; a row that sees nothing is all zeros; a
row that sees an infinity or a NaN has Z = NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    HIDDEN,
    dot,
    ex2_neg_abs,
    head_and_block,
    head_tiles,
    kahan_add,
    keep_visible,
    keys_of_rows,
    lane_compound,
    lane_max,
    lane_sum,
    load_tile,
    log2_1p,
    not_finite,
    read_tile,
    store_tile,
    visible_keys,
    weight_line,
    without_broken_rows,
)
from lssar.ops.fused.steep import (
    GENERAL,
    HIDDEN_PAIR,
    form_of_rows,
    half_dot,
    hide_pairs,
    lane_max_of_pairs,
    lane_sum_of_pairs,
    max_pairs,
    pairs_of,
    row_max_of_lanes,
    softplus_pairs,
    tile_weights,
)
from lssar.ops.fused.unit_rows import norm_parts, scaled_unit_rows

CAREFUL_SCALE = tl.constexpr(2.0**-40)


@triton.jit
def _row_statistics(
    q, k_ptr, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 1 over keys lo..hi: the row's sum of 2a and its largest x, both [M]."""
    offsets = tl.arange(0, N)
    total = tl.zeros([M, 4], tl.float32)
    lost = tl.zeros([M, 4], tl.float32)  # Kahan summation: a flat row must be flat to rounding at any length
    largest = tl.full([M, 4], HIDDEN, tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = read_tile(k_ptr, start, key_stop, D, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        if (start < full_lo) | (start + N > full_hi):
            keys = (start + offsets)[None, :]
            x = keep_visible(x, keys, row_start[:, None], row_stop[:, None], HIDDEN)
        t = ex2_neg_abs(x)
        if LOG_DEGREE == 0:
            part = lane_sum(2.0 * log2_1p(t, True) + (x + tl.abs(x)), M, N)
        else:  # a sum of logarithms is the logarithm of a product
            part = 2.0 * log2_1p(lane_compound(t, M, N), False) + lane_sum(x + tl.abs(x), M, N)
        largest = tl.maximum(largest, lane_max(x, M, N))
        total, lost = kahan_add(total, lost, part)
    return tl.sum(total - lost, 1), tl.max(largest, 1)


@triton.jit
def _rough_statistics(
    q, k_ptr, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """_row_statistics in half arithmetic, two scores an instruction: good enough for steep rows alone."""
    offsets = tl.arange(0, N)
    left = tl.arange(0, N // 2) * 2
    total = tl.zeros([M, 4], tl.float32)
    largest = tl.full([M, 4], HIDDEN_PAIR, tl.int32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = read_tile(k_ptr, start, key_stop, D, offsets, columns, D, TMA)  # [N, D]
        x = pairs_of(half_dot(q, tl.trans(k)))  # [M, N / 2]
        if (start < full_lo) | (start + N > full_hi):
            x = hide_pairs(x, (start + left)[None, :], row_start[:, None], row_stop[:, None])
        total += lane_sum_of_pairs(softplus_pairs(x))
        largest = max_pairs(largest, lane_max_of_pairs(x))
    return 2.0 * tl.sum(total, 1), row_max_of_lanes(largest)


@triton.jit
def _weighted_values(
    q, k_ptr, v_ptr, v_stride, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, slope, intercept, form,
    columns, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P,
    REWEIGHT: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 2 over keys lo..hi: sum of weights times v [M, D], and sum of weights [M].

    The scores of the next tile are computed after the weights of this one, so that the product with V runs on the
    tensor cores while the next weights are made.
    """
    offsets = tl.arange(0, N)
    o = tl.zeros([M, BLOCK_D], tl.float32)
    z = tl.zeros([M, 4], tl.float32)
    k = read_tile(k_ptr, lo, key_stop, D, offsets, columns, D, TMA)  # [N, D]
    x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = read_tile(k_ptr, start + N, key_stop, D, offsets, columns, D, TMA)  # [N, D]
        x_next = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        v = read_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        weight = tile_weights(x, slope[:, None], intercept[:, None], form, P, REWEIGHT, LOG_DEGREE, STEEP)
        if (start < full_lo) | (start + N > full_hi):
            keys = (start + offsets)[None, :]
            weight = keep_visible(weight, keys, row_start[:, None], row_stop[:, None], 0.0)
        z += lane_sum(weight, M, N)
        o = dot(weight.to(v.dtype), v, o, PRECISION=DOT)
        x = x_next
    return o, tl.sum(z, 1)


@triton.jit
def _careful_values(
    q, k_ptr, v_ptr, v_stride, lo, hi, row_start, row_stop, key_stop, slope, intercept, form, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P, REWEIGHT: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """_weighted_values for values that are not finite or whose sums overflow: sums times CAREFUL_SCALE.

    Rows that see a key whose value is not finite become NaN; others are as if that key were not there.
    """
    offsets = tl.arange(0, N)
    scale = 1.0 if v_ptr.dtype.element_ty == tl.float16 else CAREFUL_SCALE
    o = tl.zeros([M, BLOCK_D], tl.float32)
    z = tl.zeros([M, 4], tl.float32)
    spoiled = tl.zeros([M], tl.int32)
    for start in tl.range(lo, hi, N, num_stages=1):
        k = load_tile(k_ptr, start, key_stop, D, offsets, columns, D, True)  # [N, D]
        v, broken = without_broken_rows(load_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, True))
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        weight = tile_weights(x, slope[:, None], intercept[:, None], form, P, REWEIGHT, LOG_DEGREE, STEEP)
        keys = (start + offsets)[None, :]
        weight = keep_visible(weight, keys, row_start[:, None], row_stop[:, None], 0.0)
        z += lane_sum(weight, M, N)
        o = dot((weight * scale).to(v.dtype), v, o, PRECISION=DOT)
        here = keep_visible(tl.broadcast_to(broken[None, :], [M, N]), keys, row_start[:, None], row_stop[:, None], 0)
        spoiled = tl.maximum(spoiled, tl.max(here, 1))
    return o, tl.where(spoiled > 0, float("nan"), tl.sum(z, 1)), scale


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, slope_ptr, intercept_ptr, z_ptr, q_stride_b, q_stride_h, q_stride_l,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, row_stride, Hq, Hkv,
    exponent, gain_ptr, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, k_tiles1, k_tiles, v_tiles,
    HAS_GAIN: tl.constexpr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr, CACHE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N1: tl.constexpr, BLOCK_N: tl.constexpr, STAGES1: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """k: unit keys, contiguous. One program a block of rows; see head_and_block for their order.

    P: the power if it is an integer, else 0, and `exponent` holds it. HAS_GAIN: gain_ptr holds one gain a query head.
    k_tiles1, k_tiles, v_tiles: descriptors of tiles of BLOCK_N1 and BLOCK_N keys and of BLOCK_N values, if TMA says so.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)  # head: b * Hq + h
    first_row = (blocks - 1 - block) * BLOCK_M
    b = head // Hq
    h_kv = head % Hq // (Hq // Hkv)
    q_ptr += b.to(tl.int64) * q_stride_b + (head % Hq).to(tl.int64) * q_stride_h
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
    key_lo, key_hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED,
        BLOCK_M, 1,
    )  # fmt: skip
    n = (row_stop - row_start).to(tl.float32)
    gain_size = tl.abs(tl.load(gain_ptr + head % Hq)) if HAS_GAIN else 1.0
    raw_q = load_tile(q_ptr, first_row, Lq, q_stride_l, offsets, columns, D, True)  # [M, D]
    near, _, rest = norm_parts(raw_q.to(tl.float32))
    q = scaled_unit_rows(near, rest, n, gain_ptr + head % Hq, LOG_D, HAS_GAIN, k_ptr.dtype.element_ty)

    for _ in range(tl.minimum(Lq, 1)):  # one turn: see scaled_unit_rows
        slope = tl.where(n > 0, 1.0, 0.0)
        intercept = slope * 0.0
        form = GENERAL
        if REWEIGHT:
            keys = head_tiles(k_tiles1, b, h_kv, k_ptr, key_stop, D, D, BLOCK_N1, BLOCK_D, TMA)
            first_key = key_lo // BLOCK_N1 * BLOCK_N1
            if STEEP:
                total, x_max = _rough_statistics(
                    q, keys, first_key, key_hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
                    D, BLOCK_M, BLOCK_N1, TMA, STAGES1,
                )  # fmt: skip
                slope, intercept = weight_line(total, x_max, n, P if P > 0 else exponent, LOG_D, LOG_DEGREE, gain_size)
                form = form_of_rows(slope, intercept, rows < Lq, P if P > 0 else exponent)
            if form == GENERAL:
                total, x_max = _row_statistics(
                    q, keys, first_key, key_hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
                    D, BLOCK_M, BLOCK_N1, LOG_DEGREE, DOT, TMA, STAGES1,
                )  # fmt: skip
                slope, intercept = weight_line(total, x_max, n, P if P > 0 else exponent, LOG_D, LOG_DEGREE, gain_size)

        keys = head_tiles(k_tiles, b, h_kv, k_ptr, key_stop, D, D, BLOCK_N, BLOCK_D, TMA)
        values = head_tiles(v_tiles, b, h_kv, v_ptr, key_stop, v_stride_l, D, BLOCK_N, BLOCK_D, TMA)
        o, z_row = _weighted_values(
            q, keys, values, v_stride_l, key_lo // BLOCK_N * BLOCK_N, key_hi, full_lo, full_hi, row_start, row_stop,
            key_stop, slope, intercept, form, columns,
            D, BLOCK_D, BLOCK_M, BLOCK_N, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, DOT, STEEP, TMA, STAGES,
        )  # fmt: skip
        divisor = z_row
        if tl.max(tl.max(not_finite(o).to(tl.int32), 1), 0) > 0:
            o, z_row, scale = _careful_values(
                q, k_ptr, v_ptr, v_stride_l, key_lo // BLOCK_N * BLOCK_N, key_hi, row_start, row_stop, key_stop, slope,
                intercept, form, columns,
                D, BLOCK_D, BLOCK_M, BLOCK_N, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, DOT, STEEP,
            )  # fmt: skip
            divisor = z_row * scale
        spoiled = slope != slope
        z_row = tl.where(spoiled, slope, z_row)
        o = o / tl.where(spoiled, slope, tl.where(divisor == 0, 1.0, divisor))[:, None]
        store_tile(o_ptr, o, first_row, Lq, o_stride_l, offsets, columns, D)
        at = head.to(tl.int64) * row_stride + rows
        tl.store(slope_ptr + at, slope, mask=rows < Lq)
        tl.store(intercept_ptr + at, intercept, mask=rows < Lq)
        tl.store(z_ptr + at, z_row, mask=rows < Lq)
        q = tl.zeros([BLOCK_M, BLOCK_D], q.dtype)
