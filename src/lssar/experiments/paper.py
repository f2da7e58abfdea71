"""The paper's tables and figures (arXiv 2501.13428), declared: each is a question and the rows that answer it.

The numbers that the paper publishes are in `published.py`; the controls that it lacks in `controls.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lssar.evaluation.overflow import synthetic_overflow
from lssar.experiments.arms import Experiment, Row
from lssar.experiments.evaluations import Benchmarks, Length, Overflow, Retrieval

FAR = Length(to=64)
FAR_NTK = Length(to=64, ntk="length")
POWERS = (1, 3, 5, 9, 15, 31, 63)
"""Powers p of Figure 2 and of the stability experiment."""

TABLE1 = Experiment(
    name="table1",
    title="Table 1: softmax, inverted and re-centred",
    question="Does softmax need to be positive, or to sum to one?",
    draw="bars",
    at=(1,),
    rows=(
        Row(label="softmax", attention="softmax", paper="softmax"),
        Row(label="inverse", attention="softmax_inverse", paper="inverse"),
        Row(label="re-centred", attention="softmax_recentred", paper="re-centred"),
        Row(label="re-centred + l1", attention="softmax_recentred_l1", paper="re-centred + l1"),
    ),
)

TABLE2 = Experiment(
    name="table2",
    title="Table 2: softmax taken apart",
    question="Is it exp that matters in softmax, or the l1 normalisation?",
    draw="bars",
    at=(1,),
    rows=(
        Row(label="I: neither", attention="raw", paper="I"),
        Row(label="II: exp alone", attention="exp", paper="II"),
        Row(label="III: l1 alone", attention="raw_l1", paper="III"),
        Row(label="IV: both (softmax)", attention="softmax", paper="IV"),
    ),
)

TABLE3 = Experiment(
    name="table3",
    title="Table 3: activations under l1",
    question="Which activation may take the place of exp (Eq. 3)?",
    draw="bars",
    at=(1,),
    rows=(
        Row(label="ReLU", attention="l1_relu", paper="ReLU"),
        Row(label="ReLU^2", attention="l1_relu2", paper="ReLU^2"),
        Row(label="ReLU6", attention="l1_relu6", paper="ReLU6"),
        Row(label="GeLU", attention="l1_gelu", paper="GeLU"),
        Row(label="sigmoid", attention="l1_sigmoid", paper="sigmoid"),
        Row(label="softplus", attention="l1_softplus", paper="softplus"),
        Row(label="Mish", attention="l1_mish", paper="Mish"),
        Row(label="exp (softmax)", attention="softmax", paper="exp"),
    ),
)


def _by_length(label: str, attention: str, after_training: bool = False, **changes: Any) -> Row:
    """A row of Table 4: without NTK, with NTK and, where asked for, with p = 15 applied after training."""
    also = (Length(ntk="length"), *([Length(p=15)] if after_training else []))
    return Row(label=label, attention=attention, also=also, paper=label, **changes)


TABLE4 = Experiment(
    name="table4",
    title="Table 4: loss beyond the training length",
    question="Which mechanism keeps its loss on sequences longer than those it was trained on?",
    rows=(
        _by_length("softmax", "softmax", after_training=True),
        _by_length("sigmoid (Ramapuram)", "sigmoid"),
        _by_length("sigmoid (Ramapuram, changed b)", "sigmoid_n"),
        _by_length("sigmoid (Ramapuram, + l1)", "sigmoid_n_l1", after_training=True),
        _by_length("sigmoid (Eq. 3)", "l1_sigmoid"),
        _by_length("ReLU (Wortsman)", "relu_wortsman"),
        _by_length("ReLU (Li)", "l1_relu"),
        _by_length("ReLU (Shen)", "relu_shen"),
        _by_length("LSSA", "lssa", after_training=True),
        _by_length("softmax, p = 3", "softmax", p=3),
        _by_length("sigmoid + l1, p = 3", "sigmoid_n_l1", p=3),
        _by_length("LSSAR, p = 3", "lssar", p=3),
        _by_length("softmax, p = 15", "softmax", p=15),
        _by_length("sigmoid + l1, p = 15", "sigmoid_n_l1", p=15),
        _by_length("LSSAR, p = 15", "lssar", p=15),
    ),
)

FIGURE1 = Experiment(
    name="figure1",
    title="Figure 1: loss to 64 times the training length",
    question="Does the loss of LSSAR stay at its level of training, and up to which length?",
    at=(1, 2, 4, 8, 16, 32, 64),
    rows=(
        Row(label="LSSAR", attention="lssar", evaluation=FAR, seeds=3),
        Row(label="LSSAR, NTK", attention="lssar", evaluation=FAR_NTK, seeds=3),
        Row(label="softmax", attention="softmax", evaluation=FAR, seeds=3),
        Row(label="softmax, NTK", attention="softmax", evaluation=FAR_NTK, seeds=3),
        Row(label="LSSA", attention="lssa", evaluation=FAR),
        Row(label="LSSA, NTK", attention="lssa", evaluation=FAR_NTK),
    ),
)

FIGURE2 = Experiment(
    name="figure2",
    title="Figure 2: the power p",
    question="Which p is best at length, and which p does softmax tolerate?",
    draw="sweep",
    rows=tuple(
        Row(label=f"{label}, p = {p}", attention=attention, p=p)
        for attention, label in (("lssar", "LSSAR"), ("softmax", "softmax"))
        for p in POWERS
    ),
)

STABILITY = Experiment(
    name="stability",
    title="Stability: gradients, loss spikes, overflow",
    question="Is softmax with a large p unstable where LSSAR is not, and where does Eq. 5 as written overflow?",
    draw="training",
    at=(1,),
    rows=tuple(replace(row, also=(Overflow(),)) for row in FIGURE2.rows),
    measure=lambda: synthetic_overflow(POWERS),
)


def _retrieval(label: str, attention: str, **how: Any) -> Row:
    also = tuple(Retrieval(task=task, **how) for task in ("needles", "recall"))
    return Row(
        label=label, attention=attention, setting="retrieval", evaluation=Retrieval(**how), also=also, paper=label
    )


PASSKEY = Experiment(
    name="passkey",
    title="Passkey: retrieval by length",
    question="Does a model that keeps its loss also find what is far back?",
    # All arms are trained on text with the same share of retrieval documents: models of this size do not learn to
    # answer from text alone. The loss cannot tell a model that uses far context from one that ignores it; this can.
    draw="rates",
    rows=(
        _retrieval("LSSAR", "lssar"),
        _retrieval("LSSAR, NTK", "lssar", ntk="length"),
        _retrieval("softmax", "softmax"),
        _retrieval("softmax, NTK", "softmax", ntk="length"),
        _retrieval("softmax, window", "softmax", windowed=True),
        _retrieval("cosine softmax", "cosine_softmax"),
        _retrieval("cosine softmax, NTK", "cosine_softmax", ntk="length"),
    ),
)

DOWNSTREAM = Experiment(
    name="downstream",
    title="Downstream: zero-shot accuracy",
    question="Does LSSAR cost or gain anything on common zero-shot benchmarks?",
    draw="accuracy",
    rows=tuple(
        Row(label=label, attention=attention, evaluation=Benchmarks(), seeds=3, paper=label)
        for label, attention in (("LSSAR", "lssar"), ("softmax", "softmax"), ("cosine softmax", "cosine_softmax"))
    ),
)
