"""Kernels for short windows: softmax and cosine softmax, LSSA and LSSAR, forward and backward.

A program holds a block of rows (in the last kernel, of keys) and reads the few tiles of keys (rows) that they see. q
and k are read as they are: scores are products of the raw tiles, times a factor for the row and, with cosine, 1 / |k|
of the key, so no normalised copies are made. Scores are kept in base 2. KIND says what the weights of a row are:

    EXP         2^(x - m) / Z: softmax
    SOFTPLUS    2a / Z with 2a = 2 log2(1 + 2^x): LSSA
    REWEIGHTED  max(slope * 2a + intercept, 0)^p / Z: LSSAR

Per row the forward saves, with EXP, the shift m and log2 Z, or with cosine their sum and 1 / |q|; with the others
slope, intercept, Z and 1 / |q|. Shape letters in tile comments: M query rows, N keys, D head size.

Programs are short, so what they do before and after their loop costs as much as the loop: hence the grid without
divisions, the norms that are saved and not computed again, and masks for one bound at a time.

An infinity or NaN reaches only the rows that see it, and their gradients. A hidden entry is multiplied by a weight of
0, and 0 * inf is NaN, so every kernel looks at its sums once, after the loop, and computes a block that is not finite
again, more slowly, without such entries. The loops do not pay for this.
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
    USE_PTX,
    dot,
    ex2,
    ex2_neg_abs,
    lane_compound,
    lane_max,
    lane_sum,
    lg2,
    load_tile,
    log2_1p,
    not_finite,
    power,
    read_tile,
    rows_of_keys,
    saturate,
    sigmoid2,
    softplus2,
    tile_source,
    visible_keys,
    weight_root,
)

EXP = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
REWEIGHTED = tl.constexpr(2)
EXP_PLANES, SOFTPLUS_PLANES = 2, 4
"""Numbers a row that the forward saves: with EXP, and with the others."""
BACKWARD_PLANES = 8
"""Numbers a row that the dq kernel leaves for the dk, dv kernel, and the row's part of the gain's gradient."""
GAIN_PLANE = tl.constexpr(7)
FAR = tl.constexpr(1e37)  # a log-sum-exp that leaves no weight


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
    scale = _norm_in_range(_inverse_length(near, PRECISE) * down)
    tl.store(key_scale_ptr + (b * Hkv + h) * Lk + start + offsets, scale, mask=start + offsets < Lk)


@triton.jit
def near_one(x, SMALL: tl.constexpr, TOGETHER: tl.constexpr):
    """x [M, D] (float32) times a power of two for each row, or one for all TOGETHER, that brings the largest entry to
    SMALL..2 SMALL, which loses no bit of a half type; that power and its inverse, [M] or scalars.

    With SMALL = 2^-12 the product with any finite row of bfloat16 or float32 is finite. Entries that are not finite do
    not count TOGETHER: the other rows keep their bits.
    """
    if TOGETHER:
        largest = tl.max(tl.max(tl.where(not_finite(x), 0.0, tl.abs(x)), 1), 0)
    else:
        largest = tl.max(tl.abs(x), 1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 240)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True) * SMALL
    up = (exponent << 23).to(tl.float32, bitcast=True) * (1.0 / SMALL)
    if TOGETHER:
        return x * down, down, up
    else:
        return x * down[:, None], down, up


@triton.jit
def _down(inverse_norm, SMALL: tl.constexpr):
    """From 1 / |x|: the power of two that brings |x| to SMALL..2 SMALL."""
    return (inverse_norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * SMALL


@triton.jit
def _rest(inverse_norm, SMALL: tl.constexpr):
    """inverse_norm / _down(inverse_norm, SMALL), which is what unit vectors still lack."""
    bits = (inverse_norm.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000
    return bits.to(tl.float32, bitcast=True) * (1.0 / SMALL)


@triton.jit
def _norm_in_range(inverse_norm):
    """1 / |x| that float32 holds as a normal number, or 0."""
    return tl.where(inverse_norm > 0, tl.minimum(tl.maximum(inverse_norm, 1.2e-38), FAR), 0.0)


@triton.jit
def _log2(x, PRECISE: tl.constexpr):
    return tl.log2(x) if PRECISE else lg2(x)


@triton.jit
def _row_factor(n, gain, SCALE: tl.constexpr, LOG_N: tl.constexpr, PRECISE: tl.constexpr):
    """What q.k (of unit vectors, with cosine) is multiplied by for scores in base e, [M]."""
    factor = n * 0.0 + SCALE
    if LOG_N:
        factor = SCALE * LN2 * _log2(tl.maximum(n, 1.0), PRECISE)
    return factor * gain


@triton.jit
def _inverse_length(x, PRECISE: tl.constexpr):
    """1 / |x| of rows of x [M, D] whose squares float32 holds; 0 for zero rows."""
    square = tl.sum(x * x, 1)
    some = tl.where(square > 0, square, 1.0)
    return tl.where(square > 0, 1.0 / tl.sqrt(some) if PRECISE else tl.rsqrt(some), 0.0)


@triton.jit
def _to_raw(grad, x, inverse_norm, factor):
    """Gradient of x [M, D] (float32) from that of its unit vector, times factor [M], and the latter's part along x."""
    unit = x * inverse_norm[:, None]
    along = tl.sum(grad * unit, 1)
    return (grad - unit * along[:, None]) * (inverse_norm * factor)[:, None], along


