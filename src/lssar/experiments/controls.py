"""What the paper lacks: the same question put to plain controls, with three seeds, to 64 times the training length.

`cosine_softmax` has LSSA's scores (cosine, log d, log n) under plain softmax; `ssmax` a learned scale times log n;
ALiBi and a window of the training length are what everybody has. A flat loss may just mean that far context is ignored:
the table of the last tokens says whether more context helps. Re-weighting put on after training is set against
trained-in here and in Table 4.
"""

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.readings import Length

FAR = Length(to=64)

EXPERIMENT = Experiment(
    name="controls",
    title="Controls: what else is flat",
    question="Is it the softplus and the re-weighting that keep the loss flat, or would something plainer do?",
    at=(1, 2, 4, 8, 16, 32, 64),
    rows=(
        Row(label="LSSAR", attention="lssar", reading=FAR, seeds=3),
        Row(label="cosine softmax", attention="cosine_softmax", reading=FAR, seeds=3),
        Row(label="softmax", attention="softmax", reading=FAR, seeds=3),
        Row(label="softmax, window", attention="softmax", reading=Length(to=64, windowed=True), seeds=3),
        Row(label="SSMax", attention="ssmax", reading=FAR, seeds=3),
        Row(label="ALiBi", attention="softmax", position="alibi", reading=FAR, seeds=3),
        Row(label="LSSA", attention="lssa", reading=FAR),
        Row(label="LSSA, p = 15 after training", attention="lssa", reading=Length(to=64, p=15)),
    ),
)
