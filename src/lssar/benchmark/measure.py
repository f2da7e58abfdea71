"""Correctness first, then time and memory of one contestant on one case."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lssar.benchmark.contestants import Attention, Case, build
from lssar.ops.reference import reference_attention
from lssar.specs import AttentionSpec
from lssar.visibility import visibility

MODES = ("forward", "backward", "both")
CHECKED_ROWS = 48
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}
"""Relative error (Frobenius) that passes in any case; beyond it, up to twice what eager loses in the same dtype."""


class Incorrect(Exception):
    """The contestant's results are wrong: it is not timed."""


def check(function: Attention, mechanism: AttentionSpec, case: Case, gradients: bool) -> dict[str, float]:
    """Relative errors of o, dq, dk, dv against float64 on sampled rows of the full problem, the largest of the batch.

    The gradient of the output is zero but for the sampled rows: then dk and dv, too, depend on those rows alone, and
    the dense reference is CHECKED_ROWS x L however long the problem.
    """
    q, k, v, do = case.inputs()
    rows = _sampled_rows(case.queries, q.device)
    picked = torch.zeros_like(do)
    picked[:, :, rows] = do[:, :, rows]
    see = visibility(case.queries, case.length, q.device, causal=case.causal, window=case.window)
    visible = see.dense(case.length)[:, :, rows]

    def dense(dtype: torch.dtype, b: int) -> list[Tensor]:
        one = slice(b, b + 1)
        x = [t[one].to(dtype).detach().requires_grad_(gradients) for t in (q[:, :, rows], k, v)]
        o = reference_attention(x[0], x[1], x[2], visible, mechanism)[0]
        return [o.detach(), *(torch.autograd.grad(o, x, do[one, :, rows].to(dtype)) if gradients else ())]

    inputs = [t.detach().requires_grad_(gradients) for t in (q, k, v)]
    o = function(*inputs)
    got = [o.detach()[:, :, rows]]
    if gradients:
        dq, dk, dv = torch.autograd.grad(o, inputs, picked)
        got += [dq[:, :, rows], dk, dv]
    del o
    errors: dict[str, float] = {}
    for b in range(case.batch):  # one after the other: a long cache in float64 for all of them may not fit
        exact, eager = dense(torch.float64, b), dense(case.torch_dtype, b)
        for name, x, e, r in zip(("o", "dq", "dk", "dv"), got, eager, exact):
            error = _relative(x[b : b + 1], r)
            allowed = max(TOLERANCE[case.dtype], 2 * _relative(e, r))
            if not error <= allowed:
                raise Incorrect(f"relative error of {name} is {error:.2g}, allowed {allowed:.2g}")
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _sampled_rows(length: int, device: torch.device) -> Tensor:
    first = torch.arange(min(8, length))
    spread = torch.linspace(0, length - 1, max(1, min(CHECKED_ROWS - 8, length))).long()
    return torch.cat([first, spread]).unique().to(device)


def _relative(x: Tensor, r: Tensor) -> float:
    return float((x.double() - r.double()).norm() / r.double().norm().clamp_min(1e-300))


def measure(name: str, case: Case, modes: tuple[str, ...], budget_s: float) -> dict[str, Any]:
    """Times (ms), peak extra memory (MiB) and errors; raises Unavailable or Incorrect instead."""
    function, mechanism = build(name, case)
    gradients = modes != ("forward",)
    if case.device == "cpu":
        _warm_up(name, case, gradients)
    before = _memory_mark(case)
    q, k, v, do = (x.requires_grad_(gradients) for x in case.inputs())
    run = _modes(function, q, k, v, do)
    run["both" if gradients else "forward"]()
    memory = _memory_peak(case) - before - sum(x.numel() * x.element_size() for x in (q, k, v, do)) / 2**20
    result: dict[str, Any] = {"peak_extra_mib": round(max(memory, 0.0), 1)}
    result["errors"] = check(function, mechanism, case, gradients)
    for mode in modes:
        result[f"{mode}_ms"] = _time(run[mode], case, budget_s)
    return result


def _modes(function: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Callable[[], Any]]:
    kept: list[Tensor] = []

    def forward() -> None:
        with torch.no_grad():
            function(q, k, v)

    def backward() -> None:
        if not kept:
            kept.append(function(q, k, v))
        torch.autograd.grad(kept[0], (q, k, v), do, retain_graph=True)

    def both() -> None:
        torch.autograd.grad(function(q, k, v), (q, k, v), do)

    return {"forward": forward, "backward": backward, "both": both}


def _warm_up(name: str, case: Case, gradients: bool) -> None:
    """Load libraries on a small problem, so that their memory is not counted as the contestant's."""
    small = dataclasses.replace(case, batch=1, length=16)
    function, _ = build(name, small)
    q, k, v, do = (x.requires_grad_(gradients) for x in small.inputs())
    o = function(q, k, v)
    if gradients:
        torch.autograd.grad(o, (q, k, v), do)


def _memory_mark(case: Case) -> float:
    if case.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    return _memory_peak(case)


def _memory_peak(case: Case) -> float:
    if case.device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    # The high-water mark of a process only rises, so on a CPU each contestant has a process of its own.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _time(f: Callable[[], Any], case: Case, budget_s: float) -> float:
    """Median milliseconds over at least three runs, and as many more as fit the budget."""
    if case.device == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph

        if case.decode or case.cuda_graph:  # decoding as it is served: a launch costs as much as the work
            return float(do_bench_cudagraph(f, rep=int(750 * budget_s), return_mode="median"))
        return float(do_bench(f, warmup=int(250 * budget_s), rep=int(750 * budget_s), return_mode="median"))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 100):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3
