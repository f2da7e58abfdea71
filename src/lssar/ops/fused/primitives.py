"""Device functions that the forward, backward and decode kernels share.

Scores are kept in base 2: x = s * log2(e), and 2 * log2(1 + 2^x) stands for softplus(s), since any common factor of a
row cancels. Shape letters in tile comments: M query rows, N keys, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

# Approximate PTX instructions are used on NVIDIA GPUs only; the interpreter and AMD use Triton's functions.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
USE_PTX = tl.constexpr(not knobs.runtime.interpret and torch.version.hip is None)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # a score that contributes nothing: softplus 0, sigmoid 0
FIRST_ROWS = tl.constexpr(3)  # rows that see at most this many keys have no threshold
SMALLEST_SPREAD = tl.constexpr(1e-24)  # only with a gain: all base-2 scores of the row are below about -80
LARGEST_HALF_SCALE = tl.constexpr(2048.0)  # sums of 16 scores of this size fit float16
FLAT_TOLERANCE = tl.constexpr(32 * 2.0**-23)  # see numerics.FLAT_ULPS


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = "tf32"):
    """acc + a b, float32 accumulation; PRECISION matters only for float32 operands."""
    if INTERPRETED:  # it multiplies bfloat16 as if the bits were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def ex2(x):
    if USE_PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def ex2_neg_abs(x):
    """2^-|x|, with sign and absolute value as operand modifiers of a single instruction."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 m; abs.f32 m, $1; neg.f32 m, m; ex2.approx.ftz.f32 $0, m; }",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.exp2(-tl.abs(x))


