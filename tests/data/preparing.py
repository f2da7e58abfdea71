"""Shared by the tests of `prepare`: texts, a source of every kind that holds them, and runs that are interrupted."""

import gzip
import importlib
import json
import lzma

import numpy as np
import pytest

from lssar.data.prepare import Settings, prepare
from lssar.data.tokenizers import BytesTokenizer

prepare_module = importlib.import_module("lssar.data.prepare")  # the package's own name `prepare` is the function
TEXTS = ["one", "zwei\nlines", "drei ünïcode \U0001f600", "four" * 20, "5"]
BYTES = BytesTokenizer()


def tokens_of(texts):
    return [token for text in texts for token in [256, *text.encode()]]


def made(source, out, tokenizer=BYTES, workers=1, report=None, overwrite=False, **changes):
    sources = [str(source)] if not isinstance(source, list) else list(map(str, source))
    chosen = Settings(**(dict(name="x", sources=sources, shard_tokens=50) | changes))
    return prepare(chosen, tokenizer, out, workers=workers, report=report, overwrite=overwrite).parent


def files(folder):
    """Name and content of all but the manifest, which holds a date."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


class Stop(BaseException):
    pass


def interrupted(out, source, after, **changes):
    """Stops after some documents, as Ctrl-C would."""
    seen = 0

    def report(status):
        nonlocal seen
        seen += 1
        if seen == after:
            raise Stop

    with pytest.raises(Stop):
        made(source, out, report=report, **changes)


def write_jsonl(path, texts, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    return path


def a_folder(path):
    for number, text in enumerate(TEXTS):
        file = path / ("ab"[number // 3]) / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    (path / "picture.png").write_bytes(b"\x89PNG")
    (path / ".hidden.txt").write_text("not me")
    return path


def a_parquet(path, rows_in_group=2):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=rows_in_group)
    return path


def separated(path):
    path.write_bytes("<|endoftext|>".join(TEXTS).encode())
    return path


def ids_after(path):
    """uint16 ids with the end-of-document id after each document."""
    ids = np.array([token for text in TEXTS for token in [*text.encode(), 256]], "<u2")
    with lzma.open(path, "wb") as file:
        file.write(ids.tobytes())
    return path


SOURCES = {
    "folder": lambda p: a_folder(p / "folder"),
    "jsonl": lambda p: write_jsonl(p / "a.jsonl", TEXTS),
    "jsonl.gz": lambda p: write_jsonl(p / "a.jsonl.gz", TEXTS, gzip.open),
    "jsonl.xz": lambda p: write_jsonl(p / "a.jsonl.xz", TEXTS, lzma.open),
    "parquet": lambda p: a_parquet(p / "a.parquet"),
    "separated": lambda p: separated(p / "a.txt"),
    "u16.xz": lambda p: ids_after(p / "a.u16.xz"),
}
