"""The commands as a user runs them."""

import json
import math
import subprocess
import sys

import pytest

from lssar.cli import main


def test_rows(tmp_path, capsys):
    main(["rows", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "rows.json").read_text())
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    by = {(row["mechanism"], row["multiple"]): row for row in result["rows"]}
    assert by["softmax", 64]["effective"] > 20 * by["softmax", 1]["effective"]
    assert by["lssar", 64]["effective"] < 2 * by["lssar", 1]["effective"]
    for row in result["rows"]:
        assert 0 < row["peak"] <= 1
        assert 0 <= row["entropy"] <= math.log(row["n"])
    assert result["environment"]["torch"]
    assert "rows.png" in capsys.readouterr().out


def test_demo_train_eval_generate_diagnose(tmp_path, capsys):
    """The newcomer's path, made small: demo, then every command that takes a run."""
    arguments = ["demo", "--steps", "3", "--size", "tiny", "--length", "32", "--multiples", "1", "2", "--pieces", "2"]
    main([*arguments, "--attention", "softmax", "lssar", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "demo.json").read_text())
    assert [curve["label"] for curve in result["curves"]] == ["softmax", "lssar"]
    assert all(point["loss"] > 0 for curve in result["curves"] for point in curve["by_length"])
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "softmax: loss" in said
    assert "demo.png" in said.replace("\n", "")

    runs = sorted(str(path) for path in (tmp_path / "runs").iterdir())
    main(["train", runs[0]])  # a finished run has nothing left to do
    assert "finished" in capsys.readouterr().out
    out = str(tmp_path / "length")
    main(["eval", "length", *runs, "--multiples", "1", "4", "--ntk", "off", "length", "--pieces", "2", "--out", out])
    assert len(json.loads((tmp_path / "length.json").read_text())["curves"]) == 4
    assert (tmp_path / "length.svg").exists()
    both = [str(tmp_path / "demo.json"), str(tmp_path / "length.json")]
    main(["plot", *both, "--out", str(tmp_path / "both")])
    alone, together = ((tmp_path / name).read_text() for name in ("length.svg", "both.svg"))
    assert together.count("PolyCollection") > alone.count("PolyCollection")  # a band a curve
    main(["diagnose", runs[0], "--multiples", "1", "2", "--rows", "2", "--out", str(tmp_path / "diagnose")])
    assert (tmp_path / "diagnose.png").stat().st_size > 10_000
    capsys.readouterr()
    main(["generate", runs[0], "--prompt", "def f(", "--tokens", "5"])
    assert capsys.readouterr().out.startswith("def f(")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "unknown command 'fly'"),
        (["train", "gpt5"], "'gpt5' is neither a recipe"),
        (["train"], "wants a recipe"),
        (["train", "books-51m", "--out", "NEW"], "no training shards"),
        (["train", "tiny-cpu", "--attention", "lsar"], "unknown attention spec 'lsar'"),
        (["eval", "speed"], "wants one of: length"),
        (["eval", "length", "NEW"], "no run folder"),
        (["generate", "NEW"], "no run folder"),
        (["plot"], "which JSON files"),
        (["demo", "--text", "NEW", "--out", "NEW"], "does not exist"),
    ],
    ids=str,
)
def test_mistakes_get_one_line(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "new") if word == "NEW" else word for word in arguments])
    out, err = capsys.readouterr()  # what the flags' parser finds goes to stderr, in a frame
    said = " ".join((out + err).replace("│", " ").split())
    assert words in said
    assert "Traceback" not in said


def test_a_reader_that_has_seen_enough_is_no_error():
    """`lssar specs | head -1`."""
    command = [sys.executable, "-u", "-m", "lssar.cli", "specs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in ("demo", "train", "data", "eval", "bench", "generate", "diagnose"))


def test_specs(capsys):
    main(["specs"])
    assert "AttentionSpec('lssar'" in capsys.readouterr().out.replace("\n", "")


def test_bench_checks_then_times(tmp_path, capsys):
    out = tmp_path / "figures"
    arguments = ["bench", "--lengths", "64", "--heads", "2", "--head-sizes", "8", "--budget", "0.01", "--device", "cpu"]
    main(
        [
            *arguments,
            "--contestants",
            "tiled:lssar",
            "tiled:lssar,p=3",
            "sdpa:softmax",
            "fused:lssar",
            "--out",
            str(out),
        ]
    )
    result = json.loads(out.with_suffix(".json").read_text())
    figures = {row["contestant"]: row for row in result["rows"]}
    assert figures["tiled:lssar"]["both_ms"] > 0
    assert figures["tiled:lssar"]["errors"]["dq"] < 1e-4
    assert figures["fused:lssar"] | {"unavailable": "needs a GPU"} == figures["fused:lssar"]
    assert {"cpu", "torch", "commit", "date"} <= set(result["environment"])
    assert out.with_suffix(".csv").read_text().count("\n") == 5
    assert out.with_suffix(".png").stat().st_size > 10_000

    with pytest.raises(SystemExit, match="2"):  # nothing is overwritten without being asked
        main([*arguments, "--contestants", "tiled:lssar", "--out", str(out)])
    assert "exists" in capsys.readouterr().out
    assert json.loads(out.with_suffix(".json").read_text()) == result


@pytest.mark.parametrize("name", ["tiled", "tiled:", "fast:lssar", "tiled:lsar"])
def test_bench_refuses_an_unknown_contestant(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--contestants", name, "--lengths", "16"])
    assert "unknown" in capsys.readouterr().out
