"""Runs the numeric tests as other CPUs and other random numbers would: `make test-portable`.

    python -m tests.portable [--settings NAME ...] [--workers N] [--out FOLDER] [-- PYTEST ARGUMENTS]

Each setting is a process with its own environment: the instruction sets of numpy's matrix products (OpenBLAS), of
PyTorch's own kernels (ATen), of its matrix products (MKL) and of our C kernels, and the seed. All run on the CPU. After
a failure the next setting follows; the last lines say what failed and how to run only that again. Exits with 1 then.

A setting runs the tests that it can affect:

- OpenBLAS computes the products of Triton's interpreter, and nothing else here: `MODELS` never multiply in numpy.
- The C kernels belong to the tiled implementation: `KERNELS` run fused ones and compare with the reference.

Each group meets every value of what can affect it, and three seeds other than that of `make test`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = tuple(
    f"tests/ops/test_{name}.py"
    for name in (
        "activations", "decode", "decode_path", "decode_softmax", "fused", "fuzz_fused", "hopper_on_cpu", "linear",
        "loss", "not_finite", "power_and_gain", "scaled_unit", "steep", "window",
    )
)  # fmt: skip
"""Fused kernels in Triton's interpreter."""

MODELS = (
    "tests/ops/test_compiled_strips.py",
    "tests/ops/test_native.py",
    "tests/ops/test_reference.py",
    "tests/ops/test_tiled.py",
    "tests/test_adversarial.py",
    "tests/test_attention.py",
    "tests/test_containment.py",
    "tests/test_context.py",
    "tests/test_functional.py",
    "tests/test_fuzz_attention.py",
    "tests/test_model.py",
    "tests/test_nn.py",
    "tests/test_properties.py",
    "tests/test_testing.py",
)
"""The other implementations, and what is built on them."""

SETTINGS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "haswell": ({"OPENBLAS_CORETYPE": "Haswell", "LSSAR_NATIVE_ISA": "avx2", "LSSAR_TEST_SEED": "1"}, KERNELS + MODELS),
    "zen": (
        {"OPENBLAS_CORETYPE": "Zen", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "LSSAR_TEST_SEED": "3"},
        KERNELS + MODELS,
    ),
    "old": (
        {
            "OPENBLAS_CORETYPE": "Nehalem", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE",
            "LSSAR_NATIVE_ISA": "baseline",
        },
        KERNELS + MODELS,
    ),
    "skylakex": ({"OPENBLAS_CORETYPE": "SkylakeX", "LSSAR_TEST_SEED": "2"}, KERNELS),
    "no-native": ({"ATEN_CPU_CAPABILITY": "avx2", "LSSAR_NATIVE": "0", "LSSAR_TEST_SEED": "2"}, MODELS),
}  # fmt: skip
NATIVE = ROOT / f"src/lssar/ops/native/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
EVERYWHERE = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
NEEDS = {"haswell": "avx2", "zen": "avx2", "skylakex": "avx512", "no-native": "avx2"}
"""Instructions without which OpenBLAS or PyTorch would crash."""


def lacks(name: str) -> bool:
    """Whether this processor lacks instructions that the setting uses."""
    from torch.backends.cpu import get_cpu_capability

    levels = ["default", "avx2", "avx512"]
    here = get_cpu_capability().lower()
    return here in levels and name in NEEDS and levels.index(here) < levels.index(NEEDS[name])


def run(name: str, arguments: list[str], log: Path) -> tuple[bool, str, list[str]]:
    """Whether all passed, pytest's last line, and the names of tests that failed. The log gets pytest's output."""
    native = {} if "LSSAR_NATIVE" in SETTINGS[name][0] else {"LSSAR_REQUIRE_NATIVE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *arguments]
    with log.open("w") as output:
        environment = {**os.environ, **EVERYWHERE, **native, **SETTINGS[name][0]}
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    lines = log.read_text().strip().splitlines() or ["no output"]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return code == 0, lines[-1].strip("= "), failed


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the numeric tests under several CPU settings and seeds.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="all by default")
    parser.add_argument("--workers", default="auto", help="processes of pytest-xdist; 0: none; one a core by default")
    parser.add_argument("--out", type=Path, default=Path("out/portable"), help="folder for the output of pytest")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest after --, in place of the setting's tests")
    asked = parser.parse_args(words)
    if not NATIVE.exists() and asked.settings != ["no-native"]:
        print(f"the C kernels are not built for this Python: run `{sys.executable} setup.py build_ext --inplace`")
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    workers = ["-n", asked.workers] if importlib.util.find_spec("xdist") else []
    failures = []
    for number, name in enumerate(asked.settings, 1):
        start, log = time.monotonic(), asked.out / f"{name}.txt"
        values, tests = SETTINGS[name]
        print(f"[{number}/{len(asked.settings)}] {name}: {' '.join(f'{k}={v}' for k, v in values.items())}", flush=True)
        if lacks(name):
            print(f"    not run: this processor has no {NEEDS[name].upper()}", flush=True)
            continue
        passed, summary, failed = run(name, [*workers, *(asked.pytest or tests)], log)
        seconds = time.monotonic() - start
        print(f"    {'passed' if passed else 'FAILED'} in {seconds:.0f} s: {summary} ({log})", flush=True)
        if not passed:
            failures.append(name)
            print("".join(f"    {line}\n" for line in failed), end="", flush=True)
    if failures:
        print(f"{len(failures)} of {len(asked.settings)} settings failed; to run only those again:")
        print(f"    {shlex.join([sys.executable, '-m', 'tests.portable', '--settings', *failures])}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
