"""The key-value cache of one layer: append, rewind, snapshot and restore."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
    at: Tensor | None = None
    """Position (1,) int64 of the next token, on the device. While it is set (see `lssar.nn.decoding`), a token is
    added without its position being known on the host, and `length` does not change."""

    @property
    def size(self) -> int:
        """Tokens that it can keep."""
        return self.room if self.window is None else min(self.window, self.room)

    @property
    def stepping(self) -> bool:
        """Whether a decode step is under way."""
        return self.at is not None

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add the tokens of this call (dimension 2) and return all that its rows may see."""
        if self.at is not None:
            return self._append_one(self.at, new)
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

    def in_use(self, at: Tensor, batch: int) -> Tensor:
        """Slots in use (B,) int32 after token `at` (1,)."""
        return (at + 1).to(torch.int32).expand(batch).clamp(max=self.size)

    def _append_one(self, at: Tensor, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add one token at position `at` and return all slots, of which the first min(at + 1, size) are in use."""
        for kept, x in zip(self.tensors, new):
            kept.index_copy_(2, at % self.size, x)
        return tuple(self.tensors)

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
