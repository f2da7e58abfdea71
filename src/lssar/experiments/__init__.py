"""Experiments: the paper's tables and figures, controls that it lacks, and the queue that trains and evaluates them.

`lssar reproduce NAME --scale smoke|laptop|h200|paper`. How to run them: docs/reproduce.md; results: docs/results.md.
"""

from lssar.experiments import paper
from lssar.experiments.arms import SCALES, Arm, Experiment, Row, Scale, arms_of
from lssar.experiments.controls import CONTROLS
from lssar.experiments.larger import BUDGET, LARGER, LARGER_DOWNSTREAM
from lssar.experiments.mixed import EXPERIMENT as MIXED

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (  # in order of importance: a queue may be cut short
        MIXED, LARGER, LARGER_DOWNSTREAM, CONTROLS, paper.FIGURE1, paper.PASSKEY, paper.TABLE4, paper.FIGURE2,
        paper.STABILITY, paper.DOWNSTREAM, paper.TABLE1, paper.TABLE2, paper.TABLE3, BUDGET,
    )
}  # fmt: skip

__all__ = ["EXPERIMENTS", "SCALES", "Arm", "Experiment", "Row", "Scale", "arms_of"]
