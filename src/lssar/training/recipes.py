"""Recipes: all settings of a training run as one dataclass, and the registry of named ones."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lssar.configs import check_fields
from lssar.context import exchange_of
from lssar.data.tasks import TASKS
from lssar.layouts import (
    UNIFORM,
    LayerConfig,
    Pattern,
    format_layout,
    mechanism_name,
    names_attention,
    parse_layout,
    parse_mechanisms,
)
from lssar.model import ModelConfig, model_config
from lssar.records import read_sealed_json
from lssar.specs import AttentionSpec
from lssar.training.powers import PowerSchedule

CONFIG = "config.json"
"""Of a run folder: recipe, model and environment."""

Schedule = Literal["cosine", "wsd", "constant"]
Optimiser = Literal["adamw", "muon"]
Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training run. Every field is a flag of `lssar train` and is stored in the run folder."""

    # model
    size: str = "124m"
    """Model size, a name of `lssar.model.SIZES`: tiny, 0.8m, 51m, 124m, ..."""
    attention: str = "lssar"
    """A name of `lssar specs`; `lssa+lssar` divides the heads of a layer between two."""
    layout: str = "uniform"
    """`uniform`: every layer is `attention`. `mixed`: three local softmax layers with a window of 128 and rotary
    positions, then one layer of `attention` without positions; `mixed@64` has another window, `mixed*7` seven local
    layers. Or any pattern, SPEC[@WINDOW][/rope|alibi|none][*TIMES] ..., e.g. `softmax@128*3 lssar/none`."""
    p: float | None = None
    """Another power for the re-weighting; also puts re-weighting on a mechanism that has none."""
    p_schedule: str | None = None
    """Powers during training: `3:0.4,7:0.7,15` is 3 for the first 40% of the steps, 7 up to 70%, then 15; `3..15:0.8`
    rises over the first 80%. The trained model has the last one."""
    position: Literal["rope", "alibi", "none"] = "rope"
    """Positions of a uniform layout; in other layouts each layer has its own."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    window: int | None = None
    """Sliding window of every layer of a uniform layout, in tokens; none if not given."""
    heads: int | None = None
    """Another number of heads than the size has; the width stays."""
    key_heads: int | None = None
    """Number of key and value heads (grouped queries); those of the size, if not given."""
    projection: Literal["plain", "tpa"] = "plain"
    """`tpa`: tensor-product attention, whose keys and values are low-rank."""
    # data
    data: str = ""
    """Folder with *_train_*.bin and *_val_*.bin (made by `lssar data`), or `stdlib`: Python's own source, as bytes."""
    vocab_size: int = 50257
    """Size of the vocabulary, for data without a manifest.json; otherwise the manifest decides."""
    length: int = 1024
    """Training length: tokens of context."""
    pack: bool = False
    """Documents do not attend to each other; otherwise they are concatenated, as in the paper."""
    retrieval_share: float = 0.0
    """Share of the training windows that are documents which ask for retrieval (see docs/evaluation.md)."""
    retrieval_tasks: tuple[str, ...] = ("passkey", "needles", "recall", "copy")
    """Tasks of those documents: passkey, needles, recall, copy."""
    # optimisation
    steps: int = 18_865
    """Optimiser steps."""
    batch_tokens: int = 524_288
    """Tokens of one step, over all processes and micro-batches."""
    micro_batch: int = 32
    """Sequences in one forward pass of one process."""
    optimiser: Optimiser = "adamw"
    """`muon`: Muon for the matrices of the blocks, AdamW for the rest."""
    lr: float = 6e-4
    """Largest learning rate."""
    warmup: int = 700
    """Steps over which the learning rate rises linearly."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up; cosine and wsd fall to 0 at the last step."""
    decay_share: float = 0.2
    """`wsd`: share of the steps at the end over which the rate falls to 0."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments of AdamW."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    # running
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16: autocast, weights and optimiser stay float32."""
    compile: bool = True
    """Use torch.compile."""
    parallel: Parallel = "ddp"
    """Under torchrun: replicate the model (ddp) or shard it (fsdp, FSDP2)."""
    context_parallel: int = 1
    """Number of processes that share each sequence in equal parts; it must divide the number of all processes."""
    checkpoint_layers: bool = False
    """Recompute activations in the backward pass, which saves memory and takes time."""
    eval_every: int = 250
    """Steps between evaluations on held-out data."""
    eval_batches: int = 20
    """Batches of held-out data in an evaluation."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep; older ones are deleted."""
    max_non_finite: int = 10
    """Training stops after this many consecutive steps with a non-finite loss or gradient."""
    skip_non_finite: bool = False
    """Leave out the optimiser step where loss or gradient is not finite."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            numbers = value if isinstance(value, tuple) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"{name} must be finite; got {value}")  # JSON has no other numbers
        for name in (
            "steps",
            "batch_tokens",
            "micro_batch",
            "length",
            "context_parallel",
            "eval_every",
            "eval_batches",
            "save_every",
            "keep",
            "max_non_finite",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.batch_tokens % self.length:
            raise ValueError(f"batch_tokens must be a multiple of length; got {self.batch_tokens} and {self.length}")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share must lie in 0..1; got {self.decay_share}")
        if not 0 <= self.retrieval_share <= 1:
            raise ValueError(f"retrieval_share must lie in 0..1; got {self.retrieval_share}")
        for task in self.retrieval_tasks:
            if task not in TASKS:
                raise ValueError(f"unknown retrieval task {task!r}; known: {', '.join(TASKS)}")
        if self.lr <= 0 or self.clip <= 0:
            raise ValueError(f"lr and clip must be positive; got {self.lr} and {self.clip}")
        if self.weight_decay < 0 or self.warmup < 0:
            raise ValueError(f"weight_decay and warmup must be 0 or more; got {self.weight_decay} and {self.warmup}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers, at least 0 and below 1; got {self.betas}")
        if not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be 0 or more and below 2**63; got {self.seed}")
        model = self.model()  # a bad combination is an error before anything is loaded
        if self.context_parallel > 1:
            for layer in model.layer_configs:
                key_heads = model.key_heads or model.heads
                exchange_of(self.context_parallel, self.length, model.heads, key_heads, model.head_size, layer.window)

    def model(self) -> ModelConfig:
        heads = {name: n for name in ("heads", "key_heads") if (n := getattr(self, name)) is not None}
        return model_config(
            self.size, **heads, **self._layers(), rope_base=self.rope_base,
            projection=self.projection, vocab_size=self.vocab_size, train_length=self.length,
            checkpoint_layers=self.checkpoint_layers,
        )  # fmt: skip

    def _layers(self) -> dict[str, Any]:
        """The fields of a ModelConfig that say what its layers are."""
        attention = self._attention()
        uniform = self.layout == UNIFORM
        if uniform:
            pattern: Pattern = (dataclasses.replace(attention, window=self.window, position=self.position),)
        elif self.window is not None or self.position != "rope":
            raise ValueError(
                f"layout {self.layout!r} has its own windows and positions; --window and --position do not apply"
            )
        else:
            pattern = parse_layout(self.layout, attention, self._final_power)
        pattern = tuple(layer.map(lambda s: s.replace(train_length=self.length)) for layer in pattern)
        if self.p_schedule is not None:
            for mechanism in (s for layer in pattern for s in layer.specs):
                self._check_final(mechanism)
            if all(s.p is None for layer in pattern for s in layer.specs):
                raise ValueError(f"p_schedule needs a mechanism that is re-weighted; got {format_layout(pattern)!r}")
        if uniform and len(attention.specs) == 1:
            return {"attention": pattern[0].spec, "window": self.window, "position": self.position}
        return {"pattern": pattern}

    def _attention(self) -> LayerConfig:
        """The mechanisms that `attention` and `p` describe."""
        layer = parse_mechanisms(self.attention, self._final_power)
        if self.p is None:
            return layer
        refuse_ignored("p", self.layout)
        if len(layer.specs) == 1:
            return layer.map(lambda s: s.replace(p=self.p))
        return layer.map(lambda s: s if s.p is None else s.replace(p=self.p))

    @property
    def _final_power(self) -> float | None:
        """The power that the schedule ends at, if there is one."""
        return None if self.p_schedule is None else PowerSchedule.parse(self.p_schedule).final

    def _check_final(self, mechanism: AttentionSpec) -> None:
        """ValueError if the mechanism names a power of its own that is not the last of the schedule."""
        if mechanism.p not in (None, final := self._final_power):
            raise ValueError(
                f"p = {mechanism.p:g} of {mechanism.name!r} contradicts p_schedule {self.p_schedule!r}, which ends at "
                f"{final:g}"
            )

    @property
    def mechanism(self) -> str:
        """The name of the run's mechanism: `attention`, or the layout if it has mechanisms of its own only."""
        return mechanism_name(self.attention, self.layout)

    def micro_steps(self, world: int) -> int:
        """Forwards of one process in one step, of `world` processes."""
        sequences, readers = self.batch_tokens // self.length, world // self.context_parallel
        if sequences % (readers * self.micro_batch):
            shared = "" if self.context_parallel == 1 else f"groups of {self.context_parallel} "
            raise ValueError(
                f"a step of {sequences} sequences does not divide into {readers} {shared}processes x "
                f"{self.micro_batch} sequences; change batch_tokens or micro_batch"
            )
        return sequences // (readers * self.micro_batch)

    def replace(self, **changes: Any) -> Recipe:
        return Recipe.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {name: list(getattr(self, name)) for name in _TUPLES}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Recipe:
        check_fields(cls, fields)
        values: dict[str, Any] = {key: tuple(value) if key in _TUPLES else value for key, value in fields.items()}
        return cls(**values)


