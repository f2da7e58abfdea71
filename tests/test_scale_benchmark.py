"""benchmarks/scale.py loses no result when a model fails, and finds the blocks at the peak."""

from __future__ import annotations

import argparse

import pytest
from benchmarks import scale


def test_a_model_that_fails_leaves_the_others(monkeypatch):
    good = scale.TINY_MODELS["124M, LSSAR"].replace(length=32, batch_tokens=64, micro_batch=1)
    monkeypatch.setattr(scale, "TINY_MODELS", {"good": good, "bad": good.replace(vocab_size=100)})
    saved = []
    scale.models(argparse.Namespace(tiny=True, times=True, limit=200), saved.append)
    rows = {row["model"]: row for row in saved[-1]["models"]}
    assert "failed" not in rows["good"]
    assert len(rows["good"]["losses"]) == scale.WARM_UP + scale.MEASURED
    assert rows["good"]["step_s"] > 0
    assert "the vocabulary has 100 ids" in rows["bad"]["failed"]


def test_blocks_at_the_peak():
    mib = 2**20
    events = [
        {"action": "alloc", "addr": 2, "size": 3 * mib},
        {"action": "segment_alloc", "addr": 9, "size": 99 * mib},
        {"action": "alloc", "addr": 3, "size": 3 * mib},
        {"action": "free_requested", "addr": 2, "size": 3 * mib},
        {"action": "free_completed", "addr": 2, "size": 3 * mib},
        {"action": "alloc", "addr": 2, "size": mib},
    ]
    assert scale.blocks_at_peak({1: mib}, events) == [[3.0, 2], [1.0, 1]]


@pytest.mark.parametrize("name", scale.MODELS)
def test_recipes_take_two_micro_steps(name):
    assert scale.MODELS[name].length == 8192
    assert scale.MODELS[name].micro_steps(1) == 2
