"""Compiled strips for the CPU (optional): the same results as the PyTorch strips of `tiled.py`, faster."""

from __future__ import annotations

from torch import Tensor

from lssar.specs import AttentionSpec


def supports(q: Tensor, spec: AttentionSpec, mask: Tensor | None) -> bool:
    return False


def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec) -> Tensor:
    raise NotImplementedError


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError
