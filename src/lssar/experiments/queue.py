"""A queue of jobs, worked on by one process or several until all are finished or time is up.

A worker takes the next job that is neither finished nor held by another process. The lock of a job is released when its
process ends, however that ends. So a queue can be stopped at any time, repeated to resume, and run by several commands
side by side. What a job is, and when it is finished, is for subclasses to say.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from lssar.locks import FolderInUse, held, hold

LOCK = ".arm.lock"

Job = TypeVar("Job")
Say = Callable[[str], None]


class Stopped(Exception):
    """Out of time, or asked to stop; finished work is kept."""


class JobFailed(Exception):
    """A job failed for a reason that is the message; no traceback is needed."""


def print_line(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, kw_only=True)
class Queue(ABC, Generic[Job]):
    """Jobs in the order of their importance, as plain values that can be sent to another process."""

    jobs: tuple[Job, ...]
    deadline: float | None = None
    """In terms of time.time()."""
    whole_jobs: bool = False
    """Start no job that would probably not finish by the deadline."""
    noun: ClassVar[str] = "job"

    @abstractmethod
    def key(self, job: Job) -> str:
        """Its name in messages."""

    @abstractmethod
    def folder(self, job: Job) -> Path:
        """Where its lock is."""

    @abstractmethod
    def finished(self, job: Job) -> bool: ...

    @abstractmethod
    def run(self, job: Job, say: Say) -> None:
        """Do what is missing of a job. Raises Stopped, or JobFailed or any other error."""

    def effort(self, job: Job) -> float:
        """What is missing of a job, in any unit: the slowest job of a process tells how long others may take."""
        return 1.0

    def expected_seconds(self, job: Job) -> float | None:
        """How long a job takes, where that is known without another job."""
        return None

    def choose(self, waiting: list[Job], before: Job | None) -> Job:
        """The next job of a worker that has done `before`."""
        return waiting[0]

    def time_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.time()


def work_through(queue: Queue[Any], workers: int = 1, say: Say = print_line) -> list[str]:
    """Work on all jobs until they are finished or time is up; returns the keys of those that failed."""
    workers = min(workers, sum(not queue.finished(job) for job in queue.jobs))
    if workers <= 1:
        return _work(queue, say)
    # Workers compile while others train: together they should not start more compilers than there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    context = multiprocessing.get_context("spawn")
    failures: Any = context.Queue()
    threads = max(1, torch.get_num_threads() // workers)
    processes = [context.Process(target=_worker, args=(queue, failures, threads, workers)) for _ in range(workers)]
    for process in processes:
        process.start()

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)  # the worker finishes the current step and saves

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for process in processes:
            process.join()
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
    failed: list[str] = []
    while not failures.empty():
        failed.append(failures.get())
    if any(process.exitcode not in (0, -signal.SIGTERM) for process in processes):
        raise RuntimeError(f"workers exited with {[process.exitcode for process in processes]}; see above")
    return failed


def _worker(queue: Queue[Any], failures: Any, threads: int, workers: int) -> None:
    torch.set_num_threads(threads)  # more threads than cores slow each other down
    os.setsid()  # Ctrl-C reaches only the parent, which forwards it once; a second signal would kill
    for key in _work(queue, print_line, workers):
        failures.put(key)


def _work(queue: Queue[Job], say: Say, workers: int = 1) -> list[str]:
    failed: list[str] = []
    pace = 0.0  # seconds per unit of effort of the slowest job of this process
    numbers = {queue.key(job): number for number, job in enumerate(queue.jobs, 1)}
    waiting, before = list(queue.jobs), None
    held_by_others: list[Job] | None = []  # looked at once more at the end: their workers may have ended
    while waiting or held_by_others:
        if not waiting:
            waiting, held_by_others = held_by_others or [], None
        job = queue.choose(waiting, before)
        waiting.remove(job)
        if queue.finished(job):
            continue
        key = queue.key(job)
        with contextlib.ExitStack() as claim:
            try:
                claim.enter_context(hold(queue.folder(job), f"working on {key}", LOCK))
            except FolderInUse:
                if held_by_others is not None:
                    held_by_others.append(job)
                continue
            if queue.finished(job):  # by another process, meanwhile
                continue
            effort, left = queue.effort(job), queue.time_left() if queue.whole_jobs else None
            likely = 0.0 if left is None else queue.expected_seconds(job) or pace * effort
            if left is not None and left < likely:
                likely *= min(1.0, _at_work(queue) / workers)  # fewer workers make each one faster
            if left is not None and left < likely:
                say(f"{key} would take {likely:.0f} s and {max(left, 0):.0f} s are left: not started")
                continue
            say(f"{queue.noun} {numbers[key]} of {len(queue.jobs)}: {key}")
            began = time.monotonic()
            try:
                queue.run(job, say)
                pace, before = max(pace, (time.monotonic() - began) / effort), job
            except Stopped as reason:
                say(f"stopped: {reason}; the same command resumes")
                return failed
            except (JobFailed, FolderInUse) as reason:
                say(f"{reason}; continuing with the next {queue.noun}")
                failed.append(key)
            except Exception as problem:
                if isinstance(problem, torch.OutOfMemoryError) and _at_work(queue) > 1:
                    say(f"{key}: out of GPU memory beside other {queue.noun}s; left to them, this worker ends")
                    return failed
                failed.append(key)
                if device_is_lost():  # every further job would fail too
                    say(f"{key}: the GPU no longer responds to this process, which exits\n{traceback.format_exc()}")
                    return failed
                say(f"{key} failed; continuing with the next {queue.noun}\n{traceback.format_exc()}")
    return failed


def _at_work(queue: Queue[Any]) -> int:
    """The number of jobs that are locked, by this process too."""
    return sum(held(folder, LOCK) for folder in {queue.folder(job) for job in queue.jobs})


def device_is_lost() -> bool:
    """Whether calls to the GPU fail in this process, as they do after some errors."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
