"""PyTorch's norms, also for float32 inputs and half-precision weights, as FSDP gathers them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _at_least(x.dtype, self.bias)
        return F.layer_norm(x, self.normalized_shape, _at_least(x.dtype, self.weight), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, _at_least(x.dtype, self.weight), self.eps)


def _at_least(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype) if weight.dtype.itemsize < dtype.itemsize else weight
