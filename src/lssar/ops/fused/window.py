"""What the kernels for short windows share: softmax and cosine softmax, LSSA and LSSAR.

The kernels are in window_forward.py, window_query_gradient.py (dq) and window_key_gradient.py (dk and dv).

A program holds a block of rows (in the dk, dv kernel, of keys) and reads the few tiles of keys (rows) that they see. q
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

from lssar.ops.fused.primitives import LN2, ex2, lg2, load_tile, not_finite, power
from lssar.ops.fused.steep import GENERAL, SHORT, TANH_SCALE, form_of_rows, line_of_form

EXP = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
REWEIGHTED = tl.constexpr(2)
EXP_PLANES, SOFTPLUS_PLANES = 2, 4
"""Numbers a row that the forward saves: with EXP, and with the others."""
FAR = tl.constexpr(1e37)  # a log-sum-exp that leaves no weight


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
def scale_near_one(inverse_norm, SMALL: tl.constexpr):
    """From 1 / |x|: the power of two that brings |x| to SMALL..2 SMALL."""
    return (inverse_norm.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * SMALL


@triton.jit
def norm_in_range(inverse_norm):
    """1 / |x| that float32 holds as a normal number, or 0."""
    return tl.where(inverse_norm > 0, tl.minimum(tl.maximum(inverse_norm, 1.2e-38), FAR), 0.0)


@triton.jit
def log2_of(x, PRECISE: tl.constexpr):
    return tl.log2(x) if PRECISE else lg2(x)


@triton.jit
def score_factor(n, gain, SCALE: tl.constexpr, LOG_N: tl.constexpr, PRECISE: tl.constexpr):
    """What q.k (of unit vectors, with cosine) is multiplied by for scores in base e, [M]."""
    factor = n * 0.0 + SCALE
    if LOG_N:
        factor = SCALE * LN2 * log2_of(tl.maximum(n, 1.0), PRECISE)
    return factor * gain


@triton.jit
def inverse_length(x, PRECISE: tl.constexpr):
    """1 / |x| of rows of x [M, D] whose squares float32 holds; 0 for zero rows."""
    square = tl.sum(x * x, 1)
    some = tl.where(square > 0, square, 1.0)
    return tl.where(square > 0, 1.0 / tl.sqrt(some) if PRECISE else tl.rsqrt(some), 0.0)


@triton.jit
def hide_keys(x, keys, row_start, row_stop, masked, HIDE: tl.constexpr):
    """x with HIDE where the row does not see the key, if masked: if there may be such."""
    if masked:
        x = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), x, HIDE)
    return x


@triton.jit
def store_rows(ptr, value, start, stop, stride, offsets, columns, D: tl.constexpr):
    pointers = ptr + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns[None, :]
    mask = (start + offsets < stop)[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns < D)[None, :]
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_power(w, p, P: tl.constexpr, LESS: tl.constexpr):
    """w^(p - LESS) for w >= 0: by multiplications for a constant whole P; P = 0: of p, which is known when it runs."""
    if P > 0:
        return power(w, P - LESS)
    else:
        return tl.where(w > 0, ex2((p - LESS) * lg2(tl.where(w > 0, w, 1.0))), 0.0)


@triton.jit
def head_source(ptr, tiles, b, h, TMA: tl.constexpr):
    """What read_head takes: one head of a descriptor of tiles [1, 1, N, D] made by the host, or the head's pointer."""
    if TMA:
        return tiles, b, h
    else:
        return ptr


@triton.jit
def read_head(source, start, stop, stride, offsets, columns, D: tl.constexpr, TMA: tl.constexpr):
    """[len(offsets), len(columns)] rows start + offsets of a head, zeros outside."""
    if TMA:
        tile = source[0].load([source[1], source[2], start, 0])
        return tl.reshape(tile, [offsets.shape[0], columns.shape[0]])
    else:
        return load_tile(source, start, stop, stride, offsets, columns, D, True)


@triton.jit
def key_tile(
    k_source, key_scale_ptr, start, key_stop, stride, offsets, columns,
    D: tl.constexpr, COSINE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] and, with cosine, 1 / |k| [N]."""
    k = read_head(k_source, start, key_stop, stride, offsets, columns, D, TMA)
    scale = tl.zeros([offsets.shape[0]], tl.float32)
    if COSINE:
        scale = tl.load(key_scale_ptr + start + offsets, mask=start + offsets < key_stop, other=0.0)
    return k, scale


@triton.jit
def steep_rows(slope, intercept, row_factor, inside, p, P: tl.constexpr, STEEP: tl.constexpr):
    """With STEEP: whether all of these REWEIGHTED rows can do with steep.short_root, and if so, the slope and intercept
    that it takes, and row_factor for its scores. Else these as they are."""
    steep = False
    if STEEP:
        steep = form_of_rows(slope, intercept, inside, P if P > 0 else p) != GENERAL
        slope, intercept = line_of_form(slope, intercept, tl.where(steep, SHORT, GENERAL))
        row_factor = tl.where(steep, row_factor * TANH_SCALE, row_factor)
    return steep, slope, intercept, row_factor
