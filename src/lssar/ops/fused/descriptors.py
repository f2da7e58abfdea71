"""Descriptors for the tensor memory accelerator, made on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lssar.ops.fused.tiles import tma_aligned

CHECKED: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Attributes of descriptors, but for the tensor: checking them takes longer than a launch."""
MOST_CHECKED = 4096


def is_expanded(x: Tensor) -> bool:
    """Whether an axis repeats the same elements, which a descriptor cannot say."""
    return any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride()))


def can_describe(*tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator can read tiles of them."""
    return tma_aligned(*tensors) and not any(is_expanded(x) for x in tensors)


def describe(x: Tensor, block: tuple[int, ...], kind: type, layout: Callable[[], Any] | None = None) -> Any:
    """A descriptor, Triton's or Gluon's `kind`, of x (B, H, L, D) in tiles of that shape; Gluon's need a layout."""
    key = kind, block, x.dtype, x.shape, x.stride()
    attributes = CHECKED.get(key)
    if attributes is None:
        # of an axis of one element any stride will do, but the descriptor has to be able to hold it
        strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride())]
        made = kind(x, list(x.shape), [*strides, 1], list(block), *([] if layout is None else [layout()]))
        if len(CHECKED) >= MOST_CHECKED:
            CHECKED.clear()
        CHECKED[key] = {name: value for name, value in vars(made).items() if name != "base"}
        return made
    made = object.__new__(kind)
    made.__dict__.update(attributes, base=x)
    return made
