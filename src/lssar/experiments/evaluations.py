"""Evaluations of a trained model. Each is a value with a key; `evaluate` returns its results as plain values.

NTK scaling, a window and re-weighting applied after training need no training of their own: they are evaluations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lssar.data.folder import DataFolder
from lssar.data.stream import TokenStream
from lssar.data.tasks import TaskMaker, background_of
from lssar.evaluation.benchmarks import evaluate_benchmark, find_file, read_documents
from lssar.evaluation.length import evaluate_length, held_out_documents, held_out_shards, pieces_of
from lssar.evaluation.long import (
    far_multiples,
    joined_pieces,
    retrieval_multiples,
    retrieval_settings,
    shortest_context,
)
from lssar.evaluation.overflow import DTYPES, model_overflow
from lssar.evaluation.retrieval import DEPTHS, evaluate_retrieval
from lssar.model import GPT, PREFILL_CHUNK
from lssar.runs import evaluation_batch, evaluation_dtype
from lssar.training.recipes import Recipe


@dataclass(frozen=True)
class HeldOut:
    """The held-out text, the same for every arm of a scale."""

    folder: Path
    recipe: Recipe
    tokens: int
    """Tokens of one evaluation."""
    device: str
    bench: Path | None = None
    """Folder of benchmark files."""
    bench_documents: int | None = None
    """At most this many documents of each benchmark; None: all."""
    farthest: int = 64
    """Largest multiple of the training length for evaluations to the farthest length of the scale."""
    far_tokens: int = 131_072
    """Tokens of an evaluation of loss to the farthest length."""
    most_questions: int | None = None
    """About the largest number of questions in a cell."""

    def pieces(self, length: int) -> list[Tensor]:
        """About `tokens` in pieces of `length`, spread over as many documents as there are."""
        documents = held_out_documents(self.folder, self.recipe.vocab_size, length + 1)
        most = max(2, self.tokens // length)
        each = -(-most // len(documents))
        return pieces_of([document[: each * length + 1] for document in documents], length, most)

    @property
    def chunk(self) -> int:
        """Tokens of a forward pass over a long context: on a GPU the whole context, which is fastest there."""
        return FAR_CHUNK if self.device == "cuda" else PREFILL_CHUNK

    @property
    def batch_tokens(self) -> int:
        return evaluation_batch(self.device)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None: the dtype of the weights."""
        return evaluation_dtype(self.recipe, self.device)


FAR_CHUNK = 2**20
"""Tokens of a forward pass on a GPU: more than any context has."""


def far_word(multiple: float | None) -> str:
    """In the key of an evaluation: its largest multiple, or that it goes as far as the scale does."""
    return "far" if multiple is None else f"{multiple:g}x"


class Evaluation(Protocol):
    @property
    def key(self) -> str:
        """Unique among the evaluations of an arm; differs whenever the results may differ."""
        ...

    def missing(self, bench: Path | None) -> str | None:
        """What this evaluation needs and cannot find, as a sentence; None if nothing is missing."""
        ...

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]: ...


class _Always:
    """An evaluation that needs held-out text only."""

    def missing(self, bench: Path | None) -> str | None:
        return None


@contextlib.contextmanager
def reweighted(model: GPT, p: float | None) -> Iterator[None]:
    """Apply re-weighting with power p to every layer inside the context; None changes nothing."""
    layers = [block.attention for block in model.layers()]
    before = [layer.specs for layer in layers]
    try:
        if p is not None:
            for layer in layers:
                layer.specs = tuple(spec.reweighted(p) for spec in layer.specs)
        yield
    finally:
        for layer, kept in zip(layers, before):
            layer.specs = kept


@dataclass(frozen=True)
class Length(_Always):
    """Loss at 1x, 2x, 4x ... the training length, and the other two curves of `lssar eval length`."""

    to: int | None = 16
    """Largest multiple; None: the farthest of the scale, in factors of 4, on held-out documents that are joined."""
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    """With a sliding window of the training length."""
    p: float | None = None
    """Re-weighting applied after training."""

    @property
    def key(self) -> str:
        extras = [("ntk", self.ntk != "off"), ("window", self.windowed), (f"posthoc-p{self.p or 0:g}", bool(self.p))]
        return "-".join([f"length-{far_word(self.to)}", *(word for word, on in extras if on)])

    def multiples(self, farthest: int) -> list[int]:
        return far_multiples(farthest) if self.to is None else [2**i for i in range(self.to.bit_length())]

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        base, multiples = held_out.recipe.length, self.multiples(held_out.farthest)
        longest = max(multiples) * base
        pieces = (
            joined_pieces(held_out.folder, longest, held_out.far_tokens)
            if self.to is None
            else held_out.pieces(longest)
        )
        with reweighted(model, self.p):
            return evaluate_length(
                model, pieces, [m * base for m in multiples], self.ntk, base if self.windowed else None,
                batch_tokens=held_out.batch_tokens if self.to is None else 16_384, dtype=held_out.dtype,
                chunk=held_out.chunk,
            )  # fmt: skip


