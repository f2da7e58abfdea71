"""Loss against length: does a model keep what it learned when the context grows beyond what it was trained on?

Three views, because a flat mean loss can also mean that far context is ignored:
  by_length    mean loss when the same tokens are cut into pieces of each length
  by_position  loss of the token at each position of the longest pieces
  last         loss of the same last tokens of each piece against how much context they are given
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lssar.data.folder import DataFolder
from lssar.data.stream import DocumentReader
from lssar.model import GPT, PREFILL_CHUNK

LAST_TOKENS = 256


def held_out_shards(folder: Path) -> list[Path]:
    return DataFolder(folder).held_out_shards()


def held_out_documents(folder: Path, vocab_size: int, at_least: int) -> list[np.ndarray]:
    """Documents of at least so many tokens from the held-out shards of a folder."""
    data = DataFolder(folder, vocab_size)
    documents = list(DocumentReader(data.held_out_shards(), eot=data.eot, min_tokens=at_least))
    if not documents:
        raise ValueError(f"no held-out document in {str(folder)!r} has {at_least:,} tokens; ask for shorter lengths")
    return documents


def pieces_of(documents: Iterable[np.ndarray], length: int, most: int | None = None) -> list[Tensor]:
    """From each document with at least `length` + 1 tokens, its leading non-overlapping pieces of `length` + 1."""
    pieces: list[Tensor] = []
    for document in documents:
        whole = (len(document) - 1) // length
        pieces += [torch.from_numpy(document[i * length : (i + 1) * length + 1].astype(np.int64)) for i in range(whole)]
        if most is not None and len(pieces) >= most:
            return pieces[:most]
    return pieces


@torch.no_grad()
def evaluate_length(
    model: GPT,
    pieces: Sequence[Tensor],
    lengths: Sequence[int],
    ntk: Literal["off", "length"] = "off",
    window: int | None = None,
    batch_tokens: int = 16_384,
    dtype: torch.dtype | None = None,
    report: Callable[[], None] = lambda: None,
    chunk: int = PREFILL_CHUNK,
) -> dict[str, Any]:
    """The three curves for one model; `pieces` are token ids of max(lengths) + 1, on any device.

    Sequences longer than `chunk` are evaluated in chunks, which bounds memory. The losses of single pieces are kept
    (`values`), for intervals of differences: the same pieces are seen at every length.
    """
    longest = max(lengths)
    if not pieces or any(len(piece) != longest + 1 for piece in pieces):
        raise ValueError(f"evaluation to {longest} tokens needs pieces of {longest + 1}; got {len(pieces)} pieces")
    if any(longest % length for length in lengths):
        raise ValueError(f"every length must divide the longest, so that all see the same tokens; got {list(lengths)}")
    device = next(model.parameters()).device
    before = model.ntk, model.window
    model.ntk, model.window = ntk, window
    try:
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            by_length, last = [], []
            positions = torch.zeros(longest, dtype=torch.float64)
            tail = min(LAST_TOKENS, min(lengths))
            for length in sorted(lengths):
                means, tails = [], []
                for piece in pieces:
                    losses = _losses(
                        model, piece[:-1].view(-1, length), piece[1:].view(-1, length), batch_tokens, chunk
                    )
                    means.append(float(losses.mean()))
                    tails.append(float(losses[-1, -tail:].mean()))
                    if length == longest:
                        positions += losses[0].double().cpu() / len(pieces)
                    report()
                by_length.append({"length": length, **interval(means), "values": means})
                last.append({"context": length, "tokens": tail, **interval(tails), "values": tails})
    finally:
        model.ntk, model.window = before
    return {"ntk": ntk, "window": window, "by_length": by_length, "last": last, "by_position": _binned(positions)}


def _losses(model: GPT, ids: Tensor, targets: Tensor, batch_tokens: int, chunk: int) -> Tensor:
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // ids.shape[1])
    parts = [
        model.token_losses(i.to(device), t.to(device), chunk=chunk).float()
        for i, t in zip(ids.split(rows), targets.split(rows))
    ]
    return torch.cat(parts)


def changes_from_first(points: Sequence[dict[str, Any]]) -> list[list[float]] | None:
    """The change of each piece's loss from the first point of a curve to every point; paired, so text cancels out.

    None for curves recorded without the `values` of their pieces, or with a piece that diverged.
    """
    if not points or any("values" not in point or None in point["values"] for point in points):
        return None
    first = points[0]["values"]
    return [[value - base for value, base in zip(point["values"], first, strict=True)] for point in points]


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean over pieces and its 95% interval from their spread."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return {"loss": mean, "low": mean, "high": mean, "pieces": len(values)}
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return {"loss": mean, "low": mean - 1.96 * spread, "high": mean + 1.96 * spread, "pieces": len(values)}


def _binned(positions: Tensor, per_octave: int = 4) -> list[dict[str, Any]]:
    """Mean loss in bins that grow with position, from the first 16 tokens on."""
    edges = [0]
    at = 16.0
    while at < len(positions):
        if int(at) > edges[-1]:
            edges.append(int(at))
        at *= 2 ** (1 / per_octave)
    if len(edges) > 2 and len(positions) - edges[-1] < (edges[-1] - edges[-2]) / 2:
        edges.pop()  # a few last tokens are no bin of their own
    edges.append(len(positions))
    return [{"start": a, "stop": b, "loss": float(positions[a:b].mean())} for a, b in pairwise(edges) if b > a]
