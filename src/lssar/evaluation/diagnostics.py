"""What attention rows look like inside a trained model, by layer, head and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lssar.attention import attention
from lssar.model import GPT
from lssar.nn import Attention, narrower
from lssar.specs import AttentionSpec

MATTERS = 2.0**-10
"""A key matters when its weight exceeds this share of the uniform weight 1 / n."""

STATISTICS = ("entropy", "effective", "above_mean", "matters", "largest", "first_token")


def row_statistics(w: Tensor) -> dict[str, Tensor]:
    """Each statistic (...) of rows of weights (..., n)."""
    n = w.shape[-1]
    size = w.abs()
    entropy = -(size * size.clamp_min(1e-30).log()).sum(-1)
    return {
        "entropy": entropy,
        "effective": entropy.exp(),
        "above_mean": (w > 1 / n).double().mean(-1),
        "matters": (size > MATTERS / n).double().mean(-1),
        "largest": w.max(-1).values,
        "first_token": w[..., 0],
    }


@torch.no_grad()
def diagnose(model: GPT, ids: Tensor, lengths: Sequence[int], rows: int = 16) -> dict[str, Any]:
    """Statistics of the last `rows` rows at each length: {"lengths", "statistics": {name: [length][layer][head]}}.

    ids (B, L >= max(lengths)); means are over batch and rows.
    """
    if ids.shape[1] < max(lengths):
        raise ValueError(f"diagnosing at {max(lengths)} tokens needs as many; got {ids.shape[1]}")
    found: dict[str, list[list[list[float]]]] = {name: [] for name in STATISTICS}
    for length in lengths:
        layers = _layer_statistics(model, ids[:, :length], rows)
        for name in STATISTICS:
            found[name].append([layer[name].tolist() for layer in layers])
    return {"lengths": list(lengths), "rows": rows, "statistics": found}


def _layer_statistics(model: GPT, ids: Tensor, rows: int) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = []

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        layers.append(_inside(module, inputs, rows))

    hooks = [block.attention.register_forward_pre_hook(look) for block in model.layers()]
    try:
        model.hidden(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def _inside(module: Attention, inputs: tuple[Any, ...], rows: int) -> dict[str, Tensor]:
    """Statistics by head (H,) of a layer's last rows, from the layer's own inputs."""
    x, positions = inputs[:2]
    q, k, v = module.qkv(x, positions)
    window = narrower(module.window, positions.window)

    def weights(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **others: Any) -> Tensor:
        return attention(q, k, v, spec, **others, window=window, return_weights=True, impl="tiled")[1]

    sums: dict[str, Tensor] = {}
    length = k.shape[2]
    counted = min(rows, length)
    for end in range(length - counted + 1, length + 1):  # one row at a time: each has its own n
        w = module.attend(q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], function=weights)
        seen = w[:, :, 0] if window is None else w[:, :, 0, -window:]
        for name, value in row_statistics(seen.double()).items():
            sums[name] = sums.get(name, 0) + value.mean(0) / counted
    return sums
