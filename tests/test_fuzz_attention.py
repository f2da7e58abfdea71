"""The fuzzer of attention: a short run, a long one marked slow, and that it finds what is wrong."""

import json

import pytest
import torch

from lssar import testing
from lssar.ops import tiled
from tests import fuzz_attention
from tests.helpers import shifted_seed


@pytest.mark.parametrize("cases", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_calls_agree_with_float64(cases):
    result = fuzz_attention.fuzz(0, cases, seed=1 + shifted_seed(0))
    assert result["failures"] == []
    assert result["counts"]["calls"] == 3 * cases


def test_it_finds_a_wrong_output(monkeypatch):
    right = tiled._output
    monkeypatch.setattr(tiled, "_output", lambda call: right(call) * (1 + 2.0**-6))
    assert fuzz_attention.fuzz(0, 30, seed=1)["failures"]


@pytest.mark.parametrize("which", [0, 1, 2], ids=("dq", "dk", "dv"))
def test_it_finds_a_wrong_gradient(which, monkeypatch):
    right = tiled._gradients

    def wrong(call, do):
        grads = right(call, do)
        return [x * (1 - 2.0**-12) if i == which else x for i, x in enumerate(grads)]

    monkeypatch.setattr(tiled, "_gradients", wrong)
    found = fuzz_attention.fuzz(0, 60, seed=1)["failures"]
    assert len(found) >= 6 and all(f"error of {('dq', 'dk', 'dv')[which]}" in x["problem"] for x in found)


@pytest.mark.parametrize("case", [24521, 35379, 37139, 37341])
def test_roundings_that_eager_does_not_have(case):
    """dq is 0 but for rounding, and eager's terms cancel exactly. Four times the derived bound is still found."""
    assert fuzz_attention.fuzz(case, 1, seed=2026)["failures"] == []
    call = fuzz_attention.draw_call(fuzz_attention.Draw(2026, case))
    q, k, v = call.tensors.values()
    o, dq, dk, dv = call.run("tiled")
    bound = testing._cancellation(q, k, v, call.do, call.spec, call.options)[1]
    with pytest.raises(AssertionError, match="error of dq"):
        wrong = (dq + 4 * bound * dq.sign().where(dq != 0, 1)).to(dq.dtype)
        testing.assert_close_to_reference((o, wrong, dk, dv), q, k, v, call.spec, do=call.do, **call.options)


@pytest.mark.parametrize("case", [977, 1966])
def test_rows_of_which_recentring_leaves_little(case):
    """Roundings grow by the division by what is left; eager had fewer of them by luck."""
    assert fuzz_attention.fuzz(case, 1, seed=2027)["failures"] == []


def test_it_finds_an_inf_that_reaches_other_rows(monkeypatch):
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
