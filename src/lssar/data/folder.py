"""A folder of token shards as one value: its manifest, vocabulary, tokenizer and splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lssar.data.shards import write_shard
from lssar.data.synthetic import python_stdlib_text
from lssar.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_dict
from lssar.records import read_json, write_json

MANIFEST = "manifest.json"
STDLIB = "stdlib"
"""Name of the built-in data: the source of Python's standard library, as bytes."""
STDLIB_BYTES = 16_000_000
GPT2_FILE = "gpt2.tiktoken"

Split = Literal["train", "val"]


@dataclass(frozen=True)
class DataFolder:
    """Shards (*train*.bin, *val*.bin) with the manifest that `lssar data prepare` writes beside them.

    Folders without a manifest work too, for instance shards downloaded in llm.c's format. `default_vocab` is the
    vocabulary of such a folder; where there is a manifest, the manifest decides.
    """

    path: Path
    default_vocab: int | None = None

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """The checked manifest, or None if the folder has none."""
        file = self.path / MANIFEST
        return _checked_manifest(file) if file.exists() else None

    @property
    def vocab_size(self) -> int:
        if self.manifest is not None:
            return self.manifest["vocab_size"]
        if self.default_vocab is None:
            raise ValueError(f"{str(self.path)!r} has no {MANIFEST}, which would give the size of the vocabulary")
        return self.default_vocab

    @property
    def eot(self) -> int:
        """The end-of-document token; without a manifest the last id, as in byte and GPT-2 vocabularies."""
        return self.manifest["eot"] if self.manifest is not None else self.vocab_size - 1

    def tokenizer(self) -> Tokenizer:
        """The tokenizer named by the manifest; without one, bytes' or GPT-2's by the size of the vocabulary.

        `gpt2.tiktoken` in the folder serves GPT-2's tokenizer offline; otherwise tiktoken downloads its files once.
        """
        ranks = self.path / GPT2_FILE
        if self.manifest is not None:
            record = self.manifest["tokenizer"]
            if record == {"kind": "gpt2"} and ranks.exists():
                return load_tokenizer(ranks)
            return tokenizer_from_dict(record, self.path)
        by_size: dict[int, str | Path] = {257: "bytes", 50257: ranks if ranks.exists() else "gpt2"}
        if self.vocab_size not in by_size:
            raise ValueError(
                f"{str(self.path)!r} has no {MANIFEST} that names the tokenizer, and a vocabulary of {self.vocab_size} "
                "ids is neither bytes' (257) nor GPT-2's (50257)"
            )
        return load_tokenizer(by_size[self.vocab_size])

    def shards(self, split: Split) -> list[Path]:
        """Shards of a split in name order; an empty list if there are none. Hidden (unfinished) files never count."""
        return sorted(path for path in self.path.glob(f"*{split}*.bin") if not path.name.startswith("."))

    def training_shards(self) -> list[Path]:
        if found := self.shards("train"):
            return found
        raise FileNotFoundError(
            f"no training shards (*train*.bin) in {str(self.path)!r}; make some with `lssar data prepare`, give --data "
            f"FOLDER, or --data {STDLIB} for a small text that is always available"
        )

    def held_out_shards(self) -> list[Path]:
        if found := self.shards("val"):
            return found
        raise FileNotFoundError(f"no held-out shards (*val*.bin) in {str(self.path)!r}; give --data FOLDER")


def find_data(data: str, run: Path) -> Path:
    """The data folder of a run, also when the command runs in another working directory than training did."""
    if data == STDLIB:
        return run / "data"
    path = Path(data).expanduser()
    if path.is_absolute() or path.exists():
        return path
    beside = (parent / path for parent in run.absolute().parents)
    return next((found for found in beside if found.exists()), path)


def _checked_manifest(file: Path) -> dict[str, Any]:
    """The manifest, with the fields that every reader relies on checked for presence and type."""
    record = read_json(file, dict)
    for key, kind in (("vocab_size", int), ("eot", int), ("tokenizer", dict)):
        if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
            found = repr(record[key]) if key in record else "nothing"
            raise ValueError(f"{file}: {key!r} must be {_KINDS[kind]}, found {found}; the manifest is damaged")
    if not 0 <= record["eot"] < record["vocab_size"]:
        raise ValueError(f"{file}: eot {record['eot']} is outside the vocabulary of {record['vocab_size']} ids")
    return record


_KINDS = {int: "an integer", dict: "an object", list: "a list", str: "a string"}


def write_stdlib(folder: Path) -> None:
    """Write the standard library's source as byte shards with a manifest, some files held out.

    A shard that exists is kept, so a call after an interruption adds what is missing.
    """
    tokenizer = load_tokenizer("bytes")
    files = {split: folder / f"stdlib_{split}_000000.bin" for split in ("train", "val")}
    if not all(file.exists() for file in files.values()):
        parts: dict[str, list[np.ndarray]] = {split: [] for split in files}
        for split, text in python_stdlib_text(STDLIB_BYTES):
            parts[split] += [np.array([tokenizer.eot]), tokenizer.encode(text)]
        for split, arrays in parts.items():
            if not files[split].exists():
                write_shard(files[split], np.concatenate(arrays), tokenizer.vocab_size)
    record = {
        "format": "llm.c",
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "tokenizer": {"kind": "bytes"},
    }
    record["splits"] = {split: {"shards": [file.name]} for split, file in files.items()}
    write_json(folder / MANIFEST, record, overwrite=True)
