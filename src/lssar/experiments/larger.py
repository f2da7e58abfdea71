"""Larger models and more tokens.

`larger`: 124M parameters with retrieval documents in training, as in the experiment `mixed`, evaluated to 64 times the
training length; `larger-downstream`: the same models on zero-shot benchmarks. `budget`: the models of the paper's
tables (51M at scale h200) on more tokens; a budget of 1 is that of the tables, so its arms are shared with them. The
uniform rows, which decide the claim, are trained first.
"""

from typing import Any

from lssar.experiments.arms import Experiment, Row, ScaleName
from lssar.experiments.evaluations import Benchmarks, Length, Retrieval
from lssar.experiments.mixed import ANNEALED, MIXED, SHARP

Model = tuple[str, str, str, str | None]
"""Label, mechanism, layout and power schedule."""

LARGE: tuple[Model, ...] = (
    ("uniform softmax", "softmax", "uniform", None),
    ("mixed, cosine softmax", "cosine_softmax", MIXED, None),
    ("mixed, LSSAR annealed to 31", "lssar", MIXED, SHARP),
)
FAR_BACK = tuple(Retrieval(task=task, multiples=(1, 16, 64), questions=40) for task in ("passkey", "needles", "recall"))


def _row(model: Model, *scales: ScaleName, **others: Any) -> Row:
    label, attention, layout, schedule = model
    return Row(label=label, attention=attention, layout=layout, p_schedule=schedule, scales=scales, **others)


LARGER = Experiment(
    name="larger",
    title="124M parameters",
    question="Do mixed layouts keep in a larger model what they gain in a small one?",
    draw="far",
    page="results-mixed",
    at=(1, 4, 16, 64),
    rows=tuple(_row(model, "h200", setting="large", evaluation=Length(to=64), also=FAR_BACK) for model in LARGE),
)
LARGER_DOWNSTREAM = Experiment(
    name="larger-downstream",
    title="124M parameters: zero-shot accuracy",
    question="Do common zero-shot benchmarks tell the layouts apart?",
    draw="accuracy",
    page="results-mixed",
    rows=tuple(_row(model, "h200", setting="large", evaluation=Benchmarks()) for model in LARGE),
)

BUDGETS = (1, 2, 4, 8)
SOFTMAX, FIXED, RAISED = "softmax", "LSSAR, p = 15", "LSSAR annealed"
SMALL: tuple[Model, ...] = (
    (SOFTMAX, "softmax", "uniform", None),
    (FIXED, "lssar", "uniform", None),
    (RAISED, "lssar", "uniform", ANNEALED),
    ("mixed, LSSAR annealed", "lssar", MIXED, ANNEALED),
)


def budget_label(label: str, budget: int) -> str:
    return label if budget == 1 else f"{label}, {budget}x the tokens"


BUDGET = Experiment(
    name="budget",
    title="More tokens",
    question="Does LSSAR reach softmax at the training length with more tokens, or with a power that rises?",
    page="results-mixed",
    at=(1, 4, 16, 64),
    rows=tuple(
        _row(
            (budget_label(model[0], budget), *model[1:]), "laptop", "h200",
            budget=budget, rank=rank + (model[2] == MIXED), evaluation=Length(to=64),
        )
        for rank, budget in enumerate(BUDGETS)
        for model in SMALL
    ),
)  # fmt: skip
