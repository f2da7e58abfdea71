"""From a recipe and a data folder to batches."""

from __future__ import annotations

from pathlib import Path

from lssar.data.batches import Ahead, TokenBatches
from lssar.data.folder import DataFolder
from lssar.data.stream import TokenStream
from lssar.data.tasks import TaskMaker, TrainingDocuments, background_of
from lssar.training.distributed import Processes
from lssar.training.recipes import Recipe


def open_data(recipe: Recipe, data: DataFolder, w: Processes) -> tuple[TokenBatches | Ahead, TokenBatches | None]:
    """Training batches, and held-out ones if there are any."""
    train, val = data.training_shards(), data.shards("val")

    def batches(shards: list[Path], shuffle: bool, mixture: TrainingDocuments | None = None) -> TokenBatches:
        return TokenBatches(
            shards, batch=recipe.micro_batch, length=recipe.length, seed=recipe.seed, rank=w.data_rank,
            world=w.data_size, pack=recipe.pack, eot=data.eot, shuffle=shuffle, vocab_size=recipe.vocab_size,
            mixture=mixture, share=0.0 if mixture is None else recipe.retrieval_share,
        )  # fmt: skip

    held_out = batches(val, False) if val else None
    if not recipe.retrieval_share:
        return batches(train, True), held_out
    # Documents take longer to make than to read: they are made while the last batch is trained on.
    return Ahead(batches(train, True, _retrieval_documents(recipe, data, train))), held_out


def _retrieval_documents(recipe: Recipe, data: DataFolder, shards: list[Path]) -> TrainingDocuments:
    tokenizer = data.tokenizer()
    if tokenizer.vocab_size > recipe.vocab_size:
        raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids, the recipe {recipe.vocab_size}")
    maker = TaskMaker(tokenizer, background_of(TokenStream(shards), tokenizer.eot))
    documents = TrainingDocuments(maker, recipe.retrieval_tasks, recipe.seed)
    documents.check(recipe.length + 1)  # now: at the first batch the run would be recorded already
    return documents
