"""Shorter arithmetic for steep rows. docs/derivations.md defines these rows and bounds the error."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    INTERPRETED,
    LOG2E,
    USE_PTX,
    power,
    root_of_power_of_two,
    sigmoid2,
    softplus2,
    weight_root,
)

STEEP_FROM = tl.constexpr(4.643856189774724)  # 2a of x = 2
STEEP_SPREAD = tl.constexpr(0.25)  # the largest slope
LINEAR_FROM = tl.constexpr(16.01124)  # 2a of x = 8

# Forms of the arithmetic for a block of rows
GENERAL = tl.constexpr(0)
SHORT = tl.constexpr(1)
LINEAR = tl.constexpr(2)


@triton.jit
def form_of_rows(slope, intercept, inside, P):
    """The form that serves all of these rows; those that are not inside do not count.

    SHORT if they are steep: keys of x < 2 have a weight of 2^-24 at most, where the largest has 1/2 or 1/16, and the
    threshold lies about 4 (of 2a) or more below the largest. Such rows can do with `softplus_pairs` for their mean and
    with `_steep_root`. LINEAR if moreover keys of x < 8 have a weight of 2^-9 at most: the softplus of the others is x.
    """
    gentle = (slope * STEEP_FROM + intercept > root_of_power_of_two(-24.0, P)) | (slope > STEEP_SPREAD)
    near = slope * LINEAR_FROM + intercept > root_of_power_of_two(-9.0, P)
    return 2 - tl.max(tl.where(inside, tl.where(gentle, 2, near.to(tl.int32)), 0), 0)


@triton.jit
def _ex2_neg(x):
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 m; neg.f32 m, $1; ex2.approx.ftz.f32 $0, m; }", "=f,f", [x], tl.float32, True, 1
        )
    else:
        return tl.exp2(-x)


@triton.jit
def _steep_root(x, t, slope, intercept):
    """weight_root of softplus2(x) where only x >= 2 matters, t = 2^-x. Half of that softplus is off by 8e-4 there, by
    2e-2 at 1, and for smaller x below any threshold."""
    return weight_root(x + t * (t * -0.61989008 + 1.439780565), 2.0 * slope, intercept, 3)


@triton.jit
def tile_weights(
    x, slope, intercept, form, P, REWEIGHT: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr
):  # fmt: skip
    """Weights of scores x in the forward: of LSSA 2a itself, else powers of roots. form: that of the rows (STEEP)."""
    if not REWEIGHT:
        weight = softplus2(x, LOG_DEGREE)
    else:
        if STEEP:
            if form == LINEAR:
                root = weight_root(x, 2.0 * slope, intercept, 3)
            elif form == SHORT:
                root = _steep_root(x, _ex2_neg(x), slope, intercept)
            else:
                root = weight_root(softplus2(x, LOG_DEGREE), slope, intercept, LOG_DEGREE)
        else:
            root = weight_root(softplus2(x, LOG_DEGREE), slope, intercept, LOG_DEGREE)
        weight = power(root, P)
    return weight


@triton.jit
def _sigmoid_of(t):
    """1 / (1 + t), t = 2^-x: right for any x, infinite t included."""
    if USE_PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + t], tl.float32, True, 1)
    else:
        return 1.0 / (1.0 + t)


@triton.jit
def root_and_sigmoid(x, slope, intercept, short, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr):
    """weight_root and sigmoid2; with STEEP, where short is true (steep rows, no hidden keys), the shorter forms."""
    if STEEP:
        t = _ex2_neg(x)
        sigma = _sigmoid_of(t)  # outside the branch: Triton 3.6 cannot pipeline wgmma whose operand comes out of one
        if short:
            root = _steep_root(x, t, slope, intercept)
        else:
            root = weight_root(softplus2(x, LOG_DEGREE), slope, intercept, LOG_DEGREE)
    else:
        two_a = softplus2(x, LOG_DEGREE)
        root, sigma = weight_root(two_a, slope, intercept, LOG_DEGREE), sigmoid2(x, two_a, LOG_DEGREE)
    return root, sigma


# In the Gluon backward, short forms use one special function, tanh, in place of an exponential and a reciprocal. Scores
# are z = x ln(2) / 2: then sigma = (1 + tanh z) / 2, and a is x plus a polynomial of tanh z.
TANH_SCALE = tl.constexpr(0.34657359027997264)
TAIL_0 = tl.constexpr(0.9368282425)
TAIL_1 = tl.constexpr(-1.15769061 * 0.34657359027997264)
TAIL_2 = tl.constexpr(0.2208613675 * 0.34657359027997264)
LARGEST_HALF_POWER = tl.constexpr(16)


@triton.jit
def _tanh(x):
    if USE_PTX:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x * (2.0 * LOG2E), 126.0)))


@triton.jit
def line_of_form(slope, intercept, form):
    """Slope and intercept that roots of z = x ln(2) / 2 take, from those of the weights; as they are if GENERAL."""
    slope = tl.where(form == GENERAL, slope, slope * (2.0 / TANH_SCALE))
    return slope, tl.where(form == SHORT, intercept + slope * (TAIL_0 * TANH_SCALE), intercept)


@triton.jit
def general_line(slope, intercept, form):
    """The inverse of line_of_form."""
    intercept = tl.where(form == SHORT, intercept - slope * (TAIL_0 * TANH_SCALE), intercept)
    return tl.where(form == GENERAL, slope, slope * (TANH_SCALE / 2.0)), intercept


@triton.jit
def short_root(z, slope, intercept, has_tail=1.0):
    """weight_root and tanh z for steep rows; slope and intercept of line_of_form. Hidden keys have a root of 0.

    The softplus is off by 6e-4 at most for x >= 2, and too small for smaller x. has_tail: 0 for rows of form LINEAR.
    """
    th = _tanh(z)
    return weight_root(z + th * (th * (TAIL_2 * has_tail) + TAIL_1 * has_tail), slope, intercept, 3), th


@triton.jit
def _root_of_form(z, slope, intercept, form, ALWAYS_LINEAR: tl.constexpr):
    """short_root for rows of form SHORT or LINEAR; ALWAYS_LINEAR: form is known to be LINEAR, the shortest code."""
    if ALWAYS_LINEAR:
        root, th = weight_root(z, slope, intercept, 3), _tanh(z)
    else:
        root, th = short_root(z, slope, intercept, tl.where(form == SHORT, 1.0, 0.0))
    return root, th


@triton.jit
def short_key_weights(z, slope, intercept, form, P, ALWAYS_LINEAR: tl.constexpr):
    """Weights, powers p - 1 of their roots, and tanh z: gradients.key_weights for rows of form SHORT or LINEAR."""
    w, th = _root_of_form(z, slope, intercept, form, ALWAYS_LINEAR)
    y = power(w, P - 1)
    return y * w, y, th


@triton.jit
def short_score_gradient(half_scaled_dp, y, half_mean, th):
    """gradients.score_gradient with halves of its first and third argument, and th = 2 sigma - 1."""
    half = half_scaled_dp * y - half_mean
    return half * th + half


@triton.jit
def short_query_terms(x, dp, slope, intercept, unit_scale, delta, form, P, ALWAYS_LINEAR: tl.constexpr):
    """g, g sigma and sigma, float16: gradients.query_terms for rows of form SHORT or LINEAR, two keys an instruction.

    Powers of the root in float16 add 2e-3 to the error of g (p = 15). Its square is rounded, not the root itself: the
    power amplifies that half as much.
    """
    w, th = _root_of_form(x * TANH_SCALE, slope, intercept, form, ALWAYS_LINEAR)
    sigma = _half_of_tanh(th.to(tl.float16))
    g = (dp * unit_scale - delta).to(tl.float16)
    if isinstance(P, tl.tensor):  # noqa: SIM114 (what follows `or` would be compiled too)
        y = power(w, P - 1).to(tl.float16)
    elif P > LARGEST_HALF_POWER or P != P // 1:
        y = power(w, P - 1).to(tl.float16)
    else:
        y = _half_power(w, P - 1)
    g = _multiply_halves(g, y)
    return g, _multiply_halves(g, sigma), sigma


@triton.jit
def _half_of_tanh(th):
    """(1 + th) / 2 in float16."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 half; mov.b32 half, 0x38003800; fma.rn.f16x2 $0, $1, half, half; }",
            "=r,r", [th], tl.float16, True, 2,
        )  # fmt: skip
    else:
        return (th.to(tl.float32) * 0.5 + 0.5).to(tl.float16)


