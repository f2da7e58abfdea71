"""Attention rows in place: scores to weights, and the gradient of weights to the gradient of scores, for any spec.

A strip is a block of whole rows: (N, R, K), with every key that its rows may see, so that sums over a row need no
second pass and no online correction. Weights come out as `w * scale`, with `scale` (N, R, 1) one factor a row, because
the factor is cheaper to apply to the (R, D) product than to the (R, K) strip. Formulas: docs/derivations.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.ops.numerics import (
    EXP_LIMIT,
    FIRST_ROWS,
    eps_of,
    fixed_divisor,
    flat_tolerance,
    score_bias,
)
from lssar.specs import AttentionSpec

LOG1P_EXP_LIMIT = 80.0
"""Scores up to here keep exp(s) inside float32, so that softplus is log1p(exp(s)): two vectorised sweeps."""

Hide = Callable[[Tensor, float], None]
"""hide(x, value) writes value into the entries of a strip that their rows may not see."""

Buffer = Callable[[str], Tensor]
"""buffer(name) gives a strip-shaped scratch tensor with undefined contents."""


@dataclass
class Rows:
    """A strip of weights and what its backward needs."""

    w: Tensor  # (N, R, K), unscaled weights; may share memory with a
    scale: Tensor  # (N, R, 1)
    a: Tensor  # (N, R, K), activations, 0 where hidden
    y: Tensor | None = None  # re-weighted: z^(p-1), 0 in flat rows
    kappa: Tensor | None = None  # re-weighted: p / (amax - tau); re-centred: 1 / sum a
    mean: Tensor | None = None  # re-weighted: (N, R, 1), of |a|, 0 in the first rows
    threshold: Tensor | None = None  # re-weighted: (N, R, 1), in means; None: the spec's
    s: Tensor | None = None  # scores, where the derivative cannot be had from a


def softplus_(s: Tensor, bound: float) -> Tensor:
    """Works in place; `bound` is the largest possible score."""
    if bound < LOG1P_EXP_LIMIT:
        return s.exp_().log1p_()
    return torch.ops.aten.softplus.out(s, out=s)


def power(z: Tensor, p: float, out: Tensor, spare: Tensor) -> Tensor:
    """z ** p into `out`; integer powers by multiplications. z is kept, `spare` is overwritten."""
    if p != int(p) or p > 64:
        return torch.pow(z, p, out=out)
    exponent = int(p)
    if exponent == 0:
        return out.fill_(1)
    if exponent == 1:
        return out.copy_(z)
    if exponent == 2:
        return torch.mul(z, z, out=out)
    if exponent % 2 == 0:
        return power(z, exponent // 2, out, spare).square_()
    if exponent % 3 == 0:
        root = power(z, exponent // 3, out, spare)
        return root.mul_(torch.mul(root, root, out=spare))
    return power(z, exponent - 1, out, spare).mul_(z)


def weigh(
    s: Tensor, n: Tensor, spec: AttentionSpec, hide: Hide, buffer: Buffer, factor: Tensor, training: bool, wide: bool,
    threshold: Tensor | None = None,
) -> Rows:  # fmt: skip
    """Turn a strip of scores into weights. `s` is overwritten; `factor` (N, R, 1) is what q.k was multiplied by.

    `threshold` (N, R, 1) takes the place of the spec's.
    """
    if spec.bias != "none":
        s += score_bias(n, spec)
    if spec.activation == "exp":
        if spec.divisor != "l1" and wide:
            s.clamp_max_(EXP_LIMIT)
        hide(s, -torch.inf)
    score_bound = factor.abs()
    if spec.activation == "exp" or (spec.p is not None and not spec.cosine):
        s_max = _row_max(s, n, hide)
        score_bound = score_bound if spec.cosine else s_max.abs()
        if spec.activation == "exp" and spec.divisor == "l1":
            s -= s_max

    scores = None
    if training and spec.activation in ("gelu", "mish"):
        scores = buffer("s").copy_(s)
    a = _activate_(s, spec, factor)
    if spec.activation != "exp":  # exp(-inf) is 0 already
        hide(a, 0.0)

    if spec.p is not None:
        rows = _reweight(a, n, spec, hide, buffer, score_bound, training, threshold)
    elif spec.divisor != "l1":
        rows = Rows(w=a, scale=1 / fixed_divisor(n, spec), a=a)
    else:
        rows = Rows(w=a, scale=_reciprocal(_abs_sum(a, spec, buffer)), a=a)
        if spec.recentre != "none":
            rows = _recentre(rows, n, spec, hide, buffer, score_bound)
    if spec.negate:
        rows.scale = -rows.scale
    rows.s = scores
    return rows


def backpropagate(
    rows: Rows, dw: Tensor, n: Tensor, spec: AttentionSpec, hide: Hide, buffer: Buffer
) -> tuple[Tensor, Tensor | None]:
    """dw (N, R, K), the gradient of the final weights, becomes that of the scores, but for the returned row factor.

    Also returns the gradient of the thresholds (N, R, 1), where the rows have their own.
    """
    d_threshold = None
    if spec.p is not None:
        assert rows.y is not None and rows.kappa is not None
        dot = torch.mul(rows.w, dw, out=buffer("t")).sum(-1, keepdim=True).mul_(rows.scale)
        g = dw.sub_(dot).mul_(rows.y)
        total = g.sum(-1, keepdim=True)
        factor = rows.scale * rows.kappa
        if rows.threshold is not None:
            assert rows.mean is not None
            d_threshold = -total * factor * rows.mean
        mean = (total / n.clamp_min(1)).masked_fill_(n <= FIRST_ROWS, 0)
        mean = mean * (spec.threshold if rows.threshold is None else rows.threshold)
        if spec.signed:
            g.addcmul_(rows.a.sign(), mean, value=-1)
        else:
            g.sub_(mean)
    else:
        factor = torch.ones_like(n)
        if spec.recentre != "none":
            dw, factor = _recentre_backward(rows, dw, n, spec, hide, buffer)
            assert rows.kappa is not None
            l1_scale = rows.kappa
        else:
            l1_scale = rows.scale.abs()
            if spec.negate:
                factor = -factor
        if spec.divisor == "l1":
            dot = torch.mul(rows.a, dw, out=buffer("t")).sum(-1, keepdim=True).mul_(l1_scale)
            if spec.signed:
                dw.addcmul_(rows.a.sign(), dot, value=-1)
            else:
                dw.sub_(dot)
        factor = factor * l1_scale
    _activation_backward_(dw, rows, spec, hide, buffer)
    return factor, d_threshold


def _row_max(s: Tensor, n: Tensor, hide: Hide) -> Tensor:
    hide(s, -torch.inf)
    return s.amax(-1, keepdim=True).masked_fill_(n == 0, 0)


def _reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0: a row without weight has no output."""
    return torch.where(x == 0, 0, 1 / x)


