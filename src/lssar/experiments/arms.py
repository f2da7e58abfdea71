"""Experiments, their rows, and the arms (training runs) that fill them.

A row names a mechanism and an evaluation; a scale gives the recipe. An arm is identified by its content, not by the
experiment that needs it: softmax with one recipe and seed is trained once, and every evaluation that any experiment
needs is made while its weights exist.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lssar.experiments.evaluations import Evaluation, Length
from lssar.specs import AttentionSpec, spec
from lssar.training.recipes import Recipe, recipe

NOT_CONTENT = (
    "data", "micro_batch", "compile", "parallel", "checkpoint_layers", "eval_every", "eval_batches", "save_every",
    "keep",
)  # fmt: skip
"""Recipe fields that do not change the result of a run. Of the data, the name counts, not the folder."""

Position = Literal["rope", "alibi"]
ScaleName = Literal["smoke", "laptop", "h200", "paper"]
Draw = Literal["bars", "curves", "sweep", "training", "rates", "accuracy"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a mechanism, trained and evaluated in one way."""

    label: str
    attention: str
    p: float | None = None
    """Power that is trained in; re-weighting applied after training belongs to the evaluation."""
    position: Position = "rope"
    evaluation: Evaluation = field(default_factory=Length)
    mixture: bool = False
    """Train on text mixed with retrieval documents."""
    seeds: int = 1
    paper: str | None = None
    """The matching row of the paper's table, if there is one."""
    also: tuple[Evaluation, ...] = ()
    """Further evaluations of the same arms, shown in separate tables."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return (self.evaluation, *self.also)

    def spec(self) -> AttentionSpec:
        return spec(self.attention, **({} if self.p is None else {"p": self.p}))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure: its question, its rows, and how it is drawn."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]
    draw: Draw = "curves"
    at: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Multiples of the training length shown in the table."""
    measure: Callable[[], Any] | None = None
    """Further results that need no training."""

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(set(labels)) != len(labels):
            raise ValueError(f"{self.name}: rows must have distinct labels; got {labels}")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of an experiment: the recipe that all arms start from, seeds, and tokens of an evaluation."""

    name: str
    recipe_name: str
    base: Recipe
    """That recipe, with the scale's changes."""
    data: str
    """Name of the data; part of an arm's identity, unlike its folder."""
    most_seeds: int
    eval_tokens: int
    """Held-out tokens of one evaluation, cut into pieces of its longest length."""
    results: Path
    """Folder of the arms' JSON files."""
    runs: Path
    """Folder of checkpoints, which may be deleted once the results exist."""
    mixture: dict[str, Any]
    """Changes to the recipe for arms that learn retrieval."""
    bench_documents: int | None = None
    """At most this many documents of each benchmark."""
    evaluate_all: bool = True
    """Make every evaluation that any experiment needs while the weights of an arm exist."""
    processes: int = 1
    """Processes under torchrun; 1: the queue trains the arm itself."""
    remark: str = ""
    """A caveat, shown above the results."""

    def with_tokens(self, tokens: int) -> Scale:
        """The same scale with another token budget per arm, which is part of the arms' identity."""
        steps = tokens // self.base.batch_tokens
        if steps < 1:
            raise ValueError(f"--tokens must be at least one step of {self.base.batch_tokens:,}; got {tokens:,}")
        base = self.base.replace(steps=steps, warmup=min(self.base.warmup, steps // 4))
        return dataclasses.replace(self, base=base, mixture={k: v for k, v in self.mixture.items() if k != "steps"})

    @property
    def tables(self) -> Path:
        """Folder of the experiments' tables; another token budget has its own folder."""
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
    """One training run, identified by its content, and the evaluations that are wanted of it."""

    recipe: Recipe
    data: str
    evaluations: tuple[Evaluation, ...] = field(default=(), compare=False)

    @property
    def content(self) -> dict[str, Any]:
        """Everything that decides the result. Fields at their defaults are left out: new fields change no old key."""
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
    """Fields in which one recipe differs from another, and its number of steps."""
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
            eval_tokens=16_384,
            bench_documents=50,
            evaluate_all=False,
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
            eval_tokens=49_152,
            bench_documents=200,
            results=Path("results/laptop"),
            runs=Path("runs/laptop"),
            remark=(
                "The model has one head of 128, because small heads make the loss of cosine mechanisms rise with "
                "length ([training.md](training.md)); ALiBi, which is designed for several heads, then has a single, "
                "gentle slope. The arms of `passkey` are smaller still (0.1M, four heads of 16). Seeds differ by more "
                "than the bounds of some rules (± in the tables), so a verdict from one seed is weak."
            ),
        ),
        Scale(
            name="h200",
            recipe_name="books-51m",
            base=recipe("books-51m", steps=640, eval_every=320, save_every=320, keep=1),  # 41.9M tokens
            mixture=changes_of("retrieval-51m", "books-51m"),
            data="books",
            most_seeds=3,
            eval_tokens=786_432,
            bench_documents=2000,
            results=Path("results/h200"),
            runs=Path("runs/h200"),
        ),
        Scale(
            name="paper",
            recipe_name="gpt2-124m-fineweb",
            base=recipe("gpt2-124m-fineweb"),
            data="fineweb10B",
            mixture={},  # the paper trains on text only
            most_seeds=3,
            eval_tokens=4_194_304,
            results=Path("results/paper"),
            runs=Path("runs/paper"),
            processes=8,
        ),
    )
}  # fmt: skip


def arms_of(wanted: Iterable[Experiment], scale: Scale, everything: Iterable[Experiment] = ()) -> list[Arm]:
    """The arms of the wanted experiments, first seeds first, with their evaluations and those of `everything`."""
    wanted = list(wanted)
    evaluations: dict[Arm, dict[str, Evaluation]] = {}
    for experiment in [*wanted, *everything] if scale.evaluate_all else wanted:
        for row in experiment.rows:
            for seed in range(min(row.seeds, scale.most_seeds)):
                kept = evaluations.setdefault(scale.arm(row, seed), {})
                kept.update((evaluation.key, evaluation) for evaluation in row.evaluations)
    order = [
        scale.arm(row, seed)
        for seed in range(scale.most_seeds)
        for experiment in wanted
        for row in experiment.rows
        if seed < min(row.seeds, scale.most_seeds)
    ]
    return [dataclasses.replace(arm, evaluations=tuple(evaluations[arm].values())) for arm in dict.fromkeys(order)]
