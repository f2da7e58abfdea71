"""`lssar data prepare | show | decode`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from lssar.commands.common import Progress, check_given, print_json, say
from lssar.data.decode import decode_shards, decoded, manifest_tokenizer, summary
from lssar.data.folder import DataFolder
from lssar.data.prepare import Settings, Status, prepare
from lssar.data.readers import Undecodable
from lssar.data.shards import open_shard
from lssar.data.stream import find_shards
from lssar.data.tokenizers import Tokenizer, load_tokenizer
from lssar.records import read_json, warn

_SMALL = 1 << 23  # bytes; below, starting workers takes longer than the work


@dataclass
class Prepare:
    """Text, jsonl, parquet or Hugging Face datasets to token shards; the same command resumes after a stop."""

    sources: tyro.conf.Positional[list[str]]
    """Files (.txt, .md, .jsonl, .parquet, .u16; also .gz, .xz), folders, or hf:OWNER/NAME[:CONFIG[:SPLIT]], for
    instance hf:HuggingFaceFW/fineweb:sample-10BT."""
    name: str = "data"
    """Name of the shards: NAME_train_000001.bin, NAME_val_000000.bin."""
    out: Path | None = None
    """Folder for the shards; data/NAME, if not given."""
    tokenizer: str = "gpt2"
    """bytes, gpt2, a GPT-2 ranks file (.tiktoken), or a tokenizer.json."""
    eot: str | None = None
    """The end-of-document token of a tokenizer.json, where its name is an unusual one."""
    shard_tokens: int = 10**8
    """Tokens in a shard."""
    val_sources: list[str] = dataclasses.field(default_factory=list)
    """Sources for validation alone."""
    val_share: float | None = None
    """Share of the documents that is held out for validation; 0.01 unless another --val flag is given, 0 for none. Of
    few documents the last one is held out, or the end of it."""
    val_documents: int = 0
    """Hold out the first documents, this many of them."""
    val_shard: bool = False
    """Hold out the first shard, as llm.c does."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many tokens."""
    field: str = "text"
    """Field that holds the text in jsonl, parquet and datasets."""
    separator: str | None = None
    """Splits a text file into documents; without it each file is one."""
    glob: str | None = None
    """Which files of a folder, for instance '*.py'."""
    undecodable: Undecodable = "error"
    """What to do with bytes that are not UTF-8."""
    workers: int | None = None
    """Processes that tokenize. Default: one for each core; for little text, none beside this one."""
    overwrite: bool = False
    """Replace finished or unfinished data in the folder."""

    def run(self) -> None:
        others = self.val_sources or self.val_documents or self.val_shard
        share = self.val_share if self.val_share is not None else (0.0 if others else 0.01)
        settings = Settings(
            name=self.name,
            sources=self.sources,
            shard_tokens=self.shard_tokens,
            val_sources=self.val_sources,
            val_share=share,
            val_documents=self.val_documents,
            val_shard=self.val_shard,
            max_tokens=self.max_tokens,
            text_field=self.field,
            undecodable=self.undecodable,
            separator=self.separator,
            glob=self.glob,
        )
        out = self.out or Path("data") / self.name
        tokenizer = load_tokenizer(self.tokenizer, self.eot)
        check_given(self.sources, "files, folders or datasets")
        with Progress("opening sources", None) as bar:
            manifest = prepare(
                settings, tokenizer, out, workers=self._workers(), overwrite=self.overwrite, report=_Report(bar)
            )
        splits = read_json(manifest, dict)["splits"]
        train, val = splits["train"], splits["val"]
        if not val["tokens"]:
            warn("nothing is held out, so runs on this data cannot be evaluated without other text (--val-share)")
        say(
            f"{train['tokens']:,} training tokens of {train['documents']:,} documents, {val['tokens']:,} validation "
            f"tokens of {val['documents']:,}; {manifest}"
        )

    def _workers(self) -> int:
        if self.workers is not None:
            return self.workers
        files = [file for source in self.sources for file in _files(Path(source)) if ".u16" not in file.suffixes]
        remote = any(source.startswith("hf:") for source in self.sources)
        little = not remote and sum(file.stat().st_size for file in files) < _SMALL
        return 1 if self.tokenizer == "bytes" or little else os.cpu_count() or 1


