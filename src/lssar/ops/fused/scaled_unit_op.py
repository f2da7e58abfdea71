"""Unit vectors times the score factor of their row, in one launch each way, for softmax of cosines by SDPA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lssar.ops.fused.autograd import below_autograd, operator, refuse_gradient, with_autograd
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.primitives import LN2, load_tile, store_tile
from lssar.ops.fused.tiles import ceil_div, power_of_two
from lssar.ops.fused.unit_rows import unit_rows, unit_rows_backward

ELEMENTS = 4096
"""Of a program's tile."""


@triton.jit
def _factor(rows, first_n, STEP: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr):
    """SCALE, with LOG_N times log n of rows that see first_n + STEP * row keys, [M]."""
    if LOG_N:
        n = (first_n + STEP * rows).to(tl.float32)
        return SCALE * LN2 * tl.log2(tl.maximum(n, 1.0))
    else:
        return rows.to(tl.float32) * 0.0 + SCALE


@triton.jit(do_not_specialize=["L", "first_n"])
def unit_kernel(
    x_ptr, grad_ptr, out_ptr, x_stride_b, x_stride_h, x_stride_l, grad_stride_b, grad_stride_h, grad_stride_l,
    out_stride_b, out_stride_h, out_stride_l, L, first_n,
    BACKWARD: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x (B, H, L, D) to x / |x| times the factor of its row; BACKWARD: the gradient of x from that of the result."""
    start, h, b = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    offsets, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    x_ptr += b * x_stride_b + h * x_stride_h
    x = load_tile(x_ptr, start, L, x_stride_l, offsets, columns, D, True).to(tl.float32)  # [M, D]
    factor = _factor(start + offsets, first_n, STEP, SCALE, LOG_N)
    if BACKWARD:
        grad_ptr += b * grad_stride_b + h * grad_stride_h
        grad = load_tile(grad_ptr, start, L, grad_stride_l, offsets, columns, D, True).to(tl.float32)
        result = unit_rows_backward(grad * factor[:, None], x)
    else:
        unit = unit_rows(x)
        result = unit * factor[:, None]
    store_tile(out_ptr + b * out_stride_b + h * out_stride_h, result, start, L, out_stride_l, offsets, columns, D)


def _run(x: Tensor, grad: Tensor | None, scale: float, log_n: bool, first_n: int, step: int) -> Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    B, H, L, D = x.shape
    block_d = max(16, power_of_two(D))
    block = max(16, ELEMENTS // block_d)
    if grad is not None and grad.stride(-1) != 1:
        grad = grad.contiguous()
    other = x if grad is None else grad
    arguments = (x, other, out, *x.stride()[:3], *other.stride()[:3], *out.stride()[:3], L, first_n)
    constants: dict[str, Any] = {
        "BACKWARD": grad is not None, "STEP": step, "SCALE": scale, "LOG_N": log_n, "D": D, "BLOCK_D": block_d,
        "BLOCK": block, "num_warps": 4,
    }  # fmt: skip
    start_kernel(unit_kernel, (ceil_div(L, block), H, B), arguments, constants)
    return out


def _forward(x: Tensor, scale: float, log_n: bool, first_n: int, step: int) -> Tensor:
    return _run(x, None, scale, log_n, first_n, step)


unit_op = operator(
    "scaled_unit", "(Tensor x, float scale, bool log_n, int first_n, int step) -> Tensor", _forward,
    lambda x, *_: torch.empty_like(x),
)  # fmt: skip
backward_op = operator(
    "scaled_unit_backward", "(Tensor x, Tensor grad, float scale, bool log_n, int first_n, int step) -> Tensor", _run,
    lambda x, *_: torch.empty_like(x),
)  # fmt: skip


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *options):
        ctx.save_for_backward(x)
        ctx.options = options
        return below_autograd(unit_op, x, *options)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return backward_op(x, grad, *ctx.options), None, None, None, None


with_autograd(unit_op, _Unit)
refuse_gradient(backward_op, "fused attention has no second derivative; use impl='reference' for double backward")
