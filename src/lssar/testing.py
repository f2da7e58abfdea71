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

from lssar.ops.reference import reference_attention
from lssar.specs import AttentionSpec
from lssar.specs import spec as spec_of
from lssar.visibility import visibility

__all__ = ["Case", "assert_close_to_reference", "cases", "check_attention"]

EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""

FEATURES = ("causal", "window", "key_lengths", "cu_seqlens", "mask")
NAMES = ("o", "dq", "dk", "dv")


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
    floor = _cancellation(q, k, v, do, spec) if len(got) == 4 else (0.0,)
    losses = (_losses(one, reference) for one, reference in _eager_runs(run, q, k, v, exact))
    worst = [[0.0, 0.0] for _ in got]
    for loss in losses:
        worst = [[max(a, b) for a, b in zip(old, new)] for old, new in zip(worst, loss)]
    for index, (error, allowed) in enumerate(zip(_losses(got, exact), worst)):
        always = (4 * eps + sums) * float(exact[index].abs().max()) if exact[index].numel() else 0.0
        for kind, size, lost, times in zip(("root mean square", "largest"), error, allowed, (2, 8)):
            if size > times * lost + always + floor[index]:
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
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, spec: AttentionSpec
) -> tuple[float, float, float, float]:
    """Roundings of terms that cancel: in sums over values and rows, and where a needle has all the weight."""
    assert do is not None
    if k.shape[2] == 0 or q.shape[2] == 0:
        return 0.0, 0.0, 0.0, 0.0
    eps = min(EPS[q.dtype], EPS[torch.float32])
    d, n = q.shape[-1], torch.tensor(float(max(2, k.shape[2])))
    lengths = [x.double().norm(dim=-1) for x in (q, k)]
    norms = [float(torch.where(x > 0, x, torch.inf).min()) for x in lengths]
    sizes = [float(x.max()) for x in lengths]
    steepness = (spec.p or 1) * (float(torch.log(n)) if spec.log_n else 1.0)
    steepness *= float(torch.log(torch.tensor(float(max(2, d))))) if spec.scale == "log_d" else d**-0.5
    terms = 8 * eps * steepness * float(do.abs().max()) * float(v.abs().max()) * d**0.5
    of_o, of_dv = 8 * eps * float(v.abs().max()), 8 * eps * float(do.abs().max()) * (q.shape[1] // k.shape[1])
    if spec.cosine:
        return of_o, terms / norms[0], terms / norms[1], of_dv
    return of_o, terms * sizes[1], terms * sizes[0], of_dv
