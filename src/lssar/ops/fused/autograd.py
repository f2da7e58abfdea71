"""A pair of kernels as PyTorch operators, with fakes and a first derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("lssar", "FRAGMENT")


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`lssar::NAME`, on every device; under torch.compile a node of the graph.

    What `torch.library.custom_op` does, less the layers of Python that it puts between a call and `run`: with short
    sequences the host is what takes time.
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, torch.compiler.disable(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lssar::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lssar, name).default


def with_autograd(op: Any, function: type[torch.autograd.Function]) -> None:
    """Calls that need a gradient go through the function, others straight to what runs."""

    def run(*arguments):
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
            return function.apply(*arguments)
        return below_autograd(op, *arguments)

    LIBRARY.impl(op._schema.name.removeprefix("lssar::"), run, "Autograd")


def below_autograd(op: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def refuse_gradient(op: Any, why: str) -> None:
    """An operator whose results say why when somebody wants a gradient through them."""

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            return below_autograd(op, *arguments)

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError(why)

    with_autograd(op, Refuse)


def differentiable(
    name: str, mechanism: str, forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], rows_of: Callable[[Tensor], Tensor],
) -> Any:  # fmt: skip
    """`lssar::NAME_forward` (q, k, v, MECHANISM, what rows see) -> (o, rows), with `lssar::NAME_backward` behind it.

    mechanism: its one argument in the schema; rows_of: an empty tensor like the row numbers that go to the backward.
    """
    options = f"{mechanism}, bool causal, Tensor? cu_seqlens, Tensor? key_lengths, int? window"
    forward_op = operator(
        f"{name}_forward", f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)", forward,
        lambda q, *_: (torch.empty_like(q), rows_of(q)),
    )  # fmt: skip
    backward_op = operator(
        f"{name}_backward",
        f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor rows, {options}) -> (Tensor, Tensor, Tensor)",
        backward, lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    )  # fmt: skip

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mechanism, causal, cu_seqlens, key_lengths, window):
            o, rows = below_autograd(forward_op, q, k, v, mechanism, causal, cu_seqlens, key_lengths, window)
            ctx.save_for_backward(q, k, v, o, rows, cu_seqlens, key_lengths)
            ctx.options = mechanism, causal, window
            ctx.mark_non_differentiable(rows)
            return o, rows

        @staticmethod
        def backward(ctx, do, _):
            q, k, v, o, rows, cu_seqlens, key_lengths = ctx.saved_tensors
            mechanism, causal, window = ctx.options
            grads = backward_op(q, k, v, o, do, rows, mechanism, causal, cu_seqlens, key_lengths, window)
            return *grads, None, None, None, None, None

    with_autograd(forward_op, Fused)
    refuse_gradient(backward_op, "fused attention has no second derivative; use impl='reference' for double backward")
    return forward_op
