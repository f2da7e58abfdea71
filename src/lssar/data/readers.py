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
_MOST_BYTES = 1 << 30
"""Largest document after decompression. A larger one is taken for an error, or for a file made to fill memory."""
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
    """File and line, for messages."""
    read: int = 0
    """Bytes of its unit read by now, for progress."""


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    field: str = "text"
    """Field that holds the text, in jsonl, parquet and datasets."""
    undecodable: Undecodable = "error"
    separator: str | None = None
    """Splits a text file into documents; a whole file is one document without it."""
    glob: str | None = None
    """Which files of a folder; those with a known suffix, if not given."""
    eot: int = 0
    vocab_size: int = 1 << 32
    """Size of the vocabulary and end-of-document token, for sources that hold tokens."""


@dataclass(frozen=True)
class Unit:
    """A file or a dataset; `documents(skip)` leaves out the first `skip` documents."""

    name: str
    bytes: int | None
    documents: Callable[[int], Iterator[Document]]


def find_units(sources: list[str], options: ReadOptions) -> list[Unit]:
    """All units of all sources; a source that is not there or holds nothing is an error."""
    units: list[Unit] = []
    for source in sources:
        if source.startswith("hf:"):
            units.append(_dataset(source, options))
            continue
        path = Path(source)
        if not path.exists():
            _check_link(path)
            raise FileNotFoundError(
                f"source {source}: no such file or folder (a Hugging Face dataset is hf:OWNER/NAME)"
            )
        units += [_file(file, options) for file in (_folder(path, options) if path.is_dir() else [path])]
    if not units:
        raise ValueError("no source was given")
    return units


def _folder(path: Path, options: ReadOptions) -> list[Path]:
    def wanted(file: Path) -> bool:
        relative = file.relative_to(path)
        if any(part.startswith(".") for part in relative.parts):
            return False
        if options.glob is None and _kind(file) not in (*_TEXT, *_READERS):
            return False
        _check_link(file)
        return file.is_file()

    try:
        found = [file for file in path.rglob(options.glob or "*") if wanted(file)]
    except NotImplementedError as error:
        raise ValueError(f"--glob {options.glob}: must be relative to the folder, for instance '*.py'") from error
    if not found:
        what = f"that match {options.glob}" if options.glob else f"that end in {', '.join((*_TEXT, *_READERS))}"
        raise ValueError(f"source {path}: a folder with no files {what}; say which with --glob")
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path}: a link to {path.readlink()}, which is missing or leads back to the link")


def _kind(path: Path) -> str:
    """The suffix below compression: `.jsonl` for a.jsonl.gz."""
    name = PurePosixPath(path.name.lower())
    return PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix


def _file(path: Path, options: ReadOptions) -> Unit:
    read = _READERS.get(_kind(path), _text)

    return Unit(str(path), path.stat().st_size, lambda skip: read(path, options, skip))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """The content, decompressed, and the raw file, whose position tells how far we are."""
    suffix = path.suffix.lower()
    with open(path, "rb") as raw:
        try:
            yield _COMPRESSED.get(suffix, lambda file: file)(raw), raw
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged or truncated {suffix} file near byte {raw.tell():,}: {error}") from error


def _text(path: Path, options: ReadOptions, skip: int) -> Iterator[Document]:
    with _opened(path) as (file, raw):
        offset = 0
        separator = options.separator.encode() if options.separator else None
        for number, piece in enumerate(_split(file, separator, str(path)) if separator else [_whole(file, str(path))]):
            if number >= skip:
                text = _decode(piece, str(path), offset, options)
                place = f"{path}, document {number + 1}" if separator else str(path)
                yield Document(text.removeprefix("\ufeff") if offset == 0 else text, place, raw.tell())
            offset += len(piece) + len(separator or b"")


def _whole(file: BinaryIO, place: str) -> bytes:
    """The rest of a file, read in pieces so that a small archive of a huge file is noticed before memory is full."""
    pieces: list[bytes] = []
    while piece := file.read(_PIECE):
        pieces.append(piece)
        _check_size(sum(map(len, pieces)), place)
    return b"".join(pieces)


def _split(file: BinaryIO, separator: bytes, place: str) -> Iterator[bytes]:
    held = b""
    while piece := file.read(_PIECE):
        *whole, held = (held + piece).split(separator)
        yield from whole
        _check_size(len(held), place)
    yield held


