"""Table 2: softmax taken apart, without and with exp, without and with l1."""

from lssar.experiments.arms import Experiment, Row

EXPERIMENT = Experiment(
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