def _abs_sum(a: Tensor, spec: AttentionSpec, buffer: Buffer) -> Tensor:
    return (torch.abs(a, out=buffer("t")) if spec.signed else a).sum(-1, keepdim=True)


def _activate_(s: Tensor, spec: AttentionSpec, factor: Tensor) -> Tensor:
    match spec.activation:
        case "softplus":
            bounded = spec.cosine and not torch.compiler.is_compiling()  # a compiled graph cannot branch on a value
            return softplus_(s, float(factor.abs().max()) if bounded else float("inf"))
        case "exp":
            return s.exp_()
        case "relu":
            return s.relu_()
        case "relu2":
            return s.relu_().square_()
        case "relu6":
            return s.clamp_(0, 6)
        case "sigmoid":
            return s.sigmoid_()
        case "gelu":
            return s.copy_(F.gelu(s))
        case "mish":
            return F.mish(s, inplace=True)
        case _:
            return s


def _activation_backward_(da: Tensor, rows: Rows, spec: AttentionSpec, hide: Hide, buffer: Buffer) -> None:
    """da *= phi'(s), from a where that is enough; hidden entries come out 0."""
    a, t = rows.a, buffer("t")
    match spec.activation:
        case "softplus":  # sigmoid(s) = 1 - exp(-a)
            da.mul_(torch.neg(a, out=t).expm1_().neg_())
        case "exp":
            da.mul_(a)
        case "relu":
            da.mul_(torch.sign(a, out=t))
        case "relu2":
            da.mul_(torch.sqrt(a, out=t)).mul_(2)
        case "relu6":
            da.mul_((a > 0) & (a < 6))
        case "sigmoid":
            da.mul_(a).mul_(torch.sub(1, a, out=t))
        case "gelu":
            assert rows.s is not None
            da.copy_(torch.ops.aten.gelu_backward(da, rows.s))
            hide(da, 0.0)
        case "mish":
            assert rows.s is not None
            da.copy_(torch.ops.aten.mish_backward(da, rows.s))
            hide(da, 0.0)
        case _:
            hide(da, 0.0)


