"""Checks for your own kernel or port: inputs that break kernels, and the error that is allowed against float64.

    from lssar.testing import check_attention

    check_attention(my_lssar, "lssar", dtype=torch.bfloat16, device="cuda")

`my_lssar(q, k, v)` is called with the inputs of `cases` and must give the causal attention of the spec, with gradients.
The exact result is the reference in float64. The error allowed is twice what plain PyTorch loses in the same dtype, so
that a kernel is neither asked for more than its dtype holds nor let off with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lssar.ops.numerics import FIRST_ROWS, fixed_divisor, score_factor
from lssar.ops.reference import ACTIVATIONS, reference_attention, scores
from lssar.specs import AttentionSpec
from lssar.specs import spec as spec_of
from lssar.visibility import visibility

__all__ = ["Case", "assert_close_to_reference", "cases", "check_attention"]

EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""

FEATURES = ("causal", "window", "key_lengths", "cu_seqlens", "mask")
NAMES = ("o", "dq", "dk", "dv")
KINDS = ("root mean square", "largest")


@dataclass(frozen=True)
class Case:
    """Inputs of one call, the gradient of its output, and options as `lssar.attention` documents them."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    options: dict[str, Any] = field(default_factory=dict)


def cases(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", head_size: int = 32, heads: int = 4,
    key_heads: int = 2, lengths: Iterable[int] = (1, 2, 3, 4, 5, 63, 111), features: Iterable[str] = (), seed: int = 0,
) -> Iterator[Case]:  # fmt: skip
    """Causal self-attention at odd lengths and with rows that are hard to get right, then each feature asked for.

    `features`: names of options that the function takes, of "causal" (False), "window", "key_lengths", "cu_seqlens",
    "mask". With none the function is called as f(q, k, v).
    """
    features = tuple(features)
    if unknown := [name for name in features if name not in FEATURES]:
        raise ValueError(f"unknown feature {unknown[0]!r}; known: {', '.join(FEATURES)}")
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731

    def make(name: str, B: int, L: int, change: Callable[[Tensor, Tensor], Any] | None = None, **options: Any) -> Case:
        q, k = normal(B, heads, L, head_size), normal(B, key_heads, L, head_size)
        if change is not None:
            change(q, k)
        v, do = normal(B, key_heads, L, head_size), normal(B, heads, L, head_size)
        options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in options.items()}
        q, k, v, do = (x.to(device, dtype) for x in (q, k, v, do))
        return Case(name, q, k, v, do, options)

    longest = 0
    for L in lengths:
        longest = max(longest, L)
        yield make(f"length {L}", 2, L)
    L = max(8, longest)

    def needle(q: Tensor, k: Tensor) -> None:
        k.copy_(-q[:, :key_heads] + 0.1 * k)
        k[:, :, L // 3] = q[:, :key_heads, -1]

    def uniform(q: Tensor, k: Tensor) -> None:
        k.copy_(k[:, :, :1].expand_as(k).clone())

    def opposite(q: Tensor, k: Tensor) -> None:
        q.copy_(-k[:, :1, :1] + 0.1 * q)
        k.copy_(k[:, :1, :1] + 0.1 * k)

    def sizes(q: Tensor, k: Tensor) -> None:
        scale = torch.logspace(-3, 3, L, dtype=torch.float64)[:, None]
        q.mul_(scale.flip(0))
        k.mul_(scale)

    def zeros(q: Tensor, k: Tensor) -> None:
        q[:, :, L // 2] = 0
        k[:, :, L // 4] = 0

    yield make("needle", 1, L, needle)
    yield make("uniform rows", 1, L, uniform)
    yield make("opposite directions", 1, L, opposite)
    yield make("norms from 1e-3 to 1e3", 1, L, sizes)
    yield make("zero vectors", 1, L, zeros)
    if "causal" in features:
        yield make("not causal", 2, L, causal=False)
    if "window" in features:
        yield make("window 1", 1, L, window=1)
        yield make("window 5", 2, L, window=5)
    if "key_lengths" in features:
        yield make("padding", 3, L, key_lengths=torch.tensor([L, L // 2, 0]))
    if "cu_seqlens" in features:
        yield make("pack", 1, L, cu_seqlens=torch.tensor([0, 1, 1, 4, L // 2, L], dtype=torch.int32))
    if "mask" in features:
        mask = torch.rand(2, heads, L, L, generator=generator) > 0.4
        mask[..., 2, :] = False  # a row that sees nothing
        yield make("mask", 2, L, mask=mask)


def check_attention(
    fn: Callable[..., Tensor], spec: str | AttentionSpec = "lssar", *, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", gradients: bool = True, **shape: Any,
) -> list[str]:  # fmt: skip
    """Calls fn(q, k, v, **options) with every input of `cases` and compares it with the reference in float64.

    Raises AssertionError that names the case; returns the names of all. `shape`: arguments of `cases`.
    """
    done = []
    for case in cases(dtype=dtype, device=device, **shape):
        inputs = (case.q, case.k, case.v)
        if gradients:
            got = with_gradients(lambda *x: fn(*x, **case.options), inputs, case.do)  # noqa: B023
        else:
            got = (fn(*inputs, **case.options),)
        assert_close_to_reference(got, *inputs, spec, do=case.do, note=case.name, **case.options)
        done.append(case.name)
    return done


def assert_close_to_reference(
    got: Tensor | tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, spec: str | AttentionSpec = "lssar", *,
    do: Tensor | None = None, note: str = "", **options: Any,
) -> None:  # fmt: skip
    """AssertionError unless `got`, the output or (o, dq, dk, dv), is as close to float64 as its dtype allows.

    `do` is the gradient of the output, needed where gradients are given; `options` as `lssar.attention` has them.
    """
    spec, got = spec_of(spec), (got,) if isinstance(got, Tensor) else got
    q, k, v = q.detach(), k.detach(), v.detach()
    if len(got) not in (1, 4) or (len(got) == 4 and do is None):
        raise ValueError("give the output, or (o, dq, dk, dv) and do")
    run = lambda dtype, q, k, v: _eager(q, k, v, spec, dtype, do, len(got) == 4, options)  # noqa: E731
    exact = run(torch.float64, q, k, v)
    eps = EPS[q.dtype]
    for x, y, name in zip(got, exact, NAMES):
        if x.shape != y.shape or x.dtype != q.dtype:
            raise AssertionError(f"{note}: {name} is {tuple(x.shape)} {x.dtype}, not {tuple(y.shape)} {q.dtype}")
        if not x.isfinite().all():
            raise AssertionError(f"{note}: {name} is not finite")
    sums = max(q.shape[2], k.shape[2]) * min(eps, EPS[torch.float32])  # a rounding for each term of a sum
    floors = [(0.0, 0.0)]
    if do is not None and len(got) == 4:
        bounds = _cancellation(q, k, v, do, spec, options)
        floors = _losses(bounds, [torch.zeros_like(x) for x in bounds])
    losses = (_losses(one, reference) for one, reference in _eager_runs(run, q, k, v, exact))
    worst = [[0.0, 0.0] for _ in got]
    for loss in losses:
        worst = [[max(a, b) for a, b in zip(old, new)] for old, new in zip(worst, loss)]
    for index, (error, allowed) in enumerate(zip(_losses(got, exact), worst)):
        always = (4 * eps + sums) * float(exact[index].abs().max()) if exact[index].numel() else 0.0
        for kind, size, lost, floor, times in zip(KINDS, error, allowed, floors[index], (2, 8)):
            if size > times * lost + always + floor:
                raise AssertionError(
                    f"{note}: {kind} error of {NAMES[index]} is {size:.3g}; PyTorch in {q.dtype} loses {lost:.3g}"
                )


def with_gradients(f: Callable[..., Tensor], inputs: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of f(*inputs), as leaves of their own."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    o = f(*leaves)
    return (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))


def _eager(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dtype: torch.dtype, do: Tensor | None, gradients: bool,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The reference's arithmetic in one dtype throughout."""
    see = visibility(q.shape[2], k.shape[2], q.device, **{"causal": True, **options}).dense(k.shape[2])
    gain = None if spec.head_scale is None else q.new_full((q.shape[1],), spec.head_scale, dtype=torch.float64)
    f = lambda q, k, v: reference_attention(q.to(dtype), k.to(dtype), v.to(dtype), see, spec, gain=gain)[0]  # noqa: E731
    if not gradients:
        return (f(q, k, v),)
    assert do is not None
    return with_gradients(f, (q.double(), k.double(), v.double()), do)


def _eager_runs(run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, exact: tuple[Tensor, ...]) -> Iterator:
    """Eager results with what they should be: at the inputs, and in float32 and float64 one rounding away from them.

    There eager is a handful of roundings off, and how many is luck that differs from one CPU to the next.
    """
    yield run(q.dtype, q, k, v), exact
    generator = torch.Generator(q.device).manual_seed(0)
    for _ in range(8 if q.dtype in (torch.float32, torch.float64) else 0):
        moved = [one_rounding_away(x, generator) for x in (q, k, v)]
        yield run(q.dtype, *moved), run(torch.float64, *moved) if q.dtype != torch.float64 else exact


def one_rounding_away(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each number, or its neighbour above or below."""
    up = torch.rand(x.shape, generator=generator, device=x.device) < 0.5
    return torch.nextafter(x, torch.where(up, torch.inf, -torch.inf).to(x.dtype))


def _losses(got: Iterable[Tensor], exact: Iterable[Tensor]) -> list[tuple[float, float]]:
    """Error of each tensor: root mean square, and largest. One that is not finite counts as infinite."""
    errors = [(x.double() - y.double()).nan_to_num(torch.inf).abs() for x, y in zip(got, exact)]
    return [(float(e.square().mean().sqrt()), float(e.max())) if e.numel() else (0.0, 0.0) for e in errors]


def _cancellation(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, spec: AttentionSpec, options: dict[str, Any]
) -> list[Tensor]:
    """Bounds for o, dq, dk, dv, by entry, of roundings that cancel. Eager may have fewer: equal terms cancel exactly.

    The gradient of a score is the derivative of a weight times differences of products dO.v. Each operation on these
    rounds by up to eps max_j sum_d |dO_d v_jd|. Where the sum of a row's activations is small the derivative is large,
    though the gradient may be 0, as in a row that sees one key.
    """
    eps = min(EPS[q.dtype], EPS[torch.float32]) * (2 if q.dtype == torch.float64 else 1)  # float64: exact has them too
    q, k, v, do = (x.double() for x in (q, k, v, do))
    of_o, of_dv = (8 * eps * (float(x.abs().max()) if x.numel() else 0.0) for x in (v, do))
    groups = q.shape[1] // max(1, k.shape[1])
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    visible = visibility(q.shape[2], k.shape[2], q.device, **{"causal": True, **options}).dense(k.shape[2])
    visible = visible.expand(*q.shape[:3], k.shape[2])
    n = visible.sum(-1, keepdim=True).to(q.dtype)
    factor = score_factor(n, q.shape[-1], spec) * (1.0 if spec.head_scale is None else spec.head_scale)
    ds = torch.zeros(visible.shape, dtype=torch.float64, device=q.device)
    of_rows = torch.full_like(do, of_o)
    if ds.numel() > 0:
        products = (do.abs() @ values.abs().mT).masked_fill(~visible, 0).amax(-1, keepdim=True)
        operations = n + v.shape[-1] + 8  # sums over keys and columns, and a few more
        slopes, grown = _slopes(scores(q, keys, factor, n, spec), visible, n, spec)
        ds = eps * operations * products * slopes * factor.abs() * grown
        of_rows = of_rows * grown
    if spec.cosine:  # gradients of unit vectors, less the part along them
        dq = (2 * ds.sum(-1, keepdim=True) / _length(q)).expand_as(q)
        dk = (2 * ds.sum(-2)[..., None] / _length(keys)).expand_as(keys)
    else:
        dq, dk = ds @ keys.abs(), ds.mT @ q.abs()
    dk = dk.unflatten(1, (k.shape[1], groups)).sum(2)
    return [of_rows, dq, dk, torch.full_like(v, of_dv * groups)]


def _length(x: Tensor) -> Tensor:
    """Norms of rows; inf for a row of zeros, whose gradient is zero."""
    return _divisor(x.norm(dim=-1, keepdim=True))


def _divisor(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.inf)


def _slopes(s: Tensor, visible: Tensor, n: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | float]:
    """Derivatives of weights by scores s (B, H, Lq, Lk), with the sizes of terms added that would cancel; and by how
    much roundings of weights grow in each row, where it is divided by what recentring leaves of them.

    For weights a / sum a the derivative is a' / sum a; recentring and re-weighting multiply it.
    """
    if spec.activation == "exp":
        if spec.divisor == "l1":
            s = s - s.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).masked_fill(n == 0, 0)
        a = slopes = s.masked_fill(~visible, -torch.inf).exp()
    else:
        s = s.detach().requires_grad_()
        with torch.enable_grad():
            a = ACTIVATIONS[spec.activation](s)
        (slopes,) = torch.autograd.grad(a.sum(), s)
        a, slopes = a.detach().masked_fill(~visible, 0), slopes.abs().masked_fill(~visible, 0)
    total = a.abs().sum(-1, keepdim=True)
    if spec.p is not None:
        tau = spec.threshold * (total / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
        above = (a - tau).clamp_min(0).masked_fill(~visible, 0)
        spread = _divisor(above.amax(-1, keepdim=True))
        z = above / spread
        by_z = spec.p * torch.where(z > 0, z ** (spec.p - 1), 0) / _divisor((z**spec.p).sum(-1, keepdim=True))
        return slopes * (by_z + by_z.sum(-1, keepdim=True) / n.clamp_min(1)) / spread, 1.0
    if spec.divisor != "l1":
        return slopes / fixed_divisor(n, spec), 1.0
    w, slopes = a / _divisor(total), slopes / _divisor(total)
    if spec.recentre == "none":
        return slopes, 1.0
    mean = (w.sum(-1, keepdim=True) / n.clamp_min(1)).masked_fill(n <= FIRST_ROWS, 0)
    left = (w - mean).masked_fill(~visible, 0).abs().sum(-1, keepdim=True)
    if spec.recentre != "mean_l1":
        return 2 * slopes, 1.0
    return 2 * slopes / _divisor(left), 1 + 1 / _divisor(left)
