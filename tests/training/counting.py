"""A tiny data set with something to learn, and a recipe that trains on it in a second."""

from pathlib import Path

import numpy as np

from lssar.data.shards import write_shard
from lssar.training.metrics import read_metrics
from lssar.training.recipes import Recipe


def write_counting(folder: Path, vocab_size: int = 64) -> Path:
    """Bytes that count up from random starts."""
    rng = np.random.default_rng(0)
    for split, documents in (("train", 200), ("val", 20)):
        runs = [
            np.concatenate([[63], (rng.integers(60) + np.arange(rng.integers(20, 60))) % 60]) for _ in range(documents)
        ]
        write_shard(folder / f"count_{split}_000000.bin", np.concatenate(runs), vocab_size)
    return folder


def tiny(shards: Path, **changes) -> Recipe:
    base = dict(
        size="tiny", data=str(shards), vocab_size=64, length=32, steps=12, batch_tokens=256, micro_batch=4, warmup=2,
        lr=3e-3, dtype="float32", compile=False, eval_every=6, eval_batches=2, save_every=4,
    )  # fmt: skip
    return Recipe(**(base | changes))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]
