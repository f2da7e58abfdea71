"""Token shards to training batches: deterministic, resumable to the window, the same for any number of ranks.

The stream of tokens is cut into windows of `length` inputs; a window's targets are its inputs one token on, so the
last target is the next window's first input and every token is predicted once an epoch. Windows cross documents, as
the paper's do. Each epoch visits all windows in a pseudo-random order made by a Feistel network, which maps a number
below n to another without a table: 10^10 tokens need no more memory than 10^3.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lssar.data.shards import check_ids
from lssar.data.stream import Shards, TokenStream

IGNORE = torch.nn.CrossEntropyLoss().ignore_index
"""Target of positions that have nothing to predict: PyTorch's own value."""
_ROUNDS = 6


@dataclass(frozen=True)
class Batch:
    inputs: Tensor
    """(B, L) int64; (1, B * L) when packed."""
    targets: Tensor
    """Same shape as `inputs`; -100 where there is nothing to predict."""
    cu_seqlens: Tensor | None = None
    """(documents + 1,) int32, when packed."""


class Windows(Protocol):
    """Synthetic windows that are mixed into a stream of real ones."""

    def window(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the window with this number, always the same, and which of them count as targets."""

    def identity(self) -> dict[str, Any]:
        """Plain values; differs if the windows do."""


class TokenBatches:
    """An endless iterator of batches.

    `batch` is each rank's; rank r of `world` takes rows r * batch on of a global batch of world * batch windows, so
    that N ranks of B / N see together what one rank of B sees. Epochs follow one another without a gap: a batch may
    hold the last windows of one and the first of the next.

    pack=True gives documents that attention must keep apart: the rows of the batch end to end in one row, with
    `cu_seqlens` at every eot and every window's start, and no target where the next token is another document's. Each
    document begins with its eot, so the model is not trained to predict eot.

    `mixture` with a `share` makes that share of all windows, evenly spaced, made ones; the others are the real windows
    in the order they would have had, none left out.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pack: bool = False,
        eot: int | None = None,
        shuffle: bool = True,
        vocab_size: int | None = None,
        mixture: Windows | None = None,
        share: float = 0.0,
    ) -> None:
        """`vocab_size`, if given, is checked on every batch; the error names the shard and the token."""
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length must be at least 1, got batch {batch}, length {length}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 to world - 1, got rank {rank}, world {world}")
        if pack and eot is None:
            raise ValueError("pack=True needs eot, the token that begins each document")
        self.batch, self.length, self.seed, self.rank, self.world = batch, length, seed, rank, world
        self.pack, self.eot, self.shuffle, self.vocab_size = pack, eot, shuffle, vocab_size
        if not 0 <= share <= 1 or (share > 0) != (mixture is not None):
            raise ValueError(f"share must lie in 0 to 1, above 0 with a mixture and 0 without one; got {share}")
        self.mixture, self.share = mixture, share
        self.stream = TokenStream(shards)
        self.windows = (len(self.stream) - 1) // length
        if self.windows < 1:
            raise ValueError(
                f"{self.stream.shards[0].path} and {len(self.stream.shards) - 1} other shards hold {len(self.stream)} "
                f"tokens, too few for a window of {length} and one more"
            )
        self._identity = self.stream.identity()
        self.position = 0
        """Windows taken by all ranks together, over all epochs."""

    @property
    def epoch(self) -> int:
        return (self.position - self._made(self.position)) // self.windows

    def _made(self, place: int) -> int:
        """How many of the windows before this place are synthetic."""
        return int(place * self.share)

    def __iter__(self) -> TokenBatches:
        return self

    def __next__(self) -> Batch:
        first = self.position + self.rank * self.batch
        rows, counted = zip(*self._rows(first))
        self.position += self.batch * self.world
        tokens = torch.from_numpy(np.stack(rows))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.mixture is not None:
            targets.masked_fill_(torch.from_numpy(~np.stack(counted))[:, 1:], IGNORE)
        return self._packed(inputs, targets) if self.pack else Batch(inputs, targets)

    def _rows(self, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens of each window of this rank's batch, and which of them count."""
        made = [self._made(place) for place in range(first, first + self.batch + 1)]
        real = iter(self._order(first - made[0], self.batch - (made[-1] - made[0])))
        for before, after in pairwise(made):
            if self.mixture is not None and after > before:
                tokens, counted = self.mixture.window(before, self.length + 1)
                yield tokens.astype(np.int64), counted
            else:
                yield self._window(next(real)), np.ones(self.length + 1, bool)

    def _order(self, first: int, count: int) -> list[int]:
        """Indices of the windows at places first to first + count of the endless order."""
        places = np.arange(first, first + count, dtype=np.int64)
        epochs, within = np.divmod(places, self.windows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                within[chosen] = permuted(within[chosen], self.windows, self.seed, int(epoch))
        return within.tolist()

    def _window(self, index: int) -> np.ndarray:
        start = index * self.length
        tokens = self.stream.read(start, self.length + 1)
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            path, offset = self.stream.place(start + int(np.argmax(tokens >= self.vocab_size)))
            check_ids(tokens[tokens >= self.vocab_size][:1], self.vocab_size, path, offset)
        return tokens.astype(np.int64)

    def _packed(self, inputs: Tensor, targets: Tensor) -> Batch:
        assert self.eot is not None
        starts = inputs.eq(self.eot)
        starts[:, 0] = True
        bounds = torch.cat([starts.view(-1).nonzero().view(-1), torch.tensor([inputs.numel()])])
        targets = targets.masked_fill(targets.eq(self.eot), IGNORE)
        return Batch(inputs.view(1, -1), targets.view(1, -1), bounds.to(torch.int32))

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""
        return {"position": self.position, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the state was taken. The order does not depend on batch and world, so these may differ."""
        theirs, ours = state["settings"], self._settings()
        differences = [
            f"{key} was {theirs.get(key)}, is {ours.get(key)}"
            for key in sorted(ours.keys() | theirs.keys())
            if theirs.get(key) != ours.get(key)
        ]
        if differences:
            raise ValueError("the saved data position belongs to other data or settings: " + "; ".join(differences))
        self.position = int(state["position"])

    def _settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pack": self.pack,
            "eot": self.eot,
        }
        if self.mixture is not None:
            own |= {"share": self.share, **self.mixture.identity()}
        return own | self._identity


class Ahead:
    """Prefetches one batch in a thread; the state is that of the last batch returned."""

    def __init__(self, batches: TokenBatches) -> None:
        self.batches = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._state = batches.state_dict()
        self._next: Future[tuple[Batch, dict[str, Any]]] | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Batch:
        made = self._next or self._thread.submit(self._make)
        batch, self._state = made.result()
        self._next = self._thread.submit(self._make)
        return batch

    def _make(self) -> tuple[Batch, dict[str, Any]]:
        return next(self.batches), self.batches.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._next is not None:
            self._next.result()
            self._next = None
        self.batches.load_state_dict(state)
        self._state = self.batches.state_dict()


def permuted(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `places` under a permutation of 0 to n - 1 that is fixed by seed and epoch.

    A Feistel network permutes the numbers of 2h bits; a result outside n is permuted again until it is inside.
    """
    half = np.uint64(max(3, (max(n - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = (left << half) | right
        outside = values >= n
    return values.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
