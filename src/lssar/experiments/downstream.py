"""Zero-shot benchmarks, as later versions of the paper have them (the first four), and two that small models can do."""

from lssar.experiments.arms import Experiment, Row
from lssar.experiments.readings import Downstream

EXPERIMENT = Experiment(
    name="downstream",
    title="Downstream: zero-shot accuracy",
    question="Does LSSAR cost or gain anything on what language models are usually judged by?",
    draw="accuracy",
    rows=(
        Row(label="LSSAR", attention="lssar", reading=Downstream(), seeds=3, paper="LSSAR"),
        Row(label="softmax", attention="softmax", reading=Downstream(), seeds=3, paper="softmax"),
        Row(label="cosine softmax", attention="cosine_softmax", reading=Downstream(), seeds=3, paper="cosine softmax"),
    ),
)
