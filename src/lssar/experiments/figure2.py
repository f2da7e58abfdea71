"""Figure 2: the power p of the re-weighting, for LSSAR and for re-weighted softmax."""

from lssar.experiments.arms import Experiment, Row

POWERS = (1, 3, 5, 9, 15, 31, 63)

EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2: the power p",
    question="Which p is best at length, and does softmax stand as much of it?",
    draw="sweep",
    rows=tuple(
        Row(label=f"{label}, p = {p}", attention=attention, p=p)
        for attention, label in (("lssar", "LSSAR"), ("softmax", "softmax"))
        for p in POWERS
    ),
)
