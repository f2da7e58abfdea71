"""Context parallelism: each process holds a part of every sequence, and attention is exact over the whole of it.

Process r of N holds rows r L / N to (r + 1) L / N - 1. Only attention mixes tokens, so only attention layers
communicate, in one of three ways (`exchange_of` chooses the way and counts what is received):

    heads    all-to-all: a process gets all rows of its share of the heads, attends, and returns the rows (Ulysses)
    window   a process gets the keys and values that its first rows see from the processes before it
    keys     a process gets all keys and values; for models with fewer heads than processes. Later rows see more keys,
             so processes r and N - 1 - r attend for half of each other's rows, which gives both the same work

Every row sees the keys that it would see in one process, so n_i, positions and packed documents are those of the whole
sequence. Shape letters: B batch, L whole sequence, l = L / N, H query heads, h key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lssar.layouts import HeadGroup

Attend = Callable[..., Tensor]
"""attend(q, k, v, groups=, window=, cu_seqlens= or key_ranges=): the mechanisms of a layer on the given heads."""


@dataclass(frozen=True)
class Exchange:
    """How the processes of a context share a layer's attention, and what that costs."""

    kind: Literal["heads", "window", "keys"]
    received: int
    """Elements that a process receives in the forward of one sequence, at most; the backward receives as many."""