@triton.jit
def _hide(x, keys, row_start, row_stop, masked, HIDE: tl.constexpr):
    """x with HIDE where the row does not see the key, if masked: if there may be such."""
    if masked:
        x = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), x, HIDE)
    return x


@triton.jit
def _hide_both(x, y, keys, row_start, row_stop, masked):
    """x and y with 0 where the row does not see the key."""
    if masked:
        seen = (keys >= row_start[:, None]) & (keys < row_stop[:, None])
        x, y = tl.where(seen, x, 0.0), tl.where(seen, y, 0.0)
    return x, y


@triton.jit
def _store_gradient(ptr, value, start, stop, stride, offsets, columns, D: tl.constexpr):
    """Saturated in float16, whose range a gradient may leave."""
    if ptr.dtype.element_ty == tl.float16:
        value = saturate(value, tl.float16)
    _store_rows(ptr, value, start, stop, stride, offsets, columns, D)


@triton.jit
def _store_rows(ptr, value, start, stop, stride, offsets, columns, D: tl.constexpr):
    pointers = ptr + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns[None, :]
    mask = (start + offsets < stop)[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns < D)[None, :]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block_of_keys(
    first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Keys [lo, hi) that any of the rows first_row.. sees, and [full_lo, full_hi) that all of them see."""
    lo, full_hi = visible_keys(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    full_lo, hi = visible_keys(
        first_row + M - 1, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    return lo, hi, full_lo, full_hi


@triton.jit
def _weight_line(total, x_max, n, bound, p, LOG_DEGREE: tl.constexpr):
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
def _power(w, p, P: tl.constexpr, LESS: tl.constexpr):
    """w^(p - LESS) for w >= 0: by multiplications for a constant whole P; P = 0: of p, which is known when it runs."""
    if P > 0:
        return power(w, P - LESS)
    else:
        return tl.where(w > 0, ex2((p - LESS) * lg2(tl.where(w > 0, w, 1.0))), 0.0)


@triton.jit
def _key_tile(
    k_source, key_scale_ptr, start, key_stop, stride, offsets, columns,
    D: tl.constexpr, COSINE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] and, with cosine, 1 / |k| [N]."""
    k = read_tile(k_source, start, key_stop, stride, offsets, columns, D, TMA)
    scale = tl.zeros([offsets.shape[0]], tl.float32)
    if COSINE:
        scale = tl.load(key_scale_ptr + start + offsets, mask=start + offsets < key_stop, other=0.0)
    return k, scale


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
        k, key_scale = _key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, True, TMA)
        x = dot(q, tl.trans(k), PRECISION=DOT) * key_scale[None, :] * row_factor[:, None]  # [M, N]
        keys = (start + offsets)[None, :]
        x = _hide(x, keys, row_start, row_stop, (start < full_lo) | (start + N > full_hi), HIDDEN)
        t = ex2_neg_abs(x)
        if LOG_DEGREE == 0:
            total += lane_sum(2.0 * log2_1p(t, True) + (x + tl.abs(x)), M, N)
        else:  # a sum of logarithms is the logarithm of a product
            total += 2.0 * log2_1p(lane_compound(t, M, N), False) + lane_sum(x + tl.abs(x), M, N)
        largest = tl.maximum(largest, lane_max(x, M, N))
    return tl.sum(total, 1), tl.max(largest, 1)


