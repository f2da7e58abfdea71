"""Forward of short windows (see window.py), and the kernel that makes 1 / |k| for cosine kinds."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    FLAT_TOLERANCE,
    HIDDEN,
    LN2,
    LOG2E,
    compound,
    dot,
    ex2,
    ex2_neg_abs,
    keys_of_rows,
    lane_compound,
    lane_max,
    lane_sum,
    load_tile,
    log2_1p,
    sigmoid2,
    softplus2,
    visible_keys,
    weight_root,
)
from lssar.ops.fused.steep import short_root
from lssar.ops.fused.window import (
    EXP,
    FAR,
    REWEIGHTED,
    SOFTPLUS,
    head_source,
    hide_keys,
    inverse_length,
    key_tile,
    log2_of,
    near_one,
    norm_in_range,
    read_head,
    score_factor,
    steep_rows,
    store_rows,
    weight_power,
)


@triton.jit(do_not_specialize=["Lk"])
def key_scale_kernel(
    k_ptr, key_scale_ptr, k_stride_b, k_stride_h, k_stride_l, Hkv, Lk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 / |k| of every key, (B, Hkv, Lk) float32; 0 for a zero key."""
    start, h, b = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    k_ptr += b * k_stride_b + h * k_stride_h
    k = load_tile(k_ptr, start, Lk, k_stride_l, offsets, tl.arange(0, BLOCK_D), D, True)
    near, down, _ = near_one(k.to(tl.float32), 1.0, False)
    scale = norm_in_range(inverse_length(near, PRECISE) * down)
    tl.store(key_scale_ptr + (b * Hkv + h) * Lk + start + offsets, scale, mask=start + offsets < Lk)


@triton.jit
def window_line(total, x_max, n, bound, p, LOG_DEGREE: tl.constexpr):
    """Slope and intercept as primitives.weight_line makes them, for a power that is not a constant.

    total: sum of 2a; x_max: largest x; bound: of |x|; all [M].
    """
    two_tau = tl.where(n > FIRST_ROWS, total / tl.maximum(n, 1.0), 0.0)
    two_a_max = x_max + tl.abs(x_max) + 2.0 * log2_1p(tl.exp2(-tl.abs(x_max)), LOG_DEGREE == 0)
    spread = two_a_max - two_tau
    tolerance = FLAT_TOLERANCE * 2 * LOG2E * (1.0 + bound * LN2) * sigmoid2(x_max, two_a_max, LOG_DEGREE)
    flat = (n > FIRST_ROWS) & (spread <= tolerance)
    live = (n > 0) & (flat == 0)
    slope = 1.0 / tl.where(live, spread, 1.0)
    if LOG_DEGREE == 0:
        slope = tl.where(p <= 64.0, tl.exp2(tl.floor(tl.log2(slope))), slope)
    else:
        slope *= tl.exp2(tl.where(p <= 16.0, -1.0, -4.0) / p)
        two_tau += tl.where(n > FIRST_ROWS, softplus2(x_max, LOG_DEGREE) - two_a_max, 0.0)
    slope = tl.where(live, slope, 0.0)
    return slope, tl.where(flat, 1.0, -two_tau * slope)


@triton.jit
def product_of_sums(t):
    """prod(1 + t) - 1 over each row of t [M, N]; tiny t are not lost against 1."""
    return tl.reduce(t, 1, compound)


