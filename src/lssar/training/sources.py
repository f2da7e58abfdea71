"""From a recipe's `data` to batches: prepared shards, or the standard library's source where there are none."""

from __future__ import annotations

from pathlib import Path

from lssar.data.batches import Ahead, TokenBatches
from lssar.data.folder import STDLIB, DataFolder, find_data, write_stdlib
from lssar.data.stream import TokenStream
from lssar.data.tasks import TaskMaker, TrainingDocuments, background_of
from lssar.data.tokenizers import Tokenizer
from lssar.training.distributed import Processes
from lssar.training.recipes import Recipe


def open_data(recipe: Recipe, run: Path, w: Processes) -> tuple[TokenBatches | Ahead, TokenBatches | None]:
    """Training batches, and held-out ones if there are any."""
    folder = DataFolder(data_folder(recipe, run), recipe.vocab_size)
    if recipe.data == STDLIB:
        if w.main and not (folder.shards("train") and folder.shards("val")):
            write_stdlib(folder.path)
        w.barrier()
    train, val = folder.training_shards(), folder.shards("val")

    def batches(shards: list[Path], shuffle: bool, mixture: TrainingDocuments | None = None) -> TokenBatches:
        return TokenBatches(
            shards, batch=recipe.micro_batch, length=recipe.length, seed=recipe.seed, rank=w.rank, world=w.size,
            pack=recipe.pack, eot=folder.eot, shuffle=shuffle, vocab_size=recipe.vocab_size,
            mixture=mixture, share=0.0 if mixture is None else recipe.retrieval_share,
        )  # fmt: skip

    held_out = batches(val, False) if val else None
    if not recipe.retrieval_share:
        return batches(train, True), held_out
    # Documents take longer to make than to read: they are made while the last batch is trained on.
    return Ahead(batches(train, True, _retrieval_documents(recipe, folder, train))), held_out


def data_folder(recipe: Recipe, run: Path) -> Path:
    return find_data(recipe.data, run)


def tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    return DataFolder(folder, vocab_size).tokenizer()


def _retrieval_documents(recipe: Recipe, folder: DataFolder, shards: list[Path]) -> TrainingDocuments:
    tokenizer = folder.tokenizer()
    if tokenizer.vocab_size > recipe.vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids, the recipe {recipe.vocab_size}")
    maker = TaskMaker(tokenizer, background_of(TokenStream(shards), tokenizer.eot))
    return TrainingDocuments(maker, recipe.retrieval_tasks, recipe.seed)