@triton.jit
def _weights(
    x, key_scale, row_factor, shift, slope, intercept, p,
    KIND: tl.constexpr, P: tl.constexpr, LOG_DEGREE: tl.constexpr,
):  # fmt: skip
    """Weights [M, N] of cosine scores, not yet divided by Z, from products x of q and k; of hidden keys too."""
    if KIND == EXP:
        return ex2(x * key_scale[None, :] * row_factor[:, None] - shift[:, None])
    else:
        two_a = softplus2(x * key_scale[None, :] * row_factor[:, None], LOG_DEGREE)
        if KIND == SOFTPLUS:
            return two_a
        else:
            return _power(weight_root(two_a, slope[:, None], intercept[:, None], LOG_DEGREE), p, P, 0)


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
        x = _hide(
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
            k, key_scale = _key_tile(
                k_ptr, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, False
            )
            keys = start + offsets
            v = tl.load(
                v_ptr + keys[:, None].to(tl.int64) * v_stride + some[None, :],
                mask=(keys < key_stop)[:, None] & (some < D)[None, :], other=0.0,
            )  # fmt: skip
            x = dot(q, tl.trans(k), PRECISION=DOT)
            if KIND == EXP and not COSINE:
                weight = ex2(tl.minimum((x - shift[:, None]) * row_factor[:, None], 0.0))
            else:
                weight = _weights(x, key_scale, row_factor, shift, slope, intercept, p, KIND, P, LOG_DEGREE)
            seen = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_stop[:, None])
            weight = tl.where(seen, weight * inverse[:, None], 0.0)
            value = v.to(tl.float32)
            unusable = (tl.abs(value) <= 3.4028234663852886e38) == 0
            o = dot(weight.to(v.dtype), tl.where(unusable, 0.0, value).to(v.dtype), o, PRECISION=DOT)
            broken = dot(seen.to(v.dtype), unusable.to(v.dtype), broken, PRECISION=DOT)
        o = tl.where(broken > 0, float("nan"), o)
        _store_rows(o_ptr, o, first_row, Lq, o_stride, tl.arange(0, M), some, D)


