"""Documents from files, folders and Hugging Face datasets, one after the other, in an order that never changes.

A source is a path or `hf:OWNER/NAME[:CONFIG[:SPLIT]]`. It unfolds into units (a file or a dataset), a unit into
documents. What is wrong in a document is reported with its file and its line, row or byte.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

import numpy as np

from lssar.data.extras import need
from lssar.data.shards import check_ids

Undecodable = Literal["error", "replace"]
_PIECE = 1 << 24
_TEXT = (".txt", ".text", ".md", ".rst")
_COMPRESSED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
}


@dataclass(frozen=True)
class Document:
    """Text, or tokens where the source holds these already."""

    content: str | np.ndarray
    place: str
    """For messages: file and line."""
    read: int = 0
    """Bytes of its unit read by now, for progress."""


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    field: str = "text"
    """Of jsonl, parquet and datasets."""
    undecodable: Undecodable = "error"
    separator: str | None = None
    """Splits a text file into documents; a whole file is one document without it."""
    glob: str | None = None
    """Which files of a folder; those with a known suffix, if not given."""
    eot: int = 0
    vocab_size: int = 1 << 32
    """Both for sources that hold tokens."""


@dataclass(frozen=True)
class Unit:
    """A file or a dataset; `documents(skip)` leaves out the first `skip` documents."""

    name: str
    bytes: int | None
    documents: Callable[[int], Iterator[Document]]


def find_units(sources: list[str], reading: Reading) -> list[Unit]:
    """All units of all sources; a source that is not there or holds nothing is an error."""
    units: list[Unit] = []
    for source in sources:
        if source.startswith("hf:"):
            units.append(_dataset(source, reading))
            continue
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"source {source}: no such file or folder (a Hugging Face dataset is hf:OWNER/NAME)"
            )
        units += [_file(file, reading) for file in (_folder(path, reading) if path.is_dir() else [path])]
    if not units:
        raise ValueError("no source was given")
    return units


def _folder(path: Path, reading: Reading) -> list[Path]:
    def wanted(file: Path) -> bool:
        relative = file.relative_to(path)
        if any(part.startswith(".") for part in relative.parts) or not file.is_file():
            return False
        return reading.glob is not None or _kind(file) in (*_TEXT, *_READERS)

    found = [file for file in path.rglob(reading.glob or "*") if wanted(file)]
    if not found:
        what = f"that match {reading.glob}" if reading.glob else f"that end in {', '.join((*_TEXT, *_READERS))}"
        raise ValueError(f"source {path}: a folder with no files {what}; say which with --glob")
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _kind(path: Path) -> str:
    """The suffix below compression: `.jsonl` for a.jsonl.gz."""
    name = PurePosixPath(path.name.lower())
    return PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix


def _file(path: Path, reading: Reading) -> Unit:
    read = _READERS.get(_kind(path), _text)

    return Unit(str(path), path.stat().st_size, lambda skip: read(path, reading, skip))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """The content, decompressed, and the raw file, whose position tells how far we are."""
    suffix = path.suffix.lower()
    with open(path, "rb") as raw:
        try:
            yield _COMPRESSED.get(suffix, lambda file: file)(raw), raw
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged or truncated {suffix} file near byte {raw.tell():,}: {error}") from error


def _text(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    with _opened(path) as (file, raw):
        offset = 0
        separator = reading.separator.encode() if reading.separator else None
        for number, piece in enumerate(_split(file, separator) if separator else [file.read()]):
            if number >= skip:
                text = _decode(piece, str(path), offset, reading)
                place = f"{path}, document {number + 1}" if separator else str(path)
                yield Document(text.removeprefix("\ufeff") if offset == 0 else text, place, raw.tell())
            offset += len(piece) + len(separator or b"")


def _split(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    held = b""
    while piece := file.read(_PIECE):
        *whole, held = (held + piece).split(separator)
        yield from whole
    yield held


def _jsonl(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    import json

    with _opened(path) as (file, raw):
        offset, documents = 0, 0
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            if line.strip():
                documents += 1
                if documents > skip:
                    try:
                        value = json.loads(_decode(line, place, offset, reading))
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{place}: not JSON: {error}") from error
                    yield Document(_text_of(value, place, reading), place, raw.tell())
            offset += len(line)


def _text_of(value: Any, place: str, reading: Reading) -> str:
    if not isinstance(value, dict) or reading.field not in value:
        found = f"fields {', '.join(map(str, value)) or 'none'}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{place}: no field {reading.field!r}, found {found}; name the field with --field")
    text = value[reading.field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {reading.field!r} is {type(text).__name__}, expected text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON can hold
        if reading.undecodable == "error":
            raise ValueError(
                f"{place}: character {error.start} is a lone surrogate, not text; --undecodable replace puts U+FFFD"
            ) from error
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parquet(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    parquet, arrow = need("pyarrow.parquet", "a .parquet source"), need("pyarrow", "a .parquet source")
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            if reading.field not in names:
                raise ValueError(f"{path}: no column {reading.field!r}, found {', '.join(names)}; name it with --field")
            kind = file.schema_arrow.field(reading.field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {reading.field!r} is {kind}, expected string")
            row, groups = 0, list(range(file.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= skip:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[reading.field]):
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        text = _parquet_text(value, f"{path}, row {row}", reading)
                        yield Document(text, f"{path}, row {row}", size * row // rows)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or not a parquet file: {error}") from error


def _parquet_text(value: Any, place: str, reading: Reading) -> str:
    if not value.is_valid:
        raise ValueError(f"{place}: field {reading.field!r} is null, expected text")
    return _decode(value.as_buffer().to_pybytes(), place, 0, reading)


def _tokens(path: Path, reading: Reading, skip: int) -> Iterator[Document]:
    """Little-endian uint16 ids with the end-of-document id after each document."""
    with _opened(path) as (file, raw):
        held: list[np.ndarray] = []
        seen, documents = 0, 0
        while piece := file.read(_PIECE):
            if len(piece) % 2:
                raise ValueError(f"{path}: an odd number of bytes, expected uint16 tokens: truncated?")
            ids = np.frombuffer(piece, "<u2")
            check_ids(ids, reading.vocab_size, path, seen)
            seen += len(ids)
            start = 0
            for end in np.flatnonzero(ids == reading.eot).tolist():
                documents += 1
                if documents > skip:
                    yield Document(np.concatenate([*held, ids[start:end]]), f"{path}, document {documents}", raw.tell())
                held, start = [], end + 1
            held.append(ids[start:])
        if documents >= skip and any(len(part) for part in held):
            yield Document(np.concatenate(held), f"{path}, document {documents + 1}", raw.tell())


def _dataset(source: str, reading: Reading) -> Unit:
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise ValueError(f"source {source}: expected hf:OWNER/NAME, with :CONFIG and :SPLIT after it where needed")

    def documents(skip: int) -> Iterator[Document]:
        datasets = need("datasets", f"the source {source}")
        try:
            rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"source {source}: cannot be opened: {error}") from error
        for number, row in enumerate(rows.skip(skip) if skip else rows, skip + 1):
            place = f"{source}, row {number}"
            yield Document(_text_of(row, place, reading), place)

    return Unit(source, None, documents)


def _decode(raw: bytes, place: str, offset: int, reading: Reading) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.undecodable == "replace":
            return raw.decode("utf-8", "replace")
        raise ValueError(
            f"{place}: byte {offset + error.start:,} (0x{raw[error.start]:02x}) is not UTF-8 ({error.reason}); "
            f"--undecodable replace puts U+FFFD in its place"
        ) from error


_READERS: dict[str, Callable[[Path, Reading, int], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".parquet": _parquet,
    ".u16": _tokens,
}
