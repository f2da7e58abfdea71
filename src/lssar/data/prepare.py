"""From sources to shards: tokenized in parallel, written in order, resumable after any interruption.

As in llm.c's GPT-2 shards, the end-of-document token comes BEFORE each document, and a document that does not fit
continues in the next shard. The output depends on the sources and settings alone, not on workers or interruptions.

While it runs, the shards being filled are hidden `.partial` files, and `.NAME_progress.json` says how many of their
tokens and of the sources' documents are safe. A later run with the same settings truncates the partial files to that
point and resumes from there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lssar.data.folder import MANIFEST, check_shard
from lssar.data.readers import Document, ReadOptions, Undecodable, Unit, find_units
from lssar.data.shards import MOST_TOKENS, ShardInProgress, layout_for
from lssar.data.stream import TokenStream
from lssar.data.tokenizers import Tokenizer, save_tokenizer
from lssar.data.workers import tokenised
from lssar.locks import hold
from lssar.records import (
    check_name,
    checksum,
    environment,
    naming,
    read_sealed_json,
    remove_temporary,
    write_sealed_json,
)

_SAFE_POINT_SECONDS = 10.0
_MOST_HELD_OUT = 0.2
"""Share of the tokens up to which a last document is held out whole."""
_FIRST_INDEX = {"val": 0, "train": 1}  # llm.c: shard 0 is for validation


@dataclass(frozen=True)
class Settings:
    """Everything but the sources' contents and the tokenizer that the output depends on."""

    name: str
    sources: list[str]
    shard_tokens: int = 10**8
    val_sources: list[str] = field(default_factory=list)
    """Sources for validation alone."""
    val_share: float = 0.0
    """Share of the documents for validation, evenly spaced: every hundredth for 0.01. Where there are fewer documents,
    the last one; where that is more than a fifth of all tokens, its last tokens, a tenth of all."""
    val_documents: int = 0
    """This many first documents for validation."""
    val_shard: bool = False
    """The first shard for validation, whole, as llm.c does."""
    max_tokens: int | None = None
    """Ends after the document that reaches this many."""
    text_field: str = "text"
    undecodable: Undecodable = "error"
    separator: str | None = None
    glob: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.shard_tokens <= MOST_TOKENS:
            raise ValueError(f"shard_tokens must be 1 to {MOST_TOKENS:,}, got {self.shard_tokens:,}")
        if not 0 <= self.val_share < 1:
            raise ValueError(f"val_share must be at least 0 and below 1, got {self.val_share}")
        if self.val_documents < 0:
            raise ValueError(f"val_documents must be 0 or more, got {self.val_documents}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.separator == "":
            raise ValueError("separator must not be empty")
        ways = [name for name in ("val_sources", "val_share", "val_documents", "val_shard") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)}: choose one way to set validation apart")

    def split_of(self, number: int, from_val_source: bool) -> str:
        """Where the document with this number goes (val_shard, which cuts documents, is decided later)."""
        if from_val_source or number < self.val_documents:
            return "val"
        return "val" if int((number + 1) * self.val_share) > int(number * self.val_share) else "train"


@dataclass
class Status:
    """Progress; also the contents of the progress file."""

    unit: int = 0
    document: int = 0
    """Documents taken of that unit."""
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    empty: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    share: float | None = None
    """Share of the bytes of all sources that has been read, where sizes are known."""
    last_document: int = 0
    """Training tokens before the last training document."""
    resumed_tokens: int = 0
    """Tokens that an earlier process made."""

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())


def prepare(
    settings: Settings,
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Callable[[Status], Any] | None = None,
) -> Path:
    """Writes NAME_train_000001.bin, NAME_val_000000.bin, ... and manifest.json into `out`; returns the manifest's path.

    A call with the same arguments resumes an interrupted one. `report` is called after each document.
    """
    out = Path(out)
    options = ReadOptions(
        settings.text_field,
        settings.undecodable,
        settings.separator,
        settings.glob,
        tokenizer.eot,
        tokenizer.vocab_size,
    )
    training = find_units(settings.sources, options)
    validation = find_units(settings.val_sources, options) if settings.val_sources else []
    with hold(out, "preparing data"):
        job = _Job(settings, tokenizer, out, [*validation, *training], len(validation))
        status = job.begin(overwrite)
        try:
            job.run(status, workers, report or (lambda status: None))
            job.hold_out(status)
            return job.end(status)
        finally:
            for sink in job.sinks.values():
                sink.close()


