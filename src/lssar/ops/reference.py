"""The operator as the paper writes it: dense, differentiable by autograd, in the float dtype it is given.

Shape letters: B batch, H query heads, Lq, Lk lengths, D head size. Every other implementation is tested against this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from lssar.ops.containment import NonFinite, with_weights, without_nonfinite
from lssar.ops.numerics import (
    EXP_LIMIT,
    FIRST_ROWS,
    WIDE_LIMIT,
    eps_of,
    extreme,
    finite,
    fixed_divisor,
    flat_tolerance,
    limit_heads,
    limit_rows,
    may_branch,
    may_vanish,
    narrow,
    per_query_head,
    saturate,
    score_bias,
    score_factor,
    unit,
    widen,
    working_dtype,
)
from lssar.specs import AttentionSpec
from lssar.visibility import Visibility

ACTIVATIONS = {
    "identity": lambda s: s,
    "relu": F.relu,
    "relu2": lambda s: F.relu(s).square(),
    "relu6": F.relu6,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    # With where in place of abs, the derivative at 0 is 1/2.
    "softplus": lambda s: s.clamp_min(0) + torch.log1p(torch.exp(-torch.where(s < 0, -s, s))),
    "mish": F.mish,
}


def l1(a: Tensor) -> Tensor:
    """a / sum |a|; a row of zeros, or of numbers whose reciprocals are near overflow, is zero with zero gradient."""
    total = a.abs().sum(-1, keepdim=True)
    return a / total.masked_fill(total < torch.finfo(a.dtype).tiny ** 0.75, torch.inf)


def scores(q: Tensor, k: Tensor, factor: Tensor, n: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.cosine:
        q, k = unit(q), unit(k)
    return (q @ k.mT) * factor + score_bias(n, spec)


def reweight(a: Tensor, visible: Tensor, n: Tensor, p: float, threshold: Tensor | float, tolerance: Tensor) -> Tensor:
    """Eq. 5 on A = l1(a), in the form that neither overflows nor underflows: see docs/derivations.md.

    `threshold` is o_i, in means of the row.
    """
    total = a.abs().sum(-1, keepdim=True)
    tau = threshold * (total / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
    spread = (a.amax(-1, keepdim=True) - tau).detach()
    flat = (spread.abs() <= tolerance) & (total > 0) & (n > FIRST_ROWS) & (threshold == 1)
    z = F.relu(a - tau) / spread.masked_fill(flat | (spread <= 0), 1)
    return torch.where(flat, visible / n.clamp_min(1), l1(z.masked_fill(flat, 0) ** p))


def recentre(w: Tensor, visible: Tensor, n: Tensor, then_l1: bool, tolerance: Tensor) -> Tensor:
    """Table 1: the row less its mean; what is left of a flat row is rounding error, and is not scaled up to 1."""
    mean = (w.sum(-1, keepdim=True) / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
    w = torch.where(visible, w - mean, 0)
    if not then_l1:
        return w
    return l1(w.masked_fill(w.detach().abs().sum(-1, keepdim=True) <= tolerance, 0))


def weights(
    s: Tensor, visible: Tensor, n: Tensor, factor: Tensor, spec: AttentionSpec, threshold: Tensor | float,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    """Attention weights (B, H, Lq, Lk) from scores; `visible` is bool, n (B, H, Lq, 1) counts it along the row."""
    s_max = s.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).masked_fill(n == 0, 0)
    if spec.activation != "exp":
        a = torch.where(visible, ACTIVATIONS[spec.activation](s), 0)
    elif spec.divisor == "l1":  # a common factor cancels: take out the largest
        a = torch.where(visible, s - s_max, -torch.inf).exp()
    else:
        a = torch.where(visible, s.clamp_max(EXP_LIMIT) if wide else s, -torch.inf).exp()

    bound = factor.detach().abs() if spec.cosine else s_max.abs()
    tolerance = flat_tolerance(a.detach().amax(-1, keepdim=True), bound, spec, eps_of(s.dtype))
    if spec.p is not None:
        return reweight(a, visible, n, spec.p, threshold, tolerance)
    w = l1(a) if spec.divisor == "l1" else a / fixed_divisor(n, spec)
    if spec.recentre != "none":
        w = recentre(w, visible, n, spec.recentre == "mean_l1", tolerance)
    return -w if spec.negate else w


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec, wide: bool = False,
    gain: Tensor | None = None, threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and weights in the dtype of the inputs; `visible` bool, broadcastable to (B, H, Lq, Lk).

    `gain` (H,) multiplies the scores; `threshold` (H,) takes the place of the spec's.
    """
    groups = q.shape[1] // max(1, k.shape[1])
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = visible.expand(*visible.shape[:2], q.shape[2], k.shape[2])
    n = visible.sum(-1, keepdim=True).to(q.dtype)
    factor = score_factor(n, q.shape[-1], spec)
    if gain is not None:
        factor = factor * gain.to(q.dtype)[:, None, None]
    w = scores(q, k, factor, n, spec)
    o = spec.threshold if threshold is None else threshold.to(q.dtype)[:, None, None]
    # Without any entry there are no weights, but a learned threshold still has a gradient: zero.
    w = weights(w, visible, n, factor, spec, o, wide) if w.numel() > 0 else w + o
    return w @ v, w


