"""Device functions that the Triton and the Gluon backward kernels share.

The gradient of the row mean couples every key of a row through G_i / n_i (docs/derivations.md). The dq kernel needs G
only at the end: it accumulates sum_j g sigma k, sum_j sigma k and G in one pass, and hands G to the dk, dv kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
)
from lssar.ops.fused.steep import root_and_sigmoid

ROW_PLANES = 8
"""Values of each row that the dq kernel stores for the dk, dv kernel (store_row_values); a power of two for Gluon."""
GAIN_PLANE = tl.constexpr(7)
"""Which of them is the row's part of the gradient of its head's gain."""


@triton.jit
def gradient_scale(do_norm, v_max):
    """A bound [M] of |dO.v - dO.O|, and its reciprocal (0 where the bound vanishes).

    |dO.v - dO.O| <= 2 |dO|_1 max|v|: scaled to at most 1, a row of ds fits a half type whatever the loss scale.
    do_norm: |dO|_1 [M]; v_max: max|v| of the row's own head of keys, so that no head depends on another.
    """
    bound = tl.minimum(2.0 * do_norm * v_max, 1e37)
    return bound, tl.where(bound > 1e-37, 1.0 / tl.where(bound > 1e-37, bound, 1.0), 0.0)


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
def query_row_factors(g_sum, n, slope, z, bound, P, LOG_D: tl.constexpr):
    """[M]: the mean of g over visible keys; c_i log2(e); kappa, by which sums of g are multiplied for a gradient."""
    mean = g_sum * tl.where(n > FIRST_ROWS, 1.0 / tl.maximum(n, 1.0), 0.0)
    return mean, score_scale(n, LOG_D), 2.0 * P * slope * reciprocal(z) * bound


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
def store_row_values(
    rows_ptr, row_plane, inside, slope, intercept, z, delta, mean, to_score, steep, radial, P,
    EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr, HAS_GAIN: tl.constexpr,
):  # fmt: skip
    """Stores the ROW_PLANES values of each row for the dk, dv kernel; rows past the last have zeros.

    0, 1: slope and intercept of the weights. 2, 3: factor and offset that turn dO.v into the gradient of a weight.
    4: the row's mean of g. 5: with EXACT_QUERIES the factor that turns products with the stored queries into scores,
    else 1 / Z, which the weights then lack. 6: with STEEP, whether all rows of this block are steep. 7: with
    HAS_GAIN, the row's part of the gradient of its head's gain, which the host sums up.
    """
    if EXACT_QUERIES:
        root = tl.where(z > 0, ex2(-lg2(tl.where(z > 0, z, 1.0)) / P), 0.0)  # Z^(-1/p) normalises the weights
        slope, intercept = slope * root, intercept * root
        mean *= to_score
        row_factor = to_score
    else:
        row_factor = reciprocal(z)
    factor = 2.0 * P * slope * row_factor
    tl.store(rows_ptr, slope, mask=inside)
    tl.store(rows_ptr + row_plane, intercept, mask=inside)
    tl.store(rows_ptr + 2 * row_plane, factor, mask=inside)
    tl.store(rows_ptr + 3 * row_plane, saturate(delta * factor, tl.float32), mask=inside)
    tl.store(rows_ptr + 4 * row_plane, mean, mask=inside)
    tl.store(rows_ptr + 5 * row_plane, row_factor, mask=inside)
    if STEEP:
        tl.store(rows_ptr + 6 * row_plane, slope * 0.0 + steep.to(tl.float32), mask=inside)
    if HAS_GAIN:
        tl.store(rows_ptr + GAIN_PLANE * row_plane, radial, mask=inside)
