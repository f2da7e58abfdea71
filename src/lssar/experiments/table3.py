"""Table 3: l1 with other activations than exp (Eq. 3)."""

from lssar.experiments.arms import Experiment, Row

EXPERIMENT = Experiment(
    name="table3",
    title="Table 3: activations under l1",
    question="Which activation may take the place of exp?",
    draw="bars",
    at=(1,),
    rows=(
        Row(label="ReLU", attention="l1_relu", paper="ReLU"),
        Row(label="ReLU^2", attention="l1_relu2", paper="ReLU^2"),
        Row(label="ReLU6", attention="l1_relu6", paper="ReLU6"),
        Row(label="GeLU", attention="l1_gelu", paper="GeLU"),
        Row(label="sigmoid", attention="l1_sigmoid", paper="sigmoid"),
        Row(label="softplus", attention="l1_softplus", paper="softplus"),
        Row(label="Mish", attention="l1_mish", paper="Mish"),
        Row(label="exp (softmax)", attention="softmax", paper="exp"),
    ),
)
