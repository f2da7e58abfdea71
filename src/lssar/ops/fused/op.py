"""The kernels as PyTorch custom ops: `lssar::fused_forward` and `lssar::fused_backward`, with fakes and autograd."""

from __future__ import annotations

import functools
import math
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lssar import switches
from lssar.ops.fused import backward
from lssar.ops.fused.autograd import differentiable
from lssar.ops.fused.forward import forward_kernel
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.normalize import normalize_kernel
from lssar.ops.fused.tiles import ceil_div, launch, power_of_two, tma_aligned
from lssar.ops.numerics import whole

NORMALIZE_BLOCK = 32
LOG_DEGREES = {torch.bfloat16: 3, torch.float16: 5, torch.float32: 0}
SCORE_DTYPES = {torch.bfloat16: torch.float16, torch.float16: torch.float16, torch.float32: torch.float32}
"""Unit vectors have no use for bf16's exponent: fp16 copies round the scores eight times more finely."""


class _Call:
    """What forward and backward of one call share: shapes, visibility, normalised copies, constants."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, p: float | None, causal: bool, cu_seqlens: Tensor | None,
        key_lengths: Tensor | None, window: int | None,
    ) -> None:  # fmt: skip
        self.B, self.Hq, self.Lq, self.D = q.shape
        self.Hkv, self.Lk = k.shape[1], k.shape[2]
        self.itemsize = q.element_size()
        self.score_dtype = SCORE_DTYPES[q.dtype]
        self.visibility, self.visibility_kind = what_rows_see(q, self.Lk, causal, cu_seqlens, key_lengths, window)
        self.shape = {
            "LOG_D": math.log(self.D),
            "D": self.D,
            "BLOCK_D": max(16, power_of_two(self.D)),
        }
        self.mechanism = {
            "P": whole(1.0 if p is None else p),
            "REWEIGHT": p is not None,
            "LOG_DEGREE": LOG_DEGREES[q.dtype],
            "DOT": "ieee" if q.dtype == torch.float32 else "tf32",
            "STEEP": p is not None and steep_rows(q.dtype, p),
        }
        self.row_stride = ceil_div(self.Lq, 128) * 128  # rows of a head in the per-row tensors, aligned

    def per_row(self, planes: int, like: Tensor) -> Tensor:
        return like.new_empty((planes, self.B * self.Hq, self.row_stride), dtype=torch.float32)

    def normalize(self, q: Tensor, k: Tensor, v: Tensor, v_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        unit_q = q.new_empty(q.shape, dtype=self.score_dtype)
        unit_k = k.new_empty(k.shape, dtype=self.score_dtype)
        query_programs = self.B * self.Hq * ceil_div(self.Lq, NORMALIZE_BLOCK)
        key_programs = self.B * self.Hkv * ceil_div(self.Lk, NORMALIZE_BLOCK)
        arguments = (
            q, k, v, unit_q, unit_k, v if v_max is None else v_max,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], self.B, self.Hq, self.Hkv, *self.visibility,
        )  # fmt: skip
        constants = {"VALUE_MAX": v_max is not None, "BLOCK": NORMALIZE_BLOCK, "num_warps": 4, **self.shape}
        start_kernel(normalize_kernel, query_programs + key_programs, arguments, constants | self.visibility_kind)
        return unit_q, unit_k


def steep_rows(dtype: torch.dtype, p: float) -> bool:
    """Whether steep rows use the shorter forms of steep.py.

    These are accurate enough for bfloat16, and for powers that do not amplify the half-precision error of the largest
    score too much. They are faster only where there are NVIDIA's packed half-precision instructions.
    """
    return dtype == torch.bfloat16 and p <= 64 and torch.version.hip is None


@functools.cache
def hopper_kernels(d: int, part: str) -> ModuleType | None:
    """The Gluon kernels for a part (`forward` or `backward`), or None if they do not apply or are not faster.

    They are written for head sizes 64 and 128 on Hopper. Of the forward at head size 64 Triton's schedule is as good.
    """
    faster = d == 128 or (d == 64 and part == "backward")
    if not faster or not switches.GLUON or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from lssar.ops.fused import hopper
    except (ImportError, AttributeError) as problem:  # Gluon is experimental in Triton: its names change
        warnings.warn(f"this Triton cannot run the Hopper kernels ({problem}); using slower ones", stacklevel=2)
        return None
    return hopper


def what_rows_see(
    q: Tensor, Lk: int, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None
) -> tuple[tuple[Any, ...], dict[str, bool]]:  # fmt: skip
    """Arguments of the kernels (Lq, Lk, window, lengths, documents) and their constants."""
    doc_start = doc_stop = q  # any pointer: never read
    if cu_seqlens is not None:
        doc_start, doc_stop = document_bounds(cu_seqlens, Lk)
    if key_lengths is not None:
        key_lengths = key_lengths.to(device=q.device, dtype=torch.int32).contiguous()  # may be expanded
    arguments = (
        q.shape[2], Lk, 0 if window is None else min(window, 2**30), q if key_lengths is None else key_lengths,
        doc_start, doc_stop,
    )  # fmt: skip
    constants = {
        "CAUSAL": causal,
        "WINDOWED": window is not None,
        "PACKED": cu_seqlens is not None,
        "HAS_LENGTHS": key_lengths is not None,
    }
    return arguments, constants


def document_bounds(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """First key and one past the last key of the document of each position, int32 (total,)."""
    cu = cu_seqlens.to(torch.int64)
    document = torch.searchsorted(cu, torch.arange(total, device=cu.device), right=True)
    bounds = cu.to(torch.int32)
    return bounds[document - 1], bounds[document]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, p: float | None, causal: bool, cu_seqlens: Tensor | None,
    key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _Call(q, k, v, p, causal, cu_seqlens, key_lengths, window)
    o = torch.empty_like(q)
    rows = call.per_row(3, q)
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), rows.zero_()
    unit_q, unit_k = call.normalize(q, k, v)
    aligned = tma_aligned(unit_q, unit_k, v)
    by_hand = q.dtype != torch.float32 and aligned and hopper_kernels(call.D, "forward")
    kernel = by_hand.forward_kernel if by_hand else forward_kernel

    arguments = (
        unit_q, unit_k, v, o, *rows.unbind(), *v.stride()[:3], *o.stride()[:3], call.row_stride, call.Hq, call.Hkv,
        *call.visibility,
    )  # fmt: skip

    def run(tile, tile_constants):
        constants = call.mechanism | call.shape | call.visibility_kind | tile_constants
        start_kernel(kernel, ceil_div(call.Lq, tile.m) * call.B * call.Hq, arguments, constants)

    launch("forward_hopper" if by_hand else "forward", call.D, call.itemsize, aligned, run)
    return o, rows


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, rows: Tensor, p: float | None, causal: bool,
    cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    call = _Call(q, k, v, p, causal, cu_seqlens, key_lengths, window)
    if do.stride(-1) != 1:
        do = do.contiguous()
    v_max = q.new_zeros(call.B * call.Hkv, dtype=torch.float32)
    unit_q, unit_k = call.normalize(q, k, v, v_max)
    to_keys = call.per_row(backward.ROW_PLANES, q)
    if call.Lq % 128:
        to_keys.zero_()  # rows past the last are read too
    exact_queries = call.score_dtype != q.dtype  # ds q needs the range of q's own dtype
    shared = (to_keys.stride(1), to_keys.stride(0), call.Hq, call.Hkv, *call.visibility)
    constants = {**call.mechanism, **call.shape, **call.visibility_kind, "EXACT_QUERIES": exact_queries}

    aligned = tma_aligned(unit_q, unit_k, q, k, v, do)
    by_hand = exact_queries and aligned and hopper_kernels(call.D, "backward")
    kernels = by_hand or backward
    suffix = "_hopper" if by_hand else ""
    query_rows = 0

    def run_queries(tile, tile_constants):
        nonlocal query_rows
        query_rows = tile.m
        arguments = (
            unit_q, unit_k, v, o, do, q, dq, v_max, *rows.unbind(), to_keys,
            *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *q.stride()[:3], *dq.stride()[:3], *shared,
        )  # fmt: skip
        programs = ceil_div(call.Lq, tile.m) * call.B * call.Hq
        start_kernel(kernels.query_gradient_kernel, programs, arguments, constants | tile_constants)

    def run_keys(tile, tile_constants):
        flagged = call.mechanism["STEEP"] and tile.m <= 2 * query_rows  # see steep_block
        arguments = (
            unit_q.view(q.dtype), unit_k, v, do, k, dk, dv, to_keys,
            *v.stride()[:3], *do.stride()[:3], *k.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], *shared,
        )  # fmt: skip
        programs = ceil_div(call.Lk, tile.n) * call.B * call.Hkv
        start_kernel(kernels.key_gradient_kernel, programs, arguments, constants | {"STEEP": flagged} | tile_constants)

    launch("query_gradient" + suffix, call.D, call.itemsize, aligned, run_queries)
    launch("key_gradient" + suffix, call.D, call.itemsize, aligned, run_keys)
    return dq, dk, dv


def _rows_of(q: Tensor) -> Tensor:
    row_stride = (q.shape[2] + 127) // 128 * 128
    return q.new_empty((3, q.shape[0] * q.shape[1], row_stride), dtype=torch.float32)


forward_op = differentiable("fused", "float? p", _forward, _backward, _rows_of)
