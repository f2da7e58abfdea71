"""Device functions that the Triton and the Gluon backward kernels share.

The gradient of the row mean couples every key of a row through G_i / n_i (docs/derivations.md). The dq kernel needs G
only at the end: it accumulates sum_j g sigma k, sum_j sigma k and G in one pass, and hands G to the dk, dv kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.normalize import VALUE_BLOCK
from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    ex2,
    lg2,
    power,
    reciprocal,
    saturate,
    score_scale,
    sigmoid2,
    softplus2,
    with_gain,
)
from lssar.ops.fused.steep import GENERAL, TANH_SCALE, line_of_form, root_and_sigmoid
from lssar.ops.fused.unit_rows import unit_rows_backward_and_radial

ROW_PLANES = 8
"""Values of each row that the dq kernel stores for the dk, dv kernel (store_row_values); a power of two for Gluon."""
FORM_PLANE = tl.constexpr(6)
GAIN_PLANE = tl.constexpr(7)
"""Which of them are the form of the block of rows, and the row's part of the gradient of its head's gain."""
EDGE_KEYS = tl.constexpr(128)
FULL_BLOCKS = tl.constexpr(256)
"""Keys, and blocks of keys, that _largest_value loads at once: large, since every step waits for memory."""


@triton.jit
def _largest_value(
    sizes_ptr, block_sizes_ptr, row_start, row_stop, key_lo, key_hi, full_lo, full_hi, keys, blocks,
    LEFT_EDGE: tl.constexpr,
):  # fmt: skip
    """The largest finite |v| among the keys that each row sees, [M]. Arguments as in row_scales.

    Blocks that all rows see count as a whole, other keys one by one. If rows see all keys up to one of them, that
    key has the largest of its block up to there.
    """
    first_full, last_full = tl.cdiv(full_lo, VALUE_BLOCK), full_hi // VALUE_BLOCK
    largest = row_start.to(tl.float32) * 0.0
    for start in range(first_full, last_full, FULL_BLOCKS):
        size = tl.load(block_sizes_ptr + start + blocks, mask=start + blocks < last_full, other=0.0)
        largest = tl.maximum(largest, tl.max(size, 0))
    if not LEFT_EDGE:
        M: tl.constexpr = row_start.shape[0]
        last = row_stop - 1
        for i in tl.static_range(max(M // VALUE_BLOCK, 1)):  # M rows differ by fewer than M keys
            block = last_full + i
            size = tl.load(block_sizes_ptr + block, mask=(block + 1) * VALUE_BLOCK < key_hi, other=0.0)
            largest = tl.where(block < last // VALUE_BLOCK, tl.maximum(largest, size), largest)
        largest = tl.maximum(largest, tl.load(sizes_ptr + last, mask=row_stop > 0, other=0.0))
    else:
        after = tl.where(first_full < last_full, last_full * VALUE_BLOCK, key_lo)
        for start in range(after, key_hi, EDGE_KEYS):
            largest = tl.maximum(largest, _largest_seen(sizes_ptr, start + keys, row_start, row_stop, key_hi))
        for start in range(key_lo, tl.where(first_full < last_full, first_full * VALUE_BLOCK, key_lo), EDGE_KEYS):
            largest = tl.maximum(largest, _largest_seen(sizes_ptr, start + keys, row_start, row_stop, key_hi))
    return largest


@triton.jit
def _largest_seen(sizes_ptr, keys, row_start, row_stop, key_hi):
    size = tl.load(sizes_ptr + keys, mask=keys < key_hi, other=0.0)
    seen = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_stop[:, None])
    return tl.max(tl.where(seen, size[None, :], 0.0), 1)


@triton.jit
def row_scales(
    do, o, sizes_ptr, block_sizes_ptr, row_start, row_stop, key_lo, key_hi, full_lo, full_hi, keys, blocks,
    LEFT_EDGE: tl.constexpr,
):  # fmt: skip
    """[M]: delta = dO.O, a bound of |dO.v - delta|, and the bound's reciprocal (0 where it vanishes).

    |dO.v - delta| <= 2 |dO|_1 max|v|: scaled to at most 1, a row of ds fits a half type whatever the loss scale.
    do, o: [M, D], float32. sizes, block_sizes: what normalize_kernel says of values. keys, blocks:
    0..EDGE_KEYS and 0..FULL_BLOCKS as tensors, in layouts that broadcast with [M, 1] and stand alone. LEFT_EDGE: rows
    may differ in the first key that they see.
    """
    delta = tl.sum(do * o, 1)
    v_max = _largest_value(
        sizes_ptr, block_sizes_ptr, row_start, row_stop, key_lo, key_hi, full_lo, full_hi, keys, blocks, LEFT_EDGE
    )
    bound = tl.minimum(2.0 * tl.sum(tl.abs(do), 1) * v_max, 1e37)
    return delta, bound, tl.where(bound > 1e-37, 1.0 / tl.where(bound > 1e-37, bound, 1.0), 0.0)


@triton.jit
def query_terms(
    x, dp, slope, intercept, unit_scale, delta, short, P, REWEIGHT: tl.constexpr,
    LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """g (scaled by unit_scale) and sigma of scores x, for dq; dp: dO.v.

    Hidden keys have w = 0, except in flat rows, whose g is multiplied by slope = 0 in the end.
    """
    w, sigma = root_and_sigmoid(x, slope, intercept, short, LOG_DEGREE, STEEP)
    g = dp * unit_scale - delta
    if REWEIGHT:
        g = g * power(w, P - 1)
    return g, sigma


@triton.jit
def query_row_factors(g_sum, n, slope, z, P, LOG_D: tl.constexpr, PRECISE: tl.constexpr):
    """[M]: the mean of g over visible keys; c_i log2(e); kappa, which together with bound turns sums of g into a
    gradient (one after the other: the product of the two may overflow where the gradient does not)."""
    mean = g_sum * tl.where(n > FIRST_ROWS, 1.0 / tl.maximum(n, 1.0), 0.0)
    return mean, score_scale(n, LOG_D, PRECISE), 2.0 * P * slope * reciprocal(z)


@triton.jit
def _sound_rows(z, delta, mean):
    """Rows that exist and see finite q, k and v only. (Rows past the last see what the last does, with dO = 0.)"""
    return (z == z) & (delta == delta) & (mean == mean)


@triton.jit
def query_gradient(
    unit_gradient, near, norm_scale, rest, z, delta, bound, mean, kappa, scale, gain_ptr, HAS_GAIN: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """dq [M, D]; each row's part of the gradient of the head's gain; scale with that gain; and which rows are sound.

    Rows that are not sound have dq NaN. unit_gradient: of the normalised queries, up to the factors of
    query_row_factors. near, norm_scale, rest: norm_parts of the queries. HALF: see with_gain.
    """
    sound = _sound_rows(z, delta, mean)
    factor = tl.where(sound, kappa * scale, float("nan"))
    unit_gradient = unit_gradient * factor[:, None] * bound[:, None]
    dq, radial = unit_rows_backward_and_radial(unit_gradient, near, norm_scale, rest)
    if HAS_GAIN:
        gain = tl.load(gain_ptr)
        dq = dq * gain
        radial = tl.where(sound, radial, float("nan"))
        scale = with_gain(scale, gain, HALF)
    return dq, radial, scale, sound


@triton.jit
def query_gradient_of_unit(
    unit_gradient, q, to_unit, norm_scale, rest, z, delta, bound, mean, kappa, scale, gain_ptr, HAS_GAIN: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """As query_gradient with three operations an element: q times to_unit [M] are the unit queries.

    The factors of a row come in two products, neither of which overflows where the gradient does not: the second may,
    for queries near the end of the range, so that a power of two of it goes to the first.
    """
    sound = _sound_rows(z, delta, mean)
    factor = tl.where(sound, kappa * scale, float("nan"))
    along = tl.sum(unit_gradient * q, 1) * to_unit
    radial = along * factor * bound
    far = bound * norm_scale > 2.0**112
    near_factor = factor * rest * tl.where(far, 2.0**16, 1.0)
    far_factor = bound * tl.where(far, 2.0**-16, 1.0) * norm_scale
    far_factor = tl.minimum(far_factor, 3e38)  # infinite only for gradients beyond the range; those may be 0
    if HAS_GAIN:
        gain = tl.load(gain_ptr)
        near_factor = near_factor * gain
        radial = tl.where(sound, radial, float("nan"))
        scale = with_gain(scale, gain, HALF)
    dq = (unit_gradient - q * (along * to_unit)[:, None]) * near_factor[:, None] * far_factor[:, None]
    return dq, radial, scale, sound


@triton.jit
def key_weights(x, slope, intercept, short, P, REWEIGHT: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr):
    """Weights w^P of scores x, y = w^(P-1), and sigma, for dk and dv."""
    if REWEIGHT:
        w, sigma = root_and_sigmoid(x, slope, intercept, short, LOG_DEGREE, STEEP)
        y = power(w, P - 1)
        weight = y * w
    else:
        two_a = softplus2(x, LOG_DEGREE)
        sigma = sigmoid2(x, two_a, LOG_DEGREE)
        weight = two_a * slope
        y = sigma  # not used
    return weight, y, sigma


@triton.jit
def score_gradient(scaled_dp, y, mean, sigma, REWEIGHT: tl.constexpr):
    """ds from scaled_dp = dO.v factor - offset and the terms of key_weights."""
    if REWEIGHT:
        scaled_dp = scaled_dp * y - mean
    return scaled_dp * sigma


@triton.jit
def precise_score_gradient(dp, factor, delta, y, mean, sigma, REWEIGHT: tl.constexpr):
    """score_gradient with the factor last, so that nothing overflows before ds does; one more instruction a score."""
    apart = dp - delta
    return (apart * y * factor - mean if REWEIGHT else apart * factor) * sigma


@triton.jit
def store_row_values(
    rows_ptr, row_plane, inside, sound, slope, intercept, z, delta, mean, to_score, form, radial, P,
    EXACT_QUERIES: tl.constexpr, PRECISE: tl.constexpr, STEEP: tl.constexpr, HAS_GAIN: tl.constexpr,
    SHORT_FORMS: tl.constexpr,
):  # fmt: skip
    """Stores the ROW_PLANES values of each row for the dk, dv kernel; rows past the last, and those that are not sound,
    have zeros: they do not contribute to dk and dv.

    0, 1: slope and intercept of the weights. 2, 3: factor and offset that turn dO.v into the gradient of a weight;
    with PRECISE the offset lacks the factor.
    4: the row's mean of g. 5: with EXACT_QUERIES the factor that turns products with the stored queries into scores,
    else 1 / Z, which the weights then lack. 6: with STEEP, the form of this block of rows. 7: with
    HAS_GAIN, the row's part of the gradient of its head's gain, which the host sums up. SHORT_FORMS: unless the form is
    GENERAL, values 0, 1 and 5 are those that steep.short_root takes, and 2 to 4 are halved.
    """
    if EXACT_QUERIES:
        root = tl.where(z > 0, ex2(-lg2(tl.where(z > 0, z, 1.0)) / P), 0.0)  # Z^(-1/p) normalises the weights
        slope, intercept = slope * root, intercept * root
        mean *= to_score
        row_factor = to_score
    else:
        row_factor = reciprocal(z)
    slope, intercept = tl.where(sound, slope, 0.0), tl.where(sound, intercept, 0.0)
    mean, delta = tl.where(sound, mean, 0.0), tl.where(sound, delta, 0.0)
    row_factor = tl.where(sound, row_factor, 0.0)
    factor = 2.0 * P * slope * row_factor
    if SHORT_FORMS and STEEP:
        slope, intercept = line_of_form(slope, intercept, form)
        row_factor = tl.where(form == GENERAL, row_factor, row_factor * TANH_SCALE)
        half = tl.where(form == GENERAL, 1.0, 0.5)
        factor, mean = factor * half, mean * half
    tl.store(rows_ptr, slope, mask=inside)
    tl.store(rows_ptr + row_plane, intercept, mask=inside)
    tl.store(rows_ptr + 2 * row_plane, factor, mask=inside)
    offset = delta if PRECISE else saturate(delta * factor, tl.float32)
    tl.store(rows_ptr + 3 * row_plane, offset, mask=inside)
    tl.store(rows_ptr + 4 * row_plane, saturate(mean, tl.float32), mask=inside)
    tl.store(rows_ptr + 5 * row_plane, row_factor, mask=inside)
    if STEEP:
        tl.store(rows_ptr + FORM_PLANE * row_plane, slope * 0.0 + form.to(tl.float32), mask=inside)
    if HAS_GAIN:
        tl.store(rows_ptr + GAIN_PLANE * row_plane, radial, mask=inside)
