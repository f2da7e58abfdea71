"""Numerical conventions that every implementation of the operator shares, so that all give the same answer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lssar.specs import AttentionSpec

FIRST_ROWS = 3
"""Rows that see at most this many keys are not re-centred and have no threshold (the paper's "first three rows")."""

FLAT_ULPS = 32
"""A re-weighted row is flat, and gets uniform weights, when its spread is below this many roundings of its scores."""

EXP_LIMIT = 250.0
"""Largest argument of an un-normalised exp in the wide-range computation: e^250 saturates every output dtype."""

WIDE_LIMIT = 1e60
"""Largest entry of a float64 row in the wide-range computation: products of four such factors stay finite."""


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension for any finite norm; the zero vector stays zero, with zero gradient."""
    return unit_and_norm(x)[0]


def unit_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    x = x / largest.masked_fill(zero, torch.inf)  # also for the gradient
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).masked_fill(zero, 1)
    return x / norm, largest * norm


def unit_backward(grad: Tensor, x_unit: Tensor, norm: Tensor) -> Tensor:
    """Gradient of x from that of x / |x|: the part along x is lost, the rest is divided by the norm. In place."""
    grad.addcmul_(x_unit, (x_unit * grad).sum(-1, keepdim=True), value=-1)
    return grad.div_(norm).masked_fill_(norm == 0, 0)


def eps_of(dtype: torch.dtype) -> float:
    """Rounding unit of the scores: half types accumulate in float32."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def whole(x: float) -> float:
    """p as an int if it is a whole number: kernels compute whole powers by multiplication."""
    return int(x) if float(x).is_integer() else float(x)


def scale_factor(d: int, spec: AttentionSpec) -> float:
    """What all products q.k are multiplied by."""
    return math.log(d) if spec.scale == "log_d" else 1 / math.sqrt(d)


def score_factor(n: Tensor, d: int, spec: AttentionSpec) -> Tensor:
    """What the products q.k of a row are multiplied by, shaped like n (a float tensor of visible counts)."""
    factor = scale_factor(d, spec)
    return n.clamp_min(1).log() * factor if spec.log_n else torch.full_like(n, factor)


def score_bias(n: Tensor, spec: AttentionSpec) -> Tensor | float:
    if spec.bias == "-log_n":
        return -n.clamp_min(1).log()
    return -math.log(spec.train_length) if spec.bias == "-log_L" else 0.0


def fixed_divisor(n: Tensor, spec: AttentionSpec) -> Tensor:
    """The divisor of a mechanism that is not l1-normalised, shaped like n; 1 for a row that sees nothing."""
    n = n.clamp_min(1)
    match spec.divisor:
        case "L":
            return torch.full_like(n, spec.train_length)
        case "n":
            return n
        case "sqrt_n":
            return spec.gamma * (n / 2).sqrt()
        case _:
            return torch.ones_like(n)


def flat_tolerance(a_max: Tensor, score_bound: Tensor, spec: AttentionSpec, eps: float) -> Tensor:
    """Rounding error of the row's largest activation: the activation's slope there times the error of the score.

    `score_bound` bounds |s| in the row (|q^.k^| <= 1 for cosine scores, so the score factor).
    """
    slopes = {
        "softplus": lambda a: -torch.expm1(-a),  # sigmoid(s), from a = softplus(s)
        "sigmoid": lambda a: a * (1 - a),
        "relu2": lambda a: 2 * a.clamp_min(0).sqrt(),
    }
    slope = slopes.get(spec.activation, torch.ones_like)(a_max)  # 1: exact where it matters, a bound elsewhere
    return FLAT_ULPS * eps * slope * (1 + score_bound)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; what is finite stays finite. NaN (which only NaN or inf in the input can cause) stays visible."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Cast(torch.autograd.Function):
    """Cast up; the gradient comes back saturated rather than infinite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, from_finite: bool) -> Tensor:
        return x.to(dtype, copy=True)  # a view would share its forward gradient with x

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.wide, ctx.from_finite = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_):
        return tangent.to(ctx.wide)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return narrow(grad, ctx.dtype, ctx.from_finite), None, None


def widen(x: Tensor, dtype: torch.dtype, from_finite: bool = False) -> Tensor:
    return _Cast.apply(x, dtype, from_finite)


def extreme(*tensors: Tensor) -> bool:
    """Whether products of a few entries, or reciprocals of norms, could leave float32's range."""
    for x in tensors:
        largest = x.detach().abs().amax(-1)
        if ((largest > 1e8) | ((largest > 0) & (largest < 1e-8))).any():
            return True
    return False


def may_vanish(q: Tensor, k: Tensor, spec: AttentionSpec, gain: Tensor | None) -> bool:
    """Whether all activations of a row could be so small that the gradients of their shares overflow float32.

    Softplus, sigmoid and the like fall as exp(s) for scores s < 0, and a share of their sum has a derivative of up to
    1 / sum, here more than exp(60). With exp the largest activation is taken out before.
    """
    if spec.activation == "exp" or (spec.divisor != "l1" and spec.p is None) or q.numel() == 0 or k.numel() == 0:
        return False
    factor = float(score_factor(torch.tensor(float(k.shape[2])), q.shape[-1], spec))
    if gain is not None:
        factor *= float(gain.detach().abs().amax())
    if not spec.cosine:
        factor *= float(q.detach().float().norm(dim=-1).amax()) * float(k.detach().float().norm(dim=-1).amax())
    return factor > 60


def limit_rows(x: Tensor) -> Tensor:
    """Float64, rows scaled down to WIDE_LIMIT where they exceed it: the scores of such a row saturate anyway."""
    x = x.double()
    return x * (WIDE_LIMIT / x.detach().abs().amax(-1, keepdim=True).clamp_min(WIDE_LIMIT))


def limit_heads(x: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
    """Float64, scaled down to WIDE_LIMIT where it exceeds that, and the scales (B, key_heads, 1, 1).

    For what enters the result linearly. Heads that share a key head share a scale, because their gradients are added.
    """
    x = x.double()
    if x.numel() == 0:
        return x, x.new_ones(x.shape[0], key_heads, 1, 1)
    largest = x.detach().abs().unflatten(1, (key_heads, -1)).amax((2, 3, 4))[..., None, None]
    scale = WIDE_LIMIT / largest.clamp_min(WIDE_LIMIT)
    return x * per_query_head(scale, x.shape[1]), scale


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """(B, key heads, ...) -> (B, heads, ...): what query heads share, for each of them."""
    return x.repeat_interleave(heads // x.shape[1], 1)


SCORE_LIMIT = 1e15
"""Largest entry of a row of q or k in kernels that work in float32 throughout; see in_range."""


def in_range(x: Tensor) -> Tensor:
    """Rows scaled down so far that products of two stay within float32; those of float16 always do."""
    if x.dtype == torch.float16:
        return x
    return _limited(x, SCORE_LIMIT)


def times_in_range(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in the dtype of x, with rows scaled down where they would leave the range of in_range or of the dtype.

    In float16 a moderate factor is enough for that: 3e4 times a gain of 8 is infinite.
    """
    product = in_range(x).to(working_dtype(x.dtype)) * factor
    if x.dtype == torch.float16:
        product = _limited(product, torch.finfo(x.dtype).max)
    return product.to(x.dtype)


def _limited(x: Tensor, limit: float) -> Tensor:
    """x with rows scaled down whose largest entry exceeds the limit."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    return x * (limit / largest.clamp_min(limit))


def may_branch(*tensors: Tensor) -> bool:
    """Whether values can be read here; under `vmap` there are many at a time."""
    batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
    return not any(test(x) for x in tensors for test in batched)


def finite(*tensors: Tensor) -> bool:
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # a graph cannot branch on a value
    # A finite sum has finite terms; one that is not may just have overflowed.
    return all(bool(x.sum().isfinite()) or bool(x.isfinite().all()) for x in tensors)


def narrow(x: Tensor, dtype: torch.dtype, from_finite: bool = True) -> Tensor:
    """Saturate a wide-range result; what even float64 cannot hold is 0, unless the input itself was not finite."""
    limit = torch.finfo(dtype).max
    x = x.nan_to_num(nan=0.0 if from_finite else torch.nan, posinf=limit, neginf=-limit)
    return x.clamp(-limit, limit).to(dtype)
