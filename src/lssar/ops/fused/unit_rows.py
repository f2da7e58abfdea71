"""Unit vectors of rows, and their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import saturate, score_scale, with_gain


@triton.jit
def norm_parts(x):
    """Rows of x [M, D] (float32) times a power of two that brings their largest entry to 1..4 (less for entries below
    2^-127), that power [M], and what to multiply the result by for unit vectors, [M] (0 for a zero row).

    No bit is lost, and neither norm nor unit vector overflows. The reciprocals are of rows: a division an element
    would take several times as many instructions as all the rest.
    """
    exponent = tl.minimum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 253)
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^-floor(log2(largest))
    near = x * scale[:, None]
    square = tl.sum(near * near, 1)
    return near, scale, tl.where(square == 0, 0.0, 1.0 / tl.sqrt(tl.where(square == 0, 1.0, square)))


@triton.jit
def unit_rows(x):
    """Rows of x [M, D] (float32) as unit vectors; a zero row gives a zero vector."""
    near, _, rest = norm_parts(x)
    return near * rest[:, None]


@triton.jit
def exact_unit_rows(x):
    """Rows of x [M, D] (float32) times a power of two that brings them near 1, which loses no bit of a bfloat16, and
    what to multiply that by for unit vectors, [M] (0 for a zero row)."""
    near, _, rest = norm_parts(x)
    return near, tl.where(rest > 0, rest, 0.0)


@triton.jit
def scaled_unit_rows(near, rest, n, gain_ptr, LOG_D: tl.constexpr, HAS_GAIN: tl.constexpr, element: tl.constexpr):
    """Rows of queries [M, D], by their norm_parts, as unit vectors times the score scale of rows that see n keys, [M]
    float32, and the gain of their head, rounded to element: float16 or float32.

    The Triton kernels that use them have a loop of one turn around their products, which carries them. Triton keeps a
    left factor that was loaded or that a loop carries in shared memory, and any other in registers, which have no room.
    """
    half: tl.constexpr = element == tl.float16
    scale = score_scale(n, LOG_D, not half)
    if HAS_GAIN:
        scale = with_gain(scale, tl.load(gain_ptr), half)
    unit = near * (rest * scale)[:, None]
    return unit.to(element) if half else saturate(unit, element)  # half scales are limited well below its range


@triton.jit
def unit_rows_backward(grad_unit, x):
    """Gradient of x [M, D] (float32) from that of its unit vector: (g - u (u.g)) / |x|, zero for a zero row."""
    near, scale, rest = norm_parts(x)
    return unit_rows_backward_and_radial(grad_unit, near, scale, rest)[0]


@triton.jit
def unit_rows_backward_and_radial(grad_unit, near, scale, rest):
    """unit_rows_backward by the norm_parts of x, and the part u.g [M] of the gradient that the normalisation
    discards."""
    along = tl.sum(grad_unit * near, 1) * rest  # [M]
    return (grad_unit - near * (along * rest)[:, None]) * rest[:, None] * scale[:, None], along


@triton.jit
def unit_rows_backward_of_parts(grad_unit, near, scale, rest):
    """unit_rows_backward by the norm_parts of x, with three operations an element. Norms below 2^-128, whose reciprocal
    is infinite, count as about that: a gradient of 0 stays 0."""
    along = tl.sum(grad_unit * near, 1) * rest  # [M]
    return (grad_unit - near * (along * rest)[:, None]) * tl.minimum(rest * scale, 3e38)[:, None]
