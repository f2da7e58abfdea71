"""From a recipe's `data` to batches: prepared shards, or the standard library's source where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lssar.data.batches import TokenBatches
from lssar.data.shards import write_shard
from lssar.data.synthetic import python_stdlib_text
from lssar.data.tokenizers import load_tokenizer
from lssar.training.distributed import World
from lssar.training.recipes import Recipe

STDLIB = "stdlib"
STDLIB_BYTES = 16_000_000


def open_data(recipe: Recipe, run: Path, w: World) -> tuple[TokenBatches, TokenBatches | None]:
    """Training batches, and held-out ones if there are any."""
    if recipe.data == STDLIB:
        folder = run / "data"
        if w.main and not any(folder.glob("*.bin")):
            write_stdlib(folder)
        w.barrier()
    else:
        folder = Path(recipe.data)
    train, val = (sorted(folder.glob(f"*{split}*.bin")) for split in ("train", "val"))
    if not train:
        raise FileNotFoundError(
            f"no training shards (*train*.bin) in {str(folder)!r}; make some with `lssar data prepare`, give --data "
            f"FOLDER, or --data {STDLIB} for a small text that is always there"
        )

    def batches(shards: list[Path], shuffle: bool) -> TokenBatches:
        return TokenBatches(
            shards, batch=recipe.micro_batch, length=recipe.length, seed=recipe.seed, rank=w.rank, world=w.size,
            pack=recipe.pack, eot=eot_of(folder, recipe.vocab_size), shuffle=shuffle, vocab_size=recipe.vocab_size,
        )  # fmt: skip

    return batches(train, True), batches(val, False) if val else None


def eot_of(folder: Path, vocab_size: int) -> int:
    """The token between documents: what the manifest of the shards says, else the last of bytes' or GPT-2's ids."""
    manifest = folder / "manifest.json"
    return int(json.loads(manifest.read_text())["eot"]) if manifest.exists() else vocab_size - 1


def write_stdlib(folder: Path) -> None:
    """The standard library's source as byte shards, held-out files apart."""
    tokenizer = load_tokenizer("bytes")
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for split, text in python_stdlib_text(STDLIB_BYTES):
        parts[split] += [np.array([tokenizer.eot]), tokenizer.encode(text)]
    for split, arrays in parts.items():
        write_shard(folder / f"stdlib_{split}_000000.bin", np.concatenate(arrays), tokenizer.vocab_size)