def _reweight(
    a: Tensor, n: Tensor, spec: AttentionSpec, hide: Hide, buffer: Buffer, score_bound: Tensor, training: bool,
    threshold: Tensor | None,
) -> Rows:  # fmt: skip
    assert spec.p is not None
    total = _abs_sum(a, spec, buffer)
    if spec.signed:
        hide(a, -torch.inf)
    a_max = a.amax(-1, keepdim=True)
    if spec.signed:
        hide(a, 0.0)
        a_max.masked_fill_(n == 0, 0)
    mean = (total / n.clamp_min(1)).masked_fill_(n <= FIRST_ROWS, 0)
    o = spec.threshold if threshold is None else threshold
    tau = mean * o
    spread = a_max - tau
    # Other thresholds are not at the mean, so that a flat row is all above or all below and needs no rule of its own.
    tolerance = flat_tolerance(a_max, score_bound, spec, eps_of(a.dtype))
    flat = (spread.abs() <= tolerance) & (total > 0) & (n > FIRST_ROWS) & (o == 1)
    spread = torch.where(flat | (spread <= 0), torch.inf, spread)

    # Divided, not multiplied by a reciprocal: the largest z is exactly 1, and the gradient of a needle exactly 0.
    z = torch.sub(a, tau, out=buffer("z") if training else a).clamp_min_(0).div_(spread)
    y = None
    if training:
        y = power(z, spec.p - 1, buffer("y"), buffer("t"))
        if spec.p == 1:  # 0^0 must be 0 below the threshold
            y.mul_(z > 0)
        w = z.mul_(y)
    else:
        w = power(z, spec.p, buffer("y"), buffer("t"))
    norm = w.sum(-1, keepdim=True)
    if torch.compiler.is_compiling() or flat.any():
        w.masked_fill_(flat, 1)
        hide(w, 0.0)
        norm = torch.where(flat, n, norm)
        if y is not None:
            y.masked_fill_(flat, 0)
    return Rows(
        w=w, scale=_reciprocal(norm), a=a, y=y, kappa=spec.p / spread, mean=mean, threshold=threshold
    )  # fmt: skip


def _recentre(rows: Rows, n: Tensor, spec: AttentionSpec, hide: Hide, buffer: Buffer, score_bound: Tensor) -> Rows:
    """Normalise, subtract the mean (1 / n where the row is re-centred), and optionally l1 again."""
    total = rows.a.sum(-1, keepdim=True) * rows.scale  # 1, or 0 for a row that sees nothing
    mean = (total / n.clamp_min(1)).masked_fill_(n <= FIRST_ROWS, 0)
    w = torch.mul(rows.a, rows.scale, out=buffer("z")).sub_(mean)
    hide(w, 0.0)
    scale = torch.ones_like(n)
    if spec.recentre == "mean_l1":
        left = torch.abs(w, out=buffer("t")).sum(-1, keepdim=True)
        tolerance = flat_tolerance(torch.ones_like(n), score_bound, spec, eps_of(w.dtype))
        scale = _reciprocal(left.masked_fill(left <= tolerance, 0))
    return Rows(w=w, scale=scale, a=rows.a, kappa=rows.scale)


def _recentre_backward(
    rows: Rows, dw: Tensor, n: Tensor, spec: AttentionSpec, hide: Hide, buffer: Buffer
) -> tuple[Tensor, Tensor]:
    if spec.recentre == "mean_l1":
        dot = torch.mul(rows.w, dw, out=buffer("t")).sum(-1, keepdim=True).mul_(rows.scale)
        dw.addcmul_(torch.sign(rows.w, out=buffer("t")), dot, value=-1)
    hide(dw, 0.0)
    mean = (dw.sum(-1, keepdim=True) / n.clamp_min(1)).masked_fill_(n <= FIRST_ROWS, 0)
    dw.sub_(mean)
    hide(dw, 0.0)
    return dw, rows.scale