@triton.jit
def _weighted_values(
    q, factor, row_factor, slope, intercept, p, k_source, v_source, key_scale_ptr, k_stride, v_stride, lo, hi,
    full_lo, full_hi, row_start, row_stop, key_stop, columns,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, FIXED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum of weights times v [M, D], sum of weights, shift of scores and largest product, all [M]."""
    offsets = tl.arange(0, N)
    highest = tl.full([M], -float("inf"), tl.float32)
    shift = tl.abs(factor)  # of scores, for EXP
    o = tl.zeros([M, BLOCK_D], tl.float32)
    z = tl.zeros([M, 4], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k, key_scale = _key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, TMA)
        v = read_tile(v_source, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        keys = (start + offsets)[None, :]
        if KIND == EXP and not FIXED:
            if COSINE:
                x = x * key_scale[None, :] * row_factor[:, None]
            x = _hide(x, keys, row_start, row_stop, masked, -float("inf"))
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
            weight = _weights(x, key_scale, row_factor, shift, slope, intercept, p, KIND, P, LOG_DEGREE)
            weight = _hide(weight, keys, row_start, row_stop, masked, 0.0)
        z += lane_sum(weight, M, N)
        o = dot(weight.to(v.dtype), v, o, PRECISION=DOT)
    return o, tl.sum(z, 1), shift, highest


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    FIXED: tl.constexpr, SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program a block of rows. FIXED: rows of cosine softmax are shifted by their bound, not by their maximum."""
    PRECISE: tl.constexpr = LOG_DEGREE == 0
    first_row, h, b = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2).to(tl.int64)
    h_kv = (h // GROUP).to(tl.int64)
    h = h.to(tl.int64)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    key_scale_ptr += (b * Hkv + h_kv) * Lk

    row_offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    k_source = tile_source(k_ptr, Lk, k_stride_l, D, BLOCK_N, BLOCK_D, TMA)
    v_source = tile_source(v_ptr, Lk, v_stride_l, D, BLOCK_N, BLOCK_D, TMA)
    q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    lo, hi, full_lo, full_hi = _block_of_keys(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED, BLOCK_M
    )
    lo = lo // BLOCK_N * BLOCK_N
    rows = first_row + row_offsets
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    gain = tl.load(gain_ptr + h).to(tl.float32) if GAIN else 1.0
    factor = _row_factor(n, gain, SCALE, LOG_N, PRECISE) * LOG2E
    q, down, up = near_one(q_raw.to(tl.float32), SMALL, False)
    at = rows_ptr + (b * Hq + h) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    if COSINE:
        inverse_length = _inverse_length(q, PRECISE)
        row_factor = factor * inverse_length
        tl.store(at + (1 if KIND == EXP else 3) * row_plane, _norm_in_range(inverse_length * down), mask=rows < Lq)
    else:
        row_factor = tl.minimum(tl.maximum(factor * up, 1.0 / FAR), FAR)
    q = q.to(q_raw.dtype)

    slope, intercept = tl.where(n > 0, 1.0, 0.0), n * 0.0
    if KIND == REWEIGHTED:
        total, x_max = _row_statistics(
            q, row_factor, k_source, key_scale_ptr, k_stride_l, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop,
            columns, D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, STAGES, TMA,
        )  # fmt: skip
        slope, intercept = _weight_line(total, x_max, n, tl.abs(factor), p, LOG_DEGREE)
        slope += total * 0.0  # NaN where a score is NaN
    o, z_row, shift, highest = _weighted_values(
        q, factor, row_factor, slope, intercept, p, k_source, v_source, key_scale_ptr, k_stride_l, v_stride_l, lo, hi,
        full_lo, full_hi, row_start, row_stop, key_stop, columns,
        KIND, P, COSINE, FIXED, D, BLOCK_D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, STAGES, TMA,
    )  # fmt: skip
    inverse = tl.where(z_row > 0, 1.0 / tl.where(z_row > 0, z_row, 1.0), z_row * 0.0)  # NaN where a score is NaN
    if KIND == REWEIGHTED:
        inverse += slope * 0.0  # weight_root makes NaN 0
    o = o * inverse[:, None]
    _store_rows(o_ptr, o, first_row, Lq, o_stride_l, row_offsets, columns, D)
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
    if KIND == EXP:
        log_z = tl.where(z_row > 0, _log2(tl.where(z_row > 0, z_row, 1.0), PRECISE), FAR)
        tl.store(at, shift + log_z if COSINE else shift, mask=rows < Lq)
        if not COSINE:
            tl.store(at + row_plane, log_z, mask=rows < Lq)
    else:
        tl.store(at, slope, mask=rows < Lq)
        tl.store(at + row_plane, intercept, mask=rows < Lq)
        tl.store(at + 2 * row_plane, z_row, mask=rows < Lq)


@triton.jit
def _saved_numbers(at, row_plane, inside, KIND: tl.constexpr, COSINE: tl.constexpr):
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
def _query_sums(
    q, do, k_source, v_source, key_scale_ptr, k_stride, v_stride, lo, hi, full_lo, full_hi, row_start, row_stop,
    key_stop, row_factor, first, second, delta, p, columns,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum of ds k (for EXP) or of g sigma k, sum of sigma k, both [M, D], sum of g [M].

    AGAIN: entries of k that are not finite count as 0, since rows that do not see them multiply them by 0.
    """
    offsets = tl.arange(0, N)
    gk = tl.zeros([M, BLOCK_D], tl.float32)
    sk = gk
    g_sum = tl.zeros([M, 4], tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k, key_scale = _key_tile(k_source, key_scale_ptr, start, key_stop, k_stride, offsets, columns, D, COSINE, TMA)
        v = read_tile(v_source, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        dp = dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        keys = (start + offsets)[None, :]
        operand = _finite_entries(k) if AGAIN else k
        if WIDE:
            operand = operand.to(tl.float32)
        if KIND == EXP:
            g = dp - delta[:, None]
            g *= _exp_weight(x, key_scale[None, :], row_factor[:, None], first[:, None], second[:, None], COSINE)
            g = _hide(g, keys, row_start, row_stop, masked, 0.0)  # values of hidden keys may be anything
            if COSINE:
                g *= key_scale[None, :]
            gk = dot(g.to(operand.dtype), operand, gk, PRECISION=DOT)
        else:
            x = x * key_scale[None, :] * row_factor[:, None]
            two_a = softplus2(x, LOG_DEGREE)
            sigma = sigmoid2(x, two_a, LOG_DEGREE)
            g = dp - delta[:, None]
            if KIND == REWEIGHTED:
                root = weight_root(two_a, first[:, None], second[:, None], LOG_DEGREE)
                g *= _power(root, p, P, 1)
            g, sigma = _hide_both(g, sigma, keys, row_start, row_stop, masked)
            sigma *= key_scale[None, :]
            gk = dot((g * sigma).to(operand.dtype), operand, gk, PRECISION=DOT)
            if KIND == REWEIGHTED:
                g_sum += lane_sum(g, M, N)
                sk = dot(sigma.to(operand.dtype), operand, sk, PRECISION=DOT)
    return gk, sk, tl.sum(g_sum, 1)


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq, and what the dk, dv kernel needs of each row. WIDE: ds and k are multiplied as float32, not in k's dtype."""
    broken = True
    for AGAIN in tl.static_range(2):
        if broken:
            broken = _query_block(
                q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p,
                row_plane, q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b,
                v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l,
                dq_stride_b, dq_stride_h, dq_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr,
                doc_stop_ptr,
                KIND, P, COSINE, LOG_N, GAIN, SCALE, SMALL, GROUP, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                LOG_DEGREE, DOT, WIDE, BLOCK_M, 16 if AGAIN and COSINE else BLOCK_N, 1 if AGAIN else STAGES,
                TMA and not AGAIN, AGAIN,
            )  # fmt: skip


@triton.jit
def _finite_entries(x):
    """x with 0 in place of infinities and NaNs."""
    return tl.where(not_finite(x.to(tl.float32)), 0.0, x).to(x.dtype)


@triton.jit
def _program(AGAIN: tl.constexpr):
    """The three numbers of a program. AGAIN: after all that it has stored so far is stored.

    The compiler takes the numbers that it gets AGAIN for others: it computes anew what depends on them. Kept from the
    first time, that would take registers from the loop.
    """
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if AGAIN:
        tl.debug_barrier()
        if USE_PTX:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)
            y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [y], tl.int32, False, 1)
            z = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [z], tl.int32, False, 1)
    return x, y, z


