"""Figure 1: loss as the context grows to 16 times the training length, and on to 64; without and with NTK."""

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.readings import Length

FAR = Length(to=64)
FAR_NTK = Length(to=64, ntk="length")

EXPERIMENT = Experiment(
    name="figure1",
    title="Figure 1: loss to 16x and on",
    question="Does the loss of LSSAR stay where it was trained to be, and for how long?",
    at=(1, 2, 4, 8, 16, 32, 64),
    rows=(
        Row(label="LSSAR", attention="lssar", reading=FAR, seeds=3),
        Row(label="LSSAR, NTK", attention="lssar", reading=FAR_NTK, seeds=3),
        Row(label="softmax", attention="softmax", reading=FAR, seeds=3),
        Row(label="softmax, NTK", attention="softmax", reading=FAR_NTK, seeds=3),
        Row(label="LSSA", attention="lssa", reading=FAR),
        Row(label="LSSA, NTK", attention="lssa", reading=FAR_NTK),
    ),
)
