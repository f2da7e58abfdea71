"""Maps from hidden states to q, k and v: linear, or tensor products (TPA).

Shape letters: B batch, L tokens of this call, H heads, D head size, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lssar.nn.cache import LayerCache
from lssar.nn.linear import fused_linear
from lssar.nn.positions import Angles, rotate
from lssar.ops import fused

Projection = Literal["plain", "tpa"]


@dataclass(frozen=True)
class ProjectionConfig:
    """Shapes of the maps from hidden states to q, k and v."""

    width: int
    heads: int
    key_heads: int
    head_size: int
    projection: Projection = "plain"
    ranks: tuple[int, int, int] = (6, 2, 2)
    """TPA: ranks of queries, keys and values."""
    bias: bool = True

    def __post_init__(self) -> None:
        if self.projection == "tpa" and self.key_heads != self.heads:
            raise ValueError("TPA shares keys by their rank, not by head groups: key_heads must equal heads")


class PlainProjection(nn.Module):
    """q, k, v as linear maps of x; the cache keeps k and v."""

    def __init__(self, config: ProjectionConfig):
        super().__init__()
        self.config = config
        self.sizes = [heads * config.head_size for heads in (config.heads, config.key_heads, config.key_heads)]
        self.qkv = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(
        self, x: Tensor, angles: Angles | None, cache: LayerCache | None, norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of norm(x)."""
        B, L, _ = x.shape
        step = cache is not None and cache.stepping
        parts = fused_linear(x, self.qkv, norm=norm, step=step).split(self.sizes, -1)
        q, k, v = (part.view(B, L, -1, self.config.head_size).transpose(1, 2) for part in parts)
        if cache is not None and cache.at is not None and x.is_cuda and fused.HAS_TRITON and q.shape[-1] % 2 == 0:
            kept_k, kept_v = cache.tensors
            return fused.append_token(q, k, v, angles, kept_k, kept_v, cache.at), kept_k, kept_v
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v


class TensorProductProjection(nn.Module):
    """TPA (Zhang 2025, T6): each of q, k, v is a mean of `rank` outer products a (heads) x b (head size).

    The rotation acts on b alone, so the cache keeps rotated factors: (rank_k + rank_v) (heads + head size) numbers a
    token in place of 2 heads * head size.
    """

    def __init__(self, config: ProjectionConfig):
        super().__init__()
        self.config = config
        self.sizes = [rank * size for rank in config.ranks for size in (config.heads, config.head_size)]
        self.factors = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(
        self, x: Tensor, angles: Angles | None, cache: LayerCache | None, norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of norm(x)."""
        B, L, _ = x.shape
        factors = fused_linear(x, self.factors, norm=norm, step=cache is not None and cache.stepping)
        aq, bq, ak, bk, av, bv = (
            part.view(B, L, rank, -1).transpose(1, 2)  # (B, rank, L, heads or head size)
            for part, rank in zip(factors.split(self.sizes, -1), (r for r in self.config.ranks for _ in "ab"))
        )
        if angles is not None:
            bq, bk = rotate(bq, angles), rotate(bk, angles)
        if cache is not None:
            ak, bk, av, bv = cache.append(ak, bk, av, bv)
        return _outer(aq, bq), _outer(ak, bk), _outer(av, bv)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rank of a (B, r, L, H) x b (B, r, L, D) -> (B, H, L, D)."""
    return torch.einsum("brlh,brld->bhld", a, b) / a.shape[1]
