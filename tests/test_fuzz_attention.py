"""The fuzzer of attention: a short run, a long one marked slow, and that it finds what is wrong."""

import json

import pytest
import torch

from lssar.ops import tiled
from tests import fuzz_attention
from tests.helpers import shifted_seed


@pytest.mark.parametrize("cases", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_found(cases):
    result = fuzz_attention.fuzz(0, cases, seed=1 + shifted_seed(0))
    assert result["failures"] == []
    assert result["counts"]["calls"] == 3 * cases


def test_it_finds_a_wrong_output(monkeypatch):
    right = tiled._output
    monkeypatch.setattr(tiled, "_output", lambda call: right(call) * (1 + 2.0**-6))
    assert fuzz_attention.fuzz(0, 30, seed=1)["failures"]


def test_it_finds_a_leak(monkeypatch):
    """Without containment an inf in a hidden value makes NaN of rows that do not see it."""
    monkeypatch.setattr(tiled.NonFinite, "output", lambda self, o: o * torch.nan)
    problems = [x["problem"] for x in fuzz_attention.fuzz(0, 100, seed=1)["failures"]]
    assert problems and all("not finite where nothing of the kind is seen" in text for text in problems)


def test_counts_are_written(tmp_path, capsys):
    out = tmp_path / "made" / "fuzz.json"
    assert fuzz_attention.main(["--cases", "3", "--seed", "5", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert (written["cases"], written["seed"], written["failures"]) == (3, 5, [])
    assert written["environment"]["torch"] and "3 cases, 9 calls, 0 failures" in capsys.readouterr().out
