"""Shared by the tests of this folder."""

import dataclasses

import pytest

from lssar.experiments import SCALES
from lssar.experiments.newton.sweep import run_all
from tests.experiments.newton_sweep import SMALL


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A folder for the smoke scale in a still smaller form: two steps an arm, two pieces a evaluation."""
    base = SCALES["smoke"].base.replace(steps=2, length=32, micro_batch=64, warmup=1, eval_batches=1)
    monkeypatch.setitem(SCALES, "smoke", dataclasses.replace(SCALES["smoke"], base=base, eval_tokens=1024))
    return tmp_path / "out"


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    """The folder of newton_sweep.SMALL, once for each file of tests: the report is written into it."""
    out = tmp_path_factory.mktemp("sweep")
    assert run_all((SMALL,), out, "cpu", say=lambda line: None)
    return out
