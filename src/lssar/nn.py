"""Attention layers, rotary positions, ALiBi and the key-value cache.

Shape letters: B batch, L tokens of this call, T tokens seen so far, H query heads, h key heads, D head size, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lssar.attention import attention
from lssar.layouts import HeadGroup, LayerConfig, Position, mechanisms_text, parse_layout, parse_mechanisms
from lssar.specs import AttentionSpec


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
    """Rotate the two halves of the last dimension against each other, in float32, back in the dtype of x."""
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Slopes (H,) of ALiBi (Press 2022): 2^(-8 i / H) for powers of two; other counts interleave the next power's."""
    power = 2 ** math.floor(math.log2(heads))
    i = torch.arange(heads, device=device, dtype=torch.float32)
    exponents = torch.where(i < power, 8 * (i + 1), 4 * (2 * (i - power) + 1)) / power
    return 2.0**-exponents


ALIBI_ROOM = 8
"""Dimensions that ALiBi adds to a head. It uses two; fused softmax kernels need multiples of eight."""


def add_alibi(q: Tensor, k: Tensor, slopes: Tensor, first_key: int = 0) -> tuple[Tensor, Tensor]:
    """q and k with further dimensions whose product adds slope * j to the scores of a dot-product softmax.

    ALiBi adds slope * (j - i), which differs by a constant of the row, and softmax is invariant to that. Positions are
    split as 256 * high + low, because bfloat16 holds integers up to 256 only. The larger head size changes the
    1 / sqrt(d) of the scores; q is scaled to compensate.
    """
    heads, keys, d = q.shape[1], k.shape[2], q.shape[-1]
    grow = math.sqrt((d + ALIBI_ROOM) / d)
    slope = (slopes.to(q.device)[:, None, None] * math.sqrt(d + ALIBI_ROOM)).expand(q.shape[0], heads, q.shape[2], 1)
    position = torch.arange(first_key, first_key + keys, device=k.device)
    parts = torch.stack([position // 256, position % 256], -1).to(k.dtype).expand(k.shape[0], k.shape[1], keys, 2)
    q = torch.cat([q * grow, (256 * slope).to(q.dtype), slope.to(q.dtype)], -1)
    rest = (0, ALIBI_ROOM - 2)
    return F.pad(q, rest), F.pad(torch.cat([k, parts], -1), rest)


@dataclass(frozen=True)
class LayerSnapshot:
    """A state of a `LayerCache` to return to."""

    length: int
    cuts: int
    tensors: list[Tensor]


@dataclass
class LayerCache:
    """What one layer keeps of the tokens seen: a few tensors (B, ., T, .), preallocated and filled in place.

    With a window, T is the window and token i is at i modulo T, so that a new token takes the place of one that no
    later row sees. Keys are rotated before they are kept, and a single row does not depend on the order of the keys
    it sees, so a decoding step attends to the tensors as they are.
    """

    room: int
    """Largest number of tokens that may be added in all."""
    window: int | None = None
    """How many of the last tokens are kept; None: all."""
    ordered: bool = False
    """Return tokens in their order even where a row does not depend on it (ALiBi adds positions to the keys later)."""
    length: int = 0
    """Tokens seen so far."""
    tensors: list[Tensor] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Lengths that it was shortened to: a snapshot of more tokens is void from then on."""

    @property
    def size(self) -> int:
        """Tokens that it can keep."""
        return self.room if self.window is None else min(self.window, self.room)

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add the tokens of this call (dimension 2) and return all that its rows may see."""
        start, added = self.length, new[0].shape[2]
        if start + added > self.room:
            raise ValueError(f"the cache has room for {self.room} tokens; {start} + {added} do not fit")
        if not self.tensors:
            self.tensors = [x.new_empty(*x.shape[:2], self.size, x.shape[3]) for x in new]
        self.length = start + added
        if self.length <= self.size:  # nothing has been overwritten
            for kept, x in zip(self.tensors, new):
                kept[:, :, start : self.length] = x
            return tuple(kept[:, :, : self.length] for kept in self.tensors)
        seen: tuple[Tensor, ...] = ()
        if added > 1 or self.ordered:
            before = self._slots(max(0, start - self.size + 1), start)
            seen = tuple(torch.cat([kept[:, :, before], x], 2) for kept, x in zip(self.tensors, new))
        stay = min(added, self.size)
        slots = self._slots(self.length - stay, self.length)
        for kept, x in zip(self.tensors, new):
            kept[:, :, slots] = x[:, :, added - stay :]
        return seen or tuple(self.tensors)

    def _slots(self, start: int, stop: int) -> Tensor | slice:
        """Where tokens start to stop - 1 are kept."""
        first = start % self.size
        if first + stop - start <= self.size:
            return slice(first, first + stop - start)
        return torch.arange(start, stop, device=self.tensors[0].device) % self.size

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens only; a ValueError if some of them have been overwritten."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens; it cannot be rewound to {length}")
        if length < self.length > self.size:
            raise ValueError(
                f"a layer keeps only the last {self.size} of {self.length} tokens and cannot be rewound to {length}; "
                "use snapshot() before adding tokens and restore() after"
            )
        self._shorten(length)

    def snapshot(self) -> LayerSnapshot:
        """What `restore` needs: the length, and a copy of the tensors if later tokens may overwrite them."""
        copies = [] if self.window is None else [x.clone() for x in self.tensors]
        return LayerSnapshot(self.length, len(self.cuts), copies)

    def restore(self, kept: LayerSnapshot) -> None:
        """Return to a snapshot of this cache; a ValueError if it has been shortened to fewer tokens since."""
        if min([self.length, *self.cuts[kept.cuts :]]) < kept.length:
            raise ValueError(f"tokens of the snapshot have been overwritten: the cache went below {kept.length} since")
        self._shorten(kept.length)
        for mine, copy in zip(self.tensors, kept.tensors):
            mine.copy_(copy)

    def _shorten(self, length: int) -> None:
        self.length = length
        self.cuts.append(length)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


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


def token_positions(length: int, device: torch.device, start: int = 0, cu_seqlens: Tensor | None = None) -> Tensor:
    """Positions (L,) of tokens that follow `start` others; they restart in each packed document."""
    at = torch.arange(length, device=device) + start
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=device, dtype=torch.int64)
        at = at - bounds[torch.searchsorted(bounds, at, right=True) - 1]
    return at


