"""Attention weights of every row of a text, layer and head, computed in blocks of rows and kept sparsely.

A row keeps its largest weights. What it leaves out is recorded as a mass, so that a page can say how much it hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lssar.attention import attention
from lssar.model import GPT
from lssar.nn import Attention, narrower
from lssar.ops.numerics import FIRST_ROWS
from lssar.specs import AttentionSpec

AT_LEAST = 8
"""Keys that a row keeps, however small their weights: those just below a threshold belong in the picture."""

BLOCK_WEIGHTS = 1 << 20
"""Dense weights of one block of rows: a few megabytes, which stay in the cache."""


@dataclass
class HeadRows:
    """The rows of one head over N tokens: `counts[i]` keys for row i, one row after the other, largest weight first."""

    spec: AttentionSpec
    window: int | None
    threshold: float
    """What re-weighting subtracts, in means of the row."""
    counts: Tensor
    """(N,) int64."""
    keys: Tensor
    """Positions of the keys."""
    weights: Tensor
    before: Tensor | None
    """Weights before re-weighting, in multiples of the row's mean; None without re-weighting."""
    left_out: Tensor
    """(N,) sum of the weights that are not kept."""
    above: Tensor
    """(N,) keys above the threshold before re-weighting, which survive it; without re-weighting, above the mean."""
    effective: Tensor
    """(N,) exp(entropy)."""


@dataclass
class LayerRows:
    layer: int
    heads: list[HeadRows]


@torch.no_grad()
def attention_rows(
    model: GPT, ids: Tensor, *, top: int = 32, floor: float = 1e-4, layers: Sequence[int] | None = None,
    report: Callable[[], None] = lambda: None,
) -> list[LayerRows]:  # fmt: skip
    """The rows of token ids (N,) in the given layers (all, if None): at most `top` keys a row, with weights of at least
    `floor`. `report` is called after each layer."""
    blocks = model.layers()
    chosen = range(len(blocks)) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < len(blocks):
            raise ValueError(f"the model has layers 0 to {len(blocks) - 1}; got {layer}")
    found: list[LayerRows] = []

    def look(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            found.append(LayerRows(layer, _layer_rows(module, inputs, top, floor)))
            report()

        return hook

    hooks = [blocks[layer].attention.register_forward_pre_hook(look(layer)) for layer in chosen]
    try:
        model.hidden(ids[None])
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _layer_rows(module: Attention, inputs: tuple[Any, ...], top: int, floor: float) -> list[HeadRows]:
    x, positions = inputs[:2]
    q, k, v = module.qkv(x, positions)
    window = narrower(module.window, positions.window)
    heads: list[HeadRows] = []

    def rows_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **others: Any) -> Tensor:
        def weights(start: int, stop: int, reweighted: bool) -> Tensor:
            """(H, stop - start, keys): the keys are the last ones before `stop` that any of the rows sees."""
            first = 0 if window is None else max(0, start - window + 1)
            chosen, given = spec, others
            if not reweighted:
                chosen = spec.replace(p=None, threshold=1.0, learned_threshold=False)
                given = {name: value for name, value in others.items() if name not in ("p", "threshold")}
            return attention(
                q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], chosen, **given, window=window,
                return_weights=True, impl="tiled",
            )[1][0].float()  # fmt: skip

        threshold = others.get("threshold", torch.full((q.shape[1],), spec.threshold))
        heads.extend(_sparse(weights, spec, threshold.float(), q.shape[2], window, top, floor))
        return q

    module.attend(q, k, v, function=rows_of)
    return heads


def _sparse(
    weights: Callable[[int, int, bool], Tensor], spec: AttentionSpec, threshold: Tensor, length: int,
    window: int | None, top: int, floor: float,
) -> list[HeadRows]:  # fmt: skip
    """The rows of heads that share a mechanism; `threshold` (H,) is theirs, in means of the row."""
    heads = len(threshold)
    parts: dict[str, list[list[Tensor]]] = {
        name: [[] for _ in range(heads)]
        for name in ("counts", "keys", "weights", "before", "left_out", "above", "effective")
    }
    block = max(1, BLOCK_WEIGHTS // (heads * length)) if window is None else max(window, 64)
    for start in range(0, length, block):
        stop = min(length, start + block)
        final = weights(start, stop, True)
        first = stop - final.shape[-1]
        n = torch.arange(start + 1, stop + 1).clamp_max(window or length)[:, None]  # keys that each row sees
        plain = final if spec.p is None else weights(start, stop, False)
        relative = plain * n
        above = (relative > torch.where(n <= FIRST_ROWS, 0.0, threshold[:, None, None])).sum(-1)
        effective = torch.special.entr(final).sum(-1).exp()
        # Keys in the order of the weights before re-weighting, which re-weighting keeps: zeros are ordered too.
        order = relative.topk(min(top, relative.shape[-1]), -1).indices
        kept = final.gather(-1, order)
        seen = torch.arange(order.shape[-1]) < n  # a row sees no more than n keys
        keep = seen & ((kept >= floor) | (torch.arange(order.shape[-1]) < AT_LEAST))
        for head in range(heads):
            chosen = keep[head]
            values = {
                "counts": chosen.sum(-1), "keys": (order[head] + first)[chosen], "weights": kept[head][chosen],
                "before": relative[head].gather(-1, order[head])[chosen],
                "left_out": (final[head].sum(-1) - (kept[head] * chosen).sum(-1)).clamp_min(0),
                "above": above[head], "effective": effective[head],
            }  # fmt: skip
            for name, value in values.items():
                parts[name][head].append(value)
    made = [{name: torch.cat(by_head[head]) for name, by_head in parts.items()} for head in range(heads)]
    return [
        HeadRows(
            spec,
            window,
            float(o),
            m["counts"],
            m["keys"],
            m["weights"],
            None if spec.p is None else m["before"],
            m["left_out"],
            m["above"],
            m["effective"],
        )
        for o, m in zip(threshold, made)
    ]
