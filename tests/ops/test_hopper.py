"""Kernels for Hopper cannot run without the card, but the Triton at hand must be able to compile them.

What they compute is tested by test_fused.py and test_activations.py: on a GPU, and, but for Gluon, in the interpreter.
"""

from __future__ import annotations

import math

import pytest

from tests.ops.compile_for_hopper import compile_kernel

pytest.importorskip("triton")
from lssar.ops.fused.loss import BLOCK, WARPS
from lssar.ops.fused.tiles import HOPPER, Tile

SEEN = {"CAUSAL": True, "WINDOWED": True, "PACKED": True, "HAS_LENGTHS": True}
MULTIPROCESSOR = 228 * 1024
"""Bytes of shared memory."""


def compile_lssar(module, kernel, D, mechanism, tile, cache):
    constants = {
        "P": 15, "REWEIGHT": mechanism != "lssa", "LOG_D": math.log(D), "D": D, "BLOCK_D": D, "LOG_DEGREE": 3,
        "DOT": "tf32", "EXACT_QUERIES": True, "TMA": tile.tma, "BLOCK_M": tile.m, "BLOCK_N": tile.n,
        "STAGES": tile.stages, "BLOCK_N1": tile.n1 or tile.n, "STAGES1": tile.stages1 or tile.stages,
        "STEEP": "steep" in mechanism, "CACHE": 2**22, "warps": tile.warps, **SEEN,
    }  # fmt: skip
    types = {"k_ptr": "*fp16", "q_ptr": "*bf16" if "key" in kernel else "*fp16"}
    return compile_kernel(module, kernel, constants, cache, **types)


@pytest.mark.parametrize(
    ("kernel", "D", "mechanism"),
    [
        ("forward_kernel", 128, "lssar"),
        ("forward_kernel", 128, "lssar, steep"),
        ("key_gradient_kernel", 64, "lssar, steep"),
        pytest.param("forward_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 128, "lssar, steep", marks=pytest.mark.slow),
    ],
)
def test_gluon(kernel, D, mechanism, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    made = compile_lssar("lssar.ops.fused.hopper", kernel, D, mechanism, Tile(64, 64, 4, 2, tma=True), tmp_path)
    assert 2 * (made["shared"] + 1024) <= MULTIPROCESSOR, "two programs have to fit on a multiprocessor"
    assert made["wgmma"] > 0


@pytest.mark.parametrize(
    ("module", "kernel", "D"),
    [
        ("backward", "query_gradient_kernel", 64),
        pytest.param("backward", "query_gradient_kernel", 256, marks=pytest.mark.slow),
        pytest.param("backward", "key_gradient_kernel", 128, marks=pytest.mark.slow),
        pytest.param("forward", "forward_kernel", 64, marks=pytest.mark.slow),
    ],
)
def test_triton(module, kernel, D, tmp_path):
    """What runs on Hopper at other head sizes and without Gluon, with its own tiles and the branches of steep rows."""
    tile = HOPPER[kernel.removesuffix("_kernel"), D, 2]
    made = compile_lssar(f"lssar.ops.fused.{module}", kernel, D, "lssar, steep", tile, tmp_path)
    assert made["shared"] <= MULTIPROCESSOR - 1024
    assert made["wgmma"] > 0


@pytest.mark.parametrize(
    ("kernel", "D", "activation", "p"),
    [
        ("forward_kernel", 64, "exp", 0),
        ("key_gradient_kernel", 64, "gelu", 15),
        pytest.param("forward_kernel", 128, "mish", 15, marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 64, "sigmoid", 0, marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 128, "exp", 3, marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "relu2", 0, marks=pytest.mark.slow),
    ],
)
def test_activations(kernel, D, activation, p, tmp_path):
    tile = HOPPER[f"activation_{kernel.removesuffix('_kernel')}", D, 2]
    constants = {
        "ACTIVATION": activation, "DIVISOR": "l1", "SIGN": 1.0, "SCALE": D**-0.5, "LOG_N": False, "BIAS": "-log_n",
        "LENGTH": 1024.0, "LOG_LENGTH": math.log(1024), "GAMMA": 1.0, "P": p, "COSINE": False, "D": D, "BLOCK_D": D,
        "DOT": "tf32", "BLOCK_M": tile.m, "BLOCK_N": tile.n, "STAGES": tile.stages, "CACHE": 2**22,
        "warps": tile.warps, **SEEN,
    }  # fmt: skip
    made = compile_kernel("lssar.ops.fused.activations", kernel, constants, tmp_path)
    assert made["shared"] <= MULTIPROCESSOR - 1024
    assert made["wgmma"] > 0


@pytest.mark.parametrize("kernel", ["loss_kernel", "loss_gradient_kernel"])
def test_loss(kernel, tmp_path):
    fp32 = dict.fromkeys(("loss_ptr", "norm_ptr", "gradient_ptr"), "*fp32")
    constants = {"BLOCK": BLOCK, "warps": WARPS}
    compile_kernel("lssar.ops.fused.loss", kernel, constants, tmp_path, targets_ptr="*i64", **fp32)
