"""The LSSA and LSSAR kernels as PyTorch operators: `lssar::fused_forward` and `lssar::fused_backward`."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lssar import switches
from lssar.ops.fused import backward as triton_backward
from lssar.ops.fused.autograd import VISIBILITY, differentiable
from lssar.ops.fused.descriptors import describe, is_expanded
from lssar.ops.fused.forward import forward_kernel
from lssar.ops.fused.gradients import GAIN_PLANE, ROW_PLANES
from lssar.ops.fused.launch import Form, LaunchPlan, form_of, form_of_some, start_kernel
from lssar.ops.fused.normalize import VALUE_BLOCK, normalize_kernel
from lssar.ops.fused.primitives import HOST_TILES
from lssar.ops.fused.tiles import REPAIR, ceil_div, launch, power_of_two, tma_aligned

ROW_ALIGNMENT = 128
REPAIR_PROGRAMS = 128
"""Programs of the launch that computes blocks again; it nearly always finds nothing to do."""
LOG_DEGREES = {torch.bfloat16: 3, torch.float16: 5, torch.float32: 0}
SCORE_DTYPES = {torch.bfloat16: torch.float16, torch.float16: torch.float16, torch.float32: torch.float32}
"""Unit vectors do not need the exponents of bfloat16: float16 copies round the scores eight times more finely."""
LARGEST_CONSTANT_POWER = 1024


def power_value(p: float | None, p_tensor: Tensor | None) -> float | None:
    """The power of a call, which is a number or a tensor on the CPU (read here, without synchronising a GPU)."""
    value = p if p_tensor is None else p_tensor.item()
    if value is not None and not (value >= 1 and math.isfinite(value)):
        raise ValueError(f"p must be a finite number >= 1; got {value}")
    return value


def power_arguments(p: float | None) -> tuple[int, float]:
    """P and exponent of the kernels: integers are compiled in, any other power is an argument (P is 0 then)."""
    if p is None:
        return 1, 0.0
    return (int(p), 0.0) if float(p).is_integer() and p <= LARGEST_CONSTANT_POWER else (0, float(p))


class _Plan(LaunchPlan):
    """What forward and backward share of calls with tensors of the same form: shapes and kernel constants."""

    def __init__(
        self, q: Form, k: Form, others: tuple[Form | None, ...], has_gain: bool, p: float | None, causal: bool,
        window: int | None, packed: bool, padded: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        del others  # a part of the key
        self.B, self.Hq, self.Lq, self.D = q.shape
        self.Hkv, self.Lk = k.shape[1], k.shape[2]
        self.itemsize = q.dtype.itemsize
        self.score_dtype = SCORE_DTYPES[q.dtype]
        self.exact_queries = self.score_dtype != q.dtype  # ds q needs the range of q's own dtype
        self.visibility_kind = visibility_kind(causal, window, packed, padded)
        self.gain_kind = {"HAS_GAIN": has_gain}
        self.shape = {"LOG_D": math.log(self.D), "D": self.D, "BLOCK_D": max(16, power_of_two(self.D))}
        constant_power, self.exponent = power_arguments(p)
        self.mechanism = {
            "P": constant_power,
            "REWEIGHT": p is not None,
            "LOG_DEGREE": LOG_DEGREES[q.dtype],
            "DOT": "ieee" if q.dtype == torch.float32 else "tf32",
            "STEEP": p is not None and steep_rows(q.dtype, p),
        }
        self.row_stride = _row_stride(self.Lq)
        self.host_tiles = not padded  # lengths end the keys of each sequence

    def of_backward(self) -> dict[str, Any]:
        return {**self.mechanism, **self.shape, **self.visibility_kind, "EXACT_QUERIES": self.exact_queries}

    def per_row(self, planes: int, like: Tensor) -> Tensor:
        return like.new_empty((planes, self.B * self.Hq, self.row_stride), dtype=torch.float32)


_plan = functools.lru_cache(maxsize=512)(_Plan)


class _Call:
    """A plan, and the tensors of a call that say what rows see and by what scores are multiplied."""

    def __init__(
        self, q: Tensor, k: Tensor, others: tuple[Tensor, ...], gain: Tensor | None, p: float | None, causal: bool,
        cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
    ) -> None:  # fmt: skip
        gain = None if gain is None else gain.float().contiguous()
        forms = *map(form_of, others), form_of_some(gain), form_of_some(key_lengths)
        self.plan = _plan(
            form_of(q), form_of(k), forms, gain is not None, p, causal, window, cu_seqlens is not None,
            key_lengths is not None,
        )  # fmt: skip
        self.gain = q if gain is None else gain  # if there is none, any pointer: never read
        self.visibility = visibility_arguments(q, self.plan.Lk, cu_seqlens, key_lengths, window)

    def unit_keys(self, k: Tensor, v: Tensor, for_backward: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Contiguous; for the backward the kernel also writes sizes of values and a 0."""
        plan = self.plan
        unit_k = k.new_empty(k.shape, dtype=plan.score_dtype)
        _, _, _, key_lengths, _, _ = self.visibility
        arguments = (
            k, v, unit_k, *(for_backward or (v, v, v)), *k.stride()[:3], *v.stride()[:3], plan.Hkv, plan.Lk,
            key_lengths,
        )  # fmt: skip
        constants = plan.launch_constants(
            "normalize", for_backward is not None,
            make=lambda: {
                "FOR_BACKWARD": for_backward is not None, "BLOCK": VALUE_BLOCK.value, "num_warps": 4,
                "D": plan.D, "BLOCK_D": plan.shape["BLOCK_D"],
                "BY_KEY": plan.visibility_kind["WINDOWED"] or plan.visibility_kind["PACKED"],
                "HAS_LENGTHS": plan.visibility_kind["HAS_LENGTHS"],
            },
        )  # fmt: skip
        programs = plan.B * plan.Hkv * ceil_div(plan.Lk, VALUE_BLOCK.value)
        start_kernel(normalize_kernel, programs, arguments, constants)
        return unit_k


