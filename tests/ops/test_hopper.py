"""The Gluon kernels cannot run without a Hopper card, but the Triton at hand must be able to compile them.

What they compute is tested on a GPU by test_fused.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import math, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from lssar.ops.fused import hopper

kernel, D = getattr(hopper, sys.argv[1]), int(sys.argv[2])
constants = dict(
    P=15, REWEIGHT=sys.argv[3] == "lssar", LOG_D=math.log(D), D=D, BLOCK_D=D, CAUSAL=True, WINDOWED=True, PACKED=True,
    HAS_LENGTHS=True, LOG_DEGREE=3, DOT="tf32", EXACT_QUERIES=True, TMA=True, BLOCK_M=64, BLOCK_N=64, STAGES=2,
    BLOCK_N1=64, STAGES1=2,
)
half = {"k_ptr": "*fp16", "q_ptr": "*bf16" if "key" in sys.argv[1] else "*fp16"}
real = {name: "*fp32" for name in ("v_max_ptr", "slope_ptr", "intercept_ptr", "z_ptr", "rows_ptr")}
whole = {name: "*i32" for name in ("key_lengths_ptr", "doc_start_ptr", "doc_stop_ptr")}
types, values, attributes = {}, {}, {}
for i, name in enumerate(kernel.arg_names):
    if name in constants:
        types[name], values[(i,)] = "constexpr", constants[name]
    else:
        types[name] = {**half, **real, **whole}.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        if name.endswith("_ptr") or "stride" in name or name == "row_plane":
            attributes[(i,)] = [["tt.divisibility", 16]]
source = GluonASTSource(kernel, signature=types, constexprs=values, attrs=attributes)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print("shared", made.metadata.shared, "wgmma", made.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.parametrize(
    ("kernel", "D", "mechanism"),
    [
        ("forward_kernel", 128, "lssar"),
        ("key_gradient_kernel", 64, "lssar"),
        pytest.param("forward_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("key_gradient_kernel", 128, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 64, "lssa", marks=pytest.mark.slow),
        pytest.param("query_gradient_kernel", 128, "lssar", marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(kernel, D, mechanism, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, str(script), kernel, str(D), mechanism], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    words = run.stdout.split()
    assert 2 * (int(words[1]) + 1024) <= 228 * 1024, "two programs have to fit on a multiprocessor"
    assert int(words[3]) > 0