@triton.jit
def _multiply_halves(a, b):
    if USE_PTX:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2)
    else:
        return (a.to(tl.float32) * b.to(tl.float32)).to(tl.float16)


@triton.jit
def _half_power(w, N: tl.constexpr):
    """w^N in float16, for w in [0, 1] (float32)."""
    if N == 0:
        return tl.where(w > 0, 1.0, 0.0).to(tl.float16)
    elif N == 1:
        return w.to(tl.float16)
    else:
        square = (w * w).to(tl.float16)
        result = square
        for bit in tl.static_range(3, -1, -1):  # N / 2 <= 8: from the bit below the leading one down
            if (N // 2) // (2 ** (bit + 1)) >= 1:
                result = _multiply_halves(result, result)
                if ((N // 2) // (2**bit)) % 2 == 1:
                    result = _multiply_halves(result, square)
        if N % 2 == 1:
            result = _multiply_halves(result, w.to(tl.float16))
        return result


# Pairs: float16 numbers of neighbouring columns in one int32, the left in its lower half. Kept as two numbers, they
# would be unpacked and packed again by the compiler wherever branches meet.
HIDDEN_LEFT = tl.constexpr(0xFB53)  # as HIDDEN: -60000
HIDDEN_RIGHT = tl.constexpr((0xFB53 << 16) - 2**32)
HIDDEN_PAIR = tl.constexpr(0xFB53 * 0x10001 - 2**32)


@triton.jit
def pairs_of(x):
    """float16 or float32 [M, N] as pairs [M, N / 2]: for float16 accumulators of the tensor cores this
    copies nothing."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    left, right = tl.split(tl.reshape(x, [M, N // 2, 2]))
    if not USE_PTX:
        return _join_pair(left.to(tl.float16), right.to(tl.float16))
    elif x.dtype == tl.float16:
        return tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [left, right], tl.int32, True, 1)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [left, right], tl.int32, True, 1)


@triton.jit
def _join_pair(left, right):
    low = left.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (right.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def left_and_right(pairs):
    """Both numbers of pairs, float32."""
    left = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    right = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return left.to(tl.float32), right.to(tl.float32)


@triton.jit
def hide_pairs(pairs, keys, row_start, row_stop):
    """Pairs with numbers of keys outside row_start..row_stop hidden; keys: that of the left number of each pair."""
    left_seen = (keys >= row_start) & (keys < row_stop)
    right_seen = (keys + 1 >= row_start) & (keys + 1 < row_stop)
    pairs = tl.where(left_seen, pairs, (pairs & -0x10000) | HIDDEN_LEFT)
    return tl.where(right_seen, pairs, (pairs & 0xFFFF) | HIDDEN_RIGHT)


@triton.jit
def softplus_pairs(pairs):
    """log2(1 + 2^x): max(x, 0) and a polynomial of |x| that ends at 9.25. Off by 3e-3 and the rounding of float16; its
    mean over scores of any spread, by 3e-4."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 zero, one, b, minus_2b, c1, c2, c3, c4, r, h, p;
            mov.b32 zero, 0; mov.b32 one, 0x3C003C00; mov.b32 b, 0x2EEB2EEB; mov.b32 minus_2b, 0xB2EBB2EB;
            mov.b32 c1, 0xA299A299; mov.b32 c2, 0x38BC38BC; mov.b32 c3, 0xBF30BF30; mov.b32 c4, 0x406E406E;
            max.f16x2 r, $1, zero;
            fma.rn.f16x2 h, $1, b, one; fma.rn.sat.f16x2 h, r, minus_2b, h;
            fma.rn.f16x2 p, h, c4, c3; fma.rn.f16x2 p, p, h, c2; fma.rn.f16x2 p, p, h, c1;
            fma.rn.f16x2 $0, p, h, r; }""",
            "=r,r", [pairs], tl.int32, True, 1,
        )  # fmt: skip
    else:
        left, right = left_and_right(pairs)
        return _join_pair(_rough_softplus(left), _rough_softplus(right))


@triton.jit
def _rough_softplus(x):
    h = tl.minimum(tl.maximum(1.0 - tl.abs(x) / 9.25, 0.0), 1.0)
    return ((((2.21507526 * h - 1.79676559) * h + 0.59187082) * h - 0.01288905) * h + tl.maximum(x, 0.0)).to(tl.float16)


@triton.jit
def _add_pairs(a, b):
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def add_lanes_of_pairs(pairs, total):
    """total [M, 4], pairs, plus the lanes of pairs [M, N / 2]; for PTX only."""
    return _add_pairs(total, tl.reduce(_pairs_of_lanes(pairs), 1, _add_pairs))


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_pairs(a, b):
    """Larger numbers of pairs; NaN if one of the two is: softplus_pairs drops NaN, so the maximum has to tell."""
    if USE_PTX:
        return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        a_left, a_right = left_and_right(a)
        b_left, b_right = left_and_right(b)
        return _join_pair(_max_or_nan(a_left, b_left).to(tl.float16), _max_or_nan(a_right, b_right).to(tl.float16))


@triton.jit
def _pairs_of_lanes(pairs):
    """[M, N / 2] as [M, N / 8, 4]: axis 1 lies within a thread of a tensor-core accumulator, axis 2 across four."""
    M: tl.constexpr = pairs.shape[0]
    COLUMNS: tl.constexpr = pairs.shape[1]
    return tl.reshape(pairs, [M, COLUMNS // 4, 4])


@triton.jit
def lane_sum_of_pairs(pairs):
    """Row sums as [M, 4] partial ones, float32: lane_sum for pairs."""
    if USE_PTX:
        left, right = left_and_right(tl.reduce(_pairs_of_lanes(pairs), 1, _add_pairs))
        return left + right
    else:
        left, right = left_and_right(_pairs_of_lanes(pairs))
        return tl.sum(left + right, 1)


@triton.jit
def _max_of_axis_1(x):
    """tl.max that keeps NaN; for finite numbers and NaN."""
    return tl.max(x, 1) + 0.0 * tl.sum(x, 1)


@triton.jit
def lane_max_of_pairs(pairs):
    """[M, 4] pairs of the largest."""
    if USE_PTX:
        return tl.reduce(_pairs_of_lanes(pairs), 1, max_pairs)
    else:  # the interpreter needs minutes for a reduction with a custom function
        left, right = left_and_right(_pairs_of_lanes(pairs))
        return _join_pair(_max_of_axis_1(left).to(tl.float16), _max_of_axis_1(right).to(tl.float16))


@triton.jit
def row_max_of_lanes(pairs):
    """The largest number [M] of lane_max_of_pairs, float32; NaN if there is one."""
    left, right = left_and_right(pairs)
    return tl.max(tl.maximum(left, right), 1) + 0.0 * tl.sum(left + right, 1)


@triton.jit
def half_dot(a, b):
    """a b for float16, accumulated in float16 by the tensor cores."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.float16)
    else:
        return tl.dot(a, b, out_dtype=tl.float16)
