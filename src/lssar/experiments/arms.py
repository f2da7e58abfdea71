"""What an experiment declares: rows, each an arm (a run of training, three seeds perhaps) read in some way.

A row names a mechanism and a reading; a scale gives the recipe. An arm is known by its content, not by the experiment
that wants it: softmax with the same recipe and seed is trained once, and read in every way that any experiment asks for
while its weights are there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lssar.experiments.readings import Length, Reading
from lssar.specs import AttentionSpec, spec
from lssar.training.recipes import Recipe, recipe

NOT_CONTENT = (
    "data", "micro_batch", "compile", "parallel", "checkpoint_layers", "eval_every", "eval_batches", "save_every",
    "keep",
)  # fmt: skip
"""Fields of a recipe that decide how a run is done, not what comes out; of the data, the name counts, not the place."""

Position = Literal["rope", "alibi"]
ScaleName = Literal["smoke", "laptop", "h200", "paper"]
Draw = Literal["bars", "curves", "sweep", "training", "rates", "accuracy"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: a mechanism, trained and read in one way."""

    label: str
    attention: str
    p: float | None = None
    """Trained in; a re-weighting that is put on after training belongs to the reading."""
    position: Position = "rope"
    reading: Reading = field(default_factory=Length)
    mixture: bool = False
    """Trained on text with documents mixed in that ask for retrieval."""
    seeds: int = 1
    paper: str | None = None
    """The row of the paper's table with the same name as the experiment, if it has one."""
    also: tuple[Reading, ...] = ()
    """Further readings of the same arms, shown in tables of their own."""

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (self.reading, *self.also)

    def spec(self) -> AttentionSpec:
        return spec(self.attention, **({} if self.p is None else {"p": self.p}))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure: what it asks, its rows, and how it is drawn."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]
    draw: Draw = "curves"
    at: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Multiples of the training length that its table shows."""
    measure: Callable[[], Any] | None = None
    """Further figures, which need no training."""

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(set(labels)) != len(labels):
            raise ValueError(f"{self.name}: rows must have labels of their own; got {labels}")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How big: the recipe that all arms start from, how many seeds at most, and how much is read."""

    name: str
    recipe_name: str
    base: Recipe
    """That recipe, with the scale's changes."""
    data: str
    """Name of the data; part of an arm's identity, unlike the folder it lies in."""
    most_seeds: int
    read_tokens: int
    """Held-out tokens of one reading: as many pieces of its longest length as that makes."""
    results: Path
    """Folder of the arms' JSON files."""
    runs: Path
    """Folder of checkpoints, which may be deleted once the results are there."""
    mixture: dict[str, Any]
    """What changes in the recipe of an arm that is to learn retrieval."""
    bench_documents: int | None = None
    """Of each benchmark at most."""
    read_all: bool = True
    """Read an arm in every way that any experiment asks for, while its weights are there: they may soon be gone."""
    processes: int = 1
    """Under torchrun; 1: the queue trains by itself."""
    remark: str = ""
    """What to bear in mind when its results are read."""

    def with_tokens(self, tokens: int) -> Scale:
        """The same with another budget an arm; part of the recipe, so of the arms' identity."""
        steps = tokens // self.base.batch_tokens
        if steps < 1:
            raise ValueError(f"--tokens must be at least one step of {self.base.batch_tokens:,}; got {tokens:,}")
        base = self.base.replace(steps=steps, warmup=min(self.base.warmup, steps // 4))
        return dataclasses.replace(self, base=base, mixture={k: v for k, v in self.mixture.items() if k != "steps"})

    @property
    def tables(self) -> Path:
        """Folder of the experiments' tables; another budget than the scale's own has one of its own."""
        usual = self.base.steps == SCALES[self.name].base.steps
        return self.results / ("tables" if usual else f"tables-{self.base.steps * self.base.batch_tokens}")

    def recipe(self, row: Row, seed: int) -> Recipe:
        p = None if row.p == spec(row.attention).p else row.p  # lssar with p = 15 is lssar
        mixture = self.mixture if row.mixture else {}
        return self.base.replace(attention=row.attention, p=p, position=row.position, seed=seed, **mixture)

    def arm(self, row: Row, seed: int) -> Arm:
        return Arm(recipe=self.recipe(row, seed), data=self.data)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of training, known by its content, and all readings that are wanted of it."""

    recipe: Recipe
    data: str
    readings: tuple[Reading, ...] = field(default=(), compare=False)

    @property
    def content(self) -> dict[str, Any]:
        """What decides the outcome; fields at their defaults are left out, so that new ones change no old key."""
        default = Recipe().to_dict()
        fields = {k: v for k, v in self.recipe.to_dict().items() if k not in NOT_CONTENT and v != default[k]}
        return {**fields, "data": self.data}

    @property
    def key(self) -> str:
        digest = hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.name}-seed{self.recipe.seed}-{digest}"

    @property
    def name(self) -> str:
        r = self.recipe
        power = f"-p{r.p:g}" if r.p is not None else ""
        marks = (("-alibi", r.position == "alibi"), ("-retrieval", r.retrieval_share > 0))
        return r.attention + power + "".join(mark for mark, on in marks if on)


def changes_of(name: str, base: str) -> dict[str, Any]:
    """What a recipe has otherwise than another, how long it trains included."""
    ours, theirs = recipe(name), recipe(base)
    changed = (f.name for f in dataclasses.fields(Recipe) if getattr(ours, f.name) != getattr(theirs, f.name))
    return {name: getattr(ours, name) for name in (*changed, "steps")}


SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            name="smoke",
            recipe_name="tiny-cpu",
            base=recipe(
                "tiny-cpu", size="tiny", length=64, micro_batch=32, steps=200, warmup=20, eval_every=200,
                eval_batches=8, save_every=50, keep=1,
            ),
            data="stdlib",
            mixture={
                "retrieval_share": 1.0, "retrieval_tasks": ["passkey"], "length": 128, "micro_batch": 16, "lr": 5e-3,
                "steps": 1000,
            },
            most_seeds=1,
            read_tokens=16_384,
            bench_documents=50,
            read_all=False,
            results=Path("out/reproduce/smoke/results"),
            runs=Path("out/reproduce/smoke/runs"),
        ),
        Scale(
            name="laptop",
            recipe_name="tiny-cpu",
            base=recipe("tiny-cpu", eval_every=300, save_every=300, keep=1),
            data="stdlib",
            mixture=changes_of("retrieval-tiny", "tiny-cpu"),
            most_seeds=3,
            read_tokens=49_152,
            bench_documents=200,
            results=Path("results/laptop"),
            runs=Path("runs/laptop"),
            remark=(
                "The model has one head of 128, because small heads make the loss of cosine mechanisms rise with "
                "length ([training.md](training.md)); ALiBi, which is made for several heads, then has a single, "
                "gentle slope. The arms of `passkey` are smaller still (0.1M, four heads of 16). Seeds differ by more "
                "than the bounds of some rules (± in the tables), so a verdict that rests on one seed is weak."
            ),
        ),
        Scale(
            name="h200",
            recipe_name="books-51m",
            base=recipe("books-51m", steps=640, eval_every=320, save_every=320, keep=1),  # 41.9M tokens
            mixture=changes_of("retrieval-51m", "books-51m"),
            data="books",
            most_seeds=3,
            read_tokens=786_432,
            bench_documents=2000,
            results=Path("results/h200"),
            runs=Path("runs/h200"),
        ),
        Scale(
            name="paper",
            recipe_name="gpt2-124m-fineweb",
            base=recipe("gpt2-124m-fineweb"),
            data="fineweb10B",
            mixture={},  # the paper trains on text alone
            most_seeds=3,
            read_tokens=4_194_304,
            results=Path("results/paper"),
            runs=Path("runs/paper"),
            processes=8,
        ),
    )
}  # fmt: skip


def arms_of(wanted: Iterable[Experiment], scale: Scale, everything: Iterable[Experiment] = ()) -> list[Arm]:
    """The arms of the wanted experiments, first seeds first, with their readings and those of `everything`."""
    wanted = list(wanted)
    readings: dict[Arm, dict[str, Reading]] = {}
    for experiment in [*wanted, *everything] if scale.read_all else wanted:
        for row in experiment.rows:
            for seed in range(min(row.seeds, scale.most_seeds)):
                kept = readings.setdefault(scale.arm(row, seed), {})
                kept.update((reading.key, reading) for reading in row.readings)
    order = [
        scale.arm(row, seed)
        for seed in range(scale.most_seeds)
        for experiment in wanted
        for row in experiment.rows
        if seed < min(row.seeds, scale.most_seeds)
    ]
    return [dataclasses.replace(arm, readings=tuple(readings[arm].values())) for arm in dict.fromkeys(order)]
