"""Shards back to text, one document after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lssar.data.folder import DataFolder
from lssar.data.shards import Shard
from lssar.data.stream import DocumentReader, Shards, find_shards
from lssar.data.tokenizers import END_OF_TEXT, Tokenizer
from lssar.records import naming, write_file


def decoded(shards: Shards, tokenizer: Tokenizer, max_documents: int | None = None) -> Iterator[str]:
    """The text of each document, whole also where shards cut it."""
    for tokens in DocumentReader(shards, tokenizer.eot, max_documents=max_documents):
        yield tokenizer.decode(tokens[1:] if tokens[0] == tokenizer.eot else tokens)


def decode_shards(
    shards: Shards, tokenizer: Tokenizer, out: Path, max_documents: int | None = None, overwrite: bool = False
) -> Path:
    """Writes documents to `out`: .jsonl holds {"text": ...} a line, any other text with <|endoftext|> between them.

    Either prepares to the same tokens again (the text with --separator '<|endoftext|>').
    """
    out = Path(out)

    def fill(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            for number, text in enumerate(decoded(shards, tokenizer, max_documents)):
                if out.suffix == ".jsonl":
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                else:
                    file.write((END_OF_TEXT if number else "") + text)

    with naming(out):
        return write_file(out, fill, overwrite)


def manifest_tokenizer(shards: Shards) -> Tokenizer | None:
    """The tokenizer that the manifest beside the shards names; None without a manifest."""
    folder = DataFolder(find_shards(shards)[0].parent)
    return folder.tokenizer() if folder.manifest is not None else None


def summary(shard: Shard, eot: int | None) -> dict[str, int]:
    """What `lssar data show` counts, read in pieces."""
    largest, documents = 0, 0
    for piece in shard.pieces():
        largest = max(largest, int(piece.max()))
        documents += int(np.count_nonzero(piece == eot))
    return {"largest id": largest} | ({"documents that begin here": documents} if eot is not None else {})
