"""Kernels behind LSSAR_NEXT_KERNELS compute the same; in processes of their own, since the switch is read on import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.test_hopper import MULTIPROCESSOR, compile_lssar

pytest.importorskip("triton")
from lssar.ops.fused.tiles import Tile

ROOT = Path(__file__).parents[2]


def test_in_the_interpreter():
    tests = ["test_fused.py::test_against_float64", "test_fused.py::test_lengths", "test_not_finite.py"]
    wanted = "causal-torch.bfloat16 or pack-torch.bfloat16 or test_lengths or hidden_values"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", wanted]
        + [f"tests/ops/{name}" for name in tests],
        cwd=ROOT, env={**os.environ, "LSSAR_NEXT_KERNELS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-3000:]


@pytest.mark.parametrize(
    ("kernel", "D", "mechanism"),
    [
        ("query_gradient_kernel", 64, "lssar, steep"),
        pytest.param("key_gradient_kernel", 64, "lssar, steep", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 128, "lssar, steep, any power, gain", marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "lssar, steep", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("forward_kernel", 128, "lssar, steep", marks=pytest.mark.slow),
    ],
)
def test_compiled_for_hopper(kernel, D, mechanism, tmp_path, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setenv("LSSAR_NEXT_KERNELS", "1")
    made = compile_lssar("lssar.ops.fused.hopper", kernel, D, mechanism, Tile(64, 64, 4, 2, tma=True), tmp_path)
    assert 2 * (made["shared"] + 1024) <= MULTIPROCESSOR, "two programs have to fit on a multiprocessor"
    assert made["wgmma"] > 0 and made["barriers left"] == 0
