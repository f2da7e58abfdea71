"""A linear layer of a few rows with the norm before it and what follows it, in one launch, for decode steps.

Such a layer is bound by reading its weights, and in a chain of them by the gaps between launches. Each program reads
BLOCK_N rows of the weights, once, and normalises the few rows of x again, which costs less than a launch. The first
tile of weights is asked for before the previous kernel has ended: nothing in a decode step writes weights.
One row is multiplied and summed; more go through the tensor cores, filled up to 16.
Shape letters in tile comments: M rows of x, N columns of the result, K columns of x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lssar.ops.fused import FEW_ROWS
from lssar.ops.fused.autograd import operator, refuse_gradient
from lssar.ops.fused.decode import let_next_begin, wait_for_last
from lssar.ops.fused.decode_op import can_overlap
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.primitives import dot
from lssar.ops.fused.tiles import ceil_div, power_of_two

GELU_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
TILE_BYTES = 32768
"""Weights that a program of one row holds at once, in registers."""
WIDEST = 8192
"""Columns of such a tile, in bytes."""


@triton.jit
def _weights(w_ptr, rows, columns, N, K: tl.constexpr, part: tl.constexpr):
    """Rows of the weights [N, K]; part 1: of the second half of a gated layer's."""
    mask = (rows < N)[:, None] & (columns < K)[None, :]
    at = (rows + part * N).to(tl.int64)
    return tl.load(w_ptr + at[:, None] * K + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _rows_of_x(x_ptr, row, columns, R, K: tl.constexpr):
    mask = (row < R)[:, None] & (columns < K)[None, :]
    return tl.load(x_ptr + row[:, None] * K + columns[None, :], mask=mask, other=0.0)  # [M, K]


@triton.jit
def _statistics(x_ptr, row, R, eps, NORM: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean (0 for an RMS norm) and reciprocal deviation of each row, [M]; squares are summed around a mean of their
    chunk, so that nothing cancels."""
    mean = tl.zeros([M], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = _rows_of_x(x_ptr, row, columns, R, K).to(tl.float32)
        if NORM == "layer":
            count = tl.minimum(K - start, BLOCK_K).to(tl.float32)
            chunk_mean = tl.sum(x, 1) / count
            apart = tl.where((columns < K)[None, :], x - chunk_mean[:, None], 0.0)
            difference = chunk_mean - mean
            mean += difference * (count / (start + count))
            squares += tl.sum(apart * apart, 1) + difference * (difference * (start * count / (start + count)))
        else:
            squares += tl.sum(x * x, 1)
    return mean, tl.rsqrt(squares / K + eps)


@triton.jit
def _of_norm(ptr, columns, PRESENT: tl.constexpr, K: tl.constexpr):
    """Columns of a weight of the norm, [K]; zeros if it has none."""
    if PRESENT:
        return tl.load(ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    else:
        return columns.to(tl.float32) * 0.0


@triton.jit
def _inputs(x_ptr, row, columns, R, mean, inverse, scale, shift, NORM: tl.constexpr, K: tl.constexpr):
    """Columns of x [M, K], normalised, in the dtype of x as a norm of its own would leave them."""
    raw = _rows_of_x(x_ptr, row, columns, R, K)
    if NORM == "none":
        return raw
    else:
        x = (raw.to(tl.float32) - mean[:, None]) * inverse[:, None] * scale[None, :] + shift[None, :]
        return x.to(raw.dtype)


@triton.jit
def _products(w, x, M: tl.constexpr, DOT: tl.constexpr):
    """W x^T, [N, M]."""
    if M == 1:
        return tl.sum(w.to(tl.float32) * x.to(tl.float32), 1)[:, None]
    else:
        return dot(w, tl.trans(x), PRECISION=DOT)


@triton.jit(do_not_specialize=["R", "N"])
def linear_kernel(
    x_ptr, w_ptr, bias_ptr, scale_ptr, shift_ptr, residual_ptr, y_ptr, R, N, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """x (R, K) to y (R, N) by weights (N, K), or (2 N, K) with a gate, whose rows come first."""
    let_next_begin(AHEAD)
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, M)
    columns = tl.arange(0, BLOCK_K)
    w = _weights(w_ptr, rows, columns, N, K, 0)
    if GATED:
        w_second = _weights(w_ptr, rows, columns, N, K, 1)
    scale = _of_norm(scale_ptr, columns, NORM != "none", K)
    shift = _of_norm(shift_ptr, columns, HAS_SHIFT, K)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            bias_second = tl.load(bias_ptr + N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]

    wait_for_last(AHEAD)
    y_at = row[None, :] * N + rows[:, None]
    mask = (row < R)[None, :] & (rows < N)[:, None]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + y_at, mask=mask, other=0.0).to(tl.float32)
    mean, inverse = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    if NORM != "none":
        mean, inverse = _statistics(x_ptr, row, R, eps, NORM, K, M, BLOCK_K)
    x = _inputs(x_ptr, row, columns, R, mean, inverse, scale, shift, NORM, K)
    y = _products(w, x, M, DOT)
    if GATED:
        second = _products(w_second, x, M, DOT)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        scale = _of_norm(scale_ptr, start + columns, NORM != "none", K)
        shift = _of_norm(shift_ptr, start + columns, HAS_SHIFT, K)
        x = _inputs(x_ptr, row, start + columns, R, mean, inverse, scale, shift, NORM, K)
        y += _products(_weights(w_ptr, rows, start + columns, N, K, 0), x, M, DOT)
        if GATED:
            second += _products(_weights(w_ptr, rows, start + columns, N, K, 1), x, M, DOT)

    if HAS_BIAS:
        y += bias
    if ACTIVATION == "gelu":  # x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
        u = GELU_SLOPE * (y + 0.044715 * y * y * y)
        y = y / (1.0 + tl.exp(-2 * u))
    elif GATED:
        if HAS_BIAS:
            second += bias_second
        y = y / (1.0 + tl.exp(-y)) * second
    if HAS_RESIDUAL:
        y += residual
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Plan:
    """How the work of a call is divided; `plan_for` chooses, benchmarks try others."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    """Tiles of a further chunk of K in flight."""
    ahead: bool = False


def plan_for(x: Tensor, n: int, gated: bool, ahead: bool, **changes: Any) -> Plan:
    """The plan for rows x (R, K) and n columns of the result; what is given as `changes` stays.

    Two programs a multiprocessor at least, where there are so many rows of weights; then tiles as large as fit.
    """
    card = torch.cuda.get_device_properties(x.device) if x.is_cuda else None
    wanted = 2 * getattr(card, "multi_processor_count", 1)
    R, K = x.shape
    if R == 1:
        block_k = min(power_of_two(K), WIDEST // x.element_size())
        least, most = 1, max(1, TILE_BYTES // (x.element_size() * block_k * (1 + gated)))
    else:
        widest = (256 if x.element_size() == 2 else 64) // (1 + gated)  # more spills
        block_k, least, most = max(16, min(power_of_two(K), widest)), 16, 32 // (1 + gated)
    block_n = most
    while block_n > least and ceil_div(n, block_n) < wanted:
        block_n //= 2
    return replace(Plan(block_n, block_k, ahead=ahead and can_overlap(x)), **changes)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: str, norm_weight: Tensor | None,
    norm_bias: Tensor | None, activation: str,
) -> None:  # fmt: skip
    """ValueError for arguments that the kernel would read beyond their ends, or not as they are meant."""
    if norm not in ("none", "layer", "rms") or activation not in ("none", "gelu", "swiglu"):
        raise ValueError(f"unknown norm {norm!r} or activation {activation!r}")
    if (norm == "none") != (norm_weight is None) or (norm != "layer" and norm_bias is not None):
        raise ValueError(f"norm {norm!r} and its weights do not go together")
    K, rows = x.shape[-1], x.shape[:-1].numel()
    if rows > FEW_ROWS:
        raise ValueError(f"x must have at most {FEW_ROWS} rows; got {rows}")
    gated = activation == "swiglu"
    if weight.ndim != 2 or weight.shape[1] != K or (gated and weight.shape[0] % 2):
        raise ValueError(f"weight must be (N, {K}){', N even' if gated else ''}; got {tuple(weight.shape)}")
    out = (*x.shape[:-1], weight.shape[0] // (1 + gated))
    wanted = {
        "bias": (bias, weight.shape[:1]), "residual": (residual, out), "norm_weight": (norm_weight, (K,)),
        "norm_bias": (norm_bias, (K,)),
    }  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must be {tuple(shape)}; got {tuple(tensor.shape)}")
    tensors = [weight, *(tensor for tensor, _ in wanted.values() if tensor is not None)]
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        raise ValueError("all tensors must have the dtype and the device of x")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, norm: str, eps: float, activation: str, ahead: bool, **plan: Any,
) -> Tensor:  # fmt: skip
    """See lssar.ops.fused.small_linear."""
    K, gated = x.shape[-1], activation == "swiglu"
    N = weight.shape[0] // (1 + gated)
    weights = (weight, bias, norm_weight, norm_bias)
    ahead = ahead and all(t is None or t.is_contiguous() for t in weights)  # else a launch just before makes them
    y = x.new_empty((*x.shape[:-1], N))
    if y.numel() == 0:
        return y
    flat = x.reshape(-1, K).contiguous()
    R = flat.shape[0]
    how = plan_for(flat, N, gated, ahead, **plan)
    # what is absent is never read
    given = [x if t is None else t.contiguous() for t in (bias, norm_weight, norm_bias, residual)]
    arguments = (flat, weight.contiguous(), *given, y, R, N, eps)
    constants: dict[str, Any] = {
        "NORM": norm, "ACTIVATION": activation, "HAS_BIAS": bias is not None, "HAS_SHIFT": norm_bias is not None,
        "HAS_RESIDUAL": residual is not None, "K": K, "M": 1 if R == 1 else FEW_ROWS, "BLOCK_N": how.block_n,
        "BLOCK_K": how.block_k, "STAGES": how.stages, "DOT": "ieee" if x.dtype == torch.float32 else "tf32",
        "AHEAD": how.ahead, "num_warps": how.warps, **({"launch_pdl": True} if how.ahead else {}),
    }  # fmt: skip
    start_kernel(linear_kernel, ceil_div(N, how.block_n), arguments, constants)
    return y


def _fake(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    activation = others[6]
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if activation == "swiglu" else 1)))


linear_op = operator(
    "small_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, str norm,"
    " float eps, str activation, bool ahead) -> Tensor",
    linear,
    _fake,
)
refuse_gradient(linear_op, "small_linear has no gradient; the layers that it replaces have")