@triton.jit
def _query_block(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes dq of a block of rows and what the dk, dv kernel needs of them; returns whether dq is not finite.

    AGAIN: the same for a block that was not finite. Entries of k that are not finite count as 0. dq is NaN in rows
    whose delta is not finite: these are all that see an infinity or NaN, since o is NaN there, or have one in dO.
    """
    PRECISE: tl.constexpr = LOG_DEGREE == 0
    block, h, b = _program(AGAIN)
    first_row, b = block * BLOCK_M, b.to(tl.int64)
    h_kv = (h // GROUP).to(tl.int64)
    h = h.to(tl.int64)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h
    key_scale_ptr += (b * Hkv + h_kv) * Lk

    row_offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    k_source = tile_source(k_ptr, Lk, k_stride_l, D, BLOCK_N, BLOCK_D, TMA)
    v_source = tile_source(v_ptr, Lk, v_stride_l, D, BLOCK_N, BLOCK_D, TMA)
    rows = first_row + row_offsets
    q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
    o = load_tile(o_ptr, first_row, Lq, o_stride_l, row_offsets, columns, D, True)  # [M, D]
    at = (b * Hq + h) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    first, second, z = _saved_numbers(rows_ptr + at, row_plane, rows < Lq, KIND, COSINE)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    lo, hi, full_lo, full_hi = _block_of_keys(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED, BLOCK_M
    )
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # [M]
    gain = tl.load(gain_ptr + h).to(tl.float32) if GAIN else 1.0
    factor = _row_factor(n, gain, SCALE, LOG_N, PRECISE)
    if COSINE:
        inverse_norm = tl.load(rows_ptr + at + (1 if KIND == EXP else 3) * row_plane, mask=rows < Lq, other=0.0)
        down = _down(inverse_norm, SMALL)
        q = q_raw.to(tl.float32) * down[:, None]
        raw_factor = tl.minimum(tl.maximum(factor * LOG2E * inverse_norm, -FAR), FAR)  # for products with q as it is
        row_factor = factor * LOG2E * _rest(inverse_norm, SMALL)
        up = down
    else:
        q, down, up = near_one(q_raw.to(tl.float32), SMALL, False)
        row_factor = tl.minimum(tl.maximum(factor * LOG2E * up, 1.0 / FAR), FAR)
        raw_factor, inverse_norm = factor, factor
    gk, sk, g_sum = _query_sums(
        q.to(q_raw.dtype), do, k_source, v_source, key_scale_ptr, k_stride_l, v_stride_l, lo // BLOCK_N * BLOCK_N, hi,
        full_lo, full_hi, row_start, row_stop, key_stop, row_factor, first, second, delta, p, columns,
        KIND, P, COSINE, D, BLOCK_D, BLOCK_M, BLOCK_N, LOG_DEGREE, DOT, WIDE, STAGES, TMA, AGAIN,
    )  # fmt: skip

    to_keys_ptr += at
    inside = rows < Lq
    if KIND == EXP:
        grad = gk
        if COSINE:
            tl.store(to_keys_ptr, first, mask=inside)
            tl.store(to_keys_ptr + row_plane, raw_factor, mask=inside)
            tl.store(to_keys_ptr + 2 * row_plane, delta * raw_factor, mask=inside)
        else:
            tl.store(to_keys_ptr, tl.minimum(tl.maximum(first * up, -FAR), FAR), mask=inside)
            tl.store(to_keys_ptr + row_plane, second, mask=inside)
            tl.store(to_keys_ptr + 2 * row_plane, delta, mask=inside)
    else:
        mean = tl.where(n > FIRST_ROWS, g_sum / tl.maximum(n, 1.0), 0.0)
        inverse = tl.where(z > 0, 1.0 / tl.where(z > 0, z, 1.0), 0.0)
        power_factor = p if KIND == REWEIGHTED else 1.0
        kappa = 2.0 * LOG2E * power_factor * first * inverse
        grad = (gk - sk * mean[:, None]) * kappa[:, None] if KIND == REWEIGHTED else gk * kappa[:, None]
        _store_line(
            to_keys_ptr, row_plane, inside, first, second, z, inverse, raw_factor, delta, mean * kappa * LN2, p,
            KIND, LOG_DEGREE,
        )  # fmt: skip
    if COSINE:
        q_raw = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True, True).to(tl.float32)
        grad, along = _to_raw(grad, q_raw, inverse_norm, factor)
        if GAIN:
            along *= _row_factor(n, 1.0, SCALE, LOG_N, PRECISE)
            tl.store(to_keys_ptr + GAIN_PLANE * row_plane, along, mask=inside)
    else:
        grad = grad * factor[:, None]
    if AGAIN:
        grad = tl.where(not_finite(delta)[:, None], float("nan"), grad)
    _store_gradient(dq_ptr, grad, first_row, Lq, dq_stride_l, row_offsets, columns, D)
    return not_finite(tl.sum(along) if COSINE else tl.sum(grad))


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
    tl.store(to_keys_ptr, slope, mask=inside)
    tl.store(to_keys_ptr + row_plane, to_score, mask=inside)
    tl.store(to_keys_ptr + 2 * row_plane, delta, mask=inside)


@triton.jit
def _key_terms(
    x, dp, key_scale, key_down, key_up, factor, at, row_plane, inside, p, keys, row_start, row_stop, masked,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_DEGREE: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores, both [M, N]; with cosine the latter times what makes products scores."""
    if KIND == EXP:
        first = tl.load(at, mask=inside, other=FAR)[:, None]
        second = tl.load(at + row_plane, mask=inside, other=0.0 if COSINE else FAR)[:, None]
        delta = tl.load(at + 2 * row_plane, mask=inside, other=0.0)[:, None]
        if COSINE:
            weight = ex2(x * second * key_scale[None, :] - first)
            ds = weight * (dp * second - delta)
            weight, ds = _hide_both(weight, ds, keys, row_start, row_stop, masked)
        else:
            weight = ex2(tl.minimum((x - first * key_down) * (factor[:, None] * key_up) - second, 0.0))
            ds = weight * (dp - delta)
            weight, ds = _hide_both(weight, ds, keys, row_start, row_stop, masked)
    else:
        slope = tl.load(at, mask=inside, other=0.0)[:, None]
        to_score = tl.load(at + row_plane, mask=inside, other=0.0)[:, None]
        delta = tl.load(at + 2 * row_plane, mask=inside, other=0.0)[:, None]
        x = x * to_score * key_scale[None, :]
        two_a = softplus2(x, LOG_DEGREE)
        sigma = sigmoid2(x, two_a, LOG_DEGREE)
        scale = 2.0 * slope
        if KIND == REWEIGHTED:
            intercept = tl.load(at + 3 * row_plane, mask=inside, other=0.0)[:, None]
            mean = tl.load(at + 4 * row_plane, mask=inside, other=0.0)[:, None]
            root = weight_root(two_a, slope, intercept, LOG_DEGREE)
            y = _power(root, p, P, 1)
            weight = y * root
            scale *= p
            if LOG_DEGREE == 0:
                inverse = tl.load(at + 5 * row_plane, mask=inside, other=0.0)[:, None]
                weight *= inverse
                scale *= inverse
            ds = (dp * scale - delta * scale) * y - mean
        else:
            weight = two_a * slope
            ds = dp * scale - delta * scale
        weight, sigma = _hide_both(weight, sigma, keys, row_start, row_stop, masked)
        ds *= sigma * to_score  # last: with tiny queries and steep weights the product of all factors overflows
    return weight, ds


@triton.jit(do_not_specialize=["Lq", "Lk", "window", "group"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr,
    SMALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them."""
    broken = True
    for AGAIN in tl.static_range(2):
        if broken:
            broken = _key_block(
                q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
                q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h,
                v_stride_l, do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b,
                dv_stride_h, dv_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
                KIND, P, COSINE, LOG_N, SCALE, SMALL, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                LOG_DEGREE, DOT, WIDE, 16 if AGAIN else BLOCK_M, BLOCK_N, 1 if AGAIN else STAGES, TMA and not AGAIN,
                AGAIN,
            )  # fmt: skip


@triton.jit
def _key_block(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr,
    SMALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of a block of keys; returns whether any of it is not finite.

    AGAIN: the same for a block that was not finite. Rows whose delta is not finite (see _query_block) contribute
    nothing, and their infinities and NaNs count as 0, since 0 * inf is NaN.
    """
    block, h_kv, b = _program(AGAIN)
    first_key = block * BLOCK_N
    h_kv, b = h_kv.to(tl.int64), b.to(tl.int64)
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    dk_ptr += b * dk_stride_b + h_kv * dk_stride_h
    dv_ptr += b * dv_stride_b + h_kv * dv_stride_h
    row_plane = tl.cast(row_plane, tl.int64)

    row_offsets, offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = (first_key + offsets)[None, :]
    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    v = load_tile(v_ptr, first_key, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
    k_raw = load_tile(k_ptr, first_key, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
    if COSINE:
        inside = first_key + offsets < key_stop
        inverse_norm = tl.load(key_scale_ptr + (b * Hkv + h_kv) * Lk + first_key + offsets, mask=inside, other=0.0)
        down = _down(inverse_norm, SMALL)
        key_scale = _rest(inverse_norm, SMALL)
        k = (k_raw.to(tl.float32) * down[:, None]).to(k_raw.dtype)
        key_down, key_up = 1.0, 1.0
    else:
        near, key_down, key_up = near_one(k_raw.to(tl.float32), SMALL, True)
        k = near.to(k_raw.dtype)
        key_scale = tl.zeros([BLOCK_N], tl.float32)
    TURNED: tl.constexpr = BLOCK_N < 64  # sums as [D, N]: the tensor cores of Hopper make 64 rows at once
    dk = tl.zeros([BLOCK_D, BLOCK_N] if TURNED else [BLOCK_N, BLOCK_D], tl.float32)
    dv = dk
    for member in range(group):
        h = h_kv * group + member
        q_head = q_ptr + b * q_stride_b + h * q_stride_h
        do_head = do_ptr + b * do_stride_b + h * do_stride_h
        rows_head = to_keys_ptr + (b * Hq + h) * Lq
        q_source = tile_source(q_head, Lq, q_stride_l, D, BLOCK_M, BLOCK_D, TMA)
        do_source = tile_source(do_head, Lq, do_stride_l, D, BLOCK_M, BLOCK_D, TMA)
        for start in tl.range(row_lo // BLOCK_M * BLOCK_M, row_hi, BLOCK_M, num_stages=STAGES):
            rows = start + row_offsets
            q = read_tile(q_source, start, Lq, q_stride_l, row_offsets, columns, D, TMA)  # [M, D]
            do = read_tile(do_source, start, Lq, do_stride_l, row_offsets, columns, D, TMA)  # [M, D]
            if AGAIN:
                q, do = _finite_entries(q), _finite_entries(do)
            x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
            dp = dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )  # [M]
            factor = rows.to(tl.float32) * 0.0 + SCALE * LOG2E
            if LOG_N and not COSINE:
                factor = _row_factor((row_stop - row_start).to(tl.float32), LOG2E, SCALE, LOG_N, LOG_DEGREE == 0)
            masked = (start < full_lo) | (start + BLOCK_M > full_hi)
            if AGAIN:
                delta = tl.load(rows_head + 2 * row_plane + rows, mask=rows < Lq, other=0.0)
                row_stop = tl.where(not_finite(delta), row_start, row_stop)
                masked = True
            weight, ds = _key_terms(
                x, dp, key_scale, key_down, key_up, factor, rows_head + rows, row_plane, rows < Lq, p,
                keys, row_start, row_stop, masked, KIND, P, COSINE, LOG_DEGREE,
            )  # fmt: skip
            if LOG_N and not COSINE:
                ds *= factor[:, None]
            if AGAIN:
                weight, ds = _hide_both(weight, ds, keys, row_start, row_stop, masked)
            operand = q.to(tl.float32) if WIDE else q
            weight, ds = weight.to(do.dtype), ds.to(operand.dtype)
            if TURNED:
                dv = dot(tl.trans(do), weight, dv, PRECISION=DOT)
                dk = dot(tl.trans(operand), ds, dk, PRECISION=DOT)
            else:
                dv = dot(tl.trans(weight), do, dv, PRECISION=DOT)
                dk = dot(tl.trans(ds), operand, dk, PRECISION=DOT)
    if TURNED:
        dk, dv = tl.trans(dk), tl.trans(dv)
    if COSINE:
        k_raw = load_tile(k_ptr, first_key, key_stop, k_stride_l, offsets, columns, D, True, True)
        if AGAIN:
            k_raw = _finite_entries(k_raw)
        dk, along = _to_raw(dk, k_raw.to(tl.float32), inverse_norm, LN2 if KIND == EXP else 1.0)  # scores in base 2
    else:
        dk *= LN2 if LOG_N else SCALE
    _store_gradient(dk_ptr, dk, first_key, Lk, dk_stride_l, offsets, columns, D)
    _store_gradient(dv_ptr, dv, first_key, Lk, dv_stride_l, offsets, columns, D)
    # A sum of numbers that are not all finite is not finite. (One that overflows repeats the block for nothing.)
    return not_finite(tl.sum(dv) + tl.sum(along) if COSINE else tl.sum(dk + dv))
