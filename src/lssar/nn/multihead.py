"""`torch.nn.MultiheadAttention` with another mechanism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lssar.attention import attention
from lssar.layouts import LayerConfig, parse_mechanisms
from lssar.nn.mechanisms import Mechanisms
from lssar.specs import AttentionSpec


class MultiheadAttention(Mechanisms, nn.MultiheadAttention):
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
        self.divide_heads(layer, num_heads, num_heads)
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
