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

from lssar.data.stream import TokenStream
from lssar.data.tasks import TaskMaker, background_of
from lssar.evaluation.benchmarks import evaluate_benchmark, find_file, read_documents
from lssar.evaluation.length import evaluate_length, held_out_documents, held_out_shards, pieces_of
from lssar.evaluation.overflow import DTYPES, model_overflow
from lssar.evaluation.retrieval import DEPTHS, evaluate_retrieval
from lssar.model import GPT
from lssar.training.recipes import Recipe
from lssar.training.sources import tokenizer_of


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

    def pieces(self, length: int) -> list[Tensor]:
        """About `tokens` in pieces of `length`, spread over as many documents as there are."""
        documents = held_out_documents(self.folder, self.recipe.vocab_size, length + 1)
        most = max(2, self.tokens // length)
        each = -(-most // len(documents))
        return pieces_of([document[: each * length + 1] for document in documents], length, most)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None: the dtype of the weights."""
        return torch.bfloat16 if self.device == "cuda" and self.recipe.dtype == "bfloat16" else None


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

    to: int = 16
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    """With a sliding window of the training length."""
    p: float | None = None
    """Re-weighting applied after training."""

    @property
    def key(self) -> str:
        extras = [("ntk", self.ntk != "off"), ("window", self.windowed), (f"posthoc-p{self.p or 0:g}", bool(self.p))]
        return "-".join([f"length-{self.to}x", *(word for word, on in extras if on)])

    @property
    def multiples(self) -> list[int]:
        return [2**i for i in range(self.to.bit_length())]

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        base = held_out.recipe.length
        window = base if self.windowed else None
        with reweighted(model, self.p):
            return evaluate_length(
                model, held_out.pieces(self.to * base), [m * base for m in self.multiples], self.ntk, window,
                dtype=held_out.dtype,
            )  # fmt: skip


@dataclass(frozen=True)
class Retrieval(_Always):
    """Share of answers decoded correctly, by context length; see `lssar eval retrieval`."""

    task: str = "passkey"
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    multiples: tuple[float, ...] = (1, 1.5, 2, 4, 8, 16)

    @property
    def key(self) -> str:
        extras = [("ntk", self.ntk != "off"), ("window", self.windowed)]
        return "-".join([self.task, f"{max(self.multiples):g}x", *(word for word, on in extras if on)])

    def evaluate(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        if held_out.recipe.retrieval_share and self.task not in held_out.recipe.retrieval_tasks:
            return {"task": self.task, "rows": []}  # the model was not trained on this task
        base, folder = held_out.recipe.length, held_out.folder
        tokenizer = tokenizer_of(folder, held_out.recipe.vocab_size)
        maker = TaskMaker(tokenizer, background_of(TokenStream(held_out_shards(folder)), tokenizer.eot))
        batch_tokens = 524_288 if held_out.device == "cuda" else 16_384
        rows = []
        for multiple in self.multiples:
            length = int(multiple * base)
            if length < maker.shortest(self.task):
                continue  # the task does not fit, as some do not in short contexts of bytes
            samples = min(16, max(4, held_out.tokens // (length * len(DEPTHS))))
            found = evaluate_retrieval(
                model, maker, self.task, length, samples=samples, ntk=self.ntk,
                window=base if self.windowed else None, batch_tokens=batch_tokens, dtype=held_out.dtype,
            )  # fmt: skip
            rows.append({"multiple": f"{multiple:g}", **found})
        return {"task": self.task, "rows": rows}


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
        tokenizer = tokenizer_of(held_out.folder, held_out.recipe.vocab_size)
        length = max(512, held_out.recipe.length)  # questions in bytes need more than the smoke scale's length
        batch_tokens = 262_144 if held_out.device == "cuda" else 16_384
        found = {}
        for task in self.tasks:
            documents = read_documents(task, held_out.bench or Path("data/bench"), held_out.bench_documents)
            found[task] = evaluate_benchmark(model, tokenizer, task, documents, length, batch_tokens, held_out.dtype)
        return {"tasks": found}