def exchange_of(size: int, length: int, heads: int, key_heads: int, head_size: int, window: int | None) -> Exchange:
    """The exchange of a layer over `size` processes, for whole sequences of `length` tokens.

    A layer with a window takes whichever of `window` and `heads` sends less. ValueError if a layer without a window has
    at least as many key heads as processes, and they do not divide.
    """
    check_length(length, size)
    rows = length // size
    by_heads = (size - 1) * rows * 2 * (heads + max(key_heads, size)) * head_size // size
    # Heads divide if each process gets whole key heads, or if several processes get copies of one key head.
    divides = key_heads % size == 0 or (size % key_heads == 0 and heads % size == 0)
    if window is not None:
        by_window = min(window - 1, length - rows) * 2 * key_heads * head_size
        if not divides or by_window <= by_heads:
            return Exchange("window", by_window)
    if divides:
        return Exchange("heads", by_heads)
    if key_heads < size:
        return Exchange("keys", ((length - rows) * 2 * key_heads + 2 * (rows // 2) * heads) * head_size)
    possible = [n for n in range(2, key_heads + 1) if key_heads % n == 0]
    raise ValueError(
        f"{key_heads} key heads do not divide over {size} processes of a context; choose context_parallel from "
        f"{', '.join(map(str, possible))}, or more than {key_heads}"
    )


def check_length(length: int, size: int) -> None:
    """ValueError if a sequence cannot be divided into equal parts."""
    if length % size:
        raise ValueError(f"a sequence of {length} tokens does not divide over {size} processes of a context")


class Context:
    """This process's place among those that hold parts of the same sequences, rank r of `size` in `group`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def shard(self, x: Tensor) -> Tensor:
        """This process's part (B, l, ...) of a whole sequence (B, L, ...)."""
        check_length(x.shape[1], self.size)
        return x.unflatten(1, (self.size, -1))[:, self.rank]

    def attend(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[HeadGroup], *, window: int | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of this process's rows, (B, H, l, D), over the whole sequence.

        q (B, H, l, D), k and v (B, h, l, D), positions applied; `cu_seqlens` are the bounds of the whole sequence.
        """
        (_, heads, rows, d), key_heads = q.shape, k.shape[1]
        kind = exchange_of(self.size, rows * self.size, heads, key_heads, d, window).kind
        if kind == "heads":
            return self._by_heads(attend, q, k, v, groups, window=window, cu_seqlens=cu_seqlens)
        if kind == "window":
            assert window is not None
            return self._by_window(attend, q, k, v, groups, window, cu_seqlens)
        return self._by_keys(attend, q, k, v, groups, cu_seqlens)

    def _by_heads(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[HeadGroup], **view: Any
    ) -> Tensor:
        N, rows = self.size, q.shape[2]
        if k.shape[1] < N:  # query heads of several processes share a key head: each gets a copy
            k, v = (x.unsqueeze(2).expand(-1, -1, N // x.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
        shares = share_heads(groups, q.shape[1], k.shape[1], N)
        sizes = [q.shape[1] // N, k.shape[1] // N, v.shape[1] // N]
        q = _arrange(q, [share.heads for share in shares])
        k, v = (_arrange(x, [share.key_heads for share in shares]) for x in (k, v))
        parts = (x.unflatten(1, (N, -1)).permute(1, 3, 0, 2, 4) for x in (q, k, v))
        sent = torch.cat(list(parts), 3).flatten(0, 1)  # (N l, B, (H + 2 h) / N, D), rows for process 0 first
        received = self._all_to_all(sent)  # rows in the order of the sequence
        q, k, v = _plain(received.permute(1, 2, 0, 3)).split(sizes, 1)
        o = attend(q, k, v, groups=shares[self.rank].groups, **view)
        received = self._all_to_all(o.permute(2, 0, 1, 3))
        o = _plain(received.unflatten(0, (N, rows)).permute(2, 1, 0, 3, 4)).flatten(2, 3).transpose(1, 2)
        return _arrange(o, [share.heads for share in shares], back=True)

    def _by_window(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[HeadGroup], window: int,
        cu_seqlens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rows, first = q.shape[2], self.rank * q.shape[2]
        own = torch.cat([k, v], 1).permute(2, 0, 1, 3)  # (l, B, 2 h, D)
        reach = [_seen_rows(source, self.rank, rows, window) for source in range(self.size)]
        given = [_seen_rows(self.rank, target, rows, window) for target in range(self.size)]
        if window > 1:  # a collective: processes that send or receive nothing take part too, also in the backward
            sent = torch.cat([own[rows - n :] for n in given])
            own = torch.cat([self._all_to_all(sent, reach, given), own])
        k, v = own.permute(1, 2, 0, 3).chunk(2, 1)
        if cu_seqlens is None:
            return attend(q, k, v, groups=groups, window=window, cu_seqlens=None)
        # Packed attention needs as many queries as keys: rows of zeros, fewer than the window, go before ours.
        before = k.shape[2] - rows
        bounds = (cu_seqlens - (first - before)).clamp(0, k.shape[2])
        q = F.pad(q, (0, 0, before, 0))
        return attend(q, k, v, groups=groups, window=window, cu_seqlens=bounds)[:, :, before:]

    def _by_keys(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[HeadGroup], cu_seqlens: Tensor | None
    ) -> Tensor:
        rows, half, partner = q.shape[2], q.shape[2] // 2, self.size - 1 - self.rank
        own = torch.cat([k, v], 1).permute(2, 0, 1, 3)
        k, v = _plain(self._all_gather(own).permute(1, 2, 0, 3)).chunk(2, 1)

        def part(q: Tensor, end: int) -> Tensor:
            """Attention of the rows q, which end before row `end` of the whole sequence."""
            view: dict[str, Any] = {}
            if cu_seqlens is not None:
                at = torch.arange(end - q.shape[2], end, device=q.device)
                bounds = cu_seqlens.to(device=q.device, dtype=torch.int64)
                begin = bounds[torch.searchsorted(bounds, at, right=True) - 1]
                view["key_ranges"] = torch.stack([begin, at + 1], -1)[None]
            return attend(q, k[:, :, :end], v[:, :, :end], groups=groups, **view)

        first, second = q.split([rows - half, half], 2)
        first = part(first, (self.rank + 1) * rows - half)
        if half:
            second = self._swap(part(self._swap(second, partner), (partner + 1) * rows), partner)
        return torch.cat([first, second], 2)

    def _swap(self, x: Tensor, partner: int) -> Tensor:
        """Rows (B, H, rows, D) of the partner, which gets ours."""
        rows = [x.shape[2] if process == partner else 0 for process in range(self.size)]
        return _plain(self._all_to_all(x.permute(2, 0, 1, 3), rows, rows).permute(1, 2, 0, 3))

    def _all_to_all(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(x.contiguous(), received, sent, self.group)

    def _all_gather(self, x: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        names = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # the second until torch 2.12
        gather = next(getattr(collectives, name) for name in names if hasattr(collectives, name))
        return gather(x.contiguous(), 0, self.group)


@dataclass(frozen=True)
class Share:
    """Heads of a layer that one process attends with."""

    heads: list[slice]
    """Query heads, as numbered in the whole layer, in the order in which the process holds them."""
    key_heads: list[slice]
    groups: tuple[HeadGroup, ...]
    """Mechanisms, with heads as the process numbers them and `learned` as the layer does."""


def share_heads(groups: Sequence[HeadGroup], heads: int, key_heads: int, size: int) -> list[Share]:
    """The heads of each process: an equal part of every mechanism's, or, if these do not divide, of all heads.

    Mechanisms take different times, so that equal parts of each keep the processes in step.
    """
    queries = heads // key_heads  # heads that share a key head, and stay together
    ranges = [range(group.key_heads.start, group.key_heads.stop) for group in groups]
    if any(len(keys) % size for keys in ranges):
        ranges = [range(key_heads)]
    shares = []
    for rank in range(size):
        parts = [keys[rank * len(keys) // size : (rank + 1) * len(keys) // size] for keys in ranges]
        own = [head for part in parts for head in range(part.start * queries, part.stop * queries)]
        local = []
        for group in groups:
            places = [i for i, head in enumerate(own) if group.heads.start <= head < group.heads.stop]
            if places:
                first, end = places[0], places[-1] + 1
                local.append(
                    replace(
                        group, heads=slice(first, end), key_heads=slice(first // queries, -(-end // queries)),
                        learned=slice(own[first], own[end - 1] + 1),
                    )
                )  # fmt: skip
        shares.append(
            Share(
                [slice(part.start * queries, part.stop * queries) for part in parts],
                [slice(part.start, part.stop) for part in parts],
                tuple(local),
            )
        )
    return shares


def _arrange(x: Tensor, shares: Sequence[Sequence[slice]], back: bool = False) -> Tensor:
    """Heads (dimension 1) in the order of the processes that attend with them, or back in the layer's."""
    places = [part for share in shares for part in share]
    by_place = sorted(places, key=lambda part: part.start)
    if places == by_place:
        return x
    if not back:
        return torch.cat([x[:, part] for part in places], 1)
    found = dict(zip(((part.start, part.stop) for part in places), x.split([p.stop - p.start for p in places], 1)))
    return torch.cat([found[part.start, part.stop] for part in by_place], 1)


def _seen_rows(source: int, target: int, rows: int, window: int) -> int:
    """How many of the last rows of process `source` the first row of a later process `target` sees."""
    if source >= target:
        return 0
    first_seen = max(source * rows, target * rows - (window - 1))
    return max(0, (source + 1) * rows - first_seen)


def _plain(x: Tensor) -> Tensor:
    """A contiguous copy. Outside torch.compile, functional collectives return a tensor subclass that waits for its
    content when it is first used; kernels that read memory by its address need a plain tensor."""
    return x.clone(memory_format=torch.contiguous_format)