_TUPLES = ("betas", "retrieval_tasks")
"""Fields that JSON keeps as lists."""
_SEEDS = 2**63
"""Seeds are 64-bit integers, with a sign."""
_ADDED = ("layout", "p_schedule", "context_parallel", "max_non_finite", "skip_non_finite")
"""Fields that version 0.1 did not have, which its stored recipes lack."""


RECIPES: dict[str, Recipe] = {
    # The paper: FineWeb-10B, 18,865 steps of 524,288 tokens (the settings of llm.c, whose step count it is).
    "gpt2-124m-fineweb": Recipe(data="data/fineweb10B"),
    "books-51m": Recipe(
        size="51m", data="data/books", steps=1_400, batch_tokens=65_536, micro_batch=32, lr=1e-3, warmup=100,
        eval_every=200, save_every=500,
    ),
    "books-124m": Recipe(
        size="124m", data="data/books", steps=1_600, batch_tokens=65_536, micro_batch=32, lr=8e-4, warmup=100,
        eval_every=200, save_every=500,
    ),
    # A quarter of the windows ask for retrieval, which small models do not learn from text alone. With Muon the tiny
    # model learns the passkey in 1,000 steps; with AdamW it does not.
    "retrieval-51m": Recipe(
        size="51m", data="data/books", steps=1_400, batch_tokens=65_536, micro_batch=64, optimiser="muon", lr=6e-4,
        warmup=100, retrieval_share=0.25, eval_every=200, save_every=500,
    ),
    "retrieval-tiny": Recipe(
        size="tiny", data="stdlib", vocab_size=257, length=128, steps=1_500, batch_tokens=2_048, micro_batch=16,
        optimiser="muon", lr=1e-3, warmup=50, dtype="float32", compile=False, retrieval_share=1.0,
        retrieval_tasks=("passkey",), eval_every=500, save_every=500,
    ),
    "tiny-cpu": Recipe(
        size="0.8m", data="stdlib", vocab_size=257, length=128, steps=600, batch_tokens=2_048, micro_batch=16, lr=3e-3,
        warmup=50, dtype="float32", compile=False, eval_every=100, save_every=200,
    ),
    # Long readers (docs/long-reader.md): three local softmax layers, then a global layer without positions. Cosine
    # softmax finds the most needles far back (docs/results-mixed.md); for LSSAR: --attention lssar --p-schedule ...
    "long-124m": Recipe(
        size="124m", layout="mixed", attention="cosine_softmax", data="data/books", steps=1_600, batch_tokens=65_536,
        micro_batch=32, optimiser="muon", lr=6e-4, warmup=100, retrieval_share=0.25,
        retrieval_tasks=("passkey", "needles", "recall"), eval_every=200, save_every=500,
    ),
    "long-33m": Recipe(
        size="33m", layout="mixed", attention="cosine_softmax", data="data/books", length=512, steps=900,
        batch_tokens=65_536, micro_batch=128, optimiser="muon", lr=6e-4, warmup=100, retrieval_share=0.25,
        retrieval_tasks=("passkey", "needles", "recall"), eval_every=300, save_every=300,
    ),
    # The plan of docs/scale.md: a Llama-shaped 1B on 100 billion tokens of FineWeb, sharded over 8 to 64 GPUs. For
    # cosine softmax: --attention cosine_softmax --p-schedule None.
    "long-1b-fineweb": Recipe(
        size="1b", layout="mixed", p_schedule="3:0.4,7:0.7,15", data="data/fineweb100B", length=2_048, steps=95_368,
        batch_tokens=1_048_576, micro_batch=8, lr=4e-4, warmup=2_000, parallel="fsdp", eval_every=500, save_every=2_000,
    ),
    "long-tiny": Recipe(
        size="0.8m", heads=2, layout="mixed@32", attention="cosine_softmax", data="stdlib", vocab_size=257,
        length=128, steps=1_500, batch_tokens=4_096, micro_batch=32, optimiser="muon", lr=1e-3, warmup=50,
        dtype="float32", compile=False, retrieval_share=0.3, retrieval_tasks=("passkey", "needles"), eval_every=250,
        save_every=250,
    ),
    "long-6m": Recipe(
        size="6m", layout="mixed", attention="cosine_softmax", data="data/books-4k",
        vocab_size=4_096, length=512, steps=1_500, batch_tokens=65_536, micro_batch=128, optimiser="muon", lr=1.5e-3,
        warmup=100, retrieval_share=0.25, retrieval_tasks=("passkey", "needles", "recall"), eval_every=500,
        save_every=1_000,
    ),
}  # fmt: skip