@triton.jit
def _row_statistics(
    q, row_factor, k_source, key_scale_ptr, k_stride, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Of REWEIGHTED rows over keys lo..hi: the sum of 2a and the largest x, both [M]."""
    offsets = tl.arange(0, N)
    total = tl.zeros([M, 4], tl.float32)
    largest = tl.full([M, 4], HIDDEN, tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k, key_scale = key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, True, TMA)
        x = dot(q, tl.trans(k), PRECISION=DOT) * key_scale[None, :] * row_factor[:, None]  # [M, N]
        keys = (start + offsets)[None, :]
        x = hide_keys(x, keys, row_start, row_stop, (start < full_lo) | (start + N > full_hi), HIDDEN)
        t = ex2_neg_abs(x)
        if LOG_DEGREE == 0:
            total += lane_sum(2.0 * log2_1p(t, True) + (x + tl.abs(x)), M, N)
        else:  # a sum of logarithms is the logarithm of a product
            total += 2.0 * log2_1p(lane_compound(t, M, N), False) + lane_sum(x + tl.abs(x), M, N)
        largest = tl.maximum(largest, lane_max(x, M, N))
    return tl.sum(total, 1), tl.max(largest, 1)


@triton.jit
def _weights(
    x, key_scale, row_factor, shift, slope, intercept, steep, p,
    KIND: tl.constexpr, P: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Weights [M, N] of cosine scores, not yet divided by Z, from products x of q and k; of hidden keys too. steep,
    slope, intercept, row_factor: of steep_rows."""
    x = x * key_scale[None, :] * row_factor[:, None]
    if KIND == EXP:
        return ex2(x - shift[:, None])
    elif KIND == SOFTPLUS:
        return softplus2(x, LOG_DEGREE)
    else:
        if STEEP:
            if steep:
                root = short_root(x, slope[:, None], intercept[:, None])[0]
            else:
                root = weight_root(softplus2(x, LOG_DEGREE), slope[:, None], intercept[:, None], LOG_DEGREE)
        else:
            root = weight_root(softplus2(x, LOG_DEGREE), slope[:, None], intercept[:, None], LOG_DEGREE)
        return weight_power(root, p, P, 0)


@triton.jit
def _careful_sums(
    q, row_factor, k_ptr, k_stride, lo, hi, row_start, row_stop, key_stop,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Shift and Z of softmax whose scores may leave the range of float32: it scales differences, not scores."""
    N: tl.constexpr = 16
    offsets, columns = tl.arange(0, N), tl.arange(0, BLOCK_D)
    shift = tl.full([M], -float("inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=1):
        k = load_tile(k_ptr, start, key_stop, k_stride, offsets, columns, D, True)
        x = hide_keys(
            dot(q, tl.trans(k), PRECISION=DOT), (start + offsets)[None, :], row_start, row_stop, True,
            -float("inf"),
        )  # fmt: skip
        highest = tl.maximum(shift, tl.max(x, 1))
        usable = tl.where(highest > -float("inf"), highest, 0.0)
        z = z * ex2((shift - usable) * row_factor) + tl.sum(ex2((x - usable[:, None]) * row_factor[:, None]), 1)
        shift = highest
    return tl.where(shift > -float("inf"), shift, 0.0), z


@triton.jit
def _rewrite_output(
    o_ptr, o_stride, first_row, Lq, q, row_factor, shift, slope, intercept, inverse, p, k_ptr, v_ptr, key_scale_ptr,
    k_stride, v_stride, lo, hi, row_start, row_stop, key_stop,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The output again where it was not finite: a value that is not finite reaches the rows that see it alone (as NaN),
    and weights are normalised first, so that no sum overflows. In small pieces, to take no registers from the rest."""
    N: tl.constexpr = 16
    WIDTH: tl.constexpr = 16
    offsets, columns = tl.arange(0, N), tl.arange(0, BLOCK_D)
    for first_column in tl.range(0, D, WIDTH, num_stages=1):
        some = first_column + tl.arange(0, WIDTH)
        o = tl.zeros([M, WIDTH], tl.float32)
        broken = tl.zeros([M, WIDTH], tl.float32)
        for start in tl.range(lo, hi, N, num_stages=1):
            k, key_scale = key_tile(k_ptr, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, False)
            keys = start + offsets
            v = tl.load(
                v_ptr + keys[:, None].to(tl.int64) * v_stride + some[None, :],
                mask=(keys < key_stop)[:, None] & (some < D)[None, :], other=0.0,
            )  # fmt: skip
            x = dot(q, tl.trans(k), PRECISION=DOT)
            if KIND == EXP and not COSINE:
                weight = ex2(tl.minimum((x - shift[:, None]) * row_factor[:, None], 0.0))
            else:
                weight = _weights(
                    x, key_scale, row_factor, shift, slope, intercept, False, p, KIND, P, LOG_DEGREE, False
                )
            seen = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_stop[:, None])
            weight = tl.where(seen, weight * inverse[:, None], 0.0)
            value = v.to(tl.float32)
            unusable = (tl.abs(value) <= 3.4028234663852886e38) == 0
            o = dot(weight.to(v.dtype), tl.where(unusable, 0.0, value).to(v.dtype), o, PRECISION=DOT)
            # by way of float32: the interpreter makes 2^-133 of a 1 that becomes a bfloat16
            seen, unusable = seen.to(tl.float32), unusable.to(tl.float32)
            broken = dot(seen.to(v.dtype), unusable.to(v.dtype), broken, PRECISION=DOT)
        o = tl.where(broken > 0, float("nan"), o)
        store_rows(o_ptr, o, first_row, Lq, o_stride, tl.arange(0, M), some, D)


@triton.jit
def _weighted_values(
    q, factor, row_factor, slope, intercept, steep, p, k_source, v_source, key_scale_ptr, k_stride, v_stride, lo, hi,
    full_lo, full_hi, row_start, row_stop, key_stop, columns,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, FIXED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum of weights times v [M, D], sum of weights, shift of scores and largest product, all [M]."""
    offsets = tl.arange(0, N)
    highest = tl.full([M], -float("inf"), tl.float32)
    shift = tl.abs(factor)  # of scores, for EXP
    o = tl.zeros([M, BLOCK_D], tl.float32)
    z = tl.zeros([M, 4], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k, key_scale = key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, TMA)
        v = read_head(v_source, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        keys = (start + offsets)[None, :]
        if KIND == EXP and not FIXED:
            if COSINE:
                x = x * key_scale[None, :] * row_factor[:, None]
            x = hide_keys(x, keys, row_start, row_stop, masked, -float("inf"))
            last = shift
            highest = tl.maximum(highest, tl.max(x, 1))
            shift = highest if COSINE else highest * row_factor
            shift = tl.minimum(tl.maximum(shift, -FAR), FAR)  # finite in rows that have seen no key yet
            shrink = tl.where(start > lo, ex2(last - shift), 0.0)
            if COSINE:
                weight = ex2(x - shift[:, None])
            else:
                weight = ex2(x * row_factor[:, None] - shift[:, None])
            o, z = o * shrink[:, None], z * shrink[:, None]
        else:
            weight = _weights(x, key_scale, row_factor, shift, slope, intercept, steep, p, KIND, P, LOG_DEGREE, STEEP)
            weight = hide_keys(weight, keys, row_start, row_stop, masked, 0.0)
        z += lane_sum(weight, M, N)
        o = dot(weight.to(v.dtype), v, o, PRECISION=DOT)
    return o, tl.sum(z, 1), shift, highest


@triton.jit
def store_row_numbers(
    at, row_plane, inside, shift, z, slope, intercept, KIND: tl.constexpr, COSINE: tl.constexpr, PRECISE: tl.constexpr
):  # fmt: skip
    """What the backward needs of each row, but for 1 / |q|."""
    if KIND == EXP:
        log_z = tl.where(z > 0, log2_of(tl.where(z > 0, z, 1.0), PRECISE), FAR)
        tl.store(at, shift + log_z if COSINE else shift, mask=inside)
        if not COSINE:
            tl.store(at + row_plane, log_z, mask=inside)
    else:
        tl.store(at, slope, mask=inside)
        tl.store(at + row_plane, intercept, mask=inside)
        tl.store(at + 2 * row_plane, z, mask=inside)


@triton.jit
def forward_block(
    block, h, b, q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    k_tiles, v_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    FIXED: tl.constexpr, SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Writes the output of a block of rows, and what the backward needs of them."""
    PRECISE: tl.constexpr = LOG_DEGREE == 0
    first_row, h_kv = block * BLOCK_M, h // GROUP
    k_source = head_source(k_ptr + b.to(tl.int64) * k_stride_b + h_kv.to(tl.int64) * k_stride_h, k_tiles, b, h_kv, TMA)
    v_source = head_source(v_ptr + b.to(tl.int64) * v_stride_b + h_kv.to(tl.int64) * v_stride_h, v_tiles, b, h_kv, TMA)
    b, h, h_kv = b.to(tl.int64), h.to(tl.int64), h_kv.to(tl.int64)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    key_scale_ptr += (b * Hkv + h_kv) * Lk

    row_offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    lo, hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    rows = first_row + row_offsets
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    gain = tl.load(gain_ptr + h).to(tl.float32) if GAIN else 1.0
    factor = score_factor(n, gain, SCALE, LOG_N, PRECISE) * LOG2E
    q, down, up = near_one(q_raw.to(tl.float32), SMALL, False)
    at = rows_ptr + (b * Hq + h) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    if COSINE:
        one_over = inverse_length(q, PRECISE)
        row_factor = factor * one_over
        tl.store(at + (1 if KIND == EXP else 3) * row_plane, norm_in_range(one_over * down), mask=rows < Lq)
    else:
        row_factor = tl.minimum(tl.maximum(factor * up, 1.0 / FAR), FAR)
    q = q.to(q_raw.dtype)

    slope, intercept = tl.where(n > 0, 1.0, 0.0), n * 0.0
    if KIND == REWEIGHTED:
        total, x_max = _row_statistics(
            q, row_factor, k_source, key_scale_ptr, k_stride_l, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop,
            columns, D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, STAGES, TMA,
        )  # fmt: skip
        slope, intercept = window_line(total, x_max, n, tl.abs(factor), p, LOG_DEGREE)
        slope += total * 0.0  # NaN where a score is NaN
    steep, line_slope, line_intercept, line_factor = steep_rows(slope, intercept, row_factor, rows < Lq, p, P, STEEP)
    o, z_row, shift, highest = _weighted_values(
        q, factor, line_factor, line_slope, line_intercept, steep, p, k_source, v_source, key_scale_ptr, k_stride_l,
        v_stride_l, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop, columns,
        KIND, P, COSINE, FIXED, D, BLOCK_D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, STAGES, TMA, STEEP,
    )  # fmt: skip
    inverse = tl.where(z_row > 0, 1.0 / tl.where(z_row > 0, z_row, 1.0), z_row * 0.0)  # NaN where a score is NaN
    if KIND == REWEIGHTED:
        inverse += slope * 0.0  # weight_root makes NaN 0
    o = o * inverse[:, None]
    store_rows(o_ptr, o, first_row, Lq, o_stride_l, row_offsets, columns, D)
    finite = tl.sum(o * 0.0, 1) == 0
    shift = shift if COSINE else tl.where(n > 0, highest, 0.0)
    # last, when registers are free: not finite, or (softmax) a row whose weights were all lost
    if tl.min((finite & ((z_row > 0) | (n == 0))).to(tl.int32), 0) == 0:
        tl.debug_barrier()
        if KIND == EXP and not COSINE:
            shift, z_row = _careful_sums(
                q, row_factor, k_ptr, k_stride_l, lo, hi, row_start, row_stop, key_stop, D, BLOCK_D, BLOCK_M, DOT
            )
            # a row that sees keys but has no weight has a query that is not finite
            inverse = tl.where(z_row > 0, 1.0 / tl.where(z_row > 0, z_row, 1.0), tl.where(n > 0, float("nan"), 0.0))
        _rewrite_output(
            o_ptr, o_stride_l, first_row, Lq, q, row_factor, shift, slope, intercept, inverse, p, k_ptr, v_ptr,
            key_scale_ptr, k_stride_l, v_stride_l, lo, hi, row_start, row_stop, key_stop,
            KIND, P, COSINE, D, BLOCK_D, BLOCK_M, LOG_DEGREE, DOT,
        )  # fmt: skip
    store_row_numbers(at, row_plane, rows < Lq, shift, z_row, slope, intercept, KIND, COSINE, PRECISE)


@triton.jit(do_not_specialize=["Lq", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    k_tiles, v_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    FIXED: tl.constexpr, SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program a block of rows. k_tiles, v_tiles: descriptors, with TMA. FIXED: rows of cosine softmax are shifted
    by their bound, not by their maximum. STEEP: blocks of steep rows take the short forms."""
    forward_block(
        tl.program_id(0), tl.program_id(1), tl.program_id(2), q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr,
        gain_ptr, p, row_plane, q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b,
        v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr,
        doc_start_ptr, doc_stop_ptr, k_tiles, v_tiles, KIND, P, COSINE, LOG_N, GAIN, FIXED, SCALE, SMALL, GROUP, D,
        BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, LOG_DEGREE, DOT, STEEP, BLOCK_M, BLOCK_N, STAGES, TMA,
    )  # fmt: skip
