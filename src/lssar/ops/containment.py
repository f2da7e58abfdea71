"""Keeps NaN and inf inside the rows that see them.

Matrix products do not: a hidden key has weight 0, and 0 * inf is NaN. So a call whose result is not finite although
its inputs are not either is made again with those entries replaced by 0, and NaN is then written where a row that
sees one of them has a part:

    output    row i, if q_i or a key that it sees is not finite; column d of it, if v_jd of a key j that it sees is not
    gradient  the same rows of dq, and dk and dv of every key that such a row sees

A row that sees nothing of the kind gets what it would get without those keys.

Shape letters: B batch, H query heads, h key heads, Lq, Lk lengths, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lssar.visibility import Visibility

ROWS_AT_ONCE = 256
"""Rows for which a mask is combined with the ranges of keys at one time."""


def without_nonfinite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def with_weights(do: Tensor, dw: Tensor) -> Tensor:
    """`do` with NaN in rows whose gradient of the weights is not finite."""
    return do.masked_fill(~dw.isfinite().all(-1, keepdim=True), torch.nan)


class NonFinite:
    """Which rows of q, k and v have entries that are not finite, and what those reach.

    `of_heads`: learned numbers (H,) that have a part in every row of a head.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, see: Visibility, *of_heads: Tensor | None):
        self.see = see
        self.B, self.Hq, self.Lq, _ = q.shape
        self.Hkv, self.Lk = k.shape[1], k.shape[2]
        self.in_v = ~v.isfinite()  # (B, h, Lk, Dv)
        bad_q, bad_k = (~x.isfinite().all(-1, keepdim=True) for x in (q, k))
        for x in of_heads:
            if x is not None:
                bad_q = bad_q | ~x.isfinite()[:, None, None]
        self.weightless = bad_q | self._seen_by_rows(bad_k)
        """(B, H, Lq, 1): rows whose weights are not defined."""

    def output(self, o: Tensor) -> Tensor:
        """`o`, computed without the entries that are not finite, with NaN where they belong."""
        return o.masked_fill(self.weightless | self._seen_by_rows(self.in_v), torch.nan)

    def weights(self, w: Tensor) -> Tensor:
        return w.masked_fill(self.weightless & self.see.dense(self.Lk), torch.nan)

    def gradients(self, grads: Sequence[Tensor | None], do: Tensor) -> list[Tensor | None]:
        """Gradients computed without the entries that are not finite, `do`'s own included, with NaN where they belong.

        `grads`: of q, k and v, then of learned numbers (H,), which have a part in every row of their head; None stays
        None. `do` is as it was given.
        """
        rows = self.rows_without_gradient(do)
        heads = rows.any(2).any(0).squeeze(-1)
        lost = (rows, self._seeing_keys(rows), self._seeing_keys(self.weightless | ~do.isfinite()), heads, heads)
        return [None if x is None else x.masked_fill(where, torch.nan) for x, where in zip(grads, lost)]

    def rows_without_gradient(self, do: Tensor) -> Tensor:
        """(B, H, Lq, 1): rows for which the gradient of the scores is not defined."""
        seen = self._seen_by_rows(self.in_v).any(-1, keepdim=True)
        return self.weightless | seen | ~do.isfinite().all(-1, keepdim=True)

    def _bounds(self, C: int, heads: int) -> tuple[Tensor, Tensor]:
        shape = (self.B, heads, self.Lq, C)
        start, stop = (
            x.expand(self.B, self.Lq)[:, None, :, None].expand(shape) for x in (self.see.start, self.see.stop)
        )
        return start.clamp(0, self.Lk), stop.clamp(0, self.Lk)

    def _seen_by_rows(self, bad: Tensor) -> Tensor:
        """(B, h, Lk, C) -> (B, H, Lq, C): whether any key that the row sees is bad."""
        groups = self.Hq // self.Hkv
        if self.see.mask is None or self.Lq == 0:
            counts = torch.nn.functional.pad(bad.long().cumsum(2), (0, 0, 1, 0))
            start, stop = self._bounds(bad.shape[3], self.Hkv)
            return (counts.gather(2, stop) > counts.gather(2, start)).repeat_interleave(groups, 1)
        bad = bad.repeat_interleave(groups, 1).float()
        return torch.cat([visible @ bad > 0 for _, visible in self._visible()], 2)

    def _seeing_keys(self, bad: Tensor) -> Tensor:
        """(B, H, Lq, C) -> (B, h, Lk, C): whether any bad row sees the key."""
        if self.see.mask is None:
            start, stop = self._bounds(bad.shape[3], self.Hq)
            edges = torch.zeros(*bad.shape[:2], self.Lk + 1, bad.shape[3], dtype=torch.int64, device=bad.device)
            edges.scatter_add_(2, start, bad.long()).scatter_add_(2, stop, -bad.long())
            hit = edges.cumsum(2)[:, :, :-1] > 0
        else:
            hit = torch.zeros(self.B, self.Hq, self.Lk, bad.shape[3], dtype=torch.bool, device=bad.device)
            for rows, visible in self._visible():
                hit |= visible.mT @ bad[:, :, rows].float() > 0
        return hit.unflatten(1, (self.Hkv, -1)).any(2)

    def _visible(self):
        """Rows, and what they see as float (B, H, rows, Lk)."""
        for first in range(0, self.Lq, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, self.Lq))
            visible = self.see.rows(rows).dense(self.Lk)
            yield rows, visible.expand(self.B, self.Hq, -1, -1).float()
