"""Forward and backward of any activation phi under l1 or a fixed divisor, and of its re-weighting.

That is every mechanism except re-centring. Without re-weighting one pass over the keys is enough: the output is divided
by the l1 sum at the end, as in softmax, and for exp without l1 it is multiplied by the exponential of the shift. With
re-weighting a first pass gives each row's sum and largest activation, and weights are max(slope a + intercept, 0)^P, as
in forward.py. P is a constant if it is an integer, else 0, and `exponent` holds the power.
Scores are s = factor_i q.k + bias_i, with factors and biases that depend only on the number n_i of visible keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    FIRST_ROWS,
    FLAT_TOLERANCE,
    HIDDEN,
    INTERPRETED,
    dot,
    head_and_block,
    load_tile,
    power,
    rows_of_keys,
    saturate,
    store_tile,
    visible_keys,
)


@triton.jit
def _erf(x):
    if INTERPRETED:  # it has no erf: Abramowitz and Stegun 7.1.26, to 1.5e-7
        t = 1.0 / (1.0 + 0.3275911 * tl.abs(x))
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        y = 1.0 - tail * tl.exp(-x * x)
        return tl.where(x < 0, -y, y)
    else:
        return tl.erf(x)


@triton.jit
def _sigmoid(s):
    t = tl.exp(-tl.abs(s))
    return tl.where(s >= 0, 1.0, t) / (1.0 + t)


@triton.jit
def _softplus(s):
    t = tl.exp(-tl.abs(s))
    small = t * (1.0 - t * (0.5 - t * (1.0 / 3.0 - t * 0.25)))  # where 1 + t would lose t
    return tl.maximum(s, 0.0) + tl.where(t < 0.01, small, tl.log(1.0 + t))


@triton.jit
def _mish_gate(s):
    """tanh(softplus(s))."""
    e = tl.exp(tl.minimum(s, 20.0))
    return e * (e + 2.0) / (e * (e + 2.0) + 2.0)


@triton.jit
def activate(s, shift, ACTIVATION: tl.constexpr):
    """phi(s); exp(s - shift) for exp."""
    if ACTIVATION == "exp":
        return tl.exp(s - shift)
    elif ACTIVATION == "relu":
        return tl.maximum(s, 0.0)
    elif ACTIVATION == "relu2":
        return tl.maximum(s, 0.0) * tl.maximum(s, 0.0)
    elif ACTIVATION == "relu6":
        return tl.minimum(tl.maximum(s, 0.0), 6.0)
    elif ACTIVATION == "gelu":
        return 0.5 * s * (1.0 + _erf(s * 0.7071067811865476))
    elif ACTIVATION == "sigmoid":
        return _sigmoid(s)
    elif ACTIVATION == "softplus":
        return _softplus(s)
    elif ACTIVATION == "mish":
        return s * _mish_gate(s)
    else:
        return s


@triton.jit
def slope_of(s, a, ACTIVATION: tl.constexpr):
    """phi'(s), a = phi(s)."""
    if ACTIVATION == "exp":
        return a
    elif ACTIVATION == "relu":
        return tl.where(s > 0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        return 2.0 * tl.maximum(s, 0.0)
    elif ACTIVATION == "relu6":
        return tl.where((s > 0) & (s < 6.0), 1.0, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * (1.0 + _erf(s * 0.7071067811865476)) + s * 0.3989422804014327 * tl.exp(-0.5 * s * s)
    elif ACTIVATION == "sigmoid":
        return a * (1.0 - a)
    elif ACTIVATION == "softplus":
        return _sigmoid(s)
    elif ACTIVATION == "mish":
        gate = _mish_gate(s)
        return gate + s * (1.0 - gate * gate) * _sigmoid(s)
    else:
        return s * 0.0 + 1.0


@triton.jit
def _sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))


@triton.jit
def row_numbers(n, SCALE: tl.constexpr, LOG_N: tl.constexpr, BIAS: tl.constexpr, LOG_LENGTH: tl.constexpr):
    """factor_i and bias_i of the scores, [M]; n is a float tensor of visible keys."""
    log_n = tl.log(tl.maximum(n, 1.0))
    factor = log_n * SCALE if LOG_N else n * 0.0 + SCALE
    if BIAS == "-log_n":
        bias = -log_n
    elif BIAS == "-log_L":
        bias = n * 0.0 - LOG_LENGTH
    else:
        bias = n * 0.0
    return factor, bias


