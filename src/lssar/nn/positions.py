"""Positions of tokens: rotary angles (with NTK-aware scaling), ALiBi, windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.context import Context
from lssar.ops.numerics import working_dtype


def ntk_base(base: float, factor: float, head_size: int) -> float:
    """NTK-aware rotary base, base * s^(d / (d - 2)), for a context s = max(1, `factor`) times the trained one."""
    return base * max(1.0, factor) ** (head_size / (head_size - 2))


Angles = tuple[Tensor, Tensor]
"""cos and sin, (..., L, D / 2), float32."""


def rotary_angles(positions: Tensor, head_size: int, base: float) -> Angles:
    """Rotary angles of the given positions (..., L)."""
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    frequencies = base**-exponents
    return _cos_sin_once(positions, frequencies) if torch.compiler.is_compiling() else _cos_sin(positions, frequencies)


def _cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


# Opaque to torch.compile, which otherwise fuses the sines into every layer and computes them for each element of q, k.
_cos_sin_once = torch.library.custom_op(
    "lssar::cos_sin", _cos_sin, mutates_args=(), schema="(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)"
)
_cos_sin_once.register_fake(_cos_sin)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the two halves of the last dimension against each other, in float32 or float64, back in the dtype of x."""
    cos, sin = angles
    first, second = x.to(working_dtype(x.dtype)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Slopes (H,) of ALiBi (Press 2022): 2^(-8 i / H) for powers of two; other counts interleave the next power's."""
    power = 2 ** math.floor(math.log2(heads))
    i = torch.arange(heads, device=device, dtype=torch.float32)
    exponents = torch.where(i < power, 8 * (i + 1), 4 * (2 * (i - power) + 1)) / power
    return 2.0**-exponents


ALIBI_ROOM = 8
"""Dimensions that ALiBi adds to a head. It uses three; fused softmax kernels need multiples of eight."""


def add_alibi(q: Tensor, k: Tensor, slopes: Tensor, first_key: int = 0) -> tuple[Tensor, Tensor]:
    """q and k with further dimensions whose product adds slope * j to the scores of a dot-product softmax.

    ALiBi adds slope * (j - i), which differs by a constant of the row, and softmax is invariant to that. bfloat16 holds
    integers up to 256 only, so positions are split as 256 * (middle + top) + low, where top is a multiple of 256: every
    part is exact up to position 2^24, and float16 holds it too, as it would not hold a slope times 65,536. The larger
    head size changes the 1 / sqrt(d) of the scores; q is scaled to compensate.
    """
    heads, keys, d = q.shape[1], k.shape[2], q.shape[-1]
    grow = math.sqrt((d + ALIBI_ROOM) / d)
    slope = (slopes.to(q.device)[:, None, None] * math.sqrt(d + ALIBI_ROOM)).expand(q.shape[0], heads, q.shape[2], 1)
    position = torch.arange(first_key, first_key + keys, device=k.device)
    high, low = position // 256, position % 256
    middle = high % 256
    parts = torch.stack([middle, low, high - middle], -1).to(k.dtype).expand(k.shape[0], k.shape[1], keys, 3)
    steep, slope = (256 * slope).to(q.dtype), slope.to(q.dtype)
    q = torch.cat([q * grow, steep, slope, steep], -1)
    rest = (0, ALIBI_ROOM - 3)
    return F.pad(q, rest), F.pad(torch.cat([k, parts], -1), rest)


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a call are, for all layers; each layer uses what its position kind needs."""

    angles: Angles | None = None
    """Rotary cos and sin of this call's tokens."""
    slopes: Tensor | None = None
    """Slopes of ALiBi (H,)."""
    cu_seqlens: Tensor | None = None
    window: int | None = None
    """Upper limit of every layer's window."""
    attend: Callable[..., Tensor] | None = None
    """Called as attend(q, k, v, spec, window=, ...) in place of `lssar.attention`, where the caller has masks of its
    own. Learned numbers of the heads (`head_scale`, `threshold`) and a power `p` are passed if there are any."""
    context: Context | None = None
    """The processes that hold the other parts of these sequences; `cu_seqlens` are then of the whole sequence."""
    first_key: int = 0
    """Position of the first key in the whole sequence."""
    key_lengths: Mapping[int, Tensor] | None = None
    """Keys in use (B,) of a cache of each size, where the cache has its position on the device (`LayerCache.at`)."""


def token_positions(
    length: int, device: torch.device, start: int | Tensor = 0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Positions (L,) of tokens that follow `start` others; they restart in each packed document."""
    at = torch.arange(length, device=device) + start
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=device, dtype=torch.int64)
        at = at - bounds[torch.searchsorted(bounds, at, right=True) - 1]
    return at


def narrower(window: int | None, other: int | None) -> int | None:
    """The smaller of two windows, where None is unlimited."""
    return other if window is None else window if other is None else min(window, other)