def safe_reference_attention(
    q: Tensor, k: Tensor, v: Tensor, see: Visibility, spec: AttentionSpec, gain: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference_attention` for users: half types in float32, float64 where float32's range might not do.

    NaN and inf in the inputs and in incoming gradients stay within the rows that see them: see containment.py.
    """
    with torch.autocast(q.device.type, enabled=False):
        visible = see.dense(k.shape[2])
        given = [x for x in (q, k, v, gain, threshold) if x is not None]
        if may_branch(*given) and not finite(*given):
            o, w = _Contained.apply(q, k, v, gain, threshold, see, spec)
            return o, w
        if not _in_plain_autograd(given):
            return _any_range(q, k, v, visible, spec, gain, threshold)
        incoming = _Incoming(see)
        q, k, v, *numbers = _Given.apply(incoming, *given)
        gain = None if gain is None else numbers.pop(0)
        threshold = None if threshold is None else numbers.pop(0)
        o, w = _Results.apply(incoming, *_any_range(q, k, v, visible, spec, gain, threshold))
        return o, w


def _in_plain_autograd(given: list[Tensor]) -> bool:
    """Whether there will be a backward pass that autograd runs by itself: not compiled, no transform of torch.func."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _any_range(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec, gain: Tensor | None, threshold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and weights of finite inputs, in float64 where the working dtype's range might not do."""
    dtype, working = q.dtype, working_dtype(q.dtype)
    numbers: dict[str, Any] = {"gain": gain, "threshold": threshold}
    o, w = reference_attention(widen(q, working), widen(k, working), widen(v, working), visible, spec, **numbers)
    if not may_branch(q, k, v) or (finite(o, w) and not extreme(q, k, v) and not may_vanish(q, k, spec, gain)):
        return saturate(o, dtype), saturate(w, dtype)
    q, k, v = (widen(x, torch.float64, from_finite=True) for x in (q, k, v))
    v, scale = limit_heads(v, v.shape[1])
    for name, x in numbers.items():
        if x is not None:
            numbers[name] = widen(x, torch.float64, from_finite=True).clamp(-WIDE_LIMIT, WIDE_LIMIT)
    o, w = reference_attention(limit_rows(q), limit_rows(k), v, visible, spec, wide=True, **numbers)
    return narrow(o / per_query_head(scale, o.shape[1]), dtype), narrow(w, dtype)


class _Contained(torch.autograd.Function):
    """`_any_range` for inputs that are not all finite: NaN only where a row that sees those entries has a part."""

    @staticmethod
    def forward(ctx, q, k, v, gain, threshold, see: Visibility, spec: AttentionSpec):
        ctx.see, ctx.spec = see, spec
        ctx.save_for_backward(q, k, v, gain, threshold)
        found = NonFinite(q, k, v, see, gain, threshold)
        q, k, v, gain, threshold = (x if x is None else without_nonfinite(x) for x in (q, k, v, gain, threshold))
        o, w = _any_range(q, k, v, see.dense(k.shape[2]), spec, gain, threshold)
        return found.output(o), found.weights(w)

    @staticmethod
    def backward(ctx, do: Tensor, dw: Tensor):
        given = ctx.saved_tensors
        found = NonFinite(*given[:3], ctx.see, *given[3:])
        leaves: list[Any] = [None if x is None else without_nonfinite(x).detach().requires_grad_() for x in given]
        q, k, v, *numbers = leaves
        with torch.enable_grad():
            o, w = _any_range(q, k, v, ctx.see.dense(k.shape[2]), ctx.spec, *numbers)
        asked = [x for x in leaves if x is not None]
        made = iter(
            torch.autograd.grad((o, w), asked, (without_nonfinite(do), without_nonfinite(dw)), allow_unused=True)
        )
        grads = [None if x is None else next(made) for x in leaves]
        return *found.gradients(grads, with_weights(do, dw)), None, None


@dataclass
class _Incoming:
    """Gradient of the output, if it is not finite. `_Results` sets it aside, since the products of autograd would carry
    a single NaN to every row of the head; `_Given` writes NaN where it belongs."""

    see: Visibility
    do: Tensor | None = None


class _Results(torch.autograd.Function):
    """The outputs; NaN and inf in their gradients are replaced by zeros."""

    @staticmethod
    def forward(incoming: _Incoming, o: Tensor, w: Tensor):
        return o.clone(), w.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.incoming = inputs[0]
        ctx.shape = output[0].shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, do: Tensor | None, dw: Tensor | None):
        ctx.incoming.do = None
        grads = [x for x in (do, dw) if x is not None]
        if not grads or torch.compiler.is_compiling() or not may_branch(*grads) or finite(*grads):
            return None, do, dw
        do = grads[0].new_zeros(ctx.shape) if do is None else do
        ctx.incoming.do = do if dw is None else with_weights(do, dw)
        return None, without_nonfinite(do), None if dw is None else without_nonfinite(dw)


class _Given(torch.autograd.Function):
    """The inputs, all finite; their gradients are NaN where rows with a gradient that is not finite have a part."""

    @staticmethod
    def forward(incoming: _Incoming, *given: Tensor):
        return tuple(x.clone() for x in given)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.incoming, *given = inputs
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if ctx.incoming.do is None:
            return None, *grads
        q, k, v, *_ = ctx.saved_tensors
        return None, *NonFinite(q, k, v, ctx.incoming.see).gradients(grads, ctx.incoming.do)
