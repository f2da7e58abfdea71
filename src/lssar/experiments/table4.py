"""Table 4: loss beyond the training length, for all mechanisms; also with NTK, and with p put on after training."""

from typing import Any

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.readings import Length


def _row(label: str, attention: str, also: tuple[Length, ...] = (), **changes: Any) -> Row:
    return Row(label=label, attention=attention, also=(Length(ntk="length"), *also), paper=label, **changes)


AFTER = (Length(p=15),)


EXPERIMENT = Experiment(
    name="table4",
    title="Table 4: loss beyond the training length",
    question="Which mechanism keeps its loss when it reads more than it was trained on?",
    rows=(
        _row("softmax", "softmax", AFTER),
        _row("sigmoid (Ramapuram)", "sigmoid"),
        _row("sigmoid (Ramapuram, changed b)", "sigmoid_n"),
        _row("sigmoid (Ramapuram, + l1)", "sigmoid_n_l1", AFTER),
        _row("sigmoid (Eq. 3)", "l1_sigmoid"),
        _row("ReLU (Wortsman)", "relu_wortsman"),
        _row("ReLU (Li)", "l1_relu"),
        _row("ReLU (Shen)", "relu_shen"),
        _row("LSSA", "lssa", AFTER),
        _row("softmax, p = 3", "softmax", p=3),
        _row("sigmoid + l1, p = 3", "sigmoid_n_l1", p=3),
        _row("LSSAR, p = 3", "lssar", p=3),
        _row("softmax, p = 15", "softmax", p=15),
        _row("sigmoid + l1, p = 15", "sigmoid_n_l1", p=15),
        _row("LSSAR, p = 15", "lssar", p=15),
    ),
)
