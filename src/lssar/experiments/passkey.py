"""Passkey retrieval, as later versions of the paper have it, beside the controls.

The arms are trained on text with documents that ask for retrieval mixed in, the same for all: models of this size do
not learn to answer from text alone. Loss cannot tell a model that uses far context from one that ignores it; this can.
"""

from typing import Any

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.readings import Retrieval

OTHER_TASKS = ("needles", "recall")


def _row(label: str, attention: str, **how: Any) -> Row:
    also = tuple(Retrieval(task=task, **how) for task in OTHER_TASKS)
    return Row(label=label, attention=attention, mixture=True, reading=Retrieval(**how), also=also, paper=label)


EXPERIMENT = Experiment(
    name="passkey",
    title="Passkey: is it found?",
    question="Does a model that keeps its loss still find what stands far back?",
    draw="rates",
    rows=(
        _row("LSSAR", "lssar"),
        _row("LSSAR, NTK", "lssar", ntk="length"),
        _row("softmax", "softmax"),
        _row("softmax, NTK", "softmax", ntk="length"),
        _row("softmax, window", "softmax", windowed=True),
        _row("cosine softmax", "cosine_softmax"),
        _row("cosine softmax, NTK", "cosine_softmax", ntk="length"),
    ),
)
