"""A pair of kernels as PyTorch custom ops, with fakes and a first derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable(
    name: str, mechanism: str, forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], rows_of: Callable[[Tensor], Tensor],
) -> Any:  # fmt: skip
    """`lssar::NAME_forward` (q, k, v, MECHANISM, what rows see) -> (o, rows), with `lssar::NAME_backward` behind it.

    mechanism: its one argument in the schema; rows_of: an empty tensor like the row numbers that go to the backward.
    """
    options = f"{mechanism}, bool causal, Tensor? cu_seqlens, Tensor? key_lengths, int? window"
    forward_op = torch.library.custom_op(
        f"lssar::{name}_forward", forward, mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)",
    )  # fmt: skip
    backward_op = torch.library.custom_op(
        f"lssar::{name}_backward", backward, mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor rows, {options}) "
               "-> (Tensor, Tensor, Tensor)",
    )  # fmt: skip

    def save(ctx, inputs, output):
        q, k, v, ctx.mechanism, ctx.causal, cu_seqlens, key_lengths, ctx.window = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, key_lengths)

    def differentiate(ctx, do, _):
        q, k, v, o, rows, cu_seqlens, key_lengths = ctx.saved_tensors
        grads = backward_op(q, k, v, o, do, rows, ctx.mechanism, ctx.causal, cu_seqlens, key_lengths, ctx.window)
        return *grads, None, None, None, None, None

    def refuse(ctx, *_):
        raise RuntimeError("fused attention has no second derivative; use impl='reference' for double backward")

    forward_op.register_fake(lambda q, *_: (torch.empty_like(q), rows_of(q)))
    backward_op.register_fake(lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
    forward_op.register_autograd(differentiate, setup_context=save)
    backward_op.register_autograd(refuse)
    return forward_op
