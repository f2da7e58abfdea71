"""The commands as a user runs them."""

import json
import math

import pytest

from lssar.cli import main


def test_demo(tmp_path, capsys):
    main(["demo", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    by = {(row["mechanism"], row["multiple"]): row for row in result["rows"]}
    assert by["softmax", 64]["effective"] > 20 * by["softmax", 1]["effective"]
    assert by["lssar", 64]["effective"] < 2 * by["lssar", 1]["effective"]
    for row in result["rows"]:
        assert 0 < row["peak"] <= 1
        assert 0 <= row["entropy"] <= math.log(row["n"])
    assert result["environment"]["torch"]
    assert "demo.png" in capsys.readouterr().out


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
