"""`scaled_dot_product_attention` with PyTorch's signature and semantics, for any mechanism."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lssar.attention import attention
from lssar.specs import AttentionSpec, is_number, plain_number
from lssar.specs import spec as spec_of


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    spec: str | AttentionSpec = "lssar",
) -> Tensor:
    """Drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`: same arguments, same defaults.

    Args:
        query: (N, ..., Hq, L, E). As in PyTorch, (N, L, E) and (L, E) work too, and leading dimensions broadcast.
        key: (N, ..., H, S, E).
        value: (N, ..., H, S, Ev).
        attn_mask: bool, True where a query may see a key, broadcastable to (N, ..., Hq, L, S). A float mask, which
            PyTorch adds to the scores, is an error.
        dropout_p: must be 0.
        is_causal: query i sees keys j <= i, also where L and S differ. This is PyTorch's alignment; `lssar.attention`
            takes the queries for the last rows instead.
        scale: in place of 1 / sqrt(E). An error for mechanisms with cosine scores, which have no such factor.
        enable_gqa: let Hq be a multiple of H.
        spec: the mechanism.

    Returns:
        (N, ..., Hq, L, Ev). A query that sees nothing gets zeros, where PyTorch's result depends on the backend.
    """
    spec = spec_of(spec)
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, spec)
    lead, q, k, v = _four_dimensions(query, key, value, enable_gqa)
    (B, Hq, L, E), S = q.shape, k.shape[2]
    options: dict[str, Any] = {"causal": False}
    if attn_mask is not None:
        options["mask"] = _mask(attn_mask, lead, B, Hq, L, S)
    if is_causal and L <= S:  # keys after the last query are seen by none
        k, v, options = k[:, :, :L], v[:, :, :L], {"causal": True}
    elif is_causal:
        end = torch.arange(1, L + 1, device=q.device).clamp_max(S)
        options["key_ranges"] = torch.stack([torch.zeros_like(end), end], -1)[None]
    if scale is not None:
        q = (q * (plain_number(scale) * math.sqrt(E))).to(q.dtype)
    return attention(q, k, v, spec, **options).view(*lead, L, value.shape[-1])


def _check(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    spec: AttentionSpec,
) -> None:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided or x.dim() < 2:
            shown = f"{tuple(x.shape)}" if isinstance(x, Tensor) and not x.is_nested else type(x).__name__
            raise ValueError(f"{name} must be a tensor (..., length, head size); got {shown}")
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, bool):
            raise ValueError(f"{name} must be True or False; got {x!r}")
    if not is_number(plain_number(dropout_p)) or dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0: lssar has no dropout of attention weights; got {dropout_p!r} (give 0 in evaluation "
            "and in training, or drop out the output instead)"
        )
    if attn_mask is not None:
        if is_causal:
            raise ValueError(
                "attn_mask and is_causal=True cannot be combined, as in PyTorch; put the order in the mask"
            )
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
            shown = str(attn_mask.dtype) if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
            raise ValueError(
                f"attn_mask must be bool, True where a query may see a key; got {shown}. Numbers added to the scores "
                "(such as ALiBi's) are not supported"
            )
    if scale is not None:
        if spec.cosine or spec.scale != "rsqrt_d":
            raise ValueError(
                f"scale takes the place of 1 / sqrt(E), and the scores of {spec.name!r} have no such factor"
            )
        if not is_number(plain_number(scale)):
            raise ValueError(f"scale must be a finite number or None; got {scale!r}")


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """Leading dimensions of the result, and q, k, v as (batch, heads, length, head size)."""
    leads = [tuple(x.shape[:-2]) for x in (query, key, value)]
    shown = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    try:
        if enable_gqa:
            if min(x.dim() for x in (query, key, value)) < 3:
                raise ValueError(f"enable_gqa=True needs (..., heads, length, head size); got {shown}")
            batch = torch.broadcast_shapes(*(lead[:-1] for lead in leads))
            heads = [lead[-1] for lead in leads]
        else:
            lead = torch.broadcast_shapes(*leads)
            batch, heads = tuple(lead[:-1]), [lead[-1] if lead else 1] * 3
            if len(lead) == 1:  # (N, L, E): a batch without heads
                batch, heads = tuple(lead), [1, 1, 1]
    except RuntimeError:
        hint = "" if enable_gqa else " (enable_gqa=True lets query heads be a multiple of key heads)"
        raise ValueError(f"the leading dimensions of query, key, value must broadcast; got {shown}{hint}") from None
    no_heads = not enable_gqa and max(len(lead) for lead in leads) <= 1
    q, k, v = (
        x.expand(*batch, *(() if no_heads else (h,)), *x.shape[-2:]).reshape(-1, h, *x.shape[-2:])
        for x, h in zip((query, key, value), heads)
    )
    return (*batch, *(() if no_heads else heads[:1])), q, k, v


def _mask(mask: Tensor, lead: tuple[int, ...], B: int, heads: int, L: int, S: int) -> Tensor:
    """The mask broadcastable to (B, heads, L, S)."""
    try:
        torch.broadcast_shapes(mask.shape, (*lead, L, S))
        if mask.dim() <= 2:
            return mask
        return mask.expand(*lead, L, S).reshape(B, heads, L, S)
    except RuntimeError:
        raise ValueError(f"attn_mask must broadcast to {(*lead, L, S)}; got {tuple(mask.shape)}") from None
