"""The paper's tables and figures and the controls that it lacks: a file each that declares arms, and what runs them.

`lssar reproduce NAME --scale smoke|laptop|h200|paper`; how in docs/reproduce.md, outcome in docs/results.md.
"""

from lssar.experiments import controls, downstream, figure1, figure2, passkey, stability, table1, table2, table3, table4
from lssar.experiments.arms import SCALES, Arm, Experiment, Row, Scale, arms_of

_MODULES = (controls, figure1, passkey, table4, figure2, stability, downstream, table1, table2, table3)
"""What says most comes first, for a queue that may be cut short."""

EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}

__all__ = ["EXPERIMENTS", "SCALES", "Arm", "Experiment", "Row", "Scale", "arms_of"]
