"""What each row may see: causal order, window, packed documents and padding make an interval of keys; a mask, holes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Row i of batch b sees keys start[b, i] <= j < stop[b, i] for which the mask, if any, is True."""

    start: Tensor  # (B or 1, Lq), int64
    stop: Tensor  # (B or 1, Lq), int64; never below start
    mask: Tensor | None  # bool, broadcastable to (B, Hq, Lq, Lk)

    def dense(self, keys: int) -> Tensor:
        """Visibility as a bool tensor (B or 1, Hq or 1, Lq, Lk)."""
        j = torch.arange(keys, device=self.start.device)
        inside = (j >= self.start[..., None]) & (j < self.stop[..., None])
        inside = inside[:, None]
        return inside if self.mask is None else inside & self.mask

    def rows(self, rows: slice) -> Visibility:
        """Visibility of some of the rows."""
        mask = self.mask
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        return Visibility(self.start[:, rows], self.stop[:, rows], mask)


def visibility(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
) -> Visibility:
    """Arguments as `lssar.attention` documents them, already checked."""
    position = query_positions(queries, keys, device, key_lengths)
    start = torch.zeros_like(position)
    stop = torch.full_like(position, keys)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=device, dtype=torch.int64)
        document = torch.searchsorted(bounds, position[0], right=True)[None] - 1
        start, stop = bounds[document], bounds[document + 1]
    if causal:
        stop = torch.minimum(stop, position + 1)
    if window is not None:
        start = torch.maximum(start, position - (window - 1))
        stop = torch.minimum(stop, position + window)
    if key_lengths is not None:
        stop = torch.minimum(stop, key_lengths.to(device=device, dtype=torch.int64)[:, None])
    if key_ranges is not None:
        first, end = key_ranges.to(device=device, dtype=torch.int64).unbind(-1)
        start, stop = torch.maximum(start, first), torch.minimum(stop, end)
    return Visibility(start, torch.maximum(start, stop), mask)


def query_positions(queries: int, keys: int, device: torch.device, key_lengths: Tensor | None = None) -> Tensor:
    """Position of each query among the keys (B or 1, Lq), int64.

    The queries are the last rows: of the keys, or of a batch row's own length where a cache has room for more keys
    than it holds (fewer queries than keys, with `key_lengths`).
    """
    position = torch.arange(queries, device=device)[None] - queries
    if key_lengths is not None and queries < keys:
        return position + key_lengths.to(device=device, dtype=torch.int64)[:, None]
    return position + keys
