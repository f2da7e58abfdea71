"""The kernels for short windows (see window.py) as PyTorch custom ops, with fakes and autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lssar.ops.fused import op
from lssar.ops.fused import window_repair as repairs
from lssar.ops.fused.autograd import below_autograd, operator, refuse_gradient, with_autograd
from lssar.ops.fused.descriptors import can_describe, describe
from lssar.ops.fused.launch import Form, LaunchPlan, form_of, form_of_some, start_kernel
from lssar.ops.fused.op import LOG_DEGREES, steep_rows, visibility_arguments, visibility_kind
from lssar.ops.fused.tiles import LONG_WINDOW, Tile, ceil_div, launch, power_of_two, tile_for
from lssar.ops.fused.window import EXP, EXP_PLANES, REWEIGHTED, SOFTPLUS, SOFTPLUS_PLANES
from lssar.ops.fused.window_forward import forward_kernel, key_scale_kernel
from lssar.ops.fused.window_gradients import BACKWARD_PLANES, GAIN_PLANE
from lssar.ops.fused.window_key_gradient import key_gradient_kernel
from lssar.ops.fused.window_query_gradient import query_gradient_kernel
from lssar.ops.numerics import scale_factor
from lssar.specs import AttentionSpec

KEY_BLOCK = 64
LARGEST_CHAIN = 1024
"""Whole powers up to this are made by multiplications."""
FORWARD_BLOCK = 64
"""Rows and keys of a tile of the Gluon forward, which takes three tiles of keys."""
REPAIRED_BLOCKS = 64
"""Blocks of keys or rows that a program of a repair looks at."""
LARGEST_SPREAD = 100.0
"""Exponents that weights of cosine softmax may differ by if rows are shifted by their bound (see FIXED)."""


@lru_cache(maxsize=256)
def _spec_of(literal: str) -> AttentionSpec:
    return AttentionSpec.from_literal(literal)


@lru_cache(maxsize=256)
def _mechanism(literal: str, p: float | None, d: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of the kernels that do not depend on what rows see."""
    spec = _spec_of(literal)
    if spec.activation == "exp":
        kind = EXP
    else:
        kind = SOFTPLUS if p is None else REWEIGHTED
    chain = int(p) if p is not None and float(p).is_integer() and p <= LARGEST_CHAIN else 0
    return {
        "KIND": kind.value, "P": chain, "COSINE": spec.cosine, "LOG_N": spec.log_n,
        "SCALE": scale_factor(d, spec), "SMALL": 1.0 if dtype == torch.float16 else 2.0**-12,
        "D": d, "BLOCK_D": max(16, power_of_two(d)),
        "LOG_DEGREE": LOG_DEGREES[dtype], "DOT": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


class _Plan(LaunchPlan):
    """What a call needs besides its tensors. Calls with tensors of the same form share one, see `_plan_of`."""

    def __init__(
        self, q: Form, k: Form, others: tuple[Form | None, ...], has_gain: bool, spec: str, p: float | None,
        causal: bool, window: int | None, packed: bool, padded: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        del others  # a part of the key
        self.B, self.Hq, self.Lq, self.D = q.shape
        self.Hkv, self.Lk = k.shape[1], k.shape[2]
        self.itemsize = q.dtype.itemsize
        self.p = 1.0 if p is None else float(p)
        self.constants = _mechanism(spec, p, self.D, q.dtype) | visibility_kind(causal, window, packed, padded)
        c = self.constants
        self.steep = c["KIND"] == REWEIGHTED.value and steep_rows(q.dtype, self.p)
        self.wide = q.dtype != torch.bfloat16  # gradients of scores may leave float16's range
        longest = min(self.Lk, self.Lk if window is None else (window if causal else 2 * window))
        bound = c["SCALE"] * (math.log(max(longest, 1)) if c["LOG_N"] else 1.0)
        spread = 2 * bound / math.log(2)
        self.fixed = (
            c["KIND"] == EXP.value and c["COSINE"] and not has_gain and q.dtype != torch.float16
            and spread < LARGEST_SPREAD
        )  # fmt: skip
        kind = "softplus" if c["KIND"] else "cosine" if c["COSINE"] else "softmax"
        self.tiles = kind if longest <= LONG_WINDOW else f"{kind}_long"
        near = causal and 0 < (window or 0) <= 2 * FORWARD_BLOCK + 1
        self.three_tiles = near and (self.Lk - self.Lq) % FORWARD_BLOCK == 0
        self.has_gain = has_gain
        self.in_gluon = not self.wide and window is not None and not padded and (c["COSINE"] or not c["LOG_N"])

    def of_rows(self) -> dict[str, Any]:
        """Constants of the kernels that hold rows."""
        return {"GAIN": self.has_gain, "GROUP": self.Hq // self.Hkv, "STEEP": self.steep}

    def for_gluon(self, *known: str) -> dict[str, Any]:
        """Constants without those of which the Gluon kernels know the value, and without others that one of them has
        no use for."""
        known += ("BLOCK_D", "WINDOWED", "HAS_LENGTHS", "DOT")
        return {name: x for name, x in self.constants.items() if name not in known}

    def hopper(self, *in_tiles: Tensor) -> ModuleType | None:
        """The Gluon kernels if they can run; in_tiles: tensors that they read by descriptors."""
        return op.hopper_kernels(self.D, "window") if self.in_gluon and can_describe(*in_tiles) else None

    def key_scale(self, k: Tensor) -> Tensor:
        """1 / |k|, (B, Hkv, Lk); empty where norms are not divided out."""
        if not self.constants["COSINE"]:
            return k.new_empty(0, dtype=torch.float32)
        scale = k.new_empty((self.B, self.Hkv, self.Lk), dtype=torch.float32)
        arguments = (k, scale, *k.stride()[:3], self.Hkv, self.Lk)
        constants = self.launch_constants(
            "key_scale",
            make=lambda: {
                "D": self.D, "BLOCK_D": self.constants["BLOCK_D"], "PRECISE": k.dtype == torch.float32,
                "BLOCK": KEY_BLOCK, "num_warps": 4,
            },
        )  # fmt: skip
        grid = (ceil_div(self.Lk, KEY_BLOCK), self.Hkv, self.B)
        start_kernel(key_scale_kernel, grid, arguments, constants)
        return scale

    def run(
        self, name: str, kernel: Any, grid: Any, arguments: tuple, in_tiles: tuple[Tensor, ...],
        constants: Callable[[], dict[str, Any]], steep_block: int = 0,
    ) -> Tile:  # fmt: skip
        """Launch with the tiles of the table. grid(tile): programs; in_tiles: tensors that the loop reads; steep_block:
        what the constants depend on besides the plan. Returns the tile that was used."""
        padded = self.constants["HAS_LENGTHS"]  # padding may hold anything
        aligned = not padded and can_describe(*in_tiles)

        def run(tile, tile_constants):
            del tile_constants["CACHE"]
            made = self.launch_constants(
                name, tile, steep_block, make=lambda: self.constants | constants() | tile_constants
            )
            rows = tile.m if name == "key_gradient" else tile.n
            block = (1, 1, rows, self.constants["BLOCK_D"])
            tiles = [describe(x, block, TensorDescriptor) if made["TMA"] else 0 for x in in_tiles]
            start_kernel(kernel, grid(tile), (*arguments, *tiles), made)

        return launch(f"window_{name}_{self.tiles}", self.D, self.itemsize, aligned, run)


_plan = lru_cache(maxsize=512)(_Plan)


def _plan_of(
    q: Tensor, k: Tensor, others: tuple[Tensor, ...], gain: Tensor | None, power: Tensor | None, spec: str,
    causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> _Plan:  # fmt: skip
    p = _spec_of(spec).p if power is None else float(power)
    forms = *map(form_of, others), form_of_some(gain), form_of_some(key_lengths)
    return _plan(
        form_of(q), form_of(k), forms, gain is not None, spec, p, causal, window, cu_seqlens is not None,
        key_lengths is not None,
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, power: Tensor | None, spec: str, causal: bool,
    cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gain = None if gain is None else gain.contiguous()
    plan = _plan_of(q, k, (v,), gain, power, spec, causal, cu_seqlens, key_lengths, window)
    o, rows = torch.empty_like(q), _rows_of(q, spec)
    key_scale = plan.key_scale(k)
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), rows.zero_(), key_scale
    seen = visibility_arguments(q, plan.Lk, cu_seqlens, key_lengths, window)
    shapes = plan.Hq, plan.Hkv, *seen
    gain_or_any = q if gain is None else gain
    arguments = (
        q, k, v, o, rows, key_scale, gain_or_any, plan.p, rows.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *shapes,
    )  # fmt: skip
    constants = lambda: {"FIXED": plan.fixed, **plan.of_rows()}  # noqa: E731
    hopper = plan.hopper(q, k, v) if plan.three_tiles else None
    if hopper is None:
        grid = lambda tile: (ceil_div(plan.Lq, tile.m), plan.Hq, plan.B)  # noqa: E731
        plan.run("forward", forward_kernel, grid, arguments, (k, v), constants)
        return o, rows, key_scale
    blocks = ceil_div(plan.Lq, FORWARD_BLOCK)
    broken = q.new_empty((plan.B, plan.Hq, blocks), dtype=torch.int32)
    tiles = hopper.tile_arguments(True, (q, FORWARD_BLOCK), (k, FORWARD_BLOCK), (v, FORWARD_BLOCK))[0]
    start_kernel(
        hopper.window_forward_kernel, (blocks, plan.Hq, plan.B),
        (
            broken, o, rows, key_scale, gain_or_any, plan.p, rows.stride(0), *o.stride()[:3], *shapes, *tiles,
        ),
        plan.launch_constants(
            "forward_in_gluon",
            make=lambda: plan.for_gluon() | constants() | {"BLOCK": FORWARD_BLOCK, "num_warps": 4},
        ),
    )  # fmt: skip
    start_kernel(
        repairs.forward_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), plan.Hq, plan.B),
        (broken, blocks, *arguments),
        plan.launch_constants(
            "forward_repair",
            make=lambda: plan.constants | constants()
            | {"BLOCK_M": FORWARD_BLOCK, "BLOCK_N": 32, "BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
        ),
    )  # fmt: skip
    return o, rows, key_scale


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, rows: Tensor, key_scale: Tensor, gain: Tensor | None,
    power: Tensor | None, spec: str, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dgain = _gain_like(q, gain)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dgain.zero_()
    if do.stride(-1) != 1:
        do = do.contiguous()
    gain = None if gain is None else gain.contiguous()
    others = v, o, do, rows, key_scale
    plan = _plan_of(q, k, others, gain, power, spec, causal, cu_seqlens, key_lengths, window)
    shapes = plan.Hq, plan.Hkv, *visibility_arguments(q, plan.Lk, cu_seqlens, key_lengths, window)
    to_keys = q.new_empty((BACKWARD_PLANES, plan.B, plan.Hq, plan.Lq), dtype=torch.float32)
    steep_block = _query_gradient(plan, shapes, q, k, v, gain, o, do, dq, rows, to_keys, key_scale)
    _key_gradient(plan, shapes, q, k, v, do, dk, dv, to_keys, key_scale, steep_block)
    if gain is not None:
        torch.sum(to_keys[GAIN_PLANE.value], (0, 2), out=dgain)
    return dq, dk, dv, dgain


def _query_gradient(
    plan: _Plan, shapes: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, o: Tensor, do: Tensor,
    dq: Tensor, rows: Tensor, to_keys: Tensor, key_scale: Tensor,
) -> int:  # fmt: skip
    """Write dq and to_keys. Returns the rows of a block, each of which says whether it is steep; 0: none."""
    gain_or_any, strides = q if gain is None else gain, [x.stride()[:2] for x in (q, k, v, o, do, dq)]
    arguments = (
        q, k, v, o, do, dq, rows, to_keys, key_scale, gain_or_any, plan.p, rows.stride(0), *itertools.chain(*strides),
        *shapes,
    )  # fmt: skip
    constants = lambda: plan.of_rows() | _steps(Q=q, K=k, V=v, O=o, DO=do, DQ=dq)  # noqa: E731
    hopper = plan.hopper(q, k, v, do)
    if hopper is None:
        tile = plan.run(
            "query_gradient", query_gradient_kernel,
            lambda tile: (ceil_div(plan.Lq, tile.m), plan.Hq, plan.B), arguments, (k, v),
            lambda: constants() | {"WIDE": plan.wide},
        )  # fmt: skip
        return tile.m if plan.steep else 0
    tile = tile_for("window_query_gradient_hopper", plan.D, plan.itemsize)
    tiles = hopper.tile_arguments(True, (q, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))[0]
    blocks = ceil_div(plan.Lq, tile.m)
    broken = q.new_empty((plan.B, plan.Hq, blocks), dtype=torch.int32)
    start_kernel(
        hopper.window_query_gradient_kernel, (blocks, plan.Hq, plan.B),
        (
            broken, o, dq, rows, to_keys, key_scale, gain_or_any, plan.p, rows.stride(0), *strides[3], *strides[5],
            *shapes, *tiles,
        ),
        plan.launch_constants(
            "query_gradient_in_gluon", tile,
            make=lambda: plan.for_gluon() | plan.of_rows() | _steps(O=o, DQ=dq)
            | {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "STAGES": tile.stages, "num_warps": tile.warps},
        ),
    )  # fmt: skip
    start_kernel(
        repairs.query_gradient_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), plan.Hq, plan.B),
        (broken, blocks, *arguments),
        plan.launch_constants(
            "query_gradient_repair", tile,
            make=lambda: plan.constants | constants()
            | {"WIDE": plan.wide, "BLOCK_M": tile.m, "BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
        ),
    )  # fmt: skip
    return tile.m if plan.steep else 0


def _key_gradient(
    plan: _Plan, shapes: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor,
    to_keys: Tensor, key_scale: Tensor, steep_block: int,
) -> None:  # fmt: skip
    """Write dk and dv. steep_block: rows of the dq kernel's blocks, each of which says whether it is steep; 0: none."""
    strides = [x.stride()[:2] for x in (q, k, v, do, dk, dv)]
    arguments = (
        q, k, v, do, dk, dv, to_keys, key_scale, plan.p, to_keys.stride(0), plan.Hq // plan.Hkv,
        *itertools.chain(*strides), *shapes,
    )  # fmt: skip
    constants = lambda: {"WIDE": plan.wide, **_steps(Q=q, K=k, V=v, DO=do, DK=dk, DV=dv)}  # noqa: E731
    hopper = plan.hopper(q, v, do)
    if hopper is not None:
        tile = tile_for("window_key_gradient_hopper", plan.D, plan.itemsize)
    # whole tiles of rows, each within two blocks of the dq kernel at most
    if hopper is None or plan.Lq % tile.m or 0 < 2 * steep_block < tile.m:
        grid = lambda tile: (ceil_div(plan.Lk, tile.n), plan.Hkv, plan.B)  # noqa: E731
        plan.run(
            "key_gradient", key_gradient_kernel, grid, arguments, (q, do),
            lambda: constants() | {"STEEP_ROWS": steep_block}, steep_block,
        )  # fmt: skip
        return
    tiles = hopper.tile_arguments(True, (q, tile.m), (v, tile.n), (do, tile.m))[0]
    blocks = ceil_div(plan.Lk, tile.n)
    broken = k.new_empty((plan.B, plan.Hkv, blocks), dtype=torch.int32)
    start_kernel(
        hopper.window_key_gradient_kernel, (blocks, plan.Hkv, plan.B),
        (
            broken, k, dk, dv, to_keys, key_scale, plan.p, to_keys.stride(0), *strides[1], *strides[4], *strides[5],
            *shapes, *tiles,
        ),
        plan.launch_constants(
            "key_gradient_in_gluon", tile,
            make=lambda: plan.for_gluon("LOG_N") | _steps(K=k, DK=dk, DV=dv)
            | {
                "STEEP": steep_block > 0, "GROUP": plan.Hq // plan.Hkv, "BLOCK_M": tile.m, "BLOCK_N": tile.n,
                "STAGES": tile.stages, "num_warps": tile.warps,
            },
        ),
    )  # fmt: skip
    start_kernel(
        repairs.key_gradient_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), plan.Hkv, plan.B),
        (broken, blocks, *arguments),
        plan.launch_constants(
            "key_gradient_repair", tile,
            make=lambda: plan.constants | constants() | {"BLOCK_N": tile.n, "BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
        ),
    )  # fmt: skip


def _steps(**tensors: Tensor) -> dict[str, int]:
    return {f"{name}_STEP": tensor.stride(2) for name, tensor in tensors.items()}


def _rows_of(q: Tensor, spec: str) -> Tensor:
    planes = EXP_PLANES if _spec_of(spec).activation == "exp" else SOFTPLUS_PLANES
    return q.new_empty((planes, *q.shape[:3]), dtype=torch.float32)


def _gain_like(q: Tensor, gain: Tensor | None) -> Tensor:
    return q.new_empty(0 if gain is None else q.shape[1], dtype=torch.float32)


def _forward_fake(q, k, v, gain, power, spec, *_):
    cosine = _spec_of(spec).cosine
    return torch.empty_like(q), _rows_of(q, spec), q.new_empty(k.shape[:3] if cosine else 0, dtype=torch.float32)


def _backward_fake(q, k, v, o, do, rows, key_scale, gain, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _gain_like(q, gain)


_OPTIONS = "Tensor? gain, Tensor? power, str spec, bool causal, Tensor? cu_seqlens, Tensor? key_lengths, int? window"
forward_op = operator(
    "window_forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _forward,
    _forward_fake,
)  # fmt: skip
backward_op = operator(
    "window_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor rows, Tensor key_scale, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gain, power, spec, causal, cu_seqlens, key_lengths, window):
        o, rows, key_scale = below_autograd(
            forward_op, q, k, v, gain, power, spec, causal, cu_seqlens, key_lengths, window
        )
        ctx.save_for_backward(q, k, v, o, rows, key_scale, gain, power, cu_seqlens, key_lengths)
        ctx.options = spec, causal, window
        ctx.mark_non_differentiable(rows, key_scale)
        return o, rows, key_scale

    @staticmethod
    def backward(ctx, do, *_):
        q, k, v, o, rows, key_scale, gain, power, cu_seqlens, key_lengths = ctx.saved_tensors
        spec, causal, window = ctx.options
        dq, dk, dv, dgain = backward_op(
            q, k, v, o, do, rows, key_scale, gain, power, spec, causal, cu_seqlens, key_lengths, window
        )
        return dq, dk, dv, None if gain is None else dgain.to(gain.dtype), None, None, None, None, None, None


with_autograd(forward_op, _Window)
refuse_gradient(backward_op, "fused attention has no second derivative; use impl='reference' for double backward")
