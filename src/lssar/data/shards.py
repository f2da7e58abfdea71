"""Token shards in llm.c's `.bin` format: 256 little-endian int32 of header, then the tokens.

header[0] is the magic number, header[1] the version, header[2] the number of tokens, the rest zeros. GPT-2 shards
(20240520, version 1) hold uint16 tokens, Llama-3 shards (20240801, version 7) uint32, for vocabularies over 65,536.
Shards are only ever mapped, never read whole: they may be larger than memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lssar.records import naming, write_file

HEADER_BYTES = 256 * 4
MOST_TOKENS = 2**31 - 1  # the count is an int32
_PIECE = 1 << 22  # tokens


@dataclass(frozen=True)
class Layout:
    magic: int
    version: int
    dtype: np.dtype

    def header(self, tokens: int) -> bytes:
        if tokens > MOST_TOKENS:
            raise ValueError(f"a shard holds at most {MOST_TOKENS:,} tokens, not {tokens:,}")
        header = np.zeros(256, "<i4")
        header[:3] = self.magic, self.version, tokens
        return header.tobytes()


UINT16 = Layout(20240520, 1, np.dtype("<u2"))
UINT32 = Layout(20240801, 7, np.dtype("<u4"))
_LAYOUTS = {layout.magic: layout for layout in (UINT16, UINT32)}
_OTHER_MAGICS = {20240522: "an llm.c multiple-choice evaluation file", 20240326: "an llm.c model checkpoint"}


def layout_for(vocab_size: int) -> Layout:
    return UINT16 if vocab_size <= 1 << 16 else UINT32


@dataclass(frozen=True)
class Shard:
    """A checked header and the tokens behind it, mapped read-only."""

    path: Path
    layout: Layout
    count: int
    version: tuple[str, int, int]
    """Absolute path, size and time of change, so that a mapping is never one of a file since replaced."""

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> np.ndarray:
        self._check_unchanged()
        return _mapped(*self.version, self.layout.dtype, self.count)

    def _check_unchanged(self) -> None:
        """Checks that the file is unchanged: reading a mapping of a file that was cut kills the process with SIGBUS."""
        path, size, changed = self.version
        try:
            now = os.stat(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} was removed while it was in use") from error
        if (now.st_size, now.st_mtime_ns) != (size, changed):
            raise ValueError(
                f"{path} was changed while it was in use: {now.st_size:,} bytes now, {size:,} when it was opened; "
                "restore the file and start again"
            )

    def pieces(self) -> Iterator[np.ndarray]:
        """All tokens, a few megabytes at a time."""
        for start in range(0, len(self), _PIECE):
            yield self.tokens[start : start + _PIECE]

    def check_tokens(self, vocab_size: int) -> None:
        """Reads every token; the error names the first that the vocabulary does not have."""
        for number, piece in enumerate(self.pieces()):
            check_ids(piece, vocab_size, self.path, number * _PIECE)


def check_ids(tokens: np.ndarray, vocab_size: int, where: Path | str, offset: int = 0) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        bad = int(np.argmax(tokens >= vocab_size))
        raise ValueError(
            f"{where}: token {offset + bad:,} is {int(tokens[bad])}, but the vocabulary has {vocab_size} ids "
            f"(0 to {vocab_size - 1}); was the shard made with another tokenizer?"
        )


def open_shard(path: Path | str) -> Shard:
    """Maps a shard after checking that its header and its size agree."""
    path = Path(path)
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    stat = path.stat()
    size = stat.st_size
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes, expected a header of {HEADER_BYTES} bytes: not a shard, or truncated")
    magic, version, count = (int(x) for x in np.frombuffer(raw, "<i4", 3))
    layout = _LAYOUTS.get(magic)
    if layout is None:
        known = ", ".join(f"{layout.magic} ({layout.dtype.name})" for layout in _LAYOUTS.values())
        guess = f", {_OTHER_MAGICS[magic]}" if magic in _OTHER_MAGICS else ""
        raise ValueError(f"{path}: magic number {magic}{guess}, expected {known}: not a token shard")
    if version != layout.version:
        raise ValueError(f"{path}: version {version}, expected {layout.version} with magic number {magic}")
    if count < 0:
        raise ValueError(f"{path}: the header counts {count} tokens, expected 0 or more")
    expected = HEADER_BYTES + count * layout.dtype.itemsize
    if size != expected:
        fault = "truncated" if size < expected else "longer than its header says"
        raise ValueError(
            f"{path}: {fault}: {size:,} bytes found, {expected:,} expected for the {count:,} {layout.dtype.name} "
            f"tokens of its header"
        )
    return Shard(path, layout, count, (str(path.absolute()), size, stat.st_mtime_ns))


@lru_cache(maxsize=256)  # a mapping holds a file open, and a thousand shards would be too many
def _mapped(path: str, size: int, changed: int, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:  # nothing cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def write_shard(
    path: Path | str, tokens: np.ndarray | Iterable[np.ndarray], vocab_size: int, overwrite: bool = False
) -> Path:
    """Writes tokens, whole or piece by piece; the file appears under its name only when it is complete."""
    path = Path(path)
    layout = layout_for(vocab_size)

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(bytes(HEADER_BYTES))
            for piece in [tokens] if isinstance(tokens, np.ndarray) else tokens:
                _append(file, piece, layout, vocab_size, path)
            _finish(file, layout)

    with naming(path):
        return write_file(path, fill, overwrite)


class ShardInProgress:
    """A shard that grows over hours: flushed at safe points, cut back to one after a crash, renamed at the end.

    Until `finish` it lives under a hidden name, `.NAME.bin.partial`, which no glob for shards finds.
    """

    def __init__(self, path: Path, vocab_size: int, tokens: int = 0) -> None:
        """Start a shard (tokens = 0), or resume after `tokens` tokens that an earlier process flushed."""
        self.path, self.vocab_size, self.layout = path, vocab_size, layout_for(vocab_size)
        self.partial = path.with_name(f".{path.name}.partial")
        if tokens and not self.partial.exists() and path.exists():
            os.replace(path, self.partial)  # finished after the safe point that we return to
        self._file = open(self.partial, "r+b" if tokens else "wb")  # noqa: SIM115 (closed by close or finish)
        end = HEADER_BYTES + tokens * self.layout.dtype.itemsize
        if tokens and self.partial.stat().st_size < end:
            size = self.partial.stat().st_size
            self._file.close()
            raise ValueError(f"{self.partial}: truncated: {size:,} bytes found, at least {end:,} expected")
        self._file.truncate(end)
        self._file.seek(end)
        self.tokens = tokens

    def append(self, tokens: np.ndarray) -> None:
        with naming(self.path):
            _append(self._file, tokens, self.layout, self.vocab_size, self.path)
        self.tokens += len(tokens)

    def flush(self) -> None:
        """After this the tokens so far survive a crash."""
        with naming(self.path):
            _sync(self._file)

    def finish(self) -> Path:
        with naming(self.path):
            _finish(self._file, self.layout)
            self._file.close()
            self.partial.chmod(0o644)
            os.replace(self.partial, self.path)
        return self.path

    def close(self) -> None:
        """Leaves the partial file for a later process."""
        with suppress(OSError):  # what cannot be written is after the last safe point, and append has reported it
            self._file.close()


def _append(file: BinaryIO, tokens: np.ndarray, layout: Layout, vocab_size: int, path: Path) -> None:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(f"{path}: tokens must be a row of integers, got {tokens.dtype} of shape {tokens.shape}")
    if tokens.dtype.kind == "i" and len(tokens) and int(tokens.min()) < 0:
        raise ValueError(f"{path}: token {int(tokens.min())} is negative")
    check_ids(tokens, vocab_size, path)
    file.write(tokens.astype(layout.dtype, copy=False).tobytes())


def _finish(file: BinaryIO, layout: Layout) -> None:
    count = (file.seek(0, os.SEEK_END) - HEADER_BYTES) // layout.dtype.itemsize
    file.seek(0)
    file.write(layout.header(count))
    _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())  # some file systems report a full disk only here
