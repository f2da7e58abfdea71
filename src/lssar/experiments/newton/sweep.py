"""The jobs of Newton's sweep as a queue."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from lssar.experiments.newton.arms import missing, run_job
from lssar.experiments.newton.families import Family, Job, claim, jobs_of
from lssar.experiments.newton.steps import EAGER, Execution
from lssar.experiments.newton.training import Optimisation
from lssar.experiments.queue import Queue, Say, Stopped, print_line, work_through
from lssar.training.loop import stop_signal

STEP_COST = 2048
"""A step costs about as much as this many tokens more than it has; only ratios between jobs come from it."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Queue[Job]):
    """Jobs of families; with a deadline none is started that would probably not finish by then."""

    out: Path
    device: str
    keep_weights: bool = False
    how: Execution = EAGER
    whole_jobs: bool = True

    def key(self, job: Job) -> str:
        return job.name

    def folder(self, job: Job) -> Path:
        return self.out / "work" / job.name

    def finished(self, job: Job) -> bool:
        return not self.effort(job)

    def effort(self, job: Job) -> float:
        """What is missing of a job, in tokens to train on."""
        family = job.family
        arms, probe = missing(job, self.out)

        def cost(stage: Optimisation, systems: int | None = None) -> int:
            return stage.steps * (min(stage.batch, systems or stage.batch) * family.tokens + STEP_COST)

        total = sum(cost(family.finetune, labels) for _, _, labels in arms)
        if probe:
            assert family.probe is not None
            total += family.probe_functions * cost(family.probe)
        if probe or any(start == "pretrained" for _, start, _ in arms):
            total += cost(family.pretrain)
        return total

    def choose(self, waiting: list[Job], before: Job | None) -> Job:
        """One like the job before, whose compiled steps the worker has, but lower seeds first."""
        jobs = [job for job in waiting if job.seed == waiting[0].seed]
        alike = [job for job in jobs if before and (job.family, job.mechanism) == (before.family, before.mechanism)]
        return (alike + jobs)[0]

    def run(self, job: Job, say: Say) -> None:
        with stop_signal() as signalled:

            def stop() -> bool:
                return signalled() or (self.deadline is not None and time.time() > self.deadline)

            if not run_job(job, self.out, self.device, stop, self.keep_weights, say, self.how):
                raise Stopped("out of time" if not signalled() else "asked to stop")


def run_all(
    families: tuple[Family, ...], out: Path, device: str, workers: int = 1, time_limit: float | None = None,
    keep_weights: bool = False, say: Say = print_line, how: Execution = EAGER,
) -> bool:  # fmt: skip
    """Run what is missing, `workers` jobs at a time; True when every arm is there.

    After `time_limit` seconds, or on SIGINT or SIGTERM, running jobs save their state and end. If a job fails, the
    others continue, and an error names it at the end.
    """
    claim(families, out)
    deadline = None if time_limit is None else time.time() + time_limit
    jobs = tuple(jobs_of(families))
    sweep = Sweep(jobs=jobs, deadline=deadline, out=out, device=device, keep_weights=keep_weights, how=how)
    if failed := work_through(sweep, workers, say):
        raise RuntimeError(f"these jobs failed (see above): {', '.join(failed)}")
    return all(map(sweep.finished, jobs))
