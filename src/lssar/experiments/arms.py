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
from lssar.specs import spec
from lssar.training.powers import PowerSchedule
from lssar.training.recipes import Recipe, recipe

NOT_CONTENT = (
    "data", "micro_batch", "compile", "parallel", "context_parallel", "checkpoint_layers", "eval_every", "eval_batches",
    "save_every", "keep",
)  # fmt: skip
"""Recipe fields that do not change the result of a run. Of the data, the name counts, not the folder."""

Position = Literal["rope", "alibi"]
ScaleName = Literal["smoke", "laptop", "h200", "paper"]
Draw = Literal["bars", "curves", "sweep", "training", "rates", "accuracy", "far"]
Setting = Literal["text", "retrieval", "long", "large"]
"""`text`: the recipe of the scale. `retrieval`: with retrieval documents mixed in. `long`: at a short length, with
retrieval documents, evaluated to the farthest multiple of the scale. `large`: a larger model, with retrieval
documents."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a mechanism, trained and evaluated in one way."""

    label: str
    attention: str
    p: float | None = None
    """Power that is trained in; re-weighting applied after training belongs to the evaluation."""
    position: Position = "rope"
    layout: str = "uniform"
    """As in a recipe, with {window}, {half} and {double} for the local window of the scale, half of it and twice it."""
    p_schedule: str | None = None
    evaluation: Evaluation = field(default_factory=Length)
    setting: Setting = "text"
    budget: int = 1
    """Training steps as a multiple of those of the scale."""
    seeds: int = 1
    rank: int = 0
    """Arms of a lower rank are trained first, all seeds included."""
    scales: tuple[ScaleName, ...] = ("smoke", "laptop", "h200", "paper")
    """Where the row exists: a pattern of eight layers does not fit a model of four."""
    paper: str | None = None
    """The matching row of the paper's table, if there is one."""
    also: tuple[Evaluation, ...] = ()
    """Further evaluations of the same arms, shown in separate tables."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return (self.evaluation, *self.also)


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
    page: str = "results"
    """Page of the documentation that shows it: docs/PAGE.md, or docs/PAGE-SCALE.md."""
    measure: Callable[[], Any] | None = None
    """Further results that need no training."""

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(set(labels)) != len(labels):
            raise ValueError(f"{self.name}: rows must have distinct labels; got {labels}")

    def rows_at(self, scale: Scale) -> list[Row]:
        """The rows that exist at a scale."""
        return [row for row in self.rows if scale.name in row.scales and row.setting in ("text", *scale.settings)]


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
    settings: dict[str, dict[str, Any]]
    """Changes to the recipe by the setting of a row; a setting that is not listed does not exist at this scale."""
    window: int = 128
    """Window of the local layers of mixed layouts."""
    farthest: int = 64
    """Largest multiple of the training length for the `long` setting."""
    far_tokens: int = 131_072
    """Held-out tokens of an evaluation of loss in the `long` setting."""
    most_questions: int | None = None
    """About the largest number of questions in a cell, for a scale that only shows that everything runs."""
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
        settings = {
            name: changes | {"steps": max(1, tokens // changes.get("batch_tokens", self.base.batch_tokens))}
            for name, changes in self.settings.items()
        }
        return dataclasses.replace(self, base=base, settings=settings)

    @property
    def tables(self) -> Path:
        """Folder of the experiments' tables; another token budget has its own folder."""
        usual = self.base.steps == SCALES[self.name].base.steps
        return self.results / ("tables" if usual else f"tables-{self.base.steps * self.base.batch_tokens}")

    def recipe(self, row: Row, seed: int) -> Recipe:
        p = None if row.p is None or row.p == spec(row.attention).p else row.p  # lssar with p = 15 is lssar
        layout = row.layout.format(window=self.window, half=self.window // 2, double=2 * self.window)
        own = {"attention": row.attention, "p": p, "position": row.position, "layout": layout, "seed": seed}
        changes = {} if row.setting == "text" else self.settings[row.setting]
        steps = row.budget * changes.get("steps", self.base.steps)
        return self.base.replace(**{**changes, **own, "p_schedule": row.p_schedule, "steps": steps})

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
        words = [r.attention, *([f"p{r.p:g}"] if r.p is not None else [])]
        if r.layout != "uniform":
            words.append(r.layout.replace("*", "x").replace("/", "-").replace(" ", "_"))
        if r.p_schedule is not None:
            words.append(
                ("ramp" if ".." in r.p_schedule else "annealed") + f"{PowerSchedule.parse(r.p_schedule).final:g}"
            )
        marks = (("alibi", r.position == "alibi"), ("retrieval", r.retrieval_share > 0))
        return "-".join([*words, *(mark for mark, on in marks if on)])


def changes_of(name: str, base: str) -> dict[str, Any]:
    """Fields in which one recipe differs from another, and its number of steps; without those that a row sets."""
    ours, theirs = recipe(name), recipe(base)
    changed = [f.name for f in dataclasses.fields(Recipe) if getattr(ours, f.name) != getattr(theirs, f.name)]
    of_rows = ("attention", "p", "position", "layout", "p_schedule", "data", "seed")
    return {name: getattr(ours, name) for name in (*changed, "steps") if name not in of_rows}


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
            settings={
                "retrieval": {
                    "retrieval_share": 1.0, "retrieval_tasks": ["passkey"], "length": 128, "micro_batch": 16,
                    "lr": 5e-3, "steps": 1000,
                },
                "long": changes_of("long-tiny", "tiny-cpu") | {
                    "size": "0.8m", "length": 128, "micro_batch": 8, "batch_tokens": 1024, "steps": 20, "warmup": 5,
                    "eval_batches": 2,
                },
            },
            window=32,
            farthest=16,
            far_tokens=8_192,
            most_questions=10,
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
            settings={
                "retrieval": changes_of("retrieval-tiny", "tiny-cpu"),
                "long": changes_of("long-tiny", "tiny-cpu"),
            },
            window=32,
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
            settings={
                "retrieval": changes_of("retrieval-51m", "books-51m"),
                "long": changes_of("long-33m", "books-51m") | {"eval_every": 450, "save_every": 450},
                "large": changes_of("long-124m", "books-51m") | {"eval_every": 800, "save_every": 800},
            },
            farthest=512,
            far_tokens=2_097_152,
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
            settings={"retrieval": {}},  # the paper trains on text only
            most_seeds=3,
            eval_tokens=4_194_304,
            results=Path("results/paper"),
            runs=Path("runs/paper"),
            processes=8,
        ),
    )
}  # fmt: skip


def arms_of(wanted: Iterable[Experiment], scale: Scale, everything: Iterable[Experiment] = ()) -> list[Arm]:
    """The arms of the wanted experiments, by rank, then by seed, with their evaluations and those of `everything`."""
    wanted = list(wanted)
    evaluations: dict[Arm, dict[str, Evaluation]] = {}
    for experiment in [*wanted, *everything] if scale.evaluate_all else wanted:
        for row in experiment.rows_at(scale):
            for seed in range(min(row.seeds, scale.most_seeds)):
                kept = evaluations.setdefault(scale.arm(row, seed), {})
                kept.update((evaluation.key, evaluation) for evaluation in row.evaluations)
    rows = [row for experiment in wanted for row in experiment.rows_at(scale)]
    order = [
        scale.arm(row, seed)
        for rank in sorted({row.rank for row in rows})
        for seed in range(scale.most_seeds)
        for row in rows
        if row.rank == rank and seed < min(row.seeds, scale.most_seeds)
    ]
    return [dataclasses.replace(arm, evaluations=tuple(evaluations[arm].values())) for arm in dict.fromkeys(order)]