def steep_rows(dtype: torch.dtype, p: float) -> bool:
    """Whether steep rows use the shorter forms of steep.py.

    These are accurate enough for bfloat16, and for powers that do not amplify the half-precision error of the largest
    score too much. They are faster only where there are NVIDIA's packed half-precision instructions.
    """
    return dtype == torch.bfloat16 and p <= 64 and torch.version.hip is None


def hopper_kernels(d: int, part: str) -> ModuleType | None:
    """The Gluon kernels for a part (`forward`, `backward` or `window`), or None if they do not apply or are not faster.

    They are written for head sizes 64 and 128 on Hopper. Of the forward at head size 64 Triton's schedule is as good.
    """
    faster = d == 128 or (d == 64 and part != "forward")
    if not faster or not switches.GLUON or not torch.cuda.is_available():
        return None
    return _kernels_of_device(torch.cuda.current_device())


@functools.cache
def _kernels_of_device(index: int) -> ModuleType | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index)[0] != 9:
        return None
    try:
        from lssar.ops.fused import hopper
    except (ImportError, AttributeError) as problem:  # Gluon is experimental in Triton: its names change
        warnings.warn(f"this Triton cannot run the Hopper kernels ({problem}); using slower ones", stacklevel=3)
        return None
    return hopper


def visibility_arguments(
    q: Tensor, Lk: int, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None
) -> tuple[Any, ...]:
    """Arguments of the kernels that say what rows see: Lq, Lk, window, lengths, documents."""
    doc_start = doc_stop = q  # any pointer: never read
    if cu_seqlens is not None:
        doc_start, doc_stop = document_bounds(cu_seqlens, Lk)
    if key_lengths is not None:
        key_lengths = key_lengths.to(device=q.device, dtype=torch.int32).contiguous()  # may be expanded
    return (
        q.shape[2], Lk, 0 if window is None else min(window, 2**30), q if key_lengths is None else key_lengths,
        doc_start, doc_stop,
    )  # fmt: skip


def visibility_kind(causal: bool, window: int | None, packed: bool, padded: bool) -> dict[str, bool]:
    """Constants of the kernels that say of what kind these arguments are."""
    return {"CAUSAL": causal, "WINDOWED": window is not None, "PACKED": packed, "HAS_LENGTHS": padded}