@triton.jit
def lg2(x):
    if USE_PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def log2_1p(t, PRECISE: tl.constexpr):
    """log2(1 + t) for t >= 0, with small relative error for small t too. For use once a row, not once an element."""
    u = 1.0 + t
    if PRECISE:  # the rounding of 1 + t is undone by the ratio
        return tl.where(u == 1.0, t * LOG2E, tl.log2(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:
        series = t * (LOG2E - t * (0.5 * LOG2E - t * (LOG2E / 3)))
        return tl.where(t < 0.03125, series, lg2(u))


@triton.jit
def softplus2(x, LOG_DEGREE: tl.constexpr):
    """2 * log2(1 + 2^x). LOG_DEGREE 3 or 5: minimax polynomial, relative error 4e-4 or 8e-6; 0: to float32 rounding."""
    t = ex2_neg_abs(x)
    if LOG_DEGREE == 0:
        return 2.0 * log2_1p(t, True) + (x + tl.abs(x))
    else:
        if LOG_DEGREE == 3:
            h = t * -0.21450886992209584 + 0.7329612973623698
            h = h * t - 1.403494574080352
            h = h * t + 2.884256197742928
        else:
            h = t * -0.06887098969276658 + 0.29206365555015474
            h = h * t - 0.606070431873325
            h = h * t + 0.9383473307769333
            h = h * t - 1.440852198191515
            h = h * t + 2.8853658332927084
        return h * t + (x + tl.abs(x))


@triton.jit
def sigmoid2(x, twice_softplus, LOG_DEGREE: tl.constexpr):
    """d softplus / d x at x: 2^(x - log2(1 + 2^x)), with small relative error on both sides of zero."""
    if LOG_DEGREE == 0:
        return 1.0 / (1.0 + tl.exp2(tl.minimum(-x, 126.0)))
    else:
        return ex2(x - 0.5 * twice_softplus)


@triton.jit
def weight_root(two_a, slope, intercept, LOG_DEGREE: tl.constexpr):
    """max(slope * 2a + intercept, 0), whose power is a weight; for half types at most 1 too, all in one instruction."""
    if LOG_DEGREE == 0:
        return tl.maximum(two_a * slope + intercept, 0.0)
    elif USE_PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.ftz.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [two_a, slope, intercept], tl.float32, True, 1
        )
    else:
        return tl.minimum(tl.maximum(two_a * slope + intercept, 0.0), 1.0)


@triton.jit
def power(w, P):
    """w^P for w >= 0, with 0^0 = 0. Constant integers P become multiplications (five for 14 and 15); any other P, and
    one that is an argument of the kernel, an exponential of a logarithm."""
    if isinstance(P, tl.tensor):
        return tl.where(w > 0, ex2(P * lg2(tl.where(w > 0, w, 1.0))), 0.0)
    elif P == 0:
        return tl.where(w > 0, 1.0, 0.0)
    elif P != P // 1 or P > 1024:
        return tl.where(w > 0, ex2(P * lg2(tl.where(w > 0, w, 1.0))), 0.0)
    elif P % 3 == 0:
        return _power_of_two_chain(w * w * w, P // 3)
    else:
        return _power_of_two_chain(w, P)


@triton.jit
def _power_of_two_chain(w, P: tl.constexpr):
    result = w
    for bit in tl.static_range(10, -1, -1):  # P <= 1024: from the bit below the leading one down
        if P // (2 ** (bit + 1)) >= 1:
            result = result * result
            if (P // (2**bit)) % 2 == 1:
                result = result * w
    return result


@triton.jit
def compound(u, v):
    return u + v + u * v


@triton.jit
def _lanes(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] as [M, N / 8, 4, 2]: axes 1 and 3 lie within a thread of a tensor-core accumulator, axis 2 across four."""
    return tl.reshape(x, [M, N // 8, 4, 2])


@triton.jit
def lane_sum(x, M: tl.constexpr, N: tl.constexpr):
    """Row sums of [M, N] as [M, 4] partial sums that need no exchange between threads."""
    return tl.sum(tl.sum(_lanes(x, M, N), 3), 1)


@triton.jit
def lane_max(x, M: tl.constexpr, N: tl.constexpr):
    return tl.max(tl.max(_lanes(x, M, N), 3), 1)


@triton.jit
def lane_compound(t, M: tl.constexpr, N: tl.constexpr):
    """prod(1 + t) - 1 over each row of [M, N], as [M, 4] partial products; tiny t are not lost against 1."""
    return tl.reduce(tl.reduce(_lanes(t, M, N), 3, compound), 1, compound)


@triton.jit
def head_and_block(program, programs, blocks, together):
    """The head of a program, and which of its blocks it computes, counted from the longest.

    Blocks of `together` heads alternate, longest first. One head after the other, the longest block of the last head
    would start when little else is left, and most of the GPU would wait for it. `together` is limited to the heads
    whose keys and values fit the cache. Groups have equal sizes, or nearly: a small last group would wait as well.
    Divisions are unsigned, which takes a third fewer instructions.
    """
    program, blocks = tl.cast(program, tl.uint32), tl.cast(blocks, tl.uint32)
    together = tl.cast(tl.maximum(together, 1), tl.uint32)
    heads = tl.cast(programs, tl.uint32) // blocks
    groups = (heads + together - 1) // together
    groups = tl.minimum(groups, tl.maximum((2**31 - 1) // heads - 1, 1))  # products of the two fit 32 bits
    group = ((program // blocks + 1) * groups - 1) // heads
    first = group * heads // groups
    present = (group + 1) * heads // groups - first
    within = program - first * blocks
    return tl.cast(first + within % present, tl.int32), tl.cast(within // present, tl.int32)


@triton.jit
def visible_keys(
    rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Keys [start, stop) that each row sees; both bounds never decrease with the row. Rows past the last repeat it."""
    rows = tl.minimum(rows, Lq - 1)
    position = rows + (Lk - Lq)
    if PACKED:
        start = tl.load(doc_start_ptr + rows)
        stop = tl.load(doc_stop_ptr + rows)
    else:
        start = rows * 0
        stop = start + key_stop
    if CAUSAL:
        stop = tl.minimum(stop, position + 1)
    if WINDOWED:
        start = tl.maximum(start, position - window + 1)
        stop = tl.minimum(stop, position + window)
    return start, tl.maximum(start, stop)


@triton.jit
def keys_of_rows(
    first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For the M rows from first_row on: keys [lo, hi) that any of them sees, and [full_lo, full_hi) that all see. lo is
    rounded down to a multiple of TILE.

    Since bounds never decrease, the first and the last row tell, without an exchange between warps.
    """
    lo, full_hi = visible_keys(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    full_lo, hi = visible_keys(
        first_row + M - 1, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    return lo // TILE * TILE, hi, full_lo, full_hi


@triton.jit
def visible_rows(
    first_key, last_key, Lq, Lk, window, doc_start_ptr, doc_stop_ptr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows [start, stop) that see any of the keys first_key..last_key, and the part [full_start, full_stop) of them
    that sees all of these keys (up to Lk; key lengths are not considered)."""
    offset = Lk - Lq
    start, stop = 0, Lq
    full_start, full_stop = 0, Lq
    if PACKED:
        start = tl.load(doc_start_ptr + first_key)
        stop = tl.load(doc_stop_ptr + last_key)
        full_start = tl.load(doc_start_ptr + last_key)
        full_stop = tl.load(doc_stop_ptr + first_key)
    if CAUSAL:
        start = tl.maximum(start, first_key - offset)
        full_start = tl.maximum(full_start, last_key - offset)
    if WINDOWED:
        start = tl.maximum(start, first_key - offset - window + 1)
        full_start = tl.maximum(full_start, last_key - offset - window + 1)
        stop = tl.minimum(stop, last_key - offset + window)
        full_stop = tl.minimum(full_stop, first_key - offset + window)
    return start, stop, full_start, full_stop


@triton.jit
def rows_of_keys(
    first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """For the N keys from first_key on: where keys end, the rows that see any of them, and those that see them all."""
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    last_key = tl.minimum(first_key + N, Lk) - 1
    row_lo, row_hi, full_lo, full_hi = visible_rows(
        first_key, last_key, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    if first_key + N > key_stop:  # all tiles of a block that ends within the padding need a mask
        full_hi = 0
    if first_key >= key_stop:
        row_hi = row_lo
    return key_stop, row_lo, row_hi, full_lo, full_hi


@triton.jit
def score_scale(n, LOG_D: tl.constexpr, PRECISE: tl.constexpr):
    """c_i * log2(e), c_i = log(d) * log(n_i): n is a float tensor of visible keys."""
    n = tl.maximum(n, 1.0)
    return LOG_D * (tl.log2(n) if PRECISE else lg2(n))


@triton.jit
def root_of_power_of_two(exponent, P):
    """2^(exponent / P)."""
    if isinstance(P, tl.tensor):
        return tl.exp2(exponent / P)
    else:
        return 2.0 ** (exponent / P)


@triton.jit
def inverse_spread(spread, live, PRECISE: tl.constexpr, P):
    """Slope of the weights: about 1 / spread, 0 where not live. Their scale cancels, so it may be chosen.

    For float32 it is a power of two: slope * 2a - slope * 2tau then loses nothing to the rounding of its terms where
    the spread is small against them. (For large P its power might underflow.) For half types it is a little less than
    1 / spread, which leaves room for rounding below the 1 that `weight_root` clips at; the largest weight is then 1/2
    or 1/16, which no half type has to round.
    """
    slope = 1.0 / tl.where(live, spread, 1.0)
    if isinstance(P, tl.tensor):
        if PRECISE:
            slope = tl.where(P <= 64, tl.exp2(tl.floor(tl.log2(slope))), slope)
        else:
            slope *= tl.exp2(tl.where(P <= 16, -1.0, -4.0) / P)
    elif not PRECISE:
        slope *= 2.0 ** (-1.0 / P) if P <= 16 else 2.0 ** (-4.0 / P)
    elif P <= 64:
        slope = tl.exp2(tl.floor(tl.log2(slope)))
    return tl.where(live, slope, 0.0)


@triton.jit
def weight_line(total, x_max, n, P, LOG_D: tl.constexpr, LOG_DEGREE: tl.constexpr, gain_size=1.0):
    """(slope, intercept) such that weight_root(2a, slope, intercept)^P are a row's weights, the largest about 1.

    total: sum of 2a; x_max: largest x; n: visible keys, float; gain_size: |gain| of the head. Flat rows get slope 0,
    intercept 1; empty ones zeros; rows with a NaN score have slope NaN.
    The polynomial that gives 2a is off by as much at the threshold as at the largest key where the two are close, and
    where they are not it does not matter: moved by that error, the line has its two ends where they should be.
    """
    two_tau = tl.where(n > FIRST_ROWS, total / tl.maximum(n, 1.0), 0.0)
    two_a_max = x_max + tl.abs(x_max) + 2.0 * log2_1p(tl.exp2(-tl.abs(x_max)), LOG_DEGREE == 0)
    spread = two_a_max - two_tau
    c = with_gain(score_scale(n, LOG_D, LOG_DEGREE == 0), gain_size, LOG_DEGREE != 0) * LN2
    tolerance = FLAT_TOLERANCE * 2 * LOG2E * (1.0 + c) * sigmoid2(x_max, two_a_max, LOG_DEGREE)
    flat = ((n > FIRST_ROWS) & (spread <= tolerance)) | ((n > 0) & (spread < SMALLEST_SPREAD))
    live = (n > 0) & (flat == 0)
    slope = inverse_spread(spread, live, LOG_DEGREE == 0, P)
    if LOG_DEGREE != 0:
        two_tau += tl.where(n > FIRST_ROWS, softplus2(x_max, LOG_DEGREE) - two_a_max, 0.0)
    slope = tl.where(total == total, slope, total)  # a NaN score spoils the row
    return slope, tl.where(flat, 1.0, -two_tau * slope)


@triton.jit
def not_finite(x):
    """Whether entries of a float32 tensor are infinite or NaN."""
    return (x - x) != 0


@triton.jit
def without_broken_rows(x):
    """x [N, D] with rows that hold infinities or NaNs set to zero, and which rows these are, [N] int32.

    A product of matrices multiplies hidden entries by a weight of zero, and 0 * inf is NaN.
    """
    broken = tl.max(not_finite(x.to(tl.float32)).to(tl.int32), 1)
    return tl.where((broken == 0)[:, None], x, 0.0).to(x.dtype), broken


@triton.jit
def keep_visible(x, keys, row_start, row_stop, OTHERWISE: tl.constexpr):
    """x where a row sees the key, OTHERWISE elsewhere; keys, row_start and row_stop broadcast to the shape of x."""
    return tl.where((keys >= row_start) & (keys < row_stop), x, OTHERWISE)


@triton.jit
def kahan_add(total, lost, part):
    """total + part with Kahan's compensation; `total - lost` is the compensated sum."""
    part = part - lost
    new_total = total + part
    return new_total, (new_total - total) - part


@triton.jit
def load_tile(
    ptr, start, stop, stride, offsets, columns, D: tl.constexpr, MASKED: tl.constexpr,
    SECOND_READ: tl.constexpr = False,
):  # fmt: skip
    """[len(offsets), len(columns)] rows start + offsets of a matrix with unit column stride; zeros outside.

    SECOND_READ: the tile was read before a loop and is read again after it. The compiler would merge two equal loads
    and keep the tile in registers during the loop; a different eviction policy prevents that.
    """
    pointers = ptr + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns[None, :]
    padded: tl.constexpr = columns.shape[0] != D
    policy: tl.constexpr = "evict_first" if SECOND_READ else ""
    mask = (start + offsets < stop)[:, None]
    if padded:
        mask = mask & (columns < D)[None, :] if MASKED else (columns < D)[None, :]
    if MASKED or padded:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=policy)
    else:
        return tl.load(pointers, eviction_policy=policy)


@triton.jit
def tile_source(ptr, length, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """What read_tile takes: a descriptor for the tensor memory accelerator, or the pointer itself."""
    if TMA:
        shape = [tl.maximum(length, 1), D]
        return tl.make_tensor_descriptor(ptr, shape, [tl.cast(stride, tl.int64), 1], [ROWS, BLOCK_D])
    else:
        return ptr


HOST_TILES = tl.constexpr(2)  # a value of TMA: by descriptors of all heads that the host has made


@triton.jit
def head_tiles(
    tiles, b, h, ptr, length, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """tile_source of the head h that ptr points to; tiles: a descriptor of all heads if TMA is HOST_TILES.

    A program that makes its own descriptor writes it to memory and fences it before it can ask for a tile.
    """
    if TMA == HOST_TILES:
        return tiles, b, h
    else:
        return tile_source(ptr, length, stride, D, ROWS, BLOCK_D, TMA)


@triton.jit
def read_tile(source, start, stop, stride, offsets, columns, D: tl.constexpr, TMA: tl.constexpr):
    """[len(offsets), len(columns)] rows start + offsets, zeros outside."""
    if TMA == HOST_TILES:
        tile = source[0].load([source[1], source[2], start, 0])
        return tl.reshape(tile, [offsets.shape[0], columns.shape[0]])
    elif TMA:
        return source.load([start, 0])
    else:
        return load_tile(source, start, stop, stride, offsets, columns, D, True)


@triton.jit
def store_tile(ptr, value, start, stop, stride, offsets, columns, D: tl.constexpr):
    """The inverse of a masked load_tile, with values saturated to the finite range of the tensor's dtype."""
    pointers = ptr + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns[None, :]
    tl.store(
        pointers,
        saturate(value, ptr.dtype.element_ty),
        mask=(start + offsets < stop)[:, None] & (columns < D)[None, :],
    )


@triton.jit
def saturate(value, dtype: tl.constexpr):
    """value limited to the finite range of dtype; NaN stays NaN."""
    if dtype == tl.float16:
        limit = 65504.0
    elif dtype == tl.bfloat16:
        limit = 3.3895313892515355e38
    else:
        limit = 3.4028234663852886e38
    value = tl.maximum(value, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def with_gain(scale, gain, HALF: tl.constexpr):
    """Score scales times the gain of their head. HALF: limited to LARGEST_HALF_SCALE, since scores and sums of
    them are computed in float16."""
    scale = scale * gain
    if HALF:
        scale = tl.where(tl.abs(scale) > LARGEST_HALF_SCALE, tl.where(scale > 0, 1.0, -1.0) * LARGEST_HALF_SCALE, scale)
    return scale


@triton.jit
def reciprocal(z):
    """1 / z, 0 where z is not positive."""
    return tl.where(z > 0, 1.0 / tl.where(z > 0, z, 1.0), 0.0)
