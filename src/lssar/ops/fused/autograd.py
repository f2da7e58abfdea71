"""A pair of kernels as PyTorch operators, with fakes and a first derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lssar", "FRAGMENT")


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`lssar::NAME`, on every device; under torch.compile a node of the graph.

    Like `torch.library.custom_op`, without the layers of Python that it puts between a call and `run`: with short
    sequences the host's time matters.
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, torch.compiler.disable(on_its_device(run)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lssar::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lssar, name).default


def on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, which launches on the current device, on that of its first argument."""

    @functools.wraps(run)
    def guarded(first: Tensor, *others: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return run(first, *others)
        return run(first, *others)

    return guarded


def with_autograd(op: Any, function: type[torch.autograd.Function]) -> None:
    """Calls that need a gradient go through the autograd function, others directly to the operator."""

    def run(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return function.apply(*arguments)
        return below_autograd(op, *arguments)

    LIBRARY.impl(op._schema.name.removeprefix("lssar::"), run, "Autograd")


def below_autograd(op: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def refuse_gradient(op: Any, why: str) -> None:
    """Make a backward pass through the operator raise an error with this message."""

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            return below_autograd(op, *arguments)

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError(why)

    with_autograd(op, Refuse)


VISIBILITY = "bool causal, Tensor? cu_seqlens, Tensor? key_lengths, int? window"
"""Schema of the arguments that say what rows see."""


def differentiable(
    name: str, options: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, ...]],
    empty_rows: Callable[[Tensor], Tensor], gain_gradient: bool = False,
) -> Any:  # fmt: skip
    """`lssar::NAME_forward` (q, k, v, OPTIONS) -> (o, rows), differentiable by `lssar::NAME_backward`.

    options: schema of the arguments after q, k, v. rows: values of each row for the backward; empty_rows makes such a
    tensor for tracing. backward (q, k, v, o, do, rows, OPTIONS) returns dq, dk, dv, and with gain_gradient also the
    gradient of the first option (empty if that is None).
    """
    forward_op = operator(
        f"{name}_forward", f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)", forward,
        lambda q, *_: (torch.empty_like(q), empty_rows(q)),
    )  # fmt: skip
    gradients = ", ".join(["Tensor"] * (4 if gain_gradient else 3))

    def fake_backward(q, k, v, o, do, rows, *given):
        gain = ((q.new_empty(0) if given[0] is None else torch.empty_like(given[0])),) if gain_gradient else ()
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *gain

    backward_op = operator(
        f"{name}_backward",
        f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor rows, {options}) -> ({gradients})",
        backward, fake_backward,
    )  # fmt: skip

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, *given):
            o, rows = below_autograd(forward_op, q, k, v, *given)
            ctx.save_for_backward(q, k, v, o, rows, *(x for x in given if isinstance(x, Tensor)))
            ctx.given = tuple(Tensor if isinstance(x, Tensor) else x for x in given)
            ctx.mark_non_differentiable(rows)
            return o, rows

        @staticmethod
        def backward(ctx, do, _):
            q, k, v, o, rows, *tensors = ctx.saved_tensors
            saved = iter(tensors)
            given = [next(saved) if x is Tensor else x for x in ctx.given]
            dq, dk, dv, *dgain = backward_op(q, k, v, o, do, rows, *given)
            of_options = [None] * len(given)
            if dgain and given[0] is not None:
                of_options[0] = dgain[0]
            return dq, dk, dv, *of_options

    with_autograd(forward_op, Fused)
    refuse_gradient(backward_op, "fused attention has no second derivative; use impl='reference' for double backward")
    return forward_op