def document_bounds(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """First key and one past the last key of the document of each position, int32 (total,)."""
    cu = cu_seqlens.to(torch.int64)
    document = torch.searchsorted(cu, torch.arange(total, device=cu.device), right=True)
    bounds = cu.to(torch.int32)
    return bounds[document - 1], bounds[document]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, p: float | None, p_tensor: Tensor | None, causal: bool,
    cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and (slope, intercept, Z) of each row for the backward."""
    if is_expanded(q):  # descriptors cannot say that an axis repeats the same elements
        q = q.clone()  # in the layout of o that tracing is told of
    call = _Call(q, k, (v,), gain, power_value(p, p_tensor), causal, cu_seqlens, key_lengths, window)
    plan = call.plan
    o = torch.empty_like(q)
    rows = plan.per_row(3, q)
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), rows.zero_()
    unit_k = call.unit_keys(k, v)
    aligned = tma_aligned(unit_k, v)
    hopper = q.dtype != torch.float32 and aligned and tma_aligned(q) and hopper_kernels(plan.D, "forward")
    kernel = hopper.forward_kernel if hopper else forward_kernel
    name = "forward_hopper" if hopper else "forward"

    arguments = (
        q, unit_k, v, o, *rows.unbind(), *q.stride()[:3], *v.stride()[:3], *o.stride()[:3], plan.row_stride,
        plan.Hq, plan.Hkv, plan.exponent, call.gain, *call.visibility,
    )  # fmt: skip

    def run(tile, tile_constants):
        if hopper:
            by_rows = _described(name, *((x.view(plan.score_dtype), tile.m) for x in (q, o)))
            by_keys, kind = _tile_arguments(name, plan, (unit_k, 2 * tile.n), (v, tile.n))
            tiles = by_rows + by_keys
        else:
            of_host = tile_constants["TMA"] and plan.host_tiles and not is_expanded(v)
            sizes = (unit_k, tile_constants["BLOCK_N1"]), (unit_k, tile.n), (v, tile.n)
            block_d = int(plan.shape["BLOCK_D"])
            tiles = tuple(describe(x, (1, 1, n, block_d), TensorDescriptor) if of_host else 0 for x, n in sizes)
            kind = {"TMA": HOST_TILES.value if of_host else tile_constants["TMA"]}
        constants = plan.launch_constants(
            name, tile,
            make=lambda: plan.mechanism | plan.shape | plan.visibility_kind | plan.gain_kind | tile_constants | kind,
        )  # fmt: skip
        start_kernel(kernel, ceil_div(plan.Lq, tile.m) * plan.B * plan.Hq, (*arguments, *tiles), constants)

    launch(name, plan.D, plan.itemsize, aligned, run)
    return o, rows


@dataclass(frozen=True)
class _QueryPass:
    """What the dq kernel leaves for the dk, dv kernel."""

    queries: Tensor
    """(B, Hq, Lq, D) contiguous, in the dtype of q: scaled by powers of two if exact_queries, else unit."""
    rows: Tensor
    """ROW_PLANES values of each row (gradients.store_row_values)."""
    block_rows: int
    """Rows of a program of the dq kernel: whether rows are steep is known by such blocks."""


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, rows: Tensor, gain: Tensor | None, p: float | None,
    p_tensor: Tensor | None, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dgain (empty if there is no gain)."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), _zero_gain(q, gain)
    if do.stride(-1) != 1 or is_expanded(do):  # descriptors cannot say that an axis repeats the same elements
        do = do.contiguous()
    if is_expanded(q):
        q = q.clone()
    others = v, o, do, rows
    call = _Call(q, k, others, gain, power_value(p, p_tensor), causal, cu_seqlens, key_lengths, window)
    plan = call.plan
    heads = plan.B * plan.Hkv
    sizes = (
        q.new_empty((heads, plan.Lk), dtype=torch.float32),
        q.new_empty((heads, ceil_div(plan.Lk, VALUE_BLOCK.value)), dtype=torch.float32),
    )
    broken = q.new_empty(1, dtype=torch.int32)
    unit_k = call.unit_keys(k, v, (*sizes, broken))
    aligned = tma_aligned(unit_k, q, k, v, o, do)
    hopper = plan.exact_queries and aligned and hopper_kernels(plan.D, "backward")
    kernels = hopper or triton_backward
    suffix = "_hopper" if hopper else ""

    dq, passed = _query_gradient(
        call, kernels.query_gradient_kernel, "query_gradient" + suffix, aligned, q, unit_k, v, o, do, sizes, rows
    )
    dk, dv = _key_gradient(
        call, kernels.key_gradient_kernel, "key_gradient" + suffix, aligned, k, unit_k, v, do, passed, broken
    )
    dgain = _zero_gain(q, gain)
    if gain is not None:
        by_head = passed.rows[GAIN_PLANE.value].view(plan.B, plan.Hq, plan.row_stride)
        dgain = by_head[..., : plan.Lq].sum((0, 2)).to(gain.dtype)
    return dq, dk, dv, dgain


def _query_gradient(
    call: _Call, kernel: Any, name: str, aligned: bool, q: Tensor, unit_k: Tensor, v: Tensor, o: Tensor, do: Tensor,
    sizes: tuple[Tensor, Tensor], rows: Tensor,
) -> tuple[Tensor, _QueryPass]:  # fmt: skip
    plan = call.plan
    dq = torch.empty_like(q)
    row_values = plan.per_row(ROW_PLANES, q)
    if plan.Lq % ROW_ALIGNMENT:
        row_values.zero_()  # the dk, dv kernel also reads rows past the last
    queries = q.new_empty(q.shape)
    arguments = (
        q, unit_k, v, o, do, dq, queries, *sizes, *rows.unbind(), row_values,
        *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *q.stride()[:3], *dq.stride()[:3],
        row_values.stride(1), row_values.stride(0), call.gain, plan.exponent, plan.Hq, plan.Hkv, *call.visibility,
    )  # fmt: skip

    def run(tile, tile_constants):
        programs = ceil_div(plan.Lq, tile.m) * plan.B * plan.Hq
        by_rows = _described(name, *((x, tile.m) for x in (q, o.view(plan.score_dtype), do, dq, queries)))
        by_keys, kind = _tile_arguments(name, plan, (unit_k, tile.n), (v, tile.n))
        constants = plan.launch_constants(
            name, tile, make=lambda: plan.of_backward() | plan.gain_kind | kind | tile_constants
        )
        start_kernel(kernel, programs, (*arguments, *by_rows, *by_keys), constants)

    tile = launch(name, plan.D, plan.itemsize, aligned, run)
    return dq, _QueryPass(queries, row_values, tile.m)


def _key_gradient(
    call: _Call, kernel: Any, name: str, aligned: bool, k: Tensor, unit_k: Tensor, v: Tensor, do: Tensor,
    passed: _QueryPass, broken: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv; broken (1,) becomes 1 if a part of dv had to be computed twice."""
    plan = call.plan
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    arguments = (
        passed.queries, unit_k, v, do, k, dk, dv, passed.rows,
        *v.stride()[:3], *do.stride()[:3], *k.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        passed.rows.stride(1), passed.rows.stride(0), plan.exponent, plan.Hq, plan.Hkv, *call.visibility,
    )  # fmt: skip
    gluon = name.endswith("_hopper")

    def programs(tile):
        return ceil_div(plan.Lk, tile.n) * plan.B * plan.Hkv

    def run(tile, tile_constants):
        if gluon and passed.block_rows % tile.m:
            raise ValueError(f"rows of {tile} do not divide the {passed.block_rows} of the dq kernel's blocks")
        steep = plan.mechanism["STEEP"] and tile.m <= 2 * passed.block_rows  # see backward.steep_block
        tiles, kind = _tile_arguments(name, plan, (passed.queries, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))
        if not gluon:
            kind = {"REPAIR": False, "SHORT_FORMS": False}
        n = programs(tile)
        constants = plan.launch_constants(
            name, tile, steep, make=lambda: plan.of_backward() | {"STEEP": steep} | kind | tile_constants
        )
        start_kernel(kernel, n, (broken, n, *arguments, *tiles), constants)

    def repair(tile, tile_constants):
        # steep rows of the Gluon kernels come as lines of the short forms; other calls do not say which rows are steep
        kind = {"REPAIR": True, "SHORT_FORMS": gluon and plan.mechanism["STEEP"], "STEEP": False}
        n = programs(tile)
        constants = plan.launch_constants(REPAIR, tile, gluon, make=lambda: plan.of_backward() | kind | tile_constants)
        start_kernel(triton_backward.key_gradient_kernel, min(n, REPAIR_PROGRAMS), (broken, n, *arguments), constants)

    launch(name, plan.D, plan.itemsize, aligned, run)
    launch(REPAIR, plan.D, plan.itemsize, False, repair)
    return dk, dv


def _tile_arguments(name: str, plan: _Plan, *tensors: tuple[Tensor, int]) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Arguments and constants of a kernel that only those in Gluon have."""
    if not name.endswith("_hopper"):
        return (), {}
    from lssar.ops.fused.hopper import tile_arguments

    return tile_arguments(plan.host_tiles, *tensors)


def _described(name: str, *tensors: tuple[Tensor, int]) -> tuple[Any, ...]:
    """Arguments that only kernels in Gluon have: descriptors of tensors that they reach in no other way. None of the
    tensors is expanded."""
    if not name.endswith("_hopper"):
        return ()
    from lssar.ops.fused.hopper import tile_arguments

    return tile_arguments(True, *tensors)[0]


def _zero_gain(q: Tensor, gain: Tensor | None) -> Tensor:
    return q.new_empty(0) if gain is None else torch.zeros_like(gain)


def _row_stride(queries: int) -> int:
    """Rows of a head in tensors of values per row: aligned, so that tiles of them are too."""
    return ceil_div(queries, ROW_ALIGNMENT) * ROW_ALIGNMENT


def _empty_rows(q: Tensor) -> Tensor:
    return q.new_empty((3, q.shape[0] * q.shape[1], _row_stride(q.shape[2])), dtype=torch.float32)


forward_op = differentiable(
    "fused", f"Tensor? gain, float? p, Tensor? p_tensor, {VISIBILITY}", run_forward, run_backward, _empty_rows,
    gain_gradient=True,
)  # fmt: skip