@triton.jit
def fixed_divisor(n, DIVISOR: tl.constexpr, GAMMA: tl.constexpr, LENGTH: tl.constexpr):
    n = tl.maximum(n, 1.0)
    if DIVISOR == "L":
        return n * 0.0 + LENGTH
    elif DIVISOR == "n":
        return n
    elif DIVISOR == "sqrt_n":
        return GAMMA * tl.sqrt(n / 2.0)
    else:
        return n * 0.0 + 1.0


@triton.jit
def _weight_line(total, a_max, s_max, factor, n, ACTIVATION: tl.constexpr, COSINE: tl.constexpr):
    """slope and intercept such that max(slope a + intercept, 0) is 1 at the largest activation and 0 at the mean.

    Flat rows, by the rule of numerics.flat_tolerance, get slope 0 and intercept 1; rows without weight zeros.
    """
    tau = tl.where(n > FIRST_ROWS, total / tl.maximum(n, 1.0), 0.0)
    spread = a_max - tau
    if ACTIVATION == "softplus":
        steep = 1.0 - tl.exp(-a_max)
    elif ACTIVATION == "sigmoid":
        steep = a_max * (1.0 - a_max)
    elif ACTIVATION == "relu2":
        steep = 2.0 * tl.sqrt(tl.maximum(a_max, 0.0))
    else:
        steep = a_max * 0.0 + 1.0
    bound = factor if COSINE else tl.abs(s_max)
    flat = (tl.abs(spread) <= FLAT_TOLERANCE * steep * (1.0 + bound)) & (total > 0) & (n > FIRST_ROWS)
    live = (spread > 0) & (flat == 0) & (n > 0)
    slope = tl.where(live, 1.0 / tl.where(live, spread, 1.0), 0.0)
    return slope, tl.where(flat, 1.0, -tau * slope)


