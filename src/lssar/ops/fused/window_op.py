"""The kernels of window.py as PyTorch custom ops, with fakes and autograd."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lssar.ops.fused import op
from lssar.ops.fused import window as kernels
from lssar.ops.fused import window_backward as gradients
from lssar.ops.fused import window_repair as repairs
from lssar.ops.fused.autograd import below_autograd, operator, refuse_gradient, with_autograd
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.op import LOG_DEGREES, steep_rows, what_rows_see
from lssar.ops.fused.tiles import LONG_WINDOW, Tile, ceil_div, launch, power_of_two, tile_for, tma_aligned
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
        kind = kernels.EXP
    else:
        kind = kernels.SOFTPLUS if p is None else kernels.REWEIGHTED
    chain = int(p) if p is not None and float(p).is_integer() and p <= LARGEST_CHAIN else 0
    return {
        "KIND": kind.value, "P": chain, "COSINE": spec.cosine, "LOG_N": spec.log_n,
        "SCALE": scale_factor(d, spec), "SMALL": 1.0 if dtype == torch.float16 else 2.0**-12,
        "D": d, "BLOCK_D": max(16, power_of_two(d)),
        "LOG_DEGREE": LOG_DEGREES[dtype], "DOT": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


class _Call:
    """What forward and backward of one call share."""

    def __init__(
        self, q: Tensor, k: Tensor, gain: Tensor | None, power: Tensor | None, spec: str, causal: bool,
        cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
    ) -> None:  # fmt: skip
        self.B, self.Hq, self.Lq, self.D = q.shape
        self.Hkv, self.Lk = k.shape[1], k.shape[2]
        self.itemsize = q.element_size()
        p = _spec_of(spec).p if power is None else float(power)
        self.p = 1.0 if p is None else float(p)
        seen, visibility = what_rows_see(q, self.Lk, causal, cu_seqlens, key_lengths, window)
        self.shapes = (self.Hq, self.Hkv, *seen)
        self.constants = _mechanism(spec, p, self.D, q.dtype) | visibility
        reweighted = self.constants["KIND"] == kernels.REWEIGHTED.value
        self.steep = reweighted and steep_rows(q.dtype, self.p)
        self.gain = None if gain is None else gain.contiguous()
        self.wide = q.dtype != torch.bfloat16  # gradients of scores may leave float16's range
        longest = min(self.Lk, self.Lk if window is None else (window if causal else 2 * window))
        bound = self.constants["SCALE"] * (math.log(max(longest, 1)) if self.constants["LOG_N"] else 1.0)
        spread = 2 * bound / math.log(2)
        self.fixed = (
            self.constants["KIND"] == kernels.EXP.value and self.constants["COSINE"] and gain is None
            and q.dtype != torch.float16 and spread < LARGEST_SPREAD
        )  # fmt: skip
        self.kind = "softplus" if self.constants["KIND"] else "cosine" if self.constants["COSINE"] else "softmax"
        self.tiles = self.kind if longest <= LONG_WINDOW else f"{self.kind}_long"

    def key_scale(self, k: Tensor) -> Tensor:
        """1 / |k|, (B, Hkv, Lk); empty where norms are not divided out."""
        if not self.constants["COSINE"]:
            return k.new_empty(0, dtype=torch.float32)
        scale = k.new_empty((self.B, self.Hkv, self.Lk), dtype=torch.float32)
        constants = {
            "D": self.D, "BLOCK_D": self.constants["BLOCK_D"], "PRECISE": k.dtype == torch.float32,
            "BLOCK": KEY_BLOCK, "num_warps": 4,
        }  # fmt: skip
        arguments = (k, scale, *k.stride()[:3], self.Hkv, self.Lk)
        grid = (ceil_div(self.Lk, KEY_BLOCK), self.Hkv, self.B)
        start_kernel(kernels.key_scale_kernel, grid, arguments, constants)
        return scale

    def hopper(self, *tensors: Tensor) -> ModuleType | None:
        """The Gluon kernels if they can run; tensors: those that are read by descriptors."""
        c = self.constants
        known = not self.wide and (c["COSINE"] or not c["LOG_N"])
        if not known or not c["WINDOWED"] or c["HAS_LENGTHS"] or not tma_aligned(*tensors) or _expanded(*tensors):
            return None
        return op.hopper_kernels(self.D, "window")

    def run(
        self, name: str, kernel: Any, grid: Any, arguments: tuple, in_tiles: tuple[Tensor, ...], **more: Any
    ) -> Tile:
        """Launch with the tiles of the table. grid(tile): programs; in_tiles: tensors that the loop reads. Returns the
        tile that was used."""
        constants = self.constants | more
        aligned = not self.constants["HAS_LENGTHS"] and tma_aligned(*in_tiles)  # padding may hold anything
        aligned &= not _expanded(*in_tiles)

        def run(tile, tile_constants):
            del tile_constants["CACHE"]
            rows = tile.m if name == "key_gradient" else tile.n
            block = [1, 1, rows, self.constants["BLOCK_D"]]
            tiles = [_descriptor(x, block) if tile_constants["TMA"] else 0 for x in in_tiles]
            start_kernel(kernel, grid(tile), (*arguments, *tiles), constants | tile_constants)

        return launch(f"window_{name}_{self.tiles}", self.D, self.itemsize, aligned, run)


def _expanded(*tensors: Tensor) -> bool:
    return any(s == 0 and n > 1 for x in tensors for n, s in zip(x.shape, x.stride()))


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    # of an axis of one element any stride will do, but the descriptor has to be able to hold it
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, power: Tensor | None, spec: str, causal: bool,
    cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _Call(q, k, gain, power, spec, causal, cu_seqlens, key_lengths, window)
    o, rows = torch.empty_like(q), _rows_of(q, spec)
    key_scale = call.key_scale(k)
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), rows.zero_(), key_scale
    arguments = (
        q, k, v, o, rows, key_scale, q if gain is None else call.gain, call.p, rows.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *call.shapes,
    )  # fmt: skip
    hopper = call.hopper(q, k, v)
    near = causal and 0 < (window or 0) <= 2 * FORWARD_BLOCK + 1 and (call.Lk - call.Lq) % FORWARD_BLOCK == 0
    if hopper is not None and near:
        _forward_in_gluon(call, hopper, q, k, v, o, rows, key_scale, arguments)
        return o, rows, key_scale
    call.run(
        "forward", kernels.forward_kernel, lambda tile: (ceil_div(call.Lq, tile.m), call.Hq, call.B), arguments,
        (k, v), GAIN=gain is not None, FIXED=call.fixed, GROUP=call.Hq // call.Hkv, STEEP=call.steep,
    )  # fmt: skip
    return o, rows, key_scale


def _forward_in_gluon(
    call: _Call, hopper: ModuleType, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rows: Tensor, key_scale: Tensor,
    arguments: tuple,
) -> None:  # fmt: skip
    """Write o and rows. arguments: of the Triton kernel."""
    blocks = ceil_div(call.Lq, FORWARD_BLOCK)
    broken = q.new_empty((call.B, call.Hq, blocks), dtype=torch.int32)
    more = {"GAIN": call.gain is not None, "FIXED": call.fixed, "GROUP": call.Hq // call.Hkv, "STEEP": call.steep}
    constants = call.constants | more
    tiles = hopper.tile_arguments(True, (q, FORWARD_BLOCK), (k, FORWARD_BLOCK), (v, FORWARD_BLOCK))[0]
    left_out = ("BLOCK_D", "WINDOWED", "HAS_LENGTHS", "DOT")
    start_kernel(
        hopper.window_forward_kernel, (blocks, call.Hq, call.B),
        (
            broken, o, rows, key_scale, q if call.gain is None else call.gain, call.p, rows.stride(0), *o.stride()[:3],
            *call.shapes, *tiles,
        ),
        {name: x for name, x in constants.items() if name not in left_out} | {"BLOCK": FORWARD_BLOCK, "num_warps": 4},
    )  # fmt: skip
    start_kernel(
        repairs.forward_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), call.Hq, call.B),
        (broken, blocks, *arguments),
        constants | {"BLOCK_M": FORWARD_BLOCK, "BLOCK_N": 32, "BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
    )  # fmt: skip


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, rows: Tensor, key_scale: Tensor, gain: Tensor | None,
    power: Tensor | None, spec: str, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dgain = _gain_like(q, gain)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dgain.zero_()
    call = _Call(q, k, gain, power, spec, causal, cu_seqlens, key_lengths, window)
    if do.stride(-1) != 1:
        do = do.contiguous()
    to_keys = q.new_empty((gradients.BACKWARD_PLANES, call.B, call.Hq, call.Lq), dtype=torch.float32)
    steep_block = _query_gradient(call, q, k, v, o, do, dq, rows, to_keys, key_scale)
    _key_gradient(call, q, k, v, do, dk, dv, to_keys, key_scale, steep_block)
    if gain is not None:
        torch.sum(to_keys[gradients.GAIN_PLANE.value], (0, 2), out=dgain)
    return dq, dk, dv, dgain


def _query_gradient(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dq: Tensor, rows: Tensor, to_keys: Tensor,
    key_scale: Tensor,
) -> int:  # fmt: skip
    """Write dq and to_keys. Returns the rows of a block, each of which says whether it is steep; 0: none."""
    gain, strides = q if call.gain is None else call.gain, [x.stride()[:2] for x in (q, k, v, o, do, dq)]
    arguments = (
        q, k, v, o, do, dq, rows, to_keys, key_scale, gain, call.p, rows.stride(0), *itertools.chain(*strides),
        *call.shapes,
    )  # fmt: skip
    steps = _steps(Q=q, K=k, V=v, O=o, DO=do, DQ=dq)
    more = {"GAIN": call.gain is not None, "GROUP": call.Hq // call.Hkv, "STEEP": call.steep}
    hopper = call.hopper(q, k, v, do)
    if hopper is None:
        tile = call.run(
            "query_gradient", gradients.query_gradient_kernel,
            lambda tile: (ceil_div(call.Lq, tile.m), call.Hq, call.B), arguments, (k, v), WIDE=call.wide, **more,
            **steps,
        )  # fmt: skip
        return tile.m if call.steep else 0
    tile = tile_for("window_query_gradient_hopper", call.D, call.itemsize)
    tiles = hopper.tile_arguments(True, (q, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))[0]
    blocks = ceil_div(call.Lq, tile.m)
    broken = q.new_empty((call.B, call.Hq, blocks), dtype=torch.int32)
    constants = call.constants | more | {"BLOCK_M": tile.m}
    left_out = ("BLOCK_D", "WINDOWED", "HAS_LENGTHS", "DOT")
    own = {"BLOCK_N": tile.n, "STAGES": tile.stages, "num_warps": tile.warps}
    own |= {name: steps[name] for name in ("O_STEP", "DQ_STEP")}
    start_kernel(
        hopper.window_query_gradient_kernel, (blocks, call.Hq, call.B),
        (
            broken, o, dq, rows, to_keys, key_scale, gain, call.p, rows.stride(0), *strides[3], *strides[5],
            *call.shapes, *tiles,
        ),
        {name: x for name, x in constants.items() if name not in left_out} | own,
    )  # fmt: skip
    start_kernel(
        repairs.query_gradient_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), call.Hq, call.B),
        (broken, blocks, *arguments),
        constants | steps | {"WIDE": call.wide, "BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
    )  # fmt: skip
    return tile.m if call.steep else 0


def _key_gradient(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor, to_keys: Tensor,
    key_scale: Tensor, steep_block: int,
) -> None:  # fmt: skip
    """Write dk and dv. steep_block: rows of the dq kernel's blocks, each of which says whether it is steep; 0: none."""
    strides = [x.stride()[:2] for x in (q, k, v, do, dk, dv)]
    arguments = (
        q, k, v, do, dk, dv, to_keys, key_scale, call.p, to_keys.stride(0), call.Hq // call.Hkv,
        *itertools.chain(*strides), *call.shapes,
    )  # fmt: skip
    constants = _steps(Q=q, K=k, V=v, DO=do, DK=dk, DV=dv) | {"WIDE": call.wide}
    hopper = call.hopper(q, v, do)
    if hopper is not None:
        tile = tile_for("window_key_gradient_hopper", call.D, call.itemsize)
    # whole tiles of rows, each within two blocks of the dq kernel at most
    if hopper is None or call.Lq % tile.m or 0 < 2 * steep_block < tile.m:
        call.run(
            "key_gradient", gradients.key_gradient_kernel, lambda tile: (ceil_div(call.Lk, tile.n), call.Hkv, call.B),
            arguments, (q, do), STEEP_ROWS=steep_block, **constants,
        )  # fmt: skip
        return
    tiles = hopper.tile_arguments(True, (q, tile.m), (v, tile.n), (do, tile.m))[0]
    blocks = ceil_div(call.Lk, tile.n)
    broken = k.new_empty((call.B, call.Hkv, blocks), dtype=torch.int32)
    constants |= call.constants | {"BLOCK_N": tile.n}
    own = {"STEEP": steep_block > 0, "GROUP": call.Hq // call.Hkv, "BLOCK_M": tile.m, "STAGES": tile.stages}
    start_kernel(
        hopper.window_key_gradient_kernel, (blocks, call.Hkv, call.B),
        (
            broken, k, dk, dv, to_keys, key_scale, call.p, to_keys.stride(0), *strides[1], *strides[4], *strides[5],
            *call.shapes, *tiles,
        ),
        {name: constants[name] for name in _GLUON_CONSTANTS} | own | {"num_warps": tile.warps},
    )  # fmt: skip
    start_kernel(
        repairs.key_gradient_repair_kernel, (ceil_div(blocks, REPAIRED_BLOCKS), call.Hkv, call.B),
        (broken, blocks, *arguments), constants | {"BLOCKS": REPAIRED_BLOCKS, "num_warps": 8},
    )  # fmt: skip


_GLUON_CONSTANTS = (
    "KIND", "P", "COSINE", "SCALE", "SMALL", "D", "CAUSAL", "PACKED", "LOG_DEGREE", "BLOCK_N", "K_STEP", "DK_STEP",
    "DV_STEP",
)  # fmt: skip


def _steps(**tensors: Tensor) -> dict[str, int]:
    return {f"{name}_STEP": tensor.stride(2) for name, tensor in tensors.items()}


def _rows_of(q: Tensor, spec: str) -> Tensor:
    planes = kernels.EXP_PLANES if _spec_of(spec).activation == "exp" else kernels.SOFTPLUS_PLANES
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
