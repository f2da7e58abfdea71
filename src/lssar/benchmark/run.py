"""All contestants on all cases, one after the other, with the reason in place of results where one failed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lssar.benchmark.contestants import Case, Unavailable, split_name
from lssar.benchmark.measure import MODES, Incorrect, measure
from lssar.records import environment


def run_benchmark(
    contestants: Sequence[str],
    cases: Sequence[Case],
    modes: Sequence[str] = MODES,
    budget_s: float = 1.0,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Results of every contestant on every case: `{"environment": ..., "rows": [...]}`, plain values throughout."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    if any(case.decode for case in cases) and tuple(modes) != ("forward",):
        raise ValueError(f"decoding has no backward: its only mode is forward; got {', '.join(modes)}")
    if any(case.cuda_graph for case in cases):
        if not all(case.device.startswith("cuda") for case in cases):
            raise ValueError("a CUDA graph needs a GPU; measure on device cuda, or without the graph")
        if "backward" in modes:
            raise ValueError("a CUDA graph has no backward without its forward: measure the modes forward and both")
    for name in contestants:
        split_name(name)  # a typing error should not cost the first hour
    rows = []
    for case in cases:
        for name in contestants:
            row = {"contestant": name, **vars(case), **_figures(name, case, tuple(modes), budget_s)}
            rows.append(row)
            report(row)
    return {"environment": environment(), "rows": rows}


def _figures(name: str, case: Case, modes: tuple[str, ...], budget_s: float) -> dict[str, Any]:
    if case.device == "cpu":
        return _in_own_process(name, case, modes, budget_s)
    try:
        return measure(name, case, modes, budget_s)
    except Exception as error:
        return _failure(error)
    finally:
        torch.cuda.empty_cache()


def _failure(error: BaseException) -> dict[str, Any]:
    match error:
        case Unavailable():
            return {"unavailable": str(error)}
        case Incorrect():
            return {"incorrect": str(error)}
        case _:
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def _in_own_process(name: str, case: Case, modes: tuple[str, ...], budget_s: float) -> dict[str, Any]:
    """A process each, for an honest peak of memory, and so that one that runs out of it ends alone."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, case, modes, budget_s, torch.get_num_threads()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return {"failed": f"the process ended with code {process.exitcode} (killed for memory?)"}
    finally:
        process.join()


def _child(
    sender: multiprocessing.connection.Connection, name: str, case: Case, modes: tuple[str, ...], budget_s: float,
    threads: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    try:
        sender.send(measure(name, case, modes, budget_s))
    except Exception as error:
        sender.send(_failure(error))
