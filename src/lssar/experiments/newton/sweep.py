"""Run the jobs of a sweep, several at a time, until they are done or time is up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lssar.experiments.newton.arms import missing, print_line, run_job
from lssar.experiments.newton.families import Family, Job, claim, jobs_of
from lssar.experiments.newton.steps import EAGER, Execution
from lssar.experiments.newton.training import Optimisation
from lssar.training.loop import stop_signal

STEP_COST = 2048
"""A step costs about as much as this many tokens more than it has; only ratios between jobs come from it."""


def effort(job: Job, out: Path) -> int:
    """What is missing of a job, in tokens to train on."""
    family = job.family
    arms, probe = missing(job, out)

    def cost(stage: Optimisation, systems: int | None = None) -> int:
        return stage.steps * (min(stage.batch, systems or stage.batch) * family.tokens + STEP_COST)

    total = sum(cost(family.finetune, labels) for _, _, labels in arms)
    if probe:
        assert family.probe is not None
        total += family.probe_functions * cost(family.probe)
    if probe or any(start == "pretrained" for _, start, _ in arms):
        total += cost(family.pretrain)
    return total


class Schedule:
    """Chooses the next job. Interrupted jobs may be lost with the machine: none is started that would not finish."""

    def __init__(self, jobs: list[Job], out: Path, until: float | None) -> None:
        efforts = {job: effort(job, out) for job in jobs}
        self.waiting = [job for job in jobs if efforts[job]]
        self.efforts, self.until = efforts, until
        self.rates: list[float] = []  # seconds a token, of jobs finished in this run

    def take(self, before: Job | None = None) -> Job | None:
        """For a worker that has done `before`: one like it, whose compiled steps it has, but lower seeds first."""
        jobs = [job for job in self.waiting if self._in_time(job)]
        jobs = [job for job in jobs if job.seed == jobs[0].seed]
        alike = [job for job in jobs if before and (job.family, job.mechanism) == (before.family, before.mechanism)]
        chosen = next(iter(alike + jobs), None)
        if chosen is not None:
            self.waiting.remove(chosen)
        return chosen

    def _in_time(self, job: Job) -> bool:
        if self.until is None or not self.rates:  # with none finished there is nothing to go by
            return True
        return time.time() + median(self.rates) * self.efforts[job] < self.until

    def finished(self, job: Job, seconds: float) -> None:
        self.rates.append(seconds / self.efforts[job])


def run_all(
    families: tuple[Family, ...], out: Path, device: str, workers: int = 1, time_limit: float | None = None,
    keep_weights: bool = False, say: Callable[[str], None] = print_line, how: Execution = EAGER,
) -> bool:  # fmt: skip
    """Run what is missing, `workers` jobs at a time; True when every arm is there.

    After `time_limit` seconds, or on SIGINT or SIGTERM, running jobs save their state and end. With a limit no job
    is started that would probably not finish by then, judged by finished ones. If a job fails, the others continue, and
    the failure is raised at the end.
    """
    claim(families, out)
    until = None if time_limit is None else time.time() + time_limit
    schedule = Schedule(jobs_of(families), out, until)
    with stop_signal() as signalled:

        def stop() -> bool:
            return signalled() or (until is not None and time.time() > until)

        if workers > 1 and schedule.waiting:
            _side_by_side(schedule, out, device, workers, keep_weights, say, how, stop)
        else:
            _one_by_one(schedule, out, device, keep_weights, say, how, stop)
    return not any(effort(job, out) for job in jobs_of(families))


def _one_by_one(
    schedule: Schedule, out: Path, device: str, keep_weights: bool, say: Callable[[str], None], how: Execution,
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    job: Job | None = None
    while (job := schedule.take(job)) is not None:
        began = time.monotonic()
        if not run_job(job, out, device, stop, keep_weights, say, how):
            return
        schedule.finished(job, time.monotonic() - began)


def _side_by_side(
    schedule: Schedule, out: Path, device: str, workers: int, keep_weights: bool, say: Callable[[str], None],
    how: Execution, stop: Callable[[], bool],
) -> None:  # fmt: skip
    workers = min(workers, len(schedule.waiting))
    context = multiprocessing.get_context("spawn")
    ending = context.Event()
    threads = max(1, torch.get_num_threads() // workers)
    if device.startswith("cuda"):  # the GPU works; what each worker compiles should not take all cores
        threads = min(threads, 2)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    with ExitStack() as stack:
        idle: dict[ProcessPoolExecutor, Job | None] = {  # one process each, so that a job can go to a worker like it
            stack.enter_context(ProcessPoolExecutor(1, context, _start_worker, (ending, threads))): None
            for _ in range(workers)
        }
        running: dict[Future[bool], tuple[ProcessPoolExecutor, Job, float]] = {}
        failures: list[BaseException] = []
        try:
            while True:
                for pool in () if ending.is_set() else list(idle):
                    if (job := schedule.take(idle[pool])) is not None:
                        del idle[pool]
                        future = pool.submit(_work, job, out, device, keep_weights, how)
                        running[future] = pool, job, time.monotonic()
                if not running:
                    break
                for future in wait(running, timeout=0.5, return_when=FIRST_COMPLETED).done:
                    pool, job, began = running.pop(future)
                    if (problem := future.exception()) is not None:  # its worker gets no more
                        say(f"{job.name}: failed: {problem!r}")
                        failures.append(problem)
                    elif future.result():
                        schedule.finished(job, time.monotonic() - began)
                        idle[pool] = job
                if stop():
                    ending.set()
        finally:
            ending.set()  # also after an error here, so that the workers save and exit
    if failures:
        raise failures[0]


_ending: Any = None
"""In a worker: set when it is to save and end."""


def _start_worker(ending: Any, threads: int) -> None:
    global _ending
    _ending = ending
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one passes it on
    torch.set_num_threads(threads)


def _work(job: Job, out: Path, device: str, keep_weights: bool, how: Execution) -> bool:
    return run_job(job, out, device, _ending.is_set, keep_weights, how=how)
