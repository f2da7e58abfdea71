"""Cross-entropy of the next token over logits whose rows are longer than the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.ops.fused import HAS_TRITON
from lssar.ops.numerics import working_dtype

IGNORE = -100
"""Targets with this value are ignored, as by `cross_entropy`'s default."""


def next_token_loss(logits: Tensor, targets: Tensor, vocab_size: int, count: Tensor | None = None) -> Tensor:
    """Mean of `next_token_losses` over the targets that are not IGNORE; with `count`, their sum divided by it."""
    if _fused(logits):
        total = next_token_losses(logits, targets, vocab_size).sum()
        return total / ((targets != IGNORE).sum() if count is None else count)
    if torch.compiler.is_compiling():
        # Hidden, not cut off: compiled kernels go through rows of 50257 one element at a time.
        inside = torch.arange(logits.shape[-1], device=logits.device) < vocab_size
        logits = torch.where(inside, _wide(logits), -torch.inf)
    else:
        logits = _wide(logits[..., :vocab_size])
    if count is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / count


def next_token_losses(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Cross-entropies in nats (T,), float32 (float64 for float64 logits); 0 where the target is IGNORE.

    logits (T, W), of which the first `vocab_size` count; targets (T,). Half-precision logits on a GPU are read once
    for this and once for the gradient, by kernels of their own; a target out of range then gives NaN.
    """
    if _fused(logits):
        from lssar.ops.fused.loss import loss_op

        return loss_op(logits, targets, vocab_size)[0]
    return F.cross_entropy(_wide(logits[..., :vocab_size]), targets, ignore_index=IGNORE, reduction="none")


def _wide(logits: Tensor) -> Tensor:
    return logits.to(working_dtype(logits.dtype))


def _fused(logits: Tensor) -> bool:
    return HAS_TRITON and logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16)
