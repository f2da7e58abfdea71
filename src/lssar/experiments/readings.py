"""Ways to read a trained model. A reading is a value with a key; `read` gives plain figures.

NTK, a window, and a re-weighting that is put on after training need no training of their own: they are readings.
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
from lssar.evaluation.downstream import evaluate_benchmark, find_file, read_documents
from lssar.evaluation.length import evaluate_length, held_out_documents, held_out_shards, pieces_of
from lssar.evaluation.overflow import DTYPES, model_overflow
from lssar.evaluation.retrieval import DEPTHS, evaluate_retrieval
from lssar.model import GPT
from lssar.training.recipes import Recipe
from lssar.training.sources import tokenizer_of


@dataclass(frozen=True)
class HeldOut:
    """Held-out text for readings, the same for every arm of a scale."""

    folder: Path
    recipe: Recipe
    tokens: int
    """Of one reading."""
    device: str
    bench: Path | None = None
    """Folder of benchmark files."""
    bench_documents: int | None = None
    """Of each benchmark at most; None: all."""

    def pieces(self, length: int) -> list[Tensor]:
        """About `tokens` in pieces of `length`, spread over as many documents as there are."""
        documents = held_out_documents(self.folder, self.recipe.vocab_size, length + 1)
        most = max(2, self.tokens // length)
        each = -(-most // len(documents))
        return pieces_of([document[: each * length + 1] for document in documents], length, most)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """What to read in, if not the weights' own dtype."""
        return torch.bfloat16 if self.device == "cuda" and self.recipe.dtype == "bfloat16" else None


class Reading(Protocol):
    @property
    def key(self) -> str:
        """Names the reading among those of an arm; differs whenever the figures may."""
        ...

    def missing(self, bench: Path | None) -> str | None:
        """What it would need and has not, in a sentence; None if it can be made."""
        ...

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]: ...


class _Always:
    """For readings that need nothing but held-out text."""

    def missing(self, bench: Path | None) -> str | None:
        return None


@contextlib.contextmanager
def reweighted(model: GPT, p: float | None) -> Iterator[None]:
    """The model with re-weighting put on every layer, trained without it or not; None leaves it as it is."""
    layers = [block.attention for block in model.layers()]
    before = [layer.spec for layer in layers]
    try:
        if p is not None:
            for layer in layers:
                layer.spec = layer.spec.reweighted(p)
        yield
    finally:
        for layer, kept in zip(layers, before):
            layer.spec = kept


@dataclass(frozen=True)
class Length(_Always):
    """Loss at 1x, 2x, 4x ... the training length, and the other two curves of `lssar eval length`."""

    to: int = 16
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    """Through a sliding window of the training length."""
    p: float | None = None
    """Re-weighting put on after training."""

    @property
    def key(self) -> str:
        extras = [("ntk", self.ntk != "off"), ("window", self.windowed), (f"posthoc-p{self.p or 0:g}", bool(self.p))]
        return "-".join([f"length-{self.to}x", *(word for word, on in extras if on)])

    @property
    def multiples(self) -> list[int]:
        return [2**i for i in range(self.to.bit_length())]

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        base = held_out.recipe.length
        window = base if self.windowed else None
        with reweighted(model, self.p):
            return evaluate_length(
                model, held_out.pieces(self.to * base), [m * base for m in self.multiples], self.ntk, window,
                dtype=held_out.dtype,
            )  # fmt: skip


@dataclass(frozen=True)
class Retrieval(_Always):
    """Share of answers that are decoded right, by context; see `lssar eval retrieval`."""

    task: str = "passkey"
    ntk: Literal["off", "length"] = "off"
    windowed: bool = False
    multiples: tuple[float, ...] = (1, 1.5, 2, 4, 8, 16)

    @property
    def key(self) -> str:
        extras = [("ntk", self.ntk != "off"), ("window", self.windowed)]
        return "-".join([self.task, f"{max(self.multiples):g}x", *(word for word, on in extras if on)])

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        if held_out.recipe.retrieval_share and self.task not in held_out.recipe.retrieval_tasks:
            return {"task": self.task, "rows": []}  # it was taught others
        base, folder = held_out.recipe.length, held_out.folder
        tokenizer = tokenizer_of(folder, held_out.recipe.vocab_size)
        maker = TaskMaker(tokenizer, background_of(TokenStream(held_out_shards(folder)), tokenizer.eot))
        batch_tokens = 524_288 if held_out.device == "cuda" else 16_384
        rows = []
        for multiple in self.multiples:
            length = int(multiple * base)
            if length < maker.shortest(self.task):
                continue  # bytes, mostly: what has to be in it does not fit
            samples = min(16, max(4, held_out.tokens // (length * len(DEPTHS))))
            found = evaluate_retrieval(
                model, maker, self.task, length, samples=samples, ntk=self.ntk,
                window=base if self.windowed else None, batch_tokens=batch_tokens, dtype=held_out.dtype,
            )  # fmt: skip
            rows.append({"multiple": f"{multiple:g}", **found})
        return {"task": self.task, "rows": rows}


@dataclass(frozen=True)
class Overflow(_Always):
    """Rows of the trained model's own scores that textbook and stable forms of its re-weighting lose, by dtype."""

    multiples: tuple[int, ...] = (1, 16)
    pieces: int = 8

    @property
    def key(self) -> str:
        return "overflow-" + "-".join(f"{m}x" for m in self.multiples)

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        base = held_out.recipe.length
        longest = max(self.multiples) * base
        ids = torch.stack([piece[:-1] for piece in held_out.pieces(longest)[: self.pieces]]).to(held_out.device)
        lengths = [m * base for m in self.multiples]
        return {"dtypes": list(DTYPES), "by_length": [model_overflow(model, ids[:, :n]) for n in lengths]}


@dataclass(frozen=True)
class Downstream:
    """Zero-shot accuracy from local benchmark files, by the harness that needs nothing else."""

    tasks: tuple[str, ...] = ("arc_easy", "hellaswag", "piqa", "sciq", "lambada_openai", "blimp")

    key = "downstream"

    def missing(self, bench: Path | None) -> str | None:
        try:
            for task in self.tasks:
                find_file(task, bench or Path("data/bench"))
        except FileNotFoundError as error:
            return f"{error}; say with --bench FOLDER where the benchmarks are (docs/evaluation.md)"
        return None

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]:
        tokenizer = tokenizer_of(held_out.folder, held_out.recipe.vocab_size)
        length = max(512, held_out.recipe.length)  # questions of bytes are longer than the smoke scale's training
        batch_tokens = 262_144 if held_out.device == "cuda" else 16_384
        found = {}
        for task in self.tasks:
            documents = read_documents(task, held_out.bench or Path("data/bench"), held_out.bench_documents)
            found[task] = evaluate_benchmark(model, tokenizer, task, documents, length, batch_tokens, held_out.dtype)
        return {"tasks": found}