POOLED_FROM = 256
"""Multiple of the training length from which each seed is asked a third of the passkeys. A passkey needs a context of
its own, and long contexts take time; three seeds together reach the number of questions."""


@dataclass(frozen=True)
class Retrieval(_Always):
    """Share of answers decoded correctly, by context length; see `lssar eval retrieval`."""

    task: str = "passkey"
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    multiples: tuple[float, ...] | None = (1, 1.5, 2, 4, 8, 16)
    """Multiples of the training length; None: 1, 4, 16, 64 and the farthest of the scale, where the scale has them."""
    questions: int | None = None
    """Smallest number of questions at each length; None: as many as the tokens of the scale allow."""

    @property
    def key(self) -> str:
        extras = [(f"q{self.questions}", self.questions), ("ntk", self.ntk != "off"), ("window", self.windowed)]
        farthest = far_word(None if self.multiples is None else max(self.multiples))
        return "-".join([self.task, farthest, *(word for word, on in extras if on)])

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        if held_out.recipe.retrieval_share and self.task not in held_out.recipe.retrieval_tasks:
            return {"task": self.task, "rows": []}  # the model was not trained on this task
        base = held_out.recipe.length
        tokenizer = DataFolder(held_out.folder, held_out.recipe.vocab_size).tokenizer()
        maker = TaskMaker(tokenizer, background_of(TokenStream(held_out_shards(held_out.folder)), tokenizer.eot))
        rows = []
        multiples = self.multiples or retrieval_multiples(held_out.farthest)
        for multiple in multiples:
            length = int(multiple * base)
            needed = maker.shortest(self.task) if self.questions is None else shortest_context(maker, self.task, base)
            if length < needed:
                continue  # the task does not fit, as some do not in short contexts of bytes
            found = evaluate_retrieval(
                model, maker, self.task, length, **self._size(maker, length, held_out), ntk=self.ntk,
                window=base if self.windowed else None, batch_tokens=2 * held_out.batch_tokens, dtype=held_out.dtype,
            )  # fmt: skip
            rows.append({"multiple": f"{multiple:g}", **found})
        return {"task": self.task, "rows": rows}

    def _size(self, maker: TaskMaker, length: int, held_out: HeldOut) -> dict[str, Any]:
        """How many contexts, and where in them the answers are."""
        if self.questions is None:
            return {"samples": min(16, max(4, held_out.tokens // (length * len(DEPTHS))))}
        questions = min(self.questions, held_out.most_questions or self.questions)
        if self.task == "passkey" and length >= POOLED_FROM * held_out.recipe.length:
            questions = -(-questions // 3)
        return retrieval_settings(maker, self.task, held_out.recipe.length, questions) | {"chunk": held_out.chunk}


@dataclass(frozen=True)
class Overflow(_Always):
    """Attention rows of the trained model that the textbook and the stable form of re-weighting lose, by dtype."""

    multiples: tuple[int, ...] = (1, 16)
    pieces: int = 8

    @property
    def key(self) -> str:
        return "overflow-" + "-".join(f"{m}x" for m in self.multiples)

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        base = held_out.recipe.length
        longest = max(self.multiples) * base
        ids = torch.stack([piece[:-1] for piece in held_out.pieces(longest)[: self.pieces]]).to(held_out.device)
        lengths = [m * base for m in self.multiples]
        return {"dtypes": list(DTYPES), "by_length": [model_overflow(model, ids[:, :n]) for n in lengths]}


@dataclass(frozen=True)
class Benchmarks:
    """Zero-shot accuracy on local benchmark files, with the built-in harness."""

    tasks: tuple[str, ...] = ("arc_easy", "hellaswag", "piqa", "sciq", "lambada_openai", "blimp")

    key = "downstream"

    def missing(self, bench: Path | None) -> str | None:
        try:
            for task in self.tasks:
                find_file(task, bench or Path("data/bench"))
        except FileNotFoundError as error:
            return f"{error}; say with --bench FOLDER where the benchmarks are (docs/evaluation.md)"
        return None

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        tokenizer = DataFolder(held_out.folder, held_out.recipe.vocab_size).tokenizer()
        length = max(512, held_out.recipe.length)  # questions in bytes need more than the smoke scale's length
        found = {}
        for task in self.tasks:
            documents = read_documents(task, held_out.bench or Path("data/bench"), held_out.bench_documents)
            found[task] = evaluate_benchmark(
                model, tokenizer, task, documents, length, held_out.batch_tokens, held_out.dtype
            )
        return {"tasks": found}
