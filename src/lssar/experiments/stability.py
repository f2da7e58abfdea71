"""Stability: gradient norms and loss spikes over the sweep of p, and rows that textbook arithmetic loses."""

from dataclasses import replace

from lssar.evaluation.overflow import synthetic_overflow
from lssar.experiments import figure2
from lssar.experiments.arms import Experiment
from lssar.experiments.readings import Overflow

EXPERIMENT = Experiment(
    name="stability",
    title="Stability: gradients, spikes, overflow",
    question="Is softmax with a large p unstable where LSSAR is not, and what does Eq. 5 as written overflow in?",
    draw="training",
    at=(1,),
    rows=tuple(replace(row, also=(Overflow(),)) for row in figure2.EXPERIMENT.rows),
    measure=lambda: synthetic_overflow(figure2.POWERS),
)
