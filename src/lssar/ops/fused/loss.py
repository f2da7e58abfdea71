"""Cross-entropy of half-precision logits: one pass over a row for its loss, one for its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lssar.ops import loss
from lssar.ops.fused.autograd import below_autograd, operator, refuse_gradient, with_autograd
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.primitives import HIDDEN, LN2, LOG2E
from lssar.ops.fused.tiles import power_of_two

IGNORE = tl.constexpr(loss.IGNORE)
LANES = tl.constexpr(8)  # logits that a thread reads at once, 16 bytes
BLOCK = 4096
WARPS = 8


@triton.jit
def _row(logits_ptr, row_stride):
    row = tl.program_id(0)
    return row, logits_ptr + row.to(tl.int64) * row_stride


@triton.jit
def _load(row_ptr, columns, width, vocab_size):
    """Logits times log2(e), HIDDEN beyond the vocabulary. The load is not masked there: a mask that ends within
    the lanes of a thread would split its 16-byte load."""
    x = tl.load(row_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.where(columns < vocab_size, x * LOG2E, HIDDEN)


@triton.jit
def loss_kernel(logits_ptr, targets_ptr, loss_ptr, norm_ptr, row_stride, width, vocab_size, BLOCK: tl.constexpr):
    """Loss of each row, 0 if its target is IGNORE and NaN if it is out of range; log2 of its sum of exponentials.

    Sums stay within a thread until the end.
    """
    row, row_ptr = _row(logits_ptr, row_stride)
    groups = tl.arange(0, BLOCK // LANES)
    offsets = groups[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full([BLOCK // LANES], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK // LANES], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _load(row_ptr, start + offsets, width, vocab_size)
        higher = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(x - higher[:, None]), 1)
        largest = higher
    top = tl.max(largest, 0)
    norm = top + tl.log2(tl.sum(total * tl.exp2(largest - top), 0))
    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < vocab_size)
    picked = tl.load(row_ptr + tl.where(known, target, 0)).to(tl.float32)
    otherwise = tl.where(target == IGNORE, 0.0, float("nan"))
    tl.store(loss_ptr + row, tl.where(known, norm * LN2 - picked, otherwise))
    tl.store(norm_ptr + row, norm)


@triton.jit
def loss_gradient_kernel(
    gradient_ptr, logits_ptr, targets_ptr, norm_ptr, d_logits_ptr, row_stride, d_row_stride, width, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, row_ptr = _row(logits_ptr, row_stride)
    d_row_ptr = d_logits_ptr + row.to(tl.int64) * d_row_stride
    target = tl.load(targets_ptr + row)
    norm = tl.load(norm_ptr + row)
    gradient = tl.where((target >= 0) & (target < vocab_size), tl.load(gradient_ptr + row), 0.0)
    offsets = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, width, BLOCK):
        columns = start + offsets
        p = tl.exp2(_load(row_ptr, columns, width, vocab_size) - norm)
        d = (p - (columns == target).to(tl.float32)) * gradient
        tl.store(d_row_ptr + columns, d.to(d_logits_ptr.dtype.element_ty), mask=columns < width)


def _block(width: int) -> int:
    return min(BLOCK, max(32 * WARPS * LANES.value, power_of_two(width)))


def _by_row(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _loss(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    losses, norms = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        logits = _by_row(logits)
        arguments = logits, targets.contiguous(), losses, norms, logits.stride(0), width, vocab_size
        start_kernel(loss_kernel, rows, arguments, {"BLOCK": _block(width), "num_warps": WARPS})
    return losses, norms


def _gradient(gradient: Tensor, logits: Tensor, targets: Tensor, norms: Tensor, vocab_size: int) -> Tensor:
    rows, width = logits.shape
    d_logits = logits.new_empty(logits.shape)
    if rows:
        logits = _by_row(logits)
        arguments = (
            gradient.contiguous(), logits, targets.contiguous(), norms, d_logits, logits.stride(0), d_logits.stride(0),
            width, vocab_size,
        )  # fmt: skip
        start_kernel(loss_gradient_kernel, rows, arguments, {"BLOCK": _block(width), "num_warps": WARPS})
    return d_logits


def _fake(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    losses, norms = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    return losses, norms


loss_op = operator("loss", "(Tensor logits, Tensor targets, int vocab_size) -> (Tensor, Tensor)", _loss, _fake)
gradient_op = operator(
    "loss_gradient",
    "(Tensor gradient, Tensor logits, Tensor targets, Tensor norms, int vocab_size) -> Tensor",
    _gradient,
    lambda gradient, logits, *_: logits.new_empty(logits.shape),
)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, vocab_size):
        losses, norms = below_autograd(loss_op, logits, targets, vocab_size)
        ctx.save_for_backward(logits, targets, norms)
        ctx.vocab_size = vocab_size
        ctx.mark_non_differentiable(norms)
        return losses, norms

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient_op(gradient, *ctx.saved_tensors, ctx.vocab_size), None, None


with_autograd(loss_op, _Loss)
refuse_gradient(gradient_op, "the fused loss has no second derivative")
