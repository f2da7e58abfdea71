"""One process of several is killed at a random moment; the others must end by themselves, and say why.

The run then resumes on another number of processes. Checkpoints are written most of the time, in the background. At the
end every step must be there, with the loss of a run that was never interrupted, up to the order of summation.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lssar.training import checkpoints, train
from lssar.training.metrics import read_metrics
from lssar.training.recipes import Recipe
from tests.attack.children import ENDED, fork_ranks, kill, wait
from tests.attack.kills import PATIENCE, Lost, still_safe
from tests.training.counting import tiny, write_counting

STEPS = 40
SIZES = (1, 2, 2, 4, 4)
LIMIT = 60.0
"""Seconds within which all processes must have ended after one is killed."""
TOLERANCE = 1e-9
"""Of losses. Training is in float64 here, so that the order of summation does not hide a difference."""


def _train(recipe: Recipe, run: Path) -> Callable[[], None]:
    def act() -> None:
        import torch

        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        faulthandler.dump_traceback_later(0.8 * LIMIT)  # shows where a process hangs
        try:
            train(recipe, run)
        except OSError as error:
            raise SystemExit(print(f"error: {error}") or 1) from None

    return act


def kill_one_process(kills: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Counts of kills, each of one process among two or four, or of the only one."""
    rng = random.Random(f"one process {seed}")
    data = write_counting(folder / "data")
    recipe = tiny(data, steps=STEPS, save_every=2, eval_every=STEPS, parallel="fsdp", micro_batch=2, lr=3e-4)
    if wait(fork_ranks(_train(recipe, folder / "whole"), folder / "whole.log", 1), PATIENCE) != [0]:
        raise Lost(f"the uninterrupted run failed: {(folder / 'whole.log').read_text()[-2000:]}")
    expected = [row["loss"] for row in read_metrics(folder / "whole")]
    counts: dict[str, Any] = {"kills": 0, "starts": 0, "finished_runs": 0, "lost": 0, "in_a_save": 0,
                              "longest_end": 0.0, "largest_difference": 0.0, "moves": {}}  # fmt: skip
    began = time.monotonic()
    while counts["kills"] < kills:
        run = folder / "killed"
        shutil.rmtree(run, ignore_errors=True)
        safe, before = 0, 0
        while True:
            size = rng.choice(SIZES)
            counts["starts"] += 1
            if before:
                move = f"{before} to {size}"
                counts["moves"][move] = counts["moves"].get(move, 0) + 1
            log = folder / "killed.log"
            log.unlink(missing_ok=True)
            pids = fork_ranks(_train(recipe, run), log, size)
            if _run_and_kill(pids, run, log, rng if counts["kills"] < kills else None, counts):
                break
            safe, before = still_safe(f"{size} processes", run, safe), size
        found = [row["loss"] for row in read_metrics(run)]
        if len(found) != STEPS:
            raise Lost(f"{len(found)} of {STEPS} steps are in metrics.jsonl")
        difference = float(np.abs(np.subtract(found, expected)).max())
        if difference > TOLERANCE:
            raise Lost(f"losses differ from those of the uninterrupted run by {difference}")
        counts["largest_difference"] = max(counts["largest_difference"], difference)
        counts["finished_runs"] += 1
    return counts | {"seconds": round(time.monotonic() - began, 1)}


def _run_and_kill(pids: list[int], run: Path, log: Path, rng: random.Random | None, counts: dict[str, Any]) -> bool:
    """Whether the processes finished; otherwise one of them has been killed, and the others have ended."""
    before = _written(run)
    _until(lambda: _written(run) != before or wait(pids, 0.0) is not None, PATIENCE)  # training begins
    ends = wait(pids, PATIENCE if rng is None else rng.uniform(0.0, 1.5))
    if ends is None and any(pid in ENDED for pid in pids):  # they are finishing
        ends = wait(pids, PATIENCE)
    finished = checkpoints.folder(run, STEPS)
    if ends is None and rng is not None and not finished.exists():
        victim = rng.randrange(len(pids))
        if rng.random() < 0.7:
            _until(lambda: any((run / "checkpoints").glob(".step-*")), 1.0)
            time.sleep(rng.uniform(0.0, 0.005))
        os.kill(pids[victim], signal.SIGKILL)
        at = time.monotonic()
        counts["in_a_save"] += any((run / "checkpoints").glob(".step-*"))
        counts["kills"] += 1
        ends = wait(pids, LIMIT)
        counts["longest_end"] = round(max(counts["longest_end"], time.monotonic() - at), 2)
        if ends is None:
            kill(pids)
            raise Lost(f"{len(pids)} processes, {victim} killed: the others did not end: {log.read_text()[-9000:]}")
        others = [(number, end) for number, end in enumerate(ends) if number != victim]
        if others and not any(end for _, end in others) and finished.exists():
            return True  # it was killed after the last step
        said = log.read_text()
        for number, end in others:
            if end != 1 or f"error: process {number} lost the connection" not in said:
                raise Lost(f"process {victim} was killed, and {number} ended with {end}: {said[-2000:]}")
        return False
    ends = wait(pids, PATIENCE)
    if ends is None or any(ends):
        kill(pids)
        raise Lost(f"{len(pids)} processes ended with {ends}: {log.read_text()[-2000:]}")
    if not finished.exists():
        raise Lost(f"{run}: no checkpoint of the last step")
    return True


def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Return when the condition holds, or after so many seconds."""
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.0005)


def _written(run: Path) -> tuple[int, int] | None:
    """Changes when metrics are written."""
    path = run / "metrics.jsonl"
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None
