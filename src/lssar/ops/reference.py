"""The operator as the paper writes it: dense, differentiable by autograd, in whatever float dtype it is given.

Shape letters: B batch, H query heads, Lq, Lk lengths, D head size. Every other implementation is tested against this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.ops.numerics import (
    EXP_LIMIT,
    FIRST_ROWS,
    eps_of,
    extreme,
    finite,
    fixed_divisor,
    flat_tolerance,
    saturate,
    score_bias,
    score_factor,
    settle,
    tame,
    tame_rows,
    unit,
    widen,
    working_dtype,
)
from lssar.specs import AttentionSpec

ACTIVATIONS = {
    "identity": lambda s: s,
    "relu": F.relu,
    "relu2": lambda s: F.relu(s).square(),
    "relu6": F.relu6,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "softplus": lambda s: F.relu(s) + torch.log1p(torch.exp(-s.abs())),
    "mish": F.mish,
}


def l1(a: Tensor) -> Tensor:
    """a / sum |a|; a row of zeros stays zero."""
    total = a.abs().sum(-1, keepdim=True)
    return a / total.masked_fill(total == 0, 1)


def scores(q: Tensor, k: Tensor, n: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.cosine:
        q, k = unit(q), unit(k)
    return (q @ k.mT) * score_factor(n, q.shape[-1], spec) + score_bias(n, spec)


def reweight(a: Tensor, visible: Tensor, n: Tensor, p: float, tolerance: Tensor) -> Tensor:
    """Eq. 5 on A = l1(a), in the form that neither overflows nor underflows: see docs/derivations.md."""
    total = a.abs().sum(-1, keepdim=True)
    threshold = (total / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
    spread = (a.amax(-1, keepdim=True) - threshold).detach()
    flat = (spread.abs() <= tolerance) & (total > 0) & (n > FIRST_ROWS)
    z = F.relu(a - threshold) / spread.masked_fill(flat | (spread <= 0), 1)
    return torch.where(flat, visible / n.clamp_min(1), l1(z.masked_fill(flat, 0) ** p))


def recentre(w: Tensor, visible: Tensor, n: Tensor, then_l1: bool, tolerance: Tensor) -> Tensor:
    """Table 1: the row less its mean; what is left of a flat row is rounding error, and is not scaled up to 1."""
    mean = (w.sum(-1, keepdim=True) / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
    w = torch.where(visible, w - mean, 0)
    if not then_l1:
        return w
    return l1(w.masked_fill(w.detach().abs().sum(-1, keepdim=True) <= tolerance, 0))


def weights(s: Tensor, visible: Tensor, n: Tensor, d: int, spec: AttentionSpec, wide: bool = False) -> Tensor:
    """Attention weights (B, H, Lq, Lk) from scores; `visible` is bool, n (B, H, Lq, 1) counts it along the row."""
    s_max = s.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).masked_fill(n == 0, 0)
    if spec.activation != "exp":
        a = torch.where(visible, ACTIVATIONS[spec.activation](s), 0)
    elif spec.divisor == "l1":  # a common factor cancels: take out the largest
        a = torch.where(visible, s - s_max, -torch.inf).exp()
    else:
        a = torch.where(visible, s.clamp_max(EXP_LIMIT) if wide else s, -torch.inf).exp()

    bound = score_factor(n, d, spec) if spec.cosine else s_max.abs()
    tolerance = flat_tolerance(a.detach().amax(-1, keepdim=True), bound, spec, eps_of(s.dtype))
    if spec.p is not None:
        return reweight(a, visible, n, spec.p, tolerance)
    w = l1(a) if spec.divisor == "l1" else a / fixed_divisor(n, spec)
    if spec.recentre != "none":
        w = recentre(w, visible, n, spec.recentre == "mean_l1", tolerance)
    return -w if spec.negate else w


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and weights in the dtype of the inputs; `visible` bool, broadcastable to (B, H, Lq, Lk)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = visible.expand(*visible.shape[:2], q.shape[2], k.shape[2])
    n = visible.sum(-1, keepdim=True).to(q.dtype)
    w = scores(q, k, n, spec)
    if w.numel() > 0:
        w = weights(w, visible, n, q.shape[-1], spec, wide)
    return w @ v, w


def safe_reference_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """`reference_attention` for users: half types in float32, and float64 where float32's range might not do."""
    dtype, working = q.dtype, working_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        o, w = reference_attention(widen(q, working), widen(k, working), widen(v, working), visible, spec)
        if (finite(o, w) and not extreme(q, k, v)) or not finite(q, k, v):
            return saturate(o, dtype), saturate(w, dtype)
        q, k, v = (widen(x, torch.float64, from_finite=True) for x in (q, k, v))
        v, scale = tame(v)
        o, w = reference_attention(tame_rows(q), tame_rows(k), v, visible, spec, wide=True)
        return settle(o / scale, dtype, True), settle(w, dtype, True)
