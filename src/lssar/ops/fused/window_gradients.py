"""What the dq kernel and the dk, dv kernel of short windows share (see window.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import USE_PTX, not_finite, saturate, sigmoid2, softplus2, weight_root
from lssar.ops.fused.steep import short_root
from lssar.ops.fused.window import store_rows

BACKWARD_PLANES = 8
"""Numbers a row that the dq kernel leaves for the dk, dv kernel, and the row's part of the gain's gradient."""
STEEP_PLANE = tl.constexpr(6)  # 1 in blocks of steep rows
GAIN_PLANE = tl.constexpr(7)


@triton.jit
def program_numbers(AGAIN: tl.constexpr):
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
def rest_of_norm(inverse_norm, SMALL: tl.constexpr):
    """inverse_norm / scale_near_one(inverse_norm, SMALL), which is what unit vectors still lack."""
    bits = (inverse_norm.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000
    return bits.to(tl.float32, bitcast=True) * (1.0 / SMALL)


@triton.jit
def orthogonal_part(grad, unit, factor):
    """The part of grad [M, D] orthogonal to unit vectors, times factor [M]; and its part along them, [M]."""
    along = tl.sum(grad * unit, 1)
    return (grad - unit * along[:, None]) * factor[:, None], along


@triton.jit
def hide_both(x, y, keys, row_start, row_stop, masked):
    """x and y with 0 where the row does not see the key; what says so is broadcast."""
    if masked:
        seen = (keys >= row_start) & (keys < row_stop)
        x, y = tl.where(seen, x, 0.0), tl.where(seen, y, 0.0)
    return x, y


@triton.jit
def finite_entries(x):
    """x with 0 in place of infinities and NaNs."""
    return tl.where(not_finite(x.to(tl.float32)), 0.0, x).to(x.dtype)


@triton.jit
def store_gradient(ptr, value, start, stop, stride, offsets, columns, D: tl.constexpr):
    """Saturated in float16, whose range a gradient may leave."""
    if ptr.dtype.element_ty == tl.float16:
        value = saturate(value, tl.float16)
    store_rows(ptr, value, start, stop, stride, offsets, columns, D)


@triton.jit
def root_and_twice_sigma(x, factor, slope, intercept, steep, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr):
    """From scores x [M, N]: roots of the weights of REWEIGHTED rows, and 2 sigma factor. steep, slope, intercept and
    what x was multiplied by: of steep_rows."""
    if STEEP:
        if steep:
            root, th = short_root(x, slope, intercept)
            sigma = th * factor + factor  # tanh gives 2 sigma - 1
        else:
            two_a = softplus2(x, LOG_DEGREE)
            root = weight_root(two_a, slope, intercept, LOG_DEGREE)
            sigma = sigmoid2(x, two_a, LOG_DEGREE) * (2.0 * factor)
    else:
        two_a = softplus2(x, LOG_DEGREE)
        root = weight_root(two_a, slope, intercept, LOG_DEGREE)
        sigma = sigmoid2(x, two_a, LOG_DEGREE) * (2.0 * factor)
    return root, sigma