@triton.jit
def _row_statistics(
    q, k_ptr, k_stride, lo, hi, row_start, row_stop, key_stop, factor, bias, columns,
    ACTIVATION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: sum |a|, largest a, largest s, all [M]; a = exp(s - largest s) for exp."""
    offsets = tl.arange(0, N)
    total = tl.zeros([M], tl.float32)
    a_max = tl.full([M], HIDDEN, tl.float32)
    s_max = tl.full([M], HIDDEN, tl.float32)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride, offsets, columns, D, True)  # [N, D]
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        keys = (start + offsets)[None, :]
        seen = (keys >= row_start[:, None]) & (keys < row_stop[:, None])
        higher = tl.maximum(s_max, tl.max(tl.where(seen, s, HIDDEN), 1))
        a = tl.where(seen, activate(s, higher[:, None], ACTIVATION), 0.0)
        if ACTIVATION == "exp":
            total *= tl.exp(s_max - higher)
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(tl.where(seen, a, HIDDEN), 1))
        s_max = higher
    if ACTIVATION == "exp":
        a_max = tl.where(s_max > HIDDEN, 1.0, HIDDEN)
    return total, a_max, s_max


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output, and four values of each row: factor of the weights, shift of exp, slope and intercept."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)  # head: b * Hq + h
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h

    rows = first_row + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    factor, bias = row_numbers(n, SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, tl.arange(0, BLOCK_M), columns, D, True)  # [M, D]
    lo, hi = tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)  # of what is normalised: activations, or re-weighted ones
    shift = tl.full([BLOCK_M], HIDDEN, tl.float32)
    slope, intercept = total, total
    if REWEIGHT:
        sums, a_max, s_max = _row_statistics(
            q, k_ptr, k_stride_l, lo, hi, row_start, row_stop, key_stop, factor, bias, columns,
            ACTIVATION, D, BLOCK_M, BLOCK_N, DOT, STAGES,
        )  # fmt: skip
        slope, intercept = _weight_line(sums, a_max, s_max, factor, n, ACTIVATION, COSINE)
        shift = s_max
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        masked = (start < full_lo) | (start + BLOCK_N > full_hi)
        keys = (start + offsets)[None, :]
        if ACTIVATION == "exp":
            if masked:
                s = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), s, HIDDEN)
            if not REWEIGHT:
                higher = tl.maximum(shift, tl.max(s, 1))
                shrink = tl.exp(shift - higher)
                o, total, shift = o * shrink[:, None], total * shrink, higher
        a = activate(s, shift[:, None], ACTIVATION)
        if REWEIGHT:
            a = power(tl.maximum(a * slope[:, None] + intercept[:, None], 0.0), P if P > 0 else exponent)
        if masked:
            a = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), a, 0.0)
        weight = saturate(a, v.dtype)
        if DIVISOR == "l1":  # the sum of what is multiplied: of one key alone the output is then v to the bit
            total += tl.sum(tl.abs(weight.to(tl.float32)), 1)
        o = dot(weight, v, o, PRECISION=DOT)
    divisor = total if DIVISOR == "l1" else fixed_divisor(n, DIVISOR, GAMMA, LENGTH)
    inverse = tl.where(divisor > 0, SIGN / tl.where(divisor > 0, divisor, 1.0), 0.0)
    if ACTIVATION == "exp" and DIVISOR != "l1":
        inverse *= tl.exp(shift)
    store_tile(o_ptr, o * inverse[:, None], first_row, Lq, o_stride_l, tl.arange(0, BLOCK_M), columns, D)
    at = rows_ptr + head.to(tl.int64) * Lq + rows
    row_plane = tl.cast(row_plane, tl.int64)
    tl.store(at, inverse, mask=rows < Lq)
    if ACTIVATION == "exp":
        tl.store(at + row_plane, shift, mask=rows < Lq)
    if REWEIGHT:
        tl.store(at + 2 * row_plane, slope, mask=rows < Lq)
        tl.store(at + 3 * row_plane, intercept, mask=rows < Lq)


@triton.jit
def _load_row_numbers(at, row_plane, inside, ACTIVATION: tl.constexpr, REWEIGHT: tl.constexpr):
    """inverse, shift, slope, intercept [M, 1], zeros for rows past the last; those not needed are copies of inverse."""
    row_plane = tl.cast(row_plane, tl.int64)
    inverse = tl.load(at, mask=inside, other=0.0)
    shift, slope, intercept = inverse, inverse, inverse
    if ACTIVATION == "exp":
        shift = tl.load(at + row_plane, mask=inside, other=0.0)
    if REWEIGHT:
        slope = tl.load(at + 2 * row_plane, mask=inside, other=0.0)
        intercept = tl.load(at + 3 * row_plane, mask=inside, other=0.0)
    return inverse[:, None], shift[:, None], slope[:, None], intercept[:, None]


@triton.jit
def _inverse_of_gradients(inverse, row_start, row_stop, DIVISOR: tl.constexpr):
    """inverse, but 0 for rows with one key under l1: the weight is 1 or -1 whatever the score. Its computed gradient
    would be the rounding error of a difference of equal sums, divided by an activation that may be tiny."""
    return tl.where(row_stop - row_start > 1, inverse, 0.0) if DIVISOR == "l1" else inverse


@triton.jit
def _terms(
    qk, dp, factor, bias, inverse, shift, slope, intercept, delta, row_start, row_stop, keys, masked,
    P, ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, REWEIGHT: tl.constexpr,
):  # fmt: skip
    """From products q.k and dO.v [M, N], row numbers [M, 1]: weights; g; phi'; sign(a).

    Without re-weighting g phi' are the gradients of scores. With it they are kappa (g - mean sign(a)) phi', where mean
    is the sum of g over n_i (0 in the first rows) and kappa = P slope inverse (of gradients): see docs/derivations.md.
    """
    s = qk * factor + bias
    if ACTIVATION == "exp":  # noqa: SIM102 (the outer one is decided when compiling)
        if masked:  # exp(s - shift) of a hidden key may overflow
            s = tl.where((keys >= row_start) & (keys < row_stop), s, HIDDEN)
    a = activate(s, shift, ACTIVATION)
    phi = slope_of(s, a, ACTIVATION)
    sign = _sign(a)
    if REWEIGHT:
        z = tl.maximum(a * slope + intercept, 0.0)
        y = power(z, P - 1)
        weight = y * z * inverse
        g = (dp - delta) * y
    else:
        weight = a * inverse
        moving = _inverse_of_gradients(inverse, row_start, row_stop, DIVISOR)
        g = dp * moving
        if DIVISOR == "l1":
            g -= tl.abs(moving) * delta * sign
    if masked:
        seen = (keys >= row_start) & (keys < row_stop)
        weight, g, phi = tl.where(seen, weight, 0.0), tl.where(seen, g, 0.0), tl.where(seen, phi, 0.0)
    return weight, g, phi, sign


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, rows_ptr, delta_ptr, mean_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h

    row_offsets = tl.arange(0, BLOCK_M)
    rows = first_row + row_offsets
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    factor, bias = row_numbers(n, SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    at = head.to(tl.int64) * Lq + rows
    inverse, shift, slope, intercept = _load_row_numbers(rows_ptr + at, row_plane, rows < Lq, ACTIVATION, REWEIGHT)
    delta = tl.load(delta_ptr + at, mask=rows < Lq, other=0.0)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sign_k = dq  # sum of sign(a) phi' k, which the mean of g multiplies in the end
    g_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop), BLOCK_N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + BLOCK_N > full_hi)
        _, g, phi, sign = _terms(
            qk, dp, factor[:, None], bias[:, None], inverse, shift, slope, intercept, delta[:, None],
            row_start[:, None], row_stop[:, None], (start + offsets)[None, :], masked,
            P if P > 0 else exponent, ACTIVATION, DIVISOR, REWEIGHT,
        )  # fmt: skip
        dq = dot(saturate(g * phi, k.dtype), k, dq, PRECISION=DOT)
        if REWEIGHT:
            sign_k = dot(saturate(sign * phi, k.dtype), k, sign_k, PRECISION=DOT)
            g_sum += tl.sum(g, 1)
    if REWEIGHT:
        mean = tl.where(n > FIRST_ROWS, g_sum / tl.maximum(n, 1.0), 0.0)
        moving = _inverse_of_gradients(inverse, row_start[:, None], row_stop[:, None], DIVISOR)
        dq = (dq - sign_k * mean[:, None]) * ((P if P > 0 else exponent) * slope * moving)
        tl.store(mean_ptr + at, mean, mask=rows < Lq)
    store_tile(dq_ptr, dq * factor[:, None], first_row, Lq, dq_stride_l, row_offsets, columns, D)


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, rows_ptr, delta_ptr, mean_ptr, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, exponent, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    REWEIGHT: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    CACHE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them."""
    blocks = tl.cdiv(Lk, BLOCK_N)
    head_kv, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lq // (Hq // Hkv))
    first_key = block * BLOCK_N
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(tl.int64), h_kv.to(tl.int64)
    k_ptr += b64 * k_stride_b + h64 * k_stride_h
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h

    key_offsets = tl.arange(0, BLOCK_N)
    row_offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    k = load_tile(k_ptr, first_key, key_stop, k_stride_l, key_offsets, columns, D, True)  # [N, D]
    v = load_tile(v_ptr, first_key, key_stop, v_stride_l, key_offsets, columns, D, True)  # [N, D]
    keys = (first_key + key_offsets)[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(group):
        h = (h_kv * group + member).to(tl.int64)
        q_head = q_ptr + b64 * q_stride_b + h * q_stride_h
        do_head = do_ptr + b64 * do_stride_b + h * do_stride_h
        row_at = (b64 * Hq + h) * Lq
        for start in tl.range(row_lo // BLOCK_M * BLOCK_M, row_hi, BLOCK_M, num_stages=STAGES):
            rows = start + row_offsets
            inside = rows < Lq
            q = load_tile(q_head, start, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
            do = load_tile(do_head, start, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
            inverse, shift, slope, intercept = _load_row_numbers(
                rows_ptr + row_at + rows, row_plane, inside, ACTIVATION, REWEIGHT
            )  # rows past the last have no weight
            delta = tl.load(delta_ptr + row_at + rows, mask=inside, other=0.0)
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )  # [M]
            factor, bias = row_numbers((row_stop - row_start).to(tl.float32), SCALE, LOG_N, BIAS, LOG_LENGTH)
            qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
            masked = (start < full_lo) | (start + BLOCK_M > full_hi)
            weight, g, phi, sign = _terms(
                qk, dp, factor[:, None], bias[:, None], inverse, shift, slope, intercept, delta[:, None],
                row_start[:, None], row_stop[:, None], keys, masked, P if P > 0 else exponent,
                ACTIVATION, DIVISOR, REWEIGHT,
            )  # fmt: skip
            if REWEIGHT:
                mean = tl.load(mean_ptr + row_at + rows, mask=inside, other=0.0)
                moving = _inverse_of_gradients(inverse, row_start[:, None], row_stop[:, None], DIVISOR)
                g = (g - mean[:, None] * sign) * ((P if P > 0 else exponent) * slope * moving)
            ds = g * phi
            dv = dot(tl.trans(saturate(weight, do.dtype)), do, dv, PRECISION=DOT)
            dk = dot(tl.trans(saturate(ds * factor[:, None], q.dtype)), q, dk, PRECISION=DOT)
    store_tile(dk_ptr, dk, first_key, Lk, dk_stride_l, key_offsets, columns, D)
    store_tile(dv_ptr, dv, first_key, Lk, dv_stride_l, key_offsets, columns, D)
