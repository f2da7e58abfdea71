"""All jobs of a sweep, several at a time, until they are done or the time is over."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from lssar.experiments.newton.arms import print_line, run_job
from lssar.experiments.newton.families import Family, Job, claim, jobs_of
from lssar.training.loop import stop_signal


def run_all(
    families: tuple[Family, ...], out: Path, device: str, workers: int = 1, time_limit: float | None = None,
    keep_weights: bool = False, say: Callable[[str], None] = print_line,
) -> bool:  # fmt: skip
    """Run what is missing, `workers` jobs at a time; True when every arm is there.

    After `time_limit` seconds, or on SIGINT or SIGTERM, jobs under way save what they have and end.
    """
    claim(families, out)
    jobs = jobs_of(families)
    until = None if time_limit is None else time.time() + time_limit
    with stop_signal() as signalled:

        def stop() -> bool:
            return signalled() or (until is not None and time.time() > until)

        if workers == 1:
            return all(run_job(job, out, device, stop, keep_weights, say) for job in jobs)
        context = multiprocessing.get_context("spawn")
        ending = context.Event()
        threads = max(1, torch.get_num_threads() // workers)
        with ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (ending, threads)) as pool:
            waiting = {pool.submit(_work, job, out, device, keep_weights) for job in jobs}
            done: set[Any] = set()
            try:
                while waiting:
                    finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    done |= finished
                    if stop() or any(future.exception() for future in finished):
                        ending.set()
            finally:
                ending.set()  # whatever happens here, the workers save and end
            return all([future.result() for future in done])  # noqa: C419  every failure is to be seen


_ending: Any = None
"""In a worker: set when it is to save and end."""


def _start_worker(ending: Any, threads: int) -> None:
    global _ending
    _ending = ending
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one passes it on
    torch.set_num_threads(threads)


def _work(job: Job, out: Path, device: str, keep_weights: bool) -> bool:
    return run_job(job, out, device, _ending.is_set, keep_weights)
