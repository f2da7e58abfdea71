"""A folder of token shards as one value: its manifest, vocabulary, tokenizer and splits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lssar.data.shards import write_shard
from lssar.data.synthetic import python_stdlib_text
from lssar.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_dict
from lssar.records import (
    checksum,
    read_json,
    read_sealed_json,
    remove_temporary,
    warn,
    write_json,
    write_sealed_json,
)

MANIFEST = "manifest.json"
STDLIB = "stdlib"
"""Name of the built-in data: the source of Python's standard library, as bytes."""
STDLIB_BYTES = 16_000_000
GPT2_FILE = "gpt2.tiktoken"
VERIFIED = ".verified.json"
"""In a data folder: sizes, times of change and checksums of shards that were read and found whole."""
VERIFY_ALWAYS = 1 << 30
_UNLISTED: set[Path] = set()
"""Folders whose missing manifest has been mentioned."""

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

    def check(self, splits: Sequence[Split] = ("train", "val")) -> None:
        """Raise an error if a shard that the manifest lists is missing or has another checksum.

        Up to VERIFY_ALWAYS bytes are read every time. Larger data is read once; after that a shard whose size and time
        of change are as they were is not read again.
        """
        if self.manifest is None and self.path not in _UNLISTED and any(self.shards(split) for split in splits):
            _UNLISTED.add(self.path)
            warn(f"{self.path} has no {MANIFEST}, so its shards are only checked for their form")
        listed = self._listed(splits)
        for path in (path for split in splits for path in self.shards(split)):
            if listed and path.name not in listed:
                warn(f"{path} is not listed in {MANIFEST}; it is used all the same")
        stats = {name: (self.path / name).stat() for name in listed if (self.path / name).is_file()}
        small = sum(stat.st_size for stat in stats.values()) <= VERIFY_ALWAYS
        known = {} if small else self._verified()
        now: dict[str, Any] = {}
        for name, expected in listed.items():
            mark = [stats[name].st_size, stats[name].st_mtime_ns, expected] if name in stats else None
            if mark is None or expected is None or known.get(name) != mark:
                check_shard(self.path / name, expected)
            now[name] = mark
        if not small and not now.items() <= known.items():
            with contextlib.suppress(OSError):  # a read-only folder is verified again next time
                write_json(self.path / VERIFIED, known | now, overwrite=True)

    def _listed(self, splits: Sequence[Split]) -> dict[str, str | None]:
        """Names of the shards in the manifest, with their checksums where it has them."""
        listed: dict[str, str | None] = {}
        recorded = (self.manifest or {}).get("splits", {})
        for split in (recorded[name] for name in splits if name in recorded):
            names = split["shards"]
            listed |= dict(zip(names, split.get("sha256") or [None] * len(names), strict=True))
        return listed

    def _verified(self) -> dict[str, Any]:
        try:
            return read_json(self.path / VERIFIED, dict)
        except (OSError, ValueError):
            return {}

    def training_shards(self) -> list[Path]:
        if found := self.shards("train"):
            return found
        raise FileNotFoundError(
            f"no training shards (*train*.bin) in {str(self.path)!r}; make some with `lssar data prepare`, give --data "
            f"FOLDER, or --data {STDLIB} for a small text that is always available"
        )

    def held_out_shards(self) -> list[Path]:
        """Shards for evaluation, checked against the manifest."""
        self.check(("val",))
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
    record = read_sealed_json(file)
    for key, kind in (("vocab_size", int), ("eot", int), ("tokenizer", dict)):
        if not isinstance(record.get(key), kind) or isinstance(record[key], bool):
            found = repr(record[key]) if key in record else "nothing"
            raise ValueError(f"{file}: {key!r} must be {_KINDS[kind]}, found {found}; the manifest is damaged")
    if not 0 <= record["eot"] < record["vocab_size"]:
        raise ValueError(f"{file}: eot {record['eot']} is outside the vocabulary of {record['vocab_size']} ids")
    splits = record.get("splits", {})
    for part in splits.values() if isinstance(splits, dict) else [None]:
        if not isinstance(part, dict) or not _names(part.get("shards")) or not _names(part.get("sha256", [])):
            raise ValueError(f"{file}: the list of shards is not as `lssar data prepare` writes it; it is damaged")
        if part.get("sha256") and len(part["sha256"]) != len(part["shards"]):
            raise ValueError(f"{file}: {len(part['shards'])} shards but {len(part['sha256'])} checksums; it is damaged")
    return record


def _names(value: Any) -> bool:
    """Whether it is a list of plain file names."""
    return isinstance(value, list) and all(isinstance(name, str) and name == Path(name).name for name in value)


_KINDS = {int: "an integer", dict: "an object", list: "a list", str: "a string"}


def check_shard(path: Path, expected: str | None) -> str:
    """The SHA-256 of a shard, after checking that the file exists and has the expected one, if any."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, but recorded as finished; restore it, or prepare the data again")
    digest = checksum(path)
    if expected is not None and digest != expected:
        raise ValueError(
            f"{path} is damaged or was replaced: SHA-256 {digest}, recorded {expected}; prepare the data again"
        )
    return digest


def write_stdlib(folder: Path) -> None:
    """Write the standard library's source as byte shards with a manifest, some files held out.

    Files that exist are kept, so a call after an interruption adds what is missing. Only while the lock of the folder,
    or of the run that it belongs to, is held: leftovers are removed.
    """
    tokenizer = load_tokenizer("bytes")
    files = {split: folder / f"stdlib_{split}_000000.bin" for split in ("train", "val")}
    for file in [*files.values(), folder / MANIFEST]:
        remove_temporary(file)
    if not all(file.exists() for file in files.values()):
        parts: dict[str, list[np.ndarray]] = {split: [] for split in files}
        for split, text in python_stdlib_text(STDLIB_BYTES):
            parts[split] += [np.array([tokenizer.eot]), tokenizer.encode(text)]
        for split, arrays in parts.items():
            if not files[split].exists():
                write_shard(files[split], np.concatenate(arrays), tokenizer.vocab_size)
    if (folder / MANIFEST).exists():
        return
    record = {
        "format": "llm.c",
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "tokenizer": tokenizer.to_dict(),
        "splits": {split: {"shards": [file.name], "sha256": [checksum(file)]} for split, file in files.items()},
    }
    write_sealed_json(folder / MANIFEST, record, overwrite=True)
