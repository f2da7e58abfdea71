"""Consecutive shards as one stream of tokens, and the documents in it."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lssar.data.shards import Shard, open_shard

Shards = str | Path | Sequence[str | Path]
_SCAN = 1 << 20


def find_shards(shards: Shards) -> list[Path]:
    """Files, in name order where a glob or a folder gives them, in the given order where a list does."""
    if not isinstance(shards, str | Path):
        if not shards:
            raise ValueError("no shards were given")
        return [path for each in shards for path in find_shards(each)]
    if Path(shards).is_dir():
        shards = Path(shards) / "*.bin"
    elif Path(shards).exists():
        return [Path(shards)]
    found = sorted(path for path in map(Path, glob.glob(str(shards), recursive=True)) if path.is_file())
    if not found:
        raise FileNotFoundError(f"no shards: nothing matches {shards}")
    return found


class TokenStream:
    """The tokens of all shards end to end; a document cut at the end of a shard continues in the next."""

    def __init__(self, shards: Shards) -> None:
        self.shards: list[Shard] = [open_shard(path) for path in find_shards(shards)]
        self._ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start to start + count (fewer at the end), as a view where one shard holds them all."""
        count = min(count, len(self) - start)
        pieces, index = [], int(np.searchsorted(self._ends, start, "right"))
        while count > 0:
            shard = self.shards[index]
            offset = start - (int(self._ends[index]) - len(shard))
            piece = shard.tokens[offset : offset + count]
            if len(piece):
                pieces.append(piece)
            start, count, index = start + len(piece), count - len(piece), index + 1
        if len(pieces) == 1:
            return np.asarray(pieces[0])
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)

    def place(self, position: int) -> tuple[Path, int]:
        """The shard that holds a token, and the token's number there."""
        index = int(np.searchsorted(self._ends, position, "right"))
        shard = self.shards[index]
        return shard.path, position - (int(self._ends[index]) - len(shard))

    def identity(self) -> dict[str, int | str]:
        """Small and plain; differs if the shards do (names, sizes, first and last tokens), not if they moved."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.path.name} {len(shard)} {shard.layout.magic}\n".encode())
            digest.update(shard.tokens[:1024].tobytes() + shard.tokens[-1024:].tobytes())
        return {"shards": len(self.shards), "tokens": len(self), "digest": digest.hexdigest()[:32]}


@dataclass(frozen=True)
class DocumentReader:
    """Documents of at least `min_tokens` tokens, in stream order, each as an array; iterate as often as you like.

    A document begins at its eot token, as training sees it, which `with_eot=False` leaves out. Where shards have eot
    after each document instead, the documents are the same, but the first has no eot before it.
    """

    shards: Shards
    eot: int
    min_tokens: int = 1
    """Shorter documents are skipped; the eot counts where it is kept."""
    max_tokens: int | None = None
    """Longer documents are cut at this length."""
    max_documents: int | None = None
    with_eot: bool = True

    def __iter__(self) -> Iterator[np.ndarray]:
        stream, given = TokenStream(self.shards), 0
        for start, end in document_bounds(stream, self.eot):
            if given == self.max_documents:
                return
            if not self.with_eot and stream.read(start, 1)[0] == self.eot:
                start += 1
            if end - start >= self.min_tokens:
                count = end - start if self.max_tokens is None else min(end - start, self.max_tokens)
                yield np.array(stream.read(start, count))
                given += 1


def document_bounds(stream: TokenStream, eot: int) -> Iterator[tuple[int, int]]:
    """First token and end of each document, each from its eot; what precedes the first eot is a document as well."""
    begin = 0
    for start in range(0, len(stream), _SCAN):
        for position in np.flatnonzero(stream.read(start, _SCAN) == eot):
            if start + int(position) > begin:
                yield begin, start + int(position)
            begin = start + int(position)
    if len(stream) > begin:
        yield begin, len(stream)
