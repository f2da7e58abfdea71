"""Runs the numeric tests as other CPUs and other random numbers would: `make test-portable`.

    python -m tests.portable [--settings NAME ...] [-- PYTEST ARGUMENTS]

Each setting is a process with its own environment: the instruction sets of numpy's matrix products (OpenBLAS, which
Triton's interpreter uses), of PyTorch's own kernels, of MKL and of our native kernels, and the seed. Together the
settings cover every value of each. Prints a table and exits with 1 if any test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

NUMERIC = (
    "tests/test_adversarial.py",
    "tests/test_attention.py",
    "tests/test_containment.py",
    "tests/test_context.py",
    "tests/test_functional.py",
    "tests/test_model.py",
    "tests/test_nn.py",
    "tests/test_properties.py",
    "tests/test_testing.py",
    "tests/ops",
)
"""Tests that compare floating-point results."""

SETTINGS: dict[str, dict[str, str]] = {
    "haswell": {"OPENBLAS_CORETYPE": "Haswell", "LSSAR_NATIVE_ISA": "avx2", "LSSAR_TEST_SEED": "1"},
    "skylakex": {"OPENBLAS_CORETYPE": "SkylakeX", "LSSAR_TEST_SEED": "2"},
    "zen": {"OPENBLAS_CORETYPE": "Zen", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "LSSAR_TEST_SEED": "3"},
    "old": {
        "OPENBLAS_CORETYPE": "Nehalem",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "LSSAR_NATIVE_ISA": "baseline",
    },
    "no native": {"OPENBLAS_CORETYPE": "SkylakeX", "ATEN_CPU_CAPABILITY": "avx2", "LSSAR_NATIVE": "0"},
}


def run(environment: dict[str, str], arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Whether all passed, pytest's last line, and the names of tests that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return done.returncode == 0, lines[-1].strip("= "), failed


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the numeric tests under several CPU settings and seeds.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="all by default")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest after --; the numeric tests by default")
    asked = parser.parse_args(words)
    rows, failures = [], []
    for name in asked.settings:
        start = time.perf_counter()
        passed, summary, failed = run(SETTINGS[name], asked.pytest or [*NUMERIC, "-n", "auto"])
        environment = " ".join(f"{key}={value}" for key, value in SETTINGS[name].items())
        rows.append((name, "passed" if passed else "FAILED", f"{time.perf_counter() - start:.0f} s", environment))
        failures += [f"{name}: {line}" for line in failed]
        print(f"{name}: {summary}", flush=True)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)), "", row[3])
    print(*failures, sep="\n")
    return int(any(row[1] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
