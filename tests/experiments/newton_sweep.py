"""A sweep over arms that train for a few steps: shared by the tests of Newton's law."""

from lssar.experiments.newton.families import Family
from lssar.experiments.newton.training import Optimisation

SMALL = Family(
    world="wellposed", size="ci", tokens=14, first=6, mechanisms=("lssar", "softmax"), seeds=(0, 1), labels=(4, 16),
    pretrain=Optimisation(steps=6, batch=8, lr=1e-3, warmup=2),
    finetune=Optimisation(steps=3, batch=8, lr=1e-3, warmup=2),
    probe=Optimisation(steps=2, batch=8, lr=1e-3, warmup=2), probe_functions=1, tests=60,
)  # fmt: skip
