"""Arguments of the Gluon kernels that read tiles by descriptors from the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from lssar.ops.fused.descriptors import describe, is_expanded

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tile_arguments(wanted: bool, *tensors: tuple[Tensor, int]) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """The last arguments of a kernel, and its constant HOST_TILES.

    Wanted: descriptors of tensors (B, H, L, D) in tiles of so many rows each; a program then need not make its own,
    which takes it a barrier and two fences each. If not wanted, or if a tensor is expanded, zeros.
    """
    wanted = wanted and not any(is_expanded(x) for x, _ in tensors)
    made = tuple(_descriptor(x, rows) if wanted else 0 for x, rows in tensors)
    return made, {"HOST_TILES": wanted}


def _descriptor(x: Tensor, rows: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = 1, 1, rows, x.shape[3]
    layout = gl.NVMMASharedLayout.get_default_for
    return describe(x, block, TensorDescriptor, lambda: layout(list(block), _ELEMENTS[x.dtype]))
