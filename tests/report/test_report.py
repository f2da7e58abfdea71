"""The report page: what it gathers, which charts it has, and what it says about bad input."""

import base64
import gzip
import json
import re

import pytest

from lssar.cli import main
from lssar.report.collect import collect, thin
from lssar.report.report import report_html, write_report
from lssar.training import recipe, train

TINY = {"size": "tiny", "length": 32, "micro_batch": 4, "batch_tokens": 128, "steps": 3, "eval_batches": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, one of them evaluated by `lssar report --compute`."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("softmax", "lssar"):
        train(recipe("tiny-cpu", attention=name, **TINY), folder / name)
    main([
        "report", str(folder / "lssar"), str(folder / "softmax"), "--compute", "--multiples", "1", "4",
        "--samples", "1", "--tasks", "copy", "--pieces", "2", "--out", str(folder / "report.html"),
    ])  # fmt: skip
    return folder


def embedded(page: str, identity: str) -> str:
    return re.search(rf'<script [^>]*id="{identity}">(.*?)</script>', page, re.S).group(1)


def test_page_has_every_chart_and_needs_no_network(runs):
    page = (runs / "report.html").read_text()
    charts = json.loads(embedded(page, "charts"))
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(charts) == len(titles)
    for wanted in (
        "Loss while training", "Loss by length", "Loss by position", "copy: answers decoded correctly", "copy · lssar",
        "copy · softmax", "Entropy, nats · lssar", "Share of keys above the mean · softmax",
        "Weight of the first token (sink) · lssar", "Effective keys, exp(entropy) · softmax",
    ):  # fmt: skip
        assert wanted in titles
    assert all(chart["data"] for chart in charts)
    library = gzip.decompress(base64.b64decode(embedded(page, "library"))).decode()
    assert "plotly.js v" in library[:200]
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # nothing is fetched
    assert len(page) < 4e6


def test_curves_are_those_of_the_files(runs):
    page = (runs / "report.html").read_text()
    charts = dict(zip(re.findall(r"<figcaption>(.*?)</figcaption>", page), json.loads(embedded(page, "charts"))))
    result = json.loads((runs / "lssar" / "evaluation" / "length.json").read_text())["curves"][0]
    drawn = next(t for t in charts["Loss by length"]["data"] if t.get("name") == "lssar")
    assert drawn["x"] == [p["length"] for p in result["by_length"]]
    assert drawn["y"] == pytest.approx([p["loss"] for p in result["by_length"]])
    arm = json.loads((runs / "lssar" / "evaluation" / "retrieval.json").read_text())["arms"][0]
    grid = charts["copy · lssar"]["data"][0]["z"]
    rates = [
        [cell["greedy"]["rate"] for cell in row["cells"]] for row in sorted(arm["rows"], key=lambda r: r["length"])
    ]
    assert grid == [list(column) for column in zip(*rates)]
    statistics = json.loads((runs / "softmax" / "evaluation" / "diagnose.json").read_text())["statistics"]
    traces = charts["Entropy, nats · softmax"]["data"]
    assert [trace["z"] for trace in traces] == statistics["entropy"]


def test_files_of_evaluations_do_without_run_folders(runs):
    files = sorted((runs / "lssar" / "evaluation").glob("*.json"))
    page = report_html(collect(files))
    assert "Entropy, nats · lssar" in page and "Loss while training" in page


def test_markup_in_names_is_escaped(runs, tmp_path):
    result = json.loads((runs / "lssar" / "evaluation" / "length.json").read_text())
    result["curves"][0]["run"] = "</script><script>alert(1)</script>"
    (tmp_path / "length.json").write_text(json.dumps(result))
    page = report_html(collect([tmp_path / "length.json"]))
    assert "<script>alert" not in page


def test_thinned_curves_keep_held_out_losses_and_peaks():
    rows = [
        {"step": i + 1, "loss": 1.0, "grad_norm": float(i == 37), "val_loss": 2.0 if i == 99 else None}
        for i in range(1000)
    ]
    kept = thin(rows, 100)
    assert len(kept) == 100
    assert [row["val_loss"] for row in kept if "val_loss" in row] == [2.0]
    assert max(row["grad_norm"] for row in kept) == 1.0


@pytest.mark.parametrize("case", ["missing", "empty folder", "not json", "other json", "exists", "nothing"])
def test_bad_input_gets_one_line(case, tmp_path, capsys):
    arguments = {"missing": [str(tmp_path / "no")], "nothing": []}.get(case, [str(tmp_path / "x.json")])
    (tmp_path / "x.json").write_text({"not json": "{", "other json": '{"a": 1}'}.get(case, '{"curves": []}'))
    words = {
        "missing": "does not exist", "empty folder": "neither a run folder", "not json": "not a JSON file",
        "other json": "holds no evaluation", "exists": "exists", "nothing": "name at least one",
    }[case]  # fmt: skip
    if case == "empty folder":
        arguments = [str(tmp_path)]
    out = tmp_path / "report.html"
    if case == "exists":
        out.write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments, "--out", str(out)])
    assert ended.value.code in (1, 2)
    said = "".join(capsys.readouterr())
    assert words in said.replace("\n", " ")
    assert not out.exists() or out.read_text() == "mine"


def test_a_run_without_a_checkpoint(tmp_path):
    """A run without checkpoints and metrics still has a configuration to show; --compute says what is missing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"recipe": recipe("tiny-cpu", **TINY).to_dict()}))
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "Not evaluated yet" in page
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "--compute", "--out", str(tmp_path / "other.html")])
    assert not (tmp_path / "other.html").exists()
