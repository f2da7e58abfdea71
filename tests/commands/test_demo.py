"""`lssar demo` and an evaluation on the released models, at short lengths."""

import json
from pathlib import Path

import pytest

from lssar.cli import main

MODELS = Path(__file__).parents[2] / "models"


def test_demo(tmp_path, capsys):
    main(["demo", "--multiples", "1", "4", "--pieces", "1", "--out", str(tmp_path)])
    arms = {arm["run"]: arm["rows"] for arm in json.loads((tmp_path / "retrieval.json").read_text())["arms"]}
    assert [row["length"] for row in arms["tiny-long"]] == [128, 512]
    assert arms["tiny-long"][1]["greedy"]["rate"] >= 0.8  # beyond the training length
    assert arms["tiny-softmax"][1]["greedy"]["rate"] <= 0.2
    curves = json.loads((tmp_path / "length.json").read_text())["curves"]
    curves = {curve["run"]: curve["by_length"] for curve in curves}
    assert curves["tiny-softmax"][1]["loss"] > curves["tiny-softmax"][0]["loss"] + 0.1
    assert curves["tiny-long"][1]["loss"] < curves["tiny-long"][0]["loss"] + 0.02
    for name in ("length.png", "retrieval.png", "report.html", "attention.html"):
        assert (tmp_path / name).stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "tiny-long: finds most keys up to 4x" in said and "finished in" in said


def test_released_models_that_are_missing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--models", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "--models" in capsys.readouterr().err


def test_a_released_model_is_evaluated_without_its_data(tmp_path):
    words = ["eval", "retrieval", str(MODELS / "books-6m"), "--tasks", "passkey", "--multiples", "1", "--samples", "1"]
    main([*words, "--depths", "0.5", "--device", "cpu", "--out", str(tmp_path / "found")])
    (arm,) = json.loads((tmp_path / "found.json").read_text())["arms"]
    assert arm["rows"][0]["greedy"]["rate"] == 1.0
