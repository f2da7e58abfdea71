"""A mixed model with an annealed power through the commands: trained, evaluated beyond its length, continued."""

import json

from lssar.cli import main
from lssar.report.collect import mechanism_of
from lssar.runs import Run


def test_train_evaluate_and_generate_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes = {
        "size": "tiny", "length": 32, "steps": 4, "batch-tokens": 128, "micro-batch": 4, "heads": 4, "warmup": 1,
        "retrieval-share": 0, "eval-every": 4, "eval-batches": 1, "p-schedule": "3..15:0.5",
        "layout": "softmax@8 attention/none", "attention": "lssa+lssar",
    }  # fmt: skip
    main(["train", "long-tiny", *(word for name, value in changes.items() for word in (f"--{name}", str(value)))])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "long-tiny-lssa+lssar-softmax@8-attention-none-p3..15-0.5-seed0"
    run = Run.open(folder)
    model = run.model()
    assert model.config.layout == "softmax@8 lssa+lssar/none"
    assert model.layers()[1].attention.specs[1].p == 15  # the last power of the schedule
    powers = [json.loads(line)["p"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert powers == [3, 15, 15, 15]

    main(["eval", "length", str(folder), "--multiples", "1", "8", "--pieces", "1", "--out", "length"])
    (curve,) = json.loads((tmp_path / "length.json").read_text())["curves"]
    assert [row["length"] for row in curve["by_length"]] == [32, 256]
    retrieval = ["eval", "retrieval", str(folder), "--multiples", "1", "8", "--samples", "1", "--tasks", "copy"]
    main([*retrieval, "--out", "r"])
    (arm,) = json.loads((tmp_path / "r.json").read_text())["arms"]
    assert len(arm["rows"]) == 2
    main(["diagnose", str(folder), "--multiples", "1", "2", "--rows", "2", "--out", "diagnose"])
    capsys.readouterr()
    main(["generate", str(folder), "--prompt", "def f(", "--tokens", "20", "--temperature", "0"])
    assert capsys.readouterr().out.startswith("def f(")


def test_results_of_a_layout_with_its_own_mechanisms_name_the_layout(tmp_path, monkeypatch):
    """And not the recipe's --attention, of which nothing is in the model."""
    monkeypatch.chdir(tmp_path)
    changes = {
        "size": "tiny", "length": 32, "steps": 1, "batch-tokens": 64, "micro-batch": 2, "warmup": 1,
        "retrieval-share": 0, "eval-batches": 1, "layout": "softmax@8 ssmax/none",
    }  # fmt: skip
    main(["train", "long-tiny", *(word for name, value in changes.items() for word in (f"--{name}", str(value)))])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "long-tiny-softmax@8-ssmax-none-seed0"
    main(["eval", "length", str(folder), "--multiples", "1", "--pieces", "1", "--out", "l"])
    main(["eval", "retrieval", str(folder), "--multiples", "1", "--samples", "1", "--tasks", "copy", "--out", "r"])
    main(["diagnose", str(folder), "--multiples", "1", "--rows", "1", "--out", "d"])
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "lrd"]
    entries = [results[0]["curves"][0], results[1]["arms"][0], results[2]]
    assert [(entry["attention"], entry["label"]) for entry in entries] == [("softmax@8 ssmax/none",) * 2] * 3
    assert mechanism_of(entries[0]["recipe"]) == "softmax@8 ssmax/none"
