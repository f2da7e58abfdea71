"""New models: on one process as usual, under FSDP2 on the meta device and then filled shard by shard.

Every process draws the same stream of random numbers on its CPU, in the order in which `GPT(config)` draws it, a few
million at a time, and keeps those of its own shards. The weights are therefore the same on any number of processes, and
no process ever holds a whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from lssar.model import GPT, ModelConfig

DRAWN_AT_ONCE = 2**22
"""Random numbers drawn at once. A multiple of 16: PyTorch draws normal numbers on a CPU in blocks of 16, so a tensor
drawn in such parts is the same, to the bit, as one drawn at once."""
SMALLEST_PART = 16
aten = torch.ops.aten
_FILLING = (aten.normal_.default, aten.uniform_.default, aten.copy_.default)


def meta_model(config: ModelConfig) -> GPT:
    """A model without storage, to be sharded and then passed to `materialise`."""
    with torch.device("meta"):
        return GPT(config)


def materialise(model: GPT, device: torch.device) -> None:
    """Give a meta model storage on the device and the weights that `GPT(config)` would have; parameters may be sharded.

    Uses the default CPU generator; leaves it as `GPT(config)` would.
    """
    model.to_empty(device=device)
    with _Sharded():
        for module in model.modules():  # the order of construction: layers draw their usual weights first
            if (reset := getattr(module, "reset_parameters", None)) is not None:
                reset()
        model.apply(model.initialise)


class _Sharded(TorchDispatchMode):
    """`normal_`, `uniform_` and `copy_` fill a rank's shard with its part of what would be the whole tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], DTensor) or func not in _FILLING:
            return func(*args, **kwargs)
        target, *others = args
        if func is aten.copy_.default:
            _keep(target, others[0].reshape(-1), 0)
            return target
        start, total = 0, target.numel()
        while start < total:
            stop = total if total - start < DRAWN_AT_ONCE + SMALLEST_PART else start + DRAWN_AT_ONCE
            _keep(target, func(torch.empty(stop - start), *others, **kwargs), start)
            start = stop
        return target


def _keep(target: DTensor, part: Tensor, start: int) -> None:
    """Copy what the rank holds of elements `start`, ... of the flattened whole; shards are of dimension 0."""
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if list(shape[1:]) != list(target.shape[1:]):
        raise ValueError(f"parameters must be sharded by rows; got {target.placements} of {tuple(target.shape)}")
    row = target.shape[1:].numel()
    first, end = offset[0] * row, (offset[0] + shape[0]) * row
    low, high = max(first, start), min(end, start + part.numel())
    if low < high:
        flat = target.to_local().detach().view(-1)
        flat[low - first : high - first].copy_(part[low - start : high - start])