def narrower(window: int | None, other: int | None) -> int | None:
    """The smaller of two windows, where None is unlimited."""
    return other if window is None else window if other is None else min(window, other)


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


class PlainProjection(nn.Module):
    """q, k, v as linear maps of x; the cache keeps k and v."""

    def __init__(self, config: ProjectionConfig):
        super().__init__()
        self.config = config
        self.sizes = [heads * config.head_size for heads in (config.heads, config.key_heads, config.key_heads)]
        self.qkv = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(self, x: Tensor, angles: Angles | None, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        B, L, _ = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        q, k, v = (part.view(B, L, -1, self.config.head_size).transpose(1, 2) for part in parts)
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
        if config.key_heads != config.heads:
            raise ValueError("TPA shares keys by their rank, not by head groups: key_heads must equal heads")
        self.config = config
        self.sizes = [rank * size for rank in config.ranks for size in (config.heads, config.head_size)]
        self.factors = nn.Linear(config.width, sum(self.sizes), bias=config.bias)

    def forward(self, x: Tensor, angles: Angles | None, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        B, L, _ = x.shape
        aq, bq, ak, bk, av, bv = (
            part.view(B, L, rank, -1).transpose(1, 2)  # (B, rank, L, heads or head size)
            for part, rank in zip(self.factors(x).split(self.sizes, -1), (r for r in self.config.ranks for _ in "ab"))
        )
        if angles is not None:
            bq, bk = rotate(bq, angles), rotate(bk, angles)
        if cache is not None:
            ak, bk, av, bv = cache.append(ak, bk, av, bv)
        return _outer(aq, bq), _outer(ak, bk), _outer(av, bv)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rank of a (B, r, L, H) x b (B, r, L, D) -> (B, H, L, D)."""
    return torch.einsum("brlh,brld->bhld", a, b) / a.shape[1]


class _Mechanisms:
    """Base of the attention layers: groups of heads with a mechanism each, their learned numbers, and a power."""

    groups: tuple[HeadGroup, ...]
    head_scale: nn.Parameter | None
    """Learned factor of the scores of each query head, if any of the mechanisms has one."""
    threshold: nn.Parameter | None
    """Learned threshold of each query head, if any of the mechanisms has one."""
    power: Tensor | None
    """Power of every re-weighted mechanism in place of its own; set by `set_power`, not a weight."""

    def _divide(self, layer: LayerConfig, heads: int, key_heads: int) -> None:
        self.groups, self.power = layer.groups(heads, key_heads), None
        by_head = [group.spec for group in self.groups for _ in range(group.heads.start, group.heads.stop)]
        self.head_scale = self.threshold = None
        if any(spec.head_scale is not None for spec in by_head):
            self.head_scale = nn.Parameter(torch.tensor([float(spec.head_scale or 0.0) for spec in by_head]))
        if any(spec.learned_threshold for spec in by_head):
            self.threshold = nn.Parameter(torch.tensor([float(spec.threshold) for spec in by_head]))

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The mechanism of each group of heads; may be changed at test time."""
        return tuple(group.spec for group in self.groups)

    @specs.setter
    def specs(self, specs: Sequence[AttentionSpec]) -> None:
        self.groups = tuple(replace(group, spec=s) for group, s in zip(self.groups, specs, strict=True))

    @property
    def spec(self) -> AttentionSpec:
        """The mechanism of a layer that has only one."""
        if len(self.groups) > 1:
            raise ValueError("this layer divides its heads between mechanisms; see `specs`")
        return self.groups[0].spec

    @spec.setter
    def spec(self, spec: AttentionSpec) -> None:
        self.specs = [spec]

    def extra_repr(self) -> str:
        return mechanisms_text(LayerConfig(self.specs, tuple(g.heads.stop - g.heads.start for g in self.groups)))

    def set_power(self, p: float | None) -> None:
        """Re-weight with the power p from now on; None: with each mechanism's own.

        The power is a tensor on the CPU, so that a compiled graph takes it as an input and is not compiled again.
        """
        if p is None or all(s.p is None for s in self.specs):
            self.power = None
        elif self.power is None:
            self.power = torch.tensor(float(p), dtype=torch.float64, device="cpu")
        else:
            self.power.fill_(p)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, function: Callable[..., Tensor] = attention,
        mask: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Output of `lssar.attention` (or of `function`, called likewise) with each mechanism on its heads."""
        outputs = []
        for group in self.groups:
            own = dict(others)
            if mask is not None:
                own["mask"] = mask[:, group.heads] if mask.shape[1] > 1 else mask
            spec, heads, keys = group.spec, group.heads, group.key_heads
            if self.head_scale is not None and spec.head_scale is not None:
                own["head_scale"] = self.head_scale[heads]
            if self.threshold is not None and spec.learned_threshold:
                own["threshold"] = self.threshold[heads]
            if self.power is not None and spec.p is not None:
                own["p"] = self.power
            outputs.append(function(q[:, heads], k[:, keys], v[:, keys], spec, **own))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class Attention(_Mechanisms, nn.Module):
    """Causal self-attention, (B, L, width) to (B, L, width), with any mechanism, window and positions.

    Args:
        width: of the hidden states.
        heads: query heads.
        spec: a mechanism (`"lssar"`, `"lssa+lssar"` to divide the heads, an `AttentionSpec`), or a whole layer as it is
            written in a layout (`"softmax@128/none"`, a `LayerConfig`).
        key_heads: fewer than heads: grouped queries.
        head_size: width / heads, if not given.
        window: how many tokens a row sees, its own included.
        position: `rope`, `alibi` (dot-product softmax only) or `none`.
        projection: `plain`, or `tpa` for tensor-product attention with the given `ranks` of q, k and v.

    Example:
        >>> layer = lssar.nn.Attention(64, heads=4, spec="lssar", window=128)
        >>> x = torch.randn(2, 10, 64)
        >>> y = layer(x)
        >>> cache = layer.new_cache(room=10)
        >>> steps = [layer(x[:, i : i + 1], cache=cache) for i in range(10)]
        >>> torch.allclose(torch.cat(steps, 1), y, atol=1e-5)
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
        self._divide(layer, heads, key_heads)
        self.window, self.position, self.rope_base = layer.window, layer.position, rope_base
        self.project = (TensorProductProjection if projection == "tpa" else PlainProjection)(shape)
        self.out = nn.Linear(heads * shape.head_size, width, bias=bias)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{super().extra_repr()}{window}, position={self.position!r}"

    def new_cache(self, room: int, window: int | None = None) -> LayerCache:
        """A cache for up to `room` tokens; it keeps the last ones only if the layer has a window or one is given."""
        return LayerCache(room, narrower(self.window, window), ordered=self.position == "alibi")

    def positions(self, x: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Positions:
        """Positions of the tokens x (B, L, W), which follow those of the cache; for a layer used on its own."""
        shape = self.project.config
        at = token_positions(x.shape[1], x.device, 0 if cache is None else cache.length, cu_seqlens)
        return Positions(
            angles=rotary_angles(at, shape.head_size, self.rope_base) if self.position == "rope" else None,
            slopes=alibi_slopes(shape.heads, x.device) if self.position == "alibi" else None,
            cu_seqlens=cu_seqlens,
        )

    def forward(
        self, x: Tensor, positions: Positions | None = None, cache: LayerCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The output (B, L, W) for the tokens x (B, L, W), which follow those of the cache, if one is given.

        `cu_seqlens` (documents + 1,) are the bounds of documents packed into one row, which do not see each other.
        `positions` can be computed once for several layers; each layer computes its own otherwise.
        """
        if positions is None:
            positions = self.positions(x, cache, cu_seqlens)
        q, k, v = self.qkv(x, positions, cache)
        view: dict[str, Any] = {"window": narrower(self.window, positions.window)}
        if positions.attend is None:
            view["cu_seqlens"] = positions.cu_seqlens
            if cache is not None:  # it may have been created under another test-time window
                view["window"] = cache.window
        o = self.attend(q, k, v, function=positions.attend or attention, **view)
        return self.out(o[..., : self.project.config.head_size].transpose(1, 2).flatten(2))

    def qkv(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, L, D) of x and k, v (B, h, T, D) of all tokens that it may see, positions applied."""
        q, k, v = self.project(x, positions.angles if self.position == "rope" else None, cache)
        if self.position == "alibi":
            assert positions.slopes is not None
            q, k = add_alibi(q, k, positions.slopes)
            v = F.pad(v, (0, ALIBI_ROOM))  # the fused kernels need one head size for all three
        return q, k, v


class MultiheadAttention(_Mechanisms, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with another mechanism: the same arguments, parameters and shapes of results.

    `spec` is a mechanism (`"lssar"`, `"lssa+lssar"` to divide the heads, an `AttentionSpec`). As in PyTorch there are
    no positions, and rows see all keys unless a mask or `is_causal` says otherwise. A state dict of PyTorch's module
    loads. Masks are bool (True hides a key), or float with 0 and -inf only. Dropout of weights, `add_bias_kv` and
    `add_zero_attn` are not supported. Returned weights have no gradient.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, nhead=4, batch_first=True)
        >>> layer.self_attn = lssar.nn.MultiheadAttention(64, 4, spec="lssar", batch_first=True)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
        >>> attention = lssar.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> y, weights = attention(torch.randn(2, 3, 64), torch.randn(2, 5, 64), torch.randn(2, 5, 64))
        >>> y.shape, weights.shape
        (torch.Size([2, 3, 64]), torch.Size([2, 3, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: str | AttentionSpec = "lssar",
    ):
        if dropout or add_bias_kv or add_zero_attn:
            raise ValueError("dropout of attention weights, add_bias_kv and add_zero_attn are not supported")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads; got {embed_dim} and {num_heads}")
        super().__init__(
            embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device, dtype=dtype
        )
        layer = parse_mechanisms(spec) if isinstance(spec, str) else LayerConfig((spec,))
        self._divide(layer, num_heads, num_heads)
        for name in ("head_scale", "threshold"):
            if (learned := getattr(self, name)) is not None:
                setattr(self, name, nn.Parameter(learned.to(device=device, dtype=dtype)))
        # In inference, PyTorch's transformer layers bypass this module's forward with a softmax kernel if this is True.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, shaped as `query`, and with `need_weights` the weights: (B, Lq, Lk), or (B, heads, Lq, Lk) if
        not averaged. With `is_causal`, rows are causal and aligned at the last key, and `attn_mask` is not read."""
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                "query, key and value must have three dimensions each, or two without a batch; got "
                f"{query.dim()}, {key.dim()} and {value.dim()}"
            )
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in self._project(query, key, value)
        )
        causal = is_causal and (attn_mask is None or q.shape[2] == k.shape[2])
        mask = self._visible(None if causal else attn_mask, key_padding_mask, q, k)
        weights: list[Tensor] = []

        def attend(*args: Any, **others: Any) -> Tensor:
            if not need_weights:
                return attention(*args, **others)
            o, w = attention(*args, **others, return_weights=True, impl="tiled")
            weights.append(w)
            return o

        o = self.attend(q, k, v, function=attend, mask=mask, causal=causal)
        o = self.out_proj(o.transpose(1, 2).flatten(2))
        w = torch.cat(weights, 1) if need_weights else None
        if w is not None and average_attn_weights:
            w = w.mean(1)
        if not batched:
            return o[0], None if w is None else w[0]
        return (o if self.batch_first else o.transpose(0, 1)), w

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))

    def _visible(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """True where a row may see a key, (B or 1, H or 1, Lq or 1, Lk), from masks that say what it may not."""
        (B, H, Lq, _), Lk = q.shape, k.shape[2]
        seen = None
        if mask is not None:
            shapes = {(Lq, Lk): (1, 1, Lq, Lk), (B * H, Lq, Lk): (B, H, Lq, Lk)}
            if tuple(mask.shape) not in shapes:
                raise ValueError(f"attn_mask must have one of the shapes {list(shapes)}; got {tuple(mask.shape)}")
            seen = ~_hidden("attn_mask", mask).view(shapes[tuple(mask.shape)])
        if padding is not None:
            if padding.shape != (B, Lk):
                raise ValueError(f"key_padding_mask must have the shape {(B, Lk)}; got {tuple(padding.shape)}")
            inside = ~_hidden("key_padding_mask", padding)[:, None, None]
            seen = inside if seen is None else seen & inside
        return seen


def _hidden(name: str, mask: Tensor) -> Tensor:
    """A mask of PyTorch's transformer layers as bool, True where a key is hidden."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    if not mask.is_floating_point() or (not torch.compiler.is_compiling() and bool((mask[~hidden] != 0).any())):
        raise ValueError(f"{name} must be bool, or float with 0 and -inf only: no bias is added to scores")
    return hidden


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
