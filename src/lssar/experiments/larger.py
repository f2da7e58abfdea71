"""Larger models and more tokens, for one GPU.

`larger`: 124M parameters with retrieval documents in training, as in the experiment `mixed`, evaluated to 64 times the
training length; `larger-downstream`: the same models on zero-shot benchmarks. `budget`: the 51M models of the paper's
tables on more tokens; a budget of 1 is that of the tables, so its arms are shared with them.
"""

from lssar.experiments.arms import Experiment, Row, ScaleName
from lssar.experiments.evaluations import Benchmarks, Evaluation, Length, Retrieval

SHARP = "3:0.3,7:0.55,15:0.8,31"
"""The power schedule whose LSSAR finds the most needles in the experiment `mixed`."""
ANNEALED = "3:0.4,7:0.7,15"
ON_GPU: tuple[ScaleName, ...] = ("h200",)

MODELS = (
    ("uniform softmax", "softmax", "uniform", None),
    ("mixed, cosine softmax", "cosine_softmax", "mixed@{window}", None),
    ("mixed, LSSAR annealed to 31", "lssar", "mixed@{window}", SHARP),
)
FAR_BACK = tuple(Retrieval(task=task, multiples=(1, 16, 64), questions=40) for task in ("passkey", "needles", "recall"))


def _large(evaluation: Evaluation, also: tuple[Evaluation, ...] = ()) -> tuple[Row, ...]:
    return tuple(
        Row(
            label=label, attention=attention, layout=layout, p_schedule=schedule, setting="large", scales=ON_GPU,
            evaluation=evaluation, also=also,
        )
        for label, attention, layout, schedule in MODELS
    )  # fmt: skip


LARGER = Experiment(
    name="larger",
    title="124M parameters",
    question="Do mixed layouts keep in a larger model what they gain in a small one?",
    draw="far",
    page="results-mixed",
    at=(1, 4, 16, 64),
    rows=_large(Length(to=64), FAR_BACK),
)
LARGER_DOWNSTREAM = Experiment(
    name="larger-downstream",
    title="124M parameters: zero-shot accuracy",
    question="Do common zero-shot benchmarks tell the layouts apart?",
    draw="accuracy",
    page="results-mixed",
    rows=_large(Benchmarks()),
)

BUDGETS = (1, 2, 4, 8)
SOFTMAX, FIXED, RAISED = "softmax", "LSSAR, p = 15", "LSSAR annealed"


def budget_label(label: str, budget: int) -> str:
    return label if budget == 1 else f"{label}, {budget}x the tokens"


BUDGET = Experiment(
    name="budget",
    title="More tokens",
    question="Does LSSAR reach softmax at the training length with more tokens, or with a power that rises?",
    page="results-mixed",
    at=(1, 4, 16, 64),
    rows=tuple(
        Row(
            label=budget_label(label, budget), attention=attention, layout=layout, p_schedule=schedule, budget=budget,
            evaluation=Length(to=64), rank=rank, scales=ON_GPU,
        )
        for rank, budget in enumerate(BUDGETS)
        for label, attention, layout, schedule in (
            (SOFTMAX, "softmax", "uniform", None),
            (FIXED, "lssar", "uniform", None),
            (RAISED, "lssar", "uniform", ANNEALED),
            ("mixed, LSSAR annealed", "lssar", "mixed@{window}", ANNEALED),
        )
    ),
)  # fmt: skip
