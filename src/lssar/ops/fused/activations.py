"""Activations phi, their derivatives, biases of scores and divisors of weights, by the names of AttentionSpec's fields.

Scores are s = factor_i q.k + bias_i, with factors and biases that depend only on the number n_i of visible keys. The
kernels are in activation_forward.py and activation_backward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import FIRST_ROWS, FLAT_TOLERANCE, INTERPRETED


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
def weight_line(total, a_max, s_max, factor, n, ACTIVATION: tl.constexpr, COSINE: tl.constexpr):
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
