"""From a recipe's `data` to batches: prepared shards, or the standard library's source where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lssar.data.batches import Ahead, TokenBatches
from lssar.data.shards import write_shard
from lssar.data.stream import TokenStream
from lssar.data.synthetic import python_stdlib_text
from lssar.data.tasks import TaskMaker, TrainingDocuments, background_of
from lssar.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_dict
from lssar.training.distributed import World
from lssar.training.recipes import Recipe

STDLIB = "stdlib"
STDLIB_BYTES = 16_000_000
GPT2_FILE = "gpt2.tiktoken"


def open_data(recipe: Recipe, run: Path, w: World) -> tuple[TokenBatches | Ahead, TokenBatches | None]:
    """Training batches, and held-out ones if there are any."""
    folder = data_folder(recipe, run)
    if recipe.data == STDLIB:
        if w.main and not any(folder.glob("*.bin")):
            write_stdlib(folder)
        w.barrier()
    train, val = (sorted(folder.glob(f"*{split}*.bin")) for split in ("train", "val"))
    if not train:
        raise FileNotFoundError(
            f"no training shards (*train*.bin) in {str(folder)!r}; make some with `lssar data prepare`, give --data "
            f"FOLDER, or --data {STDLIB} for a small text that is always there"
        )

    def batches(shards: list[Path], shuffle: bool, mixture: TrainingDocuments | None = None) -> TokenBatches:
        return TokenBatches(
            shards, batch=recipe.micro_batch, length=recipe.length, seed=recipe.seed, rank=w.rank, world=w.size,
            pack=recipe.pack, eot=eot_of(folder, recipe.vocab_size), shuffle=shuffle, vocab_size=recipe.vocab_size,
            mixture=mixture, share=0.0 if mixture is None else recipe.retrieval_share,
        )  # fmt: skip

    held_out = batches(val, False) if val else None
    if not recipe.retrieval_share:
        return batches(train, True), held_out
    # Documents take longer to make than to read: they are made while the last batch is trained on.
    return Ahead(batches(train, True, _retrieval_documents(recipe, folder, train))), held_out


def data_folder(recipe: Recipe, run: Path) -> Path:
    """Where the shards of a run are."""
    return run / "data" if recipe.data == STDLIB else Path(recipe.data)


def tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder of shards: what its manifest says, else bytes' or GPT-2's by the vocabulary's size.

    GPT-2's comes from `gpt2.tiktoken` in the folder, if that is there: without it tiktoken needs a network once.
    """
    manifest, ranks = folder / "manifest.json", folder / GPT2_FILE
    if manifest.exists():
        record = json.loads(manifest.read_text())["tokenizer"]
        return (
            load_tokenizer(ranks)
            if record == {"kind": "gpt2"} and ranks.exists()
            else tokenizer_from_dict(record, folder)
        )
    by_size: dict[int, str | Path] = {257: "bytes", 50257: ranks if ranks.exists() else "gpt2"}
    if vocab_size not in by_size:
        raise ValueError(
            f"{str(folder)!r} has no manifest.json that names the tokenizer, and a vocabulary of {vocab_size} ids is "
            "neither bytes' (257) nor GPT-2's (50257)"
        )
    return load_tokenizer(by_size[vocab_size])


def _retrieval_documents(recipe: Recipe, folder: Path, shards: list[Path]) -> TrainingDocuments:
    tokenizer = tokenizer_of(folder, recipe.vocab_size)
    if tokenizer.vocab_size > recipe.vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids, the recipe {recipe.vocab_size}")
    maker = TaskMaker(tokenizer, background_of(TokenStream(shards), tokenizer.eot))
    return TrainingDocuments(maker, recipe.retrieval_tasks, recipe.seed)


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
