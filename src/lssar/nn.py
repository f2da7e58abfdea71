"""Layers: rotary positions, ALiBi, the key-value cache, and attention with plain or tensor-product projections.

Shape letters: B batch, L tokens of this call, T tokens seen so far, H query heads, h key heads, D head size, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lssar.attention import attention
from lssar.specs import AttentionSpec


def ntk_base(base: float, factor: float, head_size: int) -> float:
    """NTK-aware base for a context `factor` times the trained one: base * s^(d / (d - 2)); never below the trained."""
    return base * max(1.0, factor) ** (head_size / (head_size - 2))


def rotary_angles(positions: Tensor, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, (..., L, D / 2), float32."""
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    frequencies = base**-exponents
    return _cos_sin_once(positions, frequencies) if torch.compiler.is_compiling() else _cos_sin(positions, frequencies)


def _cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


# A node that the compiler cannot look into: it would compute sines anew for every element of q and k in every layer.
_cos_sin_once = torch.library.custom_op(
    "lssar::cos_sin", _cos_sin, mutates_args=(), schema="(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)"
)
_cos_sin_once.register_fake(_cos_sin)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of the last dimension against each other, in float32, back in the dtype of x."""
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def alibi_slopes(heads: int) -> Tensor:
    """Press 2022: 2^(-8 i / H) for powers of two; other counts fill in from the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


ALIBI_ROOM = 8
"""Dimensions that ALiBi adds to a head, of which it uses two: fused softmax kernels want multiples of eight."""


def add_alibi(q: Tensor, k: Tensor, slopes: Tensor, first_key: int = 0) -> tuple[Tensor, Tensor]:
    """q, k with more dimensions, whose product adds slope * j to the scores of a dot-product softmax.

    ALiBi's slope * (j - i) differs from that by a constant of the row, which softmax does not feel. The position goes
    in as 256 * high + low, since half precision holds no more than 8 bits of it. Scores are scaled by 1 / sqrt(d) with
    the new d, which is made up for in q.
    """
    heads, keys, d = q.shape[1], k.shape[2], q.shape[-1]
    grow = math.sqrt((d + ALIBI_ROOM) / d)
    slope = (slopes.to(q.device)[:, None, None] * math.sqrt(d + ALIBI_ROOM)).expand(q.shape[0], heads, q.shape[2], 1)
    position = torch.arange(first_key, first_key + keys, device=k.device)
    parts = torch.stack([position // 256, position % 256], -1).to(k.dtype).expand(k.shape[0], k.shape[1], keys, 2)
    q = torch.cat([q * grow, (256 * slope).to(q.dtype), slope.to(q.dtype)], -1)
    rest = (0, ALIBI_ROOM - 2)
    return F.pad(q, rest), F.pad(torch.cat([k, parts], -1), rest)


@dataclass
class LayerCache:
    """What one layer keeps of the tokens seen: a few tensors (B, ., T, .), grown in place in preallocated room."""

    room: int
    length: int = 0
    tensors: list[Tensor] = field(default_factory=list)

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add the tokens of this call (dimension 2) and return all seen so far, as views."""
        added = new[0].shape[2]
        if self.length + added > self.room:
            raise ValueError(f"the cache has room for {self.room} tokens; {self.length} + {added} do not fit")
        if not self.tensors:
            self.tensors = [x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in new]
        for kept, x in zip(self.tensors, new):
            kept[:, :, self.length : self.length + added] = x
        self.length += added
        return tuple(kept[:, :, : self.length] for kept in self.tensors)


@dataclass(frozen=True)
class Positions:
    """What the layers need to know about where tokens are."""

    angles: tuple[Tensor, Tensor] | None  # rotary cos, sin of this call's tokens
    slopes: Tensor | None  # ALiBi
    cu_seqlens: Tensor | None
    window: int | None
    attend: Callable[..., Tensor] | None = None
    """In place of `lssar.attention` with the two above, where masks are kept by somebody else."""


Projection = Literal["plain", "tpa"]


@dataclass(frozen=True)
class AttentionConfig:
    width: int
    heads: int
    key_heads: int
    head_size: int
    projection: Projection = "plain"
    ranks: tuple[int, int, int] = (6, 2, 2)
    """TPA: ranks of queries, keys and values."""
    bias: bool = True


class PlainProjection(nn.Module):
    """q, k, v as linear maps of x; the cache keeps k and v."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.config = config
        self.sizes = [heads * config.head_size for heads in (config.heads, config.key_heads, config.key_heads)]
        self.qkv = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        B, L, _ = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.view(B, L, -1, self.config.head_size).transpose(1, 2) for part in parts)
        if positions.angles is not None:
            q, k = rotate(q, positions.angles), rotate(k, positions.angles)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v


class TensorProductProjection(nn.Module):
    """TPA (Zhang 2025, T6): each of q, k, v is a mean of `rank` outer products a (heads) x b (head size).

    The rotation acts on b alone, so the cache keeps rotated factors: (rank_k + rank_v) (heads + head size) numbers a
    token in place of 2 heads * head size.
    """

    def __init__(self, config: AttentionConfig):
        super().__init__()
        if config.key_heads != config.heads:
            raise ValueError("TPA shares keys by their rank, not by head groups: key_heads must equal heads")
        self.config = config
        self.sizes = [rank * size for rank in config.ranks for size in (config.heads, config.head_size)]
        self.factors = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        B, L, _ = x.shape
        aq, bq, ak, bk, av, bv = (
            part.view(B, L, rank, -1).transpose(1, 2)  # (B, rank, L, heads or head size)
            for part, rank in zip(self.factors(x).split(self.sizes, -1), (r for r in self.config.ranks for _ in "ab"))
        )
        if positions.angles is not None:
            bq, bk = rotate(bq, positions.angles), rotate(bk, positions.angles)
        if cache is not None:
            ak, bk, av, bv = cache.append(ak, bk, av, bv)
        return _outer(aq, bq), _outer(ak, bk), _outer(av, bv)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rank of a (B, r, L, H) x b (B, r, L, D) -> (B, H, L, D)."""
    return torch.einsum("brlh,brld->bhld", a, b) / a.shape[1]


class Attention(nn.Module):
    """Projections around `lssar.attention` with one mechanism."""

    def __init__(self, config: AttentionConfig, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.project = (TensorProductProjection if config.projection == "tpa" else PlainProjection)(config)
        self.out = nn.Linear(config.heads * config.head_size, config.width, bias=config.bias)
        self.head_scale = None
        if spec.head_scale is not None:
            self.head_scale = nn.Parameter(torch.full((config.heads,), float(spec.head_scale)))

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.project(x, positions, cache)
        size = v.shape[-1]
        if positions.slopes is not None:
            q, k = add_alibi(q, k, positions.slopes)
            v = F.pad(v, (0, ALIBI_ROOM))  # one head size for all three: without it the fused kernels refuse
        if positions.attend is not None:
            o = positions.attend(q, k, v, self.spec, head_scale=self.head_scale)
        else:
            o = attention(
                q, k, v, self.spec, head_scale=self.head_scale, window=positions.window, cu_seqlens=positions.cu_seqlens
            )  # fmt: skip
        o = o[..., :size]
        return self.out(o.transpose(1, 2).flatten(2))
