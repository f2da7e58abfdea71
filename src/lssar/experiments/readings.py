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

from lssar.evaluation.length import evaluate_length, held_out_documents, pieces_of
from lssar.evaluation.overflow import DTYPES, model_overflow
from lssar.model import GPT
from lssar.training.recipes import Recipe


@dataclass(frozen=True)
class HeldOut:
    """Held-out text for readings, the same for every arm of a scale."""

    folder: Path
    recipe: Recipe
    tokens: int
    """Of one reading."""
    device: str

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

    def read(self, model: GPT, held_out: HeldOut) -> dict[str, Any]: ...


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
class Length:
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
class Overflow:
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
