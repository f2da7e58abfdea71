"""Descriptors for the tensor memory accelerator, made on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tile_arguments(wanted: bool, *tensors: tuple[Tensor, int]) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """The last arguments of a kernel, and its constant HOST_TILES.

    Wanted: descriptors of tensors (B, H, L, D) in tiles of so many rows each; a program then need not make its own,
    which takes it a barrier and two fences each. If not wanted, or if a tensor is expanded, zeros.
    """
    wanted = wanted and all(s > 0 or n == 1 for x, _ in tensors for n, s in zip(x.shape, x.stride()))
    made = tuple(_descriptor(x, rows) if wanted else 0 for x, rows in tensors)
    return made, {"HOST_TILES": wanted}


def _descriptor(x: Tensor, rows: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[x.dtype])
    # of an axis of one element any stride will do, but the descriptor has to be able to hold it
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)
