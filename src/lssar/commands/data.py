"""`lssar data prepare | show | decode`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lssar.data.decode import decode_shards, decoded, manifest_tokenizer, summary
from lssar.data.prepare import Settings, Status, prepare
from lssar.data.readers import Undecodable
from lssar.data.shards import Shard, open_shard
from lssar.data.stream import find_shards
from lssar.data.tokenizers import Tokenizer, load_tokenizer

console = Console()
_SMALL = 1 << 23  # bytes; below, starting workers takes longer than the work


@dataclass
class Prepare:
    """Text, jsonl, parquet or Hugging Face datasets to token shards; run it again to go on after a stop."""

    sources: tyro.conf.Positional[list[str]]
    """Files (.txt, .md, .jsonl, .parquet, .u16; also .gz, .xz), folders, or hf:OWNER/NAME[:CONFIG[:SPLIT]], for
    instance hf:HuggingFaceFW/fineweb:sample-10BT."""
    name: str = "data"
    """Of the shards: NAME_train_000001.bin, NAME_val_000000.bin."""
    out: Path | None = None
    """Folder; data/NAME, if not given."""
    tokenizer: str = "gpt2"
    """bytes, gpt2, a GPT-2 ranks file (.tiktoken), or a tokenizer.json."""
    eot: str | None = None
    """The end-of-document token of a tokenizer.json, where its name is an unusual one."""
    shard_tokens: int = 10**8
    val_sources: list[str] = dataclasses.field(default_factory=list)
    """Sources for validation alone."""
    val_share: float | None = None
    """Share of documents for validation; 0.01 if no way to set validation apart is given, 0 for none."""
    val_documents: int = 0
    """This many first documents for validation."""
    val_shard: bool = False
    """The first shard for validation, as llm.c does."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many."""
    field: str = "text"
    """That holds the text in jsonl, parquet and datasets."""
    separator: str | None = None
    """Splits a text file into documents; without it each file is one."""
    glob: str | None = None
    """Which files of a folder, for instance '*.py'."""
    undecodable: Undecodable = "error"
    """What to do with bytes that are not UTF-8."""
    workers: int | None = None
    """Processes that tokenize; if not given, one for each core, or none beside this one for little text."""
    overwrite: bool = False

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
        with _Report() as report:
            manifest = prepare(
                settings, tokenizer, out, workers=self._workers(), overwrite=self.overwrite, report=report
            )
        status = report.status
        if not status.tokens["val"]:
            console.print("no document was set apart for validation (--val-share, --val-documents, --separator)")
        console.print(
            f"{status.tokens['train']:,} training and {status.tokens['val']:,} validation tokens of "
            f"{sum(status.documents.values()):,} documents; {manifest}",
            highlight=False,
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
    """Header, counts and first text of shards, each checked to its last token."""

    shards: tyro.conf.Positional[list[str]]
    """Files, folders or globs."""
    tokenizer: str | None = None
    """As for prepare; that of the manifest beside the shards, if not given."""
    eot: str | None = None
    tokens: int = 64
    """How many first tokens to decode."""

    def run(self) -> None:
        tokenizer = _tokenizer(self.shards, self.tokenizer, self.eot)
        failed = False
        for path in find_shards(self.shards):
            try:
                self._show(open_shard(path), tokenizer)
            except ValueError as error:
                console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
                failed = True
        if failed:
            sys.exit(1)

    def _show(self, shard: Shard, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None:
            shard.check_tokens(tokenizer.vocab_size)
        first = shard.tokens[: self.tokens]
        lines = [
            f"{shard.path}: {len(shard):,} tokens, {shard.path.stat().st_size / 2**20:,.1f} MiB",
            f"  header: {shard.layout.dtype.name}, magic {shard.layout.magic}, version {shard.layout.version}",
            *(f"  {key}: {value:,}" for key, value in summary(shard, tokenizer.eot if tokenizer else None).items()),
            f"  checked: size against header{', ids against the vocabulary' if tokenizer else ''}",
            f"  begins: {repr(tokenizer.decode(first)) if tokenizer else f'{first.tolist()} (text: --tokenizer)'}",
        ]
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@dataclass
class Decode:
    """Shards back to text: a .jsonl of documents, or text with <|endoftext|> between them; printed without --out."""

    shards: tyro.conf.Positional[list[str]]
    out: Path | None = None
    tokenizer: str | None = None
    """As for prepare; that of the manifest beside the shards, if not given."""
    eot: str | None = None
    max_documents: int | None = None
    overwrite: bool = False

    def run(self) -> None:
        tokenizer = _tokenizer(self.shards, self.tokenizer, self.eot)
        if tokenizer is None:
            raise ValueError("there is no manifest.json beside the shards: name their tokenizer with --tokenizer")
        if self.out is not None:
            path = decode_shards(self.shards, tokenizer, self.out, self.max_documents, self.overwrite)
            console.print(f"written: {path}", highlight=False)
            return
        for text in decoded(self.shards, tokenizer, self.max_documents):
            sys.stdout.write(text + "\n")


class _Report:
    """A line of progress on stderr, redrawn a few times a second however many documents there are."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("opening sources", total=None)
        self._start = self._shown = time.monotonic()
        self.status = Status()

    def __enter__(self) -> _Report:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, status: Status) -> None:
        self.status = status
        now = time.monotonic()
        if now - self._shown < 0.2:
            return
        self._shown = now
        rate = (status.total_tokens - status.resumed_tokens) / (now - self._start)
        text = f"{status.total_tokens:,} tokens, {sum(status.documents.values()):,} documents, {rate:,.0f} tokens/s"
        total, completed = (None, 0.0) if status.share is None else (1.0, status.share)
        self._progress.update(self._task, description=text, total=total, completed=completed)


def _tokenizer(shards: list[str], name: str | None, eot: str | None) -> Tokenizer | None:
    return load_tokenizer(name, eot) if name is not None else manifest_tokenizer(shards)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path] if path.exists() else []
