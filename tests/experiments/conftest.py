"""Shared by the tests of this folder."""

import pytest

from lssar.experiments.newton.sweep import run_all
from tests.experiments.newton_sweep import SMALL


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    """The folder of newton_sweep.SMALL, once for each file of tests: the report is written into it."""
    out = tmp_path_factory.mktemp("sweep")
    assert run_all((SMALL,), out, "cpu", say=lambda line: None)
    return out