@dataclass
class Show:
    """Header, counts and first text of shards, each checked to its last token and against the manifest's checksums."""

    shards: tyro.conf.Positional[list[str]]
    """Files, folders or globs."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file, as for `prepare`; the one that the manifest names, if not given."""
    eot: str | None = None
    """End-of-document token, as for `prepare`."""
    tokens: int = 64
    """How many first tokens to decode."""
    json: bool = False
    """Print a JSON list with one object for each shard."""

    def run(self) -> None:
        check_given(self.shards, "shards, folders or globs")
        tokenizer = _tokenizer(self.shards, self.tokenizer, self.eot)
        paths, shown, failed = find_shards(self.shards), [], False
        for folder in dict.fromkeys(path.parent for path in paths):
            try:
                DataFolder(folder).check()
            except (ValueError, OSError) as error:
                failed = _failed(error)
        for path in paths:
            try:
                record = self._record(path, tokenizer)
            except (ValueError, OSError) as error:
                failed = _failed(error)
                continue
            shown.append(record)
            if not self.json:
                say(_described(record))
        if self.json:
            print_json(shown)
        if failed:
            sys.exit(1)

    def _record(self, path: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
        shard = open_shard(path)
        if tokenizer is not None:
            shard.check_tokens(tokenizer.vocab_size)
        first = shard.tokens[: self.tokens]
        return {
            "path": str(path),
            "tokens": len(shard),
            "bytes": path.stat().st_size,
            "dtype": shard.layout.dtype.name,
            "magic": shard.layout.magic,
            "version": shard.layout.version,
            "counts": summary(shard, tokenizer.eot if tokenizer else None),
            "ids_checked": tokenizer is not None,
            "begins": tokenizer.decode(first) if tokenizer else first.tolist(),
        }


def _failed(error: Exception) -> bool:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return True


def _described(record: dict[str, Any]) -> str:
    text = record["begins"]
    checked = "size against header" + (", ids against the vocabulary" if record["ids_checked"] else "")
    lines = [
        f"{record['path']}: {record['tokens']:,} tokens, {record['bytes'] / 2**20:,.1f} MiB",
        f"  header: {record['dtype']}, magic {record['magic']}, version {record['version']}",
        *(f"  {key}: {value:,}" for key, value in record["counts"].items()),
        f"  checked: {checked}",
        f"  begins: {repr(text) if isinstance(text, str) else f'{text} (text: --tokenizer)'}",
    ]
    return "\n".join(lines)


@dataclass
class Decode:
    """Shards back to text: a .jsonl of documents, or text with <|endoftext|> between them; printed without --out."""

    shards: tyro.conf.Positional[list[str]]
    """Files, folders or globs."""
    out: Path | None = None
    """File to write: .jsonl, or any other suffix for text."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file, as for `prepare`; the one that the manifest names, if not given."""
    eot: str | None = None
    """End-of-document token, as for `prepare`."""
    max_documents: int | None = None
    """Stop after this many documents."""
    overwrite: bool = False
    """Replace the file."""

    def run(self) -> None:
        tokenizer = _tokenizer(self.shards, self.tokenizer, self.eot)
        if tokenizer is None:
            raise ValueError("there is no manifest.json beside the shards: name their tokenizer with --tokenizer")
        if self.out is not None:
            path = decode_shards(self.shards, tokenizer, self.out, self.max_documents, self.overwrite)
            say(f"written: {path}")
            return
        for text in decoded(self.shards, tokenizer, self.max_documents):
            sys.stdout.write(text + "\n")


class _Report:
    """Updates the progress a few times a second, however many documents there are."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._start = self._shown = time.monotonic()

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        if now - self._shown < 0.2:
            return
        self._shown = now
        rate = (status.total_tokens - status.resumed_tokens) / (now - self._start)
        note = f"{status.total_tokens:,} tokens, {sum(status.documents.values()):,} documents, {rate:,.0f} tokens/s"
        self._bar.update(status.share or 0.0, note, "preparing", None if status.share is None else 1.0)


def _tokenizer(shards: list[str], name: str | None, eot: str | None) -> Tokenizer | None:
    return load_tokenizer(name, eot) if name is not None else manifest_tokenizer(shards)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path] if path.exists() else []
