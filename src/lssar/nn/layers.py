"""Causal self-attention with any mechanism, window, position kind and cache.

Shape letters: B batch, L tokens of this call, T tokens seen so far, H query heads, h key heads, D head size, W width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lssar.attention import attention
from lssar.layouts import LayerConfig, Position, parse_layout
from lssar.nn.cache import LayerCache
from lssar.nn.linear import fused_linear
from lssar.nn.mechanisms import Mechanisms
from lssar.nn.positions import (
    ALIBI_ROOM,
    Positions,
    add_alibi,
    alibi_slopes,
    narrower,
    rotary_angles,
    token_positions,
)
from lssar.nn.projections import PlainProjection, Projection, ProjectionConfig, TensorProductProjection
from lssar.specs import AttentionSpec


class Attention(Mechanisms, nn.Module):
    """Causal self-attention, (B, L, width) to (B, L, width), with any mechanism, window and positions.

    Args:
        width: of the hidden states.
        heads: query heads.
        spec: a mechanism (`"lssar"`, `"lssa+lssar"` to divide the heads, an `AttentionSpec`), or a whole layer as it is
            written in a layout (`"softmax@128/none"`, a `LayerConfig`).
        key_heads: fewer than heads: grouped queries.
        head_size: width / heads, if not given.
        window: how many tokens a row sees, its own included.
        position: `rope`, `alibi` (dot-product softmax only) or `none`; by default that of `spec`, else `rope`.
        rope_base: base of the rotary frequencies.
        projection: `plain`, or `tpa` for tensor-product attention with the given `ranks` of q, k and v.
        bias: whether the linear layers have biases.

    Example:
        >>> layer = lssar.nn.Attention(64, heads=4, spec="lssar", window=128).double()
        >>> x = torch.randn(2, 10, 64, dtype=torch.float64)
        >>> y = layer(x)
        >>> cache = layer.new_cache(room=10)
        >>> steps = [layer(x[:, i : i + 1], cache=cache) for i in range(10)]
        >>> torch.allclose(torch.cat(steps, 1), y)
        True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        spec: str | AttentionSpec | LayerConfig = "lssar",
        *,
        key_heads: int | None = None,
        head_size: int | None = None,
        window: int | None = None,
        position: Position | None = None,
        rope_base: float = 10_000.0,
        projection: Projection = "plain",
        ranks: tuple[int, int, int] = (6, 2, 2),
        bias: bool = True,
    ):
        super().__init__()
        layer = layer_config(spec, window, position)
        if head_size is None and width % heads:
            raise ValueError(f"width must be a multiple of heads, or head_size given; got {width} and {heads}")
        key_heads = key_heads or heads
        if heads % key_heads:
            raise ValueError(f"heads must be a multiple of key_heads; got {heads} and {key_heads}")
        shape = ProjectionConfig(width, heads, key_heads, head_size or width // heads, projection, ranks, bias)
        if layer.position == "rope" and (shape.head_size % 2 or shape.head_size < 4):
            raise ValueError(f"rope needs an even head size of at least 4; got {shape.head_size}")
        self.divide_heads(layer, heads, key_heads)
        self.window, self.position, self.rope_base = layer.window, layer.position, rope_base
        self.project = (TensorProductProjection if projection == "tpa" else PlainProjection)(shape)
        self.out = nn.Linear(heads * shape.head_size, width, bias=bias)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{super().extra_repr()}{window}, position={self.position!r}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the learned numbers of the heads to their initial values; the layers inside have methods of their own."""
        for name, values in self.initial_numbers().items():
            getattr(self, name).copy_(torch.tensor(values))

    def new_cache(self, room: int, window: int | None = None) -> LayerCache:
        """A cache for up to `room` tokens; with a window, the layer's or the one given, it keeps only the last ones."""
        return LayerCache(room, narrower(self.window, window), ordered=self.position == "alibi")

    def positions(self, x: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Positions:
        """Positions of the tokens x (B, L, W), which follow those of the cache; for a layer used on its own."""
        shape = self.project.config
        start = 0 if cache is None else cache.length if cache.at is None else cache.at
        at = token_positions(x.shape[1], x.device, start, cu_seqlens)
        in_use = None if cache is None or cache.at is None else {cache.size: cache.in_use(cache.at, x.shape[0])}
        return Positions(
            angles=rotary_angles(at, shape.head_size, self.rope_base) if self.position == "rope" else None,
            slopes=alibi_slopes(shape.heads, x.device) if self.position == "alibi" else None,
            cu_seqlens=cu_seqlens,
            key_lengths=in_use,
        )

    def forward(
        self, x: Tensor, positions: Positions | None = None, cache: LayerCache | None = None,
        cu_seqlens: Tensor | None = None, *, norm: nn.Module | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The output (B, L, W) for the tokens x (B, L, W), which follow those of the cache, if one is given.

        `cu_seqlens` (documents + 1,) are the bounds of documents packed into one row, which do not see each other.
        `positions` can be computed once for several layers; each layer computes its own otherwise.
        With `norm` and `residual` it is residual + output(norm(x)), which takes fewer launches in a decode step.
        """
        if positions is None:
            positions = self.positions(x, cache, cu_seqlens)
        q, k, v = self.qkv(x, positions, cache, norm)
        view: dict[str, Any] = {"window": narrower(self.window, positions.window)}
        if positions.attend is None:
            view["cu_seqlens"] = positions.cu_seqlens
            if cache is not None:  # it may have been created under another test-time window
                view["window"] = cache.window
            if cache is not None and cache.at is not None:
                assert positions.key_lengths is not None
                view |= {"window": None, "key_lengths": positions.key_lengths[cache.size]}
        if positions.context is not None:
            o = positions.context.attend(self.attend, q, k, v, self.groups, **view)
        else:
            o = self.attend(q, k, v, function=positions.attend or attention, **view)
        o = o[..., : self.project.config.head_size].transpose(1, 2).flatten(2)
        return fused_linear(o, self.out, residual=residual, step=cache is not None and cache.stepping)

    def qkv(
        self, x: Tensor, positions: Positions, cache: LayerCache | None = None, norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, L, D) of norm(x) and k, v (B, h, T, D) of all tokens that it may see, positions applied."""
        q, k, v = self.project(x, positions.angles if self.position == "rope" else None, cache, norm)
        if self.position == "alibi":
            assert positions.slopes is not None
            q, k = add_alibi(q, k, positions.slopes, positions.first_key)
            v = F.pad(v, (0, ALIBI_ROOM))  # the fused kernels need one head size for all three
        return q, k, v


def layer_config(
    spec: str | AttentionSpec | LayerConfig, window: int | None = None, position: Position | None = None
) -> LayerConfig:
    """The layer that `spec` describes, with another window or position kind where one is given."""
    if isinstance(spec, str):
        layers = parse_layout(spec)
        if len(layers) != 1:
            raise ValueError(f"wanted one layer; {spec!r} has {len(layers)}")
        layer = layers[0]
    else:
        layer = LayerConfig((spec,)) if isinstance(spec, AttentionSpec) else spec
    changes: dict[str, Any] = {"window": window, "position": position}
    return replace(layer, **{name: value for name, value in changes.items() if value is not None})
