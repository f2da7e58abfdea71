"""The controls that the paper lacks, with three seeds, to 64 times the training length.

`cosine_softmax` has LSSA's scores (cosine, log d, log n) under plain softmax; `ssmax` scales the scores by a learned
multiple of log n; ALiBi and a window of the training length are common practice. A flat loss may only mean that far
context is ignored: the table of the last tokens shows whether more context helps. Here, as in Table 4, re-weighting
applied after training is compared with re-weighting that was trained in.
"""

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.evaluations import Length

FAR = Length(to=64)

CONTROLS = Experiment(
    name="controls",
    title="Controls: which other mechanisms are flat",
    question="Do softplus and re-weighting keep the loss flat, or do plainer mechanisms as well?",
    at=(1, 2, 4, 8, 16, 32, 64),
    rows=(
        Row(label="LSSAR", attention="lssar", evaluation=FAR, seeds=3),
        Row(label="cosine softmax", attention="cosine_softmax", evaluation=FAR, seeds=3),
        Row(label="softmax", attention="softmax", evaluation=FAR, seeds=3),
        Row(label="softmax, window", attention="softmax", evaluation=Length(to=64, windowed=True), seeds=3),
        Row(label="SSMax", attention="ssmax", evaluation=FAR, seeds=3),
        Row(label="ALiBi", attention="softmax", position="alibi", evaluation=FAR, seeds=3),
        Row(label="LSSA", attention="lssa", evaluation=FAR),
        Row(label="LSSA, p = 15 after training", attention="lssa", evaluation=Length(to=64, p=15)),
    ),
)
