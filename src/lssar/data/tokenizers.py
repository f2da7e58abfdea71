"""Text to token ids and back: bytes, GPT-2's BPE, or any tokenizer.json, behind one protocol."""

from __future__ import annotations

import hashlib
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lssar.data.extras import need

END_OF_TEXT = "<|endoftext|>"
GPT2_RANKS = 50256
# The pattern of the GPT-2 release, in the equivalent form that does not backtrack.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Names under which published tokenizers keep their end-of-document token, most telling first.
_EOT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<|endofdocument|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eot(self) -> int:
        """The id that precedes each document."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text alone: special tokens spelled out in it are ordinary text."""

    def decode(self, ids: Any) -> str: ...
    def to_dict(self) -> dict[str, Any]:
        """Plain values from which `tokenizer_from_dict` makes it again."""

    @property
    def file(self) -> Path | None:
        """The file it was read from, if any."""


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents."""

    name, vocab_size, eot, file = "bytes", 257, 256, None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, ids: Any) -> str:
        ids = _checked(ids, self)
        parts = np.split(ids, np.flatnonzero(ids == self.eot))
        texts = [part[part != self.eot].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts]
        return END_OF_TEXT.join(texts)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class Gpt2Tokenizer:
    """GPT-2's BPE through tiktoken: by name (tiktoken downloads and caches it) or from a ranks file, offline."""

    name, vocab_size, eot = "gpt2", GPT2_RANKS + 1, GPT2_RANKS

    def __init__(self, ranks: Path | str | None = None) -> None:
        self.file = Path(ranks) if ranks is not None else None
        if self.file is not None:
            self._ranks  # noqa: B018 (a bad file is reported now, not in the middle of a run)

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        assert self.file is not None
        return read_ranks(self.file)

    @cached_property
    def _encoding(self) -> Any:  # made on first use: ids that exist already need no tiktoken
        tiktoken = need("tiktoken", "the gpt2 tokenizer")
        if self.file is not None:
            special = {END_OF_TEXT: self.eot}
            return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=self._ranks, special_tokens=special)
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' errors are OSErrors
            raise OSError(
                f"tiktoken could not download its gpt2 files ({type(error).__name__}); without a network give the "
                f"path of a ranks file (gpt2.tiktoken) as the tokenizer, or put it next to the shards"
            ) from error

    @property
    def ranks(self) -> dict[bytes, int]:
        return self._ranks if self.file is not None else self._encoding._mergeable_ranks

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids: Any) -> str:
        return self._encoding.decode(_checked(ids, self).tolist())

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "gpt2"} | _file_record(self.file)

    def __getstate__(self) -> dict[str, Any]:  # an Encoding is remade in each worker rather than sent
        return {"file": self.file}


class JsonTokenizer:
    """Any tokenizer of the tokenizers library, from its tokenizer.json."""

    def __init__(self, file: Path | str, eot: str | None = None) -> None:
        """`eot` is the end-of-document token as text; if not given, it is found among the usual names."""
        self.file, self._eot_text = Path(file), eot
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = self.file.parent.name if self.file.name == "tokenizer.json" else self.file.stem
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have holes
        known = [name for name in ([eot] if eot is not None else _EOT_NAMES) if name in vocabulary]
        if not known:
            wanted = f"no token {eot!r}" if eot is not None else f"none of the usual names ({', '.join(_EOT_NAMES)})"
            raise ValueError(f"{file}: cannot tell the end-of-document token: {wanted} in its vocabulary; name it")
        self.eot = vocabulary[known[0]]

    @cached_property
    def _tokenizer(self) -> Any:
        library = need("tokenizers", "a tokenizer.json")
        if not self.file.is_file():
            raise FileNotFoundError(f"{self.file}: no such tokenizer file")
        try:
            tokenizer = library.Tokenizer.from_file(str(self.file))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{self.file}: not a tokenizer.json: {error}") from error
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not a boundary
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def encode(self, text: str) -> np.ndarray:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(_checked(ids, self).tolist(), skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "json", "eot": self._eot_text} | _file_record(self.file)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tokenizer"}


def load_tokenizer(name: str | Path, eot: str | None = None) -> Tokenizer:
    """`"bytes"`, `"gpt2"`, or a path: GPT-2 ranks (.tiktoken), a tokenizer.json, or a folder that holds one."""
    if name == "bytes":
        return BytesTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"tokenizer {str(name)!r}: neither bytes nor gpt2, and there is no file {path}")
    return JsonTokenizer(path, eot) if path.suffix == ".json" else Gpt2Tokenizer(path)


def tokenizer_from_dict(record: dict[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a record; its file is looked for in `folder` first, and must be the same as then."""
    kind, file = record.get("kind"), record.get("file")
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "gpt2" and file is None:
        return Gpt2Tokenizer()
    if kind not in ("gpt2", "json") or file is None:
        raise ValueError(f"not the record of a tokenizer: {record}")
    beside = folder / Path(file).name if folder is not None else None
    path = beside if beside is not None and beside.exists() else Path(file)
    if not path.exists():
        raise FileNotFoundError(f"tokenizer file {path} is gone" + (f", nor is it in {folder}" if folder else ""))
    if (digest := _digest(path)) != record.get("sha256"):
        raise ValueError(f"{path} is not the tokenizer file recorded: sha256 {digest}, expected {record.get('sha256')}")
    return Gpt2Tokenizer(path) if kind == "gpt2" else JsonTokenizer(path, record.get("eot"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Copies the tokenizer's file, if it has one, into `folder`; the record then stays valid when the folder moves."""
    record = tokenizer.to_dict()
    if tokenizer.file is None:
        return record
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / tokenizer.file.name
    if not (copy.exists() and _digest(copy) == record["sha256"]):
        from lssar.records import write_file

        source = tokenizer.file
        write_file(copy, lambda temporary: shutil.copyfile(source, temporary), overwrite=True)
    return record | {"file": copy.name}


def read_ranks(path: Path) -> dict[bytes, int]:
    """GPT-2's ranks from a .tiktoken file, checked to be all there."""
    load = need("tiktoken.load", "a .tiktoken file")
    # tiktoken caches files by path; with the checksum a file that has changed is read again.
    ranks: dict[bytes, int] = load.load_tiktoken_bpe(str(path), expected_hash=_digest(path))
    if sorted(ranks.values()) != list(range(GPT2_RANKS)):
        raise ValueError(f"{path}: {len(ranks):,} ranks, expected GPT-2's {GPT2_RANKS:,} (0 to {GPT2_RANKS - 1:,})")
    return ranks


def _checked(ids: Any, tokenizer: Tokenizer) -> np.ndarray:
    ids = np.atleast_1d(np.asarray(ids))
    if ids.size and not (ids.min() >= 0 and ids.max() < tokenizer.vocab_size):
        bad = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
        raise ValueError(f"token {bad} is outside the vocabulary of {tokenizer.name}, 0 to {tokenizer.vocab_size - 1}")
    return ids.astype(np.int64)


def _file_record(file: Path | None) -> dict[str, Any]:
    return {} if file is None else {"file": str(file), "sha256": _digest(file)}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