def _check_size(size: int, place: str) -> None:
    if size > _MOST_BYTES:
        raise ValueError(
            f"{place}: a document of more than {_MOST_BYTES:,} bytes; divide it (--separator for text files)"
        )


def _jsonl(path: Path, options: ReadOptions, skip: int) -> Iterator[Document]:
    import json

    with _opened(path) as (file, raw):
        offset, documents = 0, 0
        for number, line in enumerate(iter(lambda: file.readline(_MOST_BYTES + 1), b""), 1):
            place = f"{path}, line {number}"
            _check_size(len(line), place)
            if line.strip():
                documents += 1
                if documents > skip:
                    text = _decode(line, place, offset, options)
                    try:
                        value = json.loads(text)
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{place}: not JSON: {error}") from error
                    except ValueError as error:  # Python's limit on the digits of an integer
                        raise ValueError(f"{place}: JSON with a number that is too long") from error
                    except RecursionError as error:
                        raise ValueError(f"{place}: JSON that is nested too deeply") from error
                    yield Document(_text_of(value, place, options), place, raw.tell())
            offset += len(line)


def _text_of(value: Any, place: str, options: ReadOptions) -> str:
    if not isinstance(value, dict) or options.field not in value:
        found = f"fields {', '.join(map(str, value)) or 'none'}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{place}: no field {options.field!r}, found {found}; name the field with --field")
    text = value[options.field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {options.field!r} is {type(text).__name__}, expected text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON can hold
        if options.undecodable == "error":
            raise ValueError(
                f"{place}: character {error.start} is a lone surrogate, not text; --undecodable replace puts U+FFFD"
            ) from error
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parquet(path: Path, options: ReadOptions, skip: int) -> Iterator[Document]:
    parquet, arrow = need("pyarrow.parquet", "a .parquet source"), need("pyarrow", "a .parquet source")
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            if options.field not in names:
                raise ValueError(f"{path}: no column {options.field!r}, found {', '.join(names)}; name it with --field")
            kind = file.schema_arrow.field(options.field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {options.field!r} is {kind}, expected string")
            row, groups = 0, list(range(file.num_row_groups))
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= skip:
                row += file.metadata.row_group(groups.pop(0)).num_rows
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[options.field]):
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        text = _parquet_text(value, f"{path}, row {row}", options)
                        yield Document(text, f"{path}, row {row}", size * row // rows)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or not a parquet file: {error}") from error


def _parquet_text(value: Any, place: str, options: ReadOptions) -> str:
    if not value.is_valid:
        raise ValueError(f"{place}: field {options.field!r} is null, expected text")
    return _decode(value.as_buffer().to_pybytes(), place, 0, options)


def _tokens(path: Path, options: ReadOptions, skip: int) -> Iterator[Document]:
    """Little-endian uint16 ids with the end-of-document id after each document."""
    with _opened(path) as (file, raw):
        held: list[np.ndarray] = []
        seen, documents = 0, 0
        while piece := file.read(_PIECE):
            if len(piece) % 2:
                raise ValueError(f"{path}: an odd number of bytes, expected uint16 tokens: truncated?")
            ids = np.frombuffer(piece, "<u2")
            check_ids(ids, options.vocab_size, path, seen)
            seen += len(ids)
            start = 0
            for end in np.flatnonzero(ids == options.eot).tolist():
                documents += 1
                if documents > skip:
                    yield Document(np.concatenate([*held, ids[start:end]]), f"{path}, document {documents}", raw.tell())
                held, start = [], end + 1
            held.append(ids[start:])
            _check_size(sum(part.nbytes for part in held), str(path))
        if documents >= skip and any(len(part) for part in held):
            yield Document(np.concatenate(held), f"{path}, document {documents + 1}", raw.tell())


def _dataset(source: str, options: ReadOptions) -> Unit:
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
            yield Document(_text_of(row, place, options), place)

    return Unit(source, None, documents)


def _decode(raw: bytes, place: str, offset: int, options: ReadOptions) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if options.undecodable == "replace":
            return raw.decode("utf-8", "replace")
        raise ValueError(
            f"{place}: byte {offset + error.start:,} (0x{raw[error.start]:02x}) is not UTF-8 ({error.reason}); "
            f"--undecodable replace puts U+FFFD in its place"
        ) from error


_READERS: dict[str, Callable[[Path, ReadOptions, int], Iterator[Document]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".parquet": _parquet,
    ".u16": _tokens,
}