class _Job:
    """One run: where it starts, the loop, and what is left at the end."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, out: Path, units: list[Unit], val_units: int) -> None:
        self.settings, self.tokenizer, self.out, self.units, self.val_units = settings, tokenizer, out, units, val_units
        self.progress_file = _progress_file(out, settings.name)
        self.sinks = {split: _Sink(self, split) for split in ("val", "train")}
        self.identity = json.loads(
            json.dumps(
                {
                    "settings": asdict(settings),
                    "tokenizer": {key: value for key, value in tokenizer.to_dict().items() if key != "file"},
                    "units": _digest([[unit.name, unit.bytes] for unit in units]),
                }
            )
        )

    def begin(self, overwrite: bool) -> Status:
        """A fresh start, or the last safe point of an earlier run; never overwrites other files unasked."""
        manifest, shards = self.out / MANIFEST, self.shards()
        remove_temporary(self.progress_file)
        remove_temporary(manifest)
        if overwrite:
            self._clear_others()
            return self._fresh()
        if manifest.exists():
            self.progress_file.unlink(missing_ok=True)  # left by a process that was killed after its last step
            raise FileExistsError(
                f"{manifest} exists: a dataset is finished there; choose another folder or --overwrite"
            )
        if not self.progress_file.exists():
            if shards:
                raise FileExistsError(f"{shards[0]} exists; choose another folder or name, or --overwrite")
            if begun := [name for name in self._others() if _has_tokens(_progress_file(self.out, name))]:
                raise FileExistsError(
                    f"{self.out} holds an unfinished run named {begun[0]!r}, which could not resume beside another; "
                    "finish it, choose another folder, or --overwrite"
                )
            self._clear_others()
            return self._fresh()
        saved, status = self._progress()
        if not status.total_tokens:  # it failed before the first token, so other settings are fine
            return self._fresh()
        if saved["identity"] != self.identity:
            raise FileExistsError(
                f"{self.out} holds an unfinished run with other settings or sources "
                f"({_difference(saved['identity'], self.identity)}); finish it with the same ones, or --overwrite"
            )
        for split, sink in self.sinks.items():
            sink.resume(saved["sinks"][split], self.shards())
        return replace(status, resumed_tokens=status.total_tokens)

    def _progress(self) -> tuple[dict[str, Any], Status]:
        """What the progress file says, checked."""
        saved = read_sealed_json(self.progress_file)
        try:
            status = Status(**saved["status"])
            settings, sinks = saved["identity"]["settings"], saved["sinks"]
            whole = all(isinstance(sinks[split][key], int) for split in self.sinks for key in ("index", "tokens"))
            whole &= isinstance(settings, dict) and isinstance(status.total_tokens, int)
        except (TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise ValueError(f"{self.progress_file} is damaged, so this run cannot resume; start over with --overwrite")
        return saved, status

    def _others(self) -> list[str]:
        """Other names under which something was begun in this folder and not finished."""
        names = [path.name[1 : -len(_PROGRESS)] for path in self.out.glob(f".*{_PROGRESS}")]
        return [name for name in names if name != self.settings.name]

    def _clear_others(self) -> None:
        for name in self._others():
            remove_temporary(_progress_file(self.out, name))
            self._clear(name)

    def _fresh(self) -> Status:
        self._clear_all()
        self._save(status := Status())  # from now on, shards in this folder are known to be ours
        return status

    def run(self, status: Status, workers: int, report: Callable[[Status], Any]) -> None:
        before = list(accumulate((unit.bytes or 0 for unit in self.units), initial=0))
        known = all(unit.bytes is not None for unit in self.units)
        saved, finished = time.monotonic(), self._finished()
        eot = np.array([self.tokenizer.eot], layout_for(self.tokenizer.vocab_size).dtype)
        with closing(tokenised(self._documents(status), self.tokenizer, workers)) as documents:
            for unit, document, tokens in documents:
                self._take(np.concatenate([eot, tokens]) if len(tokens) else tokens, unit < self.val_units, status)
                status.document = status.document + 1 if unit == status.unit else 1
                status.unit = unit
                status.share = (before[unit] + document.read) / max(1, before[-1]) if known else None
                if self._finished() != finished or time.monotonic() - saved > _SAFE_POINT_SECONDS:
                    self._save(status)
                    saved, finished = time.monotonic(), self._finished()
                report(status)
                if self._enough(status):
                    break

    def _documents(self, status: Status) -> Iterator[tuple[int, Document]]:
        """What is left to read; the status moves on while this runs, so its start is noted first."""
        first, skip = status.unit, status.document
        if not self._enough(status):
            for index in range(first, len(self.units)):
                for document in self.units[index].documents(skip if index == first else 0):
                    yield index, document

    def _enough(self, status: Status) -> bool:
        return self.settings.max_tokens is not None and status.total_tokens >= self.settings.max_tokens

    def _take(self, tokens: np.ndarray, from_val_source: bool, status: Status) -> None:
        """One document, to the split that it belongs to."""
        if not len(tokens):
            status.empty += 1
            return
        room = len(tokens)
        split = self.settings.split_of(sum(status.documents.values()), from_val_source)
        if self.settings.val_shard:  # the one case where a document can be part validation, part training
            room = max(0, self.settings.shard_tokens - status.tokens["val"])
            split = "val" if room else "train"
        if split == "train":
            status.last_document = status.tokens["train"]
        for name, part in ((split, tokens[:room]), ("train", tokens[room:])):
            self.sinks[name].append(part)
            status.tokens[name] += len(part)
        status.documents[split] += 1

    def _finished(self) -> int:
        return sum(sink.index for sink in self.sinks.values())

    def _save(self, status: Status, **cut: dict[str, Any]) -> None:
        """First the tokens, then the note that they are there. `cut` is where a sink is about to be cut back to."""
        sinks = {split: sink.flush() for split, sink in self.sinks.items()}
        record = {"identity": self.identity, "status": asdict(status), "sinks": sinks | cut}
        with naming(self.progress_file):
            write_sealed_json(self.progress_file, record, overwrite=True)

    def hold_out(self, status: Status) -> None:
        """Hold something out where there were too few documents for the share: see `Settings.val_share`."""
        total, start = status.tokens["train"], status.last_document
        if not self.settings.val_share or status.tokens["val"]:
            return
        whole = start > 0 and total - start <= total * _MOST_HELD_OUT
        if not whole:
            start = max(start + 1, total - max(1, total // 10))
        if not 1 < start < total:
            return  # a word or two
        train, val = self.sinks["train"], self.sinks["val"]
        train.finish()
        tail = TokenStream(train.paths()).read(start, total - start)
        eot = np.array([] if whole else [self.tokenizer.eot], tail.dtype)
        val.append(np.concatenate([eot, tail]))
        status.tokens |= {"train": start, "val": total - start + len(eot)}
        status.documents["val"] += 1
        status.documents["train"] -= whole
        # From here on a run that is killed resumes with the shorter training split.
        self._save(status, train=(cut := train.at(start)))
        train.resume(cut, self.shards())

    def end(self, status: Status) -> Path:
        if not status.tokens["train"]:
            self._clear_all()
            if not status.total_tokens:
                raise ValueError(f"no text in {', '.join(self.settings.sources)}: {status.empty} empty documents")
            raise ValueError(
                f"all {sum(status.documents.values())} documents ({status.total_tokens:,} tokens) went to validation, "
                f"none is left for training; set less apart, or make shards smaller"
            )
        for sink in self.sinks.values():
            sink.finish()
        splits: dict[str, Any] = {}
        for split, sink in self.sinks.items():
            names = [path.name for path in sink.paths()]
            splits[split] = {
                "documents": status.documents[split],
                "tokens": status.tokens[split],
                "shards": names,
                "sha256": [sink.checksums[name] for name in names],
            }
        record = {
            "format": "llm.c",
            "dtype": layout_for(self.tokenizer.vocab_size).dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "eot": self.tokenizer.eot,
            "tokenizer": save_tokenizer(self.tokenizer, self.out),
            "splits": splits,
            "empty_documents": status.empty,
            "settings": asdict(self.settings),
            "files": len(self.units),
            "bytes": sum(unit.bytes or 0 for unit in self.units),
            "environment": environment(),
        }
        with naming(self.out / MANIFEST):
            manifest = write_sealed_json(self.out / MANIFEST, record, overwrite=True)
        self.progress_file.unlink(missing_ok=True)
        return manifest

    def shards(self) -> list[Path]:
        """Finished shards of this name, whoever made them."""
        return self._files(self.settings.name, "{}")

    def _files(self, name: str, form: str) -> list[Path]:
        pattern = form.format(re.escape(name) + r"_(train|val)_\d{6}\.bin")
        return sorted(path for path in self.out.iterdir() if re.fullmatch(pattern, path.name))

    def _clear_all(self) -> None:
        for sink in self.sinks.values():
            sink.close()
        (self.out / MANIFEST).unlink(missing_ok=True)
        self._clear(self.settings.name)

    def _clear(self, name: str) -> None:
        """Delete what was prepared under a name."""
        for path in [_progress_file(self.out, name), *self._files(name, r"\.{}\.partial"), *self._files(name, "{}")]:
            path.unlink(missing_ok=True)


class _Sink:
    """The tokens of one split, cut into shards of equal size."""

    def __init__(self, job: _Job, split: str) -> None:
        self.split, self.out, self.name = split, job.out, job.settings.name
        self.size, self.vocab_size = job.settings.shard_tokens, job.tokenizer.vocab_size
        self.index = _FIRST_INDEX[split]
        self.shard: ShardInProgress | None = None
        self.checksums: dict[str, str] = {}
        """Checksums of finished shards, by name."""

    def path(self, index: int) -> Path:
        return self.out / f"{self.name}_{self.split}_{index:06d}.bin"

    def paths(self) -> list[Path]:
        """Finished shards."""
        return [self.path(index) for index in range(_FIRST_INDEX[self.split], self.index)]

    def at(self, tokens: int) -> dict[str, Any]:
        """What `flush` would have returned after the first `tokens` tokens."""
        full, rest = divmod(tokens, self.size)
        return {"index": _FIRST_INDEX[self.split] + full, "tokens": rest, "sha256": self.checksums}

    def append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self.shard is None:
                self.shard = ShardInProgress(self.path(self.index), self.vocab_size)
            room = self.size - self.shard.tokens
            self.shard.append(tokens[:room])
            tokens = tokens[room:]
            if self.shard.tokens == self.size:
                self.finish()

    def finish(self) -> None:
        if self.shard is not None:
            path = self.shard.finish()
            self.checksums[path.name] = checksum(path)
            self.shard = None
            self.index += 1

    def flush(self) -> dict[str, Any]:
        if self.shard is not None:
            self.shard.flush()
        tokens = self.shard.tokens if self.shard is not None else 0
        return {"index": self.index, "tokens": tokens, "sha256": self.checksums}

    def resume(self, saved: dict[str, Any], shards: list[Path]) -> None:
        """Return to a safe point: shards finished before it are checked, what came after it is written again."""
        self.index = saved["index"]
        for path in self.paths():
            self.checksums[path.name] = check_shard(path, saved.get("sha256", {}).get(path.name))
        if saved["tokens"]:
            self.shard = ShardInProgress(self.path(self.index), self.vocab_size, saved["tokens"])
        kept = set(self.paths())
        for path in shards:
            if path.name.startswith(f"{self.name}_{self.split}_") and path not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self.shard is not None:
            self.shard.close()


_PROGRESS = "_progress.json"


def _progress_file(out: Path, name: str) -> Path:
    return out / f".{name}{_PROGRESS}"


def _has_tokens(progress: Path) -> bool:
    """Whether something was prepared; if the file does not say, it may have been."""
    try:
        return bool(sum(read_sealed_json(progress)["status"]["tokens"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _difference(saved: dict[str, Any], ours: dict[str, Any]) -> str:
    for key, value in ours["settings"].items():
        if saved["settings"].get(key) != value:
            return f"{key} was {saved['settings'].get(key)!r}, is {value!r}"
    return "another tokenizer" if saved["tokenizer"] != ours["tokenizer"] else "files were added, removed or changed"