def recipe(name: str, **changes: Any) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    made = RECIPES[name].replace(**changes)
    if "attention" in changes:
        refuse_ignored("attention", made.layout)
    return made


def refuse_ignored(field: str, layout: str) -> None:
    """ValueError if `field`, which somebody gave, would change nothing in a model of this layout.

    A recipe cannot tell an `attention` that was given from its default, so those who make one of flags ask.
    """
    if not names_attention(layout):
        raise ValueError(f"layout {layout!r} has its own mechanisms; --{field} does not apply")


def read_recipe(folder: Path) -> Recipe:
    """The recipe that a run folder was trained with."""
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no run folder: it has no {CONFIG}")
    return recipe_in(read_sealed_json(path), path, f"not the {CONFIG} of a run")


def recipe_in(record: dict[str, Any], path: Path, otherwise: str) -> Recipe:
    """The recipe in the JSON object of a file; `otherwise` says in the error what a file without one is."""
    fields = record.get("recipe")
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: no recipe in it; {otherwise}, or damaged")
    try:
        stored = Recipe.from_dict(fields)
        if missing := [field.name for field in dataclasses.fields(Recipe) if field.name not in {*fields, *_ADDED}]:
            raise ValueError(f"the recipe lacks {', '.join(missing)}; the file is damaged")
        return stored
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def power(r: Recipe, step: int) -> float | None:
    """Power of the re-weighting in the given step, counted from 0; None: each mechanism's own, throughout."""
    return None if r.p_schedule is None else PowerSchedule.parse(r.p_schedule).at(step, r.steps)


def learning_rate(r: Recipe, step: int) -> float:
    """Rate of the given step, counted from 0: linear warm-up, then the schedule, to 0 after the last step."""
    if step < r.warmup:
        return r.lr * (step + 1) / r.warmup
    left = (r.steps - step) / max(1, r.steps - r.warmup)
    match r.schedule:
        case "cosine":
            return r.lr * 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case "wsd":
            return r.lr * min(1.0, (r.steps - step) / max(1.0, r.decay_share * r.steps))
        case _:
            return r.lr
