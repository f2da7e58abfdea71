"""Divide the cases of a fuzzer over processes and add up what they found."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

CHUNKS = 8
"""Pieces of each process by default, since some cases take much longer than others."""


def _piece(fuzz: Callable[..., dict[str, Any]], first: int, cases: int, ends: float) -> dict[str, Any]:
    left = ends - time.time()
    return fuzz(first, cases, left) if left > 0 else {"cases": 0, "counts": {}, "failures": []}


def in_processes(
    fuzz: Callable[[int, int, float], dict[str, Any]], first: int, cases: int, seconds: float, jobs: int,
    size: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `fuzz(first, cases, seconds)` in `jobs` processes: its counts added, its failures in order.

    size: cases of one piece.
    """
    if jobs == 1:
        return fuzz(first, cases, seconds)
    size = size or max(1, -(-cases // (CHUNKS * jobs)))
    starts = range(first, first + cases, size)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        ends = time.time() + seconds
        futures = [pool.submit(_piece, fuzz, start, min(size, first + cases - start), ends) for start in starts]
        parts = [future.result() for future in futures]
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
    failures = [failure for part in parts for failure in part["failures"]]
    about = max(parts, key=lambda part: part["cases"]) | {"first": first, "jobs": jobs}
    return about | {
        "cases": sum(part["cases"] for part in parts), "counts": dict(sorted(counts.items())), "failures": failures,
    }  # fmt: skip
