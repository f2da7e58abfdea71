"""Table 1: does softmax need to be positive, or to sum to one?"""

from lssar.experiments.arms import Experiment, Row

EXPERIMENT = Experiment(
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
