"""Figures: every curve has a look and a label of its own, and the setting is written below."""

import re

import pytest

from lssar.plots import plot_length
from lssar.plots.length import paired_change
from lssar.plots.style import COLOURS, LOOKS, describe, distinct_labels, flat_limits, looks

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


def curve(seed: int, p: float | None = None, loss: float = 3.0, **recipe) -> dict:
    lengths = (128, 256, 512)
    points = [
        {"length": n, "context": n, "tokens": 64, "loss": loss + 0.01 * i, "values": [loss - 1 + 0.01 * i, loss + 1]}
        for i, n in enumerate(lengths)
    ]
    settings = {"attention": "lssar", "size": "0.8m", "data": "stdlib", "length": 128, "seed": seed, "p": p}
    return {
        "run": f"run{seed}", "label": "lssar", "attention": "lssar", "ntk": "off", "train_length": 128,
        "recipe": settings | recipe, "training": {"tokens": 1_000_000}, "by_length": points, "last": points,
        "by_position": [{"start": 0, "stop": 128, "loss": loss}],
    }  # fmt: skip


def test_mechanisms_are_told_apart_without_colour_too():
    assert set(COLOURS.values()) <= OKABE_ITO
    assert len(set(COLOURS.values())) == len(LOOKS)
    assert len({marker for _, marker, _ in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(
    ("curves", "labels"),
    [
        ([curve(0), curve(1)], ["lssar, seed 0", "lssar, seed 1"]),
        ([curve(0, 3), curve(0, 15)], ["lssar, p 3", "lssar, p 15"]),
        ([curve(0), curve(0) | {"run": "again"}], ["lssar (run0)", "lssar (again)"]),
    ],
    ids=["seed", "p", "run"],
)
def test_runs_that_differ_in_one_setting_have_labels_and_lines_of_their_own(curves, labels, tmp_path):
    assert distinct_labels(curves) == labels
    styles = looks([each["attention"] for each in curves])
    assert styles[0]["color"] == styles[1]["color"]
    assert styles[0]["ls"] != styles[1]["ls"]
    path = plot_length({"curves": curves}, tmp_path / "length.svg")
    drawn = re.findall(r"<!-- (.*?) -->", path.read_text())
    assert set(labels) <= set(drawn)
    assert any("0.8m model; stdlib; trained at 128 tokens; 1M tokens; seed" in text for text in drawn)


def test_change_is_paired_over_pieces():
    """Pieces differ by 2 nats; their changes by 0.02, and the interval is that of the changes."""
    change = paired_change(curve(0)["by_length"])
    assert [mean for mean, _ in change] == pytest.approx([0.0, 0.005, 0.01])
    assert change[0][1] == 0.0
    assert change[2][1] == pytest.approx(1.96 * 0.01, rel=1e-6)
    old = [{"length": 1, "loss": 3.0}, {"length": 2, "loss": 3.1}]
    assert paired_change(old)[1] == (pytest.approx(0.1), None)


def test_flat_curves_fill_the_axis():
    low, high = flat_limits([[0.0, 0.01, -0.03], [0.0, 0.5, 2.0]])
    assert -0.05 < low < -0.03
    assert 0.02 < high < 0.05
    assert flat_limits([[0.0, 1.0]]) is None
    assert describe([{"size": "51m", "data": "data/books", "length": 512, "seed": 0}]).startswith("51m model; books")
