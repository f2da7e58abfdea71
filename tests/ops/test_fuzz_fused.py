"""A few random calls of the fused kernels; tests/fuzz_fused.py runs as many as asked for."""

import pytest

pytest.importorskip("triton")
from tests.fuzz_fused import CUDA, draw, fuzz


def test_cases_cover_every_kind():
    cases = [draw(seed, small=True) for seed in range(300)]
    assert {case.kind for case in cases} == {"lssar", "activation", "decode", "paged", "hidden", "hidden window"}
    assert {case.view for case in cases} >= {"causal", "full", "window", "full window", "pack", "full pack", "padding"}
    assert draw(7, small=True) == draw(7, small=True)


def test_random_calls_agree_with_float64():
    cases = 200 if CUDA else 12
    result = fuzz(first=0, cases=cases, small=not CUDA)
    assert not result["failures"]
    assert result["cases"] == cases
