"""The experiment `mixed`: local layers with rotary positions and a window, global layers without positions.

Trained at a short length (512 tokens at scale h200), evaluated to 512 times of it: loss by length on held-out documents
that are joined, passkeys, needles in real text, and recall. Rows with three seeds decide the claims m1 to m5
(`mixed_claims.py`); rows with one explain them: other mechanisms in the global layers, other powers and schedules,
windows, patterns and positions.

What the questions of a cell share: a passkey has a context of its own; up to 8 needles and 16 pairs to recall share a
context, and the intervals count contexts as clusters (`lssar.evaluation.retrieval`). Every arm gets the same contexts
and the same pieces of text.
"""

from __future__ import annotations

from typing import Any

from lssar.experiments.arms import Experiment, Row, ScaleName
from lssar.experiments.evaluations import Length, Retrieval

DECIDING, EXPLAINING = 100, 40
"""Questions at each length, for rows that decide a claim and for rows that explain one. From 256 times the training
length on a seed is asked a third of the passkeys (`evaluations.POOLED_FROM`)."""

ANNEALED, SHARP = "3:0.4,7:0.7,15", "3:0.3,7:0.55,15:0.8,31"
MIXED = "mixed@{window}"
ON_CPU: tuple[ScaleName, ...] = ("smoke", "laptop")


def _row(
    label: str, attention: str, layout: str = MIXED, *, seeds: int = 1, rank: int | None = None,
    questions: int | None = None, **changes: Any,
) -> Row:  # fmt: skip
    questions = questions or (DECIDING if seeds > 1 else EXPLAINING)
    also = tuple(Retrieval(task=task, multiples=None, questions=questions) for task in ("passkey", "needles", "recall"))
    return Row(
        label=label, attention=attention, layout=layout, setting="long", seeds=seeds,
        rank=3 * (seeds == 1) if rank is None else rank,
        evaluation=Length(to=None), also=also, **changes,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="mixed",
    title="Mixed layouts: train short, evaluate long",
    question=(
        "Do local layers with global layers between them keep the loss and find what is far back, and which mechanism "
        "is best in the global layers?"
    ),
    draw="far",
    page="results-mixed",
    at=(1, 4, 16, 64, 256, 512),
    rows=(
        # What decides: three seeds.
        _row("uniform softmax", "softmax", "uniform", seeds=3),
        _row("mixed, LSSAR annealed", "lssar", p_schedule=ANNEALED, seeds=3),
        _row("mixed, LSSA + LSSAR annealed", "lssa+lssar", p_schedule=ANNEALED, seeds=3),
        _row("mixed, cosine softmax", "cosine_softmax", seeds=3),
        _row("mixed, SSMax", "ssmax", seeds=3),
        _row("mixed, cosine softmax, twice the tokens", "cosine_softmax", budget=2, seeds=3, rank=1),
        _row("uniform softmax, twice the tokens", "softmax", "uniform", budget=2, seeds=3, rank=2),
        # Other mechanisms in the global layers, and a power that is high from the start.
        _row("mixed, LSSAR, p = 15 fixed", "lssar", seeds=3, questions=EXPLAINING, rank=0),
        _row("mixed, LSSAR annealed to 31", "lssar", p_schedule=SHARP, seeds=3, questions=EXPLAINING, rank=1),
        _row("mixed, softmax", "softmax"),
        _row("mixed, LSSA", "lssa"),
        # Without the layout: last, because evaluating these takes longer than training them.
        _row("uniform LSSAR, p = 15 (the paper)", "lssar", "uniform", rank=4),
        _row("uniform LSSAR annealed", "lssar", "uniform", p_schedule=ANNEALED, rank=4),
        _row("uniform cosine softmax", "cosine_softmax", "uniform", rank=4),
        _row("uniform softmax, ALiBi", "softmax", "uniform", position="alibi", rank=4),
        _row("window in all layers", "softmax", "attention@{window}"),
        # Parts of the layout, with the mechanism that the recipes have.
        _row("rotary in the global layer", "cosine_softmax", "softmax@{window}*3 attention"),
        _row("half the window", "cosine_softmax", "mixed@{half}"),
        _row("twice the window", "cosine_softmax", "mixed@{double}"),
        _row("1 local : 1 global", "cosine_softmax", "mixed@{window}*1"),
        _row("7 local : 1 global", "cosine_softmax", "mixed@{window}*7", scales=("h200",)),
        _row(
            "7 local : 1 global, LSSA + LSSAR", "lssa+lssar", "mixed@{window}*7", p_schedule=ANNEALED, scales=("h200",)
        ),
        # The power and its schedule, in LSSAR.
        _row("mixed, LSSAR, continuous 3 to 15", "lssar", p_schedule="3..15:0.8"),
        _row("mixed, LSSAR annealed to 9", "lssar", p_schedule="3:0.4,5:0.7,9"),
        _row("mixed, LSSAR annealed to 63", "lssar", p_schedule="3:0.25,7:0.45,15:0.65,31:0.85,63"),
        # A learned gain for each head; and thresholds other than 1, on a CPU only: the fused kernels subtract 1, and at
        # 262,144 tokens nothing else is fast enough.
        _row("mixed, LSSAR annealed, learned gain", "lssar,head_scale=1", p_schedule=ANNEALED),
        _row("mixed, cosine softmax, learned gain", "cosine_softmax,head_scale=1", rank=2),
        _row("mixed, LSSAR annealed, threshold 0.5", "lssar,threshold=0.5", p_schedule=ANNEALED, scales=ON_CPU),
        _row(
            "mixed, LSSAR annealed, learned threshold", "lssar,learned_threshold=true", p_schedule=ANNEALED,
            scales=ON_CPU,
        ),
    ),
)  # fmt: skip
