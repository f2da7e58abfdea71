"""The kill loop: training and data preparation are killed at random moments and restarted until they finish.

After every kill, what was safe must still be safe; at the end, the result must be that of a run that was never
interrupted, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lssar.data import prepare as preparation
from lssar.data.prepare import Settings, prepare
from lssar.data.tokenizers import load_tokenizer
from lssar.training import checkpoints, train
from lssar.training.metrics import read_metrics
from tests.attack.children import fork_ranks, kill, wait
from tests.training.counting import tiny, write_counting

STEPS = 60
PATIENCE = 120.0
"""Seconds after which a process that was not killed counts as hanging."""


@dataclass(frozen=True)
class Victim:
    """A way to train: changes of the recipe, and how many processes."""

    name: str
    changes: dict[str, Any]
    processes: int = 1


VICTIMS = (
    Victim("plain", {}),
    Victim("mixed layout, power schedule", {"layout": "mixed@16", "p_schedule": "3:0.4,15", "size": "0.8m"}),
    Victim("ddp, 2 processes", {"parallel": "ddp", "micro_batch": 2}, 2),
    Victim("fsdp, 2 processes", {"parallel": "fsdp", "micro_batch": 2}, 2),
)


class Lost(AssertionError):
    """Something that was safe is gone, or differs from the uninterrupted run."""


def _train(victim: Victim, data: Path, run: Path) -> Callable[[], None]:
    recipe = tiny(data, steps=STEPS, save_every=3, eval_every=20, **victim.changes)

    def act() -> None:
        import torch

        torch.set_num_threads(1)
        train(recipe, run)

    return act


def _outcome(run: Path) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """Losses and gradient norms of every step, and the checksums of the last checkpoint's tensors.

    Not of its files: safetensors writes the metadata in a header in any order.
    """
    rows = [(row["loss"], row["grad_norm"]) for row in read_metrics(run)]
    found = checkpoints.newest(run, whole=True)
    if found is None or checkpoints.step_of(found) != STEPS:
        raise Lost(f"{run}: no checkpoint of the last step")
    tensors = checkpoints.load_all(found)
    return rows, {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in tensors.items()}


def kill_training(victim: Victim, kills: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Train the victim, killed so many times, against the same training left alone. Returns counts."""
    rng = random.Random(f"{victim.name} {seed}")
    data = write_counting(folder / "data")
    began = time.monotonic()
    pids = fork_ranks(_train(victim, data, folder / "whole"), folder / "whole.log", victim.processes)
    if wait(pids, PATIENCE) != [0] * len(pids):
        kill(pids)
        raise Lost(f"{victim.name}: the uninterrupted run failed: {(folder / 'whole.log').read_text()[-2000:]}")
    usual = time.monotonic() - began
    expected = _outcome(folder / "whole")

    counts: dict[str, Any] = {"victim": victim.name, "kills": 0, "starts": 0, "finished_runs": 0, "lost": 0}
    while counts["kills"] < kills:
        run = folder / "killed"
        shutil.rmtree(run, ignore_errors=True)
        safe = 0
        while True:
            counts["starts"] += 1
            pids = fork_ranks(_train(victim, data, run), folder / "killed.log", victim.processes)
            moment = rng.uniform(0.0, 0.6 * usual) if counts["kills"] < kills else PATIENCE
            ends = wait(pids, moment)
            if ends is not None:
                if any(ends):
                    raise Lost(f"{victim.name}: ended with {ends}: {(folder / 'killed.log').read_text()[-2000:]}")
                break
            kill(pids)
            counts["kills"] += 1
            safe = still_safe(victim.name, run, safe)
        if _outcome(run) != expected:
            raise Lost(f"{victim.name}: the killed run differs from the uninterrupted one")
        counts["finished_runs"] += 1
    counts["seconds"] = round(time.monotonic() - began, 1)
    return counts


def still_safe(name: str, run: Path, safe: int) -> int:
    """The step of the newest checkpoint, none of which may be damaged or older than the last one seen."""
    found = checkpoints.checkpoints(run)
    for path in found:
        if (fault := checkpoints.damage(path, whole=True)) is not None:
            raise Lost(f"{name}: after a kill {fault}")
    step = checkpoints.step_of(found[-1]) if found else 0
    if step < safe:
        raise Lost(f"{name}: the checkpoint of step {safe} is gone; the newest is {step}")
    return step


def _prepare(sources: Path, out: Path, workers: int) -> Callable[[], None]:
    settings = Settings(name="x", sources=[str(sources)], shard_tokens=3000, val_share=0.05)

    def act() -> None:
        preparation._SAFE_POINT_SECONDS = 0.02
        prepare(settings, load_tokenizer("bytes"), out, workers=workers, report=lambda status: time.sleep(0.0005))

    return act


def _data(out: Path) -> dict[str, Any]:
    manifest = json.loads((out / "manifest.json").read_text())
    shards = {path.name: path.read_bytes() for path in sorted(out.glob("*.bin"))}
    return {"shards": shards} | {key: manifest[key] for key in ("splits", "eot", "tokenizer")}


def kill_preparation(kills: int, folder: Path, workers: int = 1, seed: int = 0) -> dict[str, Any]:
    """Prepare data, killed so many times, against the same left alone. Returns counts."""
    rng = random.Random(f"prepare {workers} {seed}")
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for i in range(400):
        (sources / f"{i:04d}.txt").write_text(f"{i} " * rng.randint(1, 120))
    began = time.monotonic()
    if wait(fork_ranks(_prepare(sources, folder / "whole", workers), folder / "whole.log", 1), PATIENCE) != [0]:
        raise Lost(f"uninterrupted preparation failed: {(folder / 'whole.log').read_text()[-2000:]}")
    usual = time.monotonic() - began
    expected = _data(folder / "whole")
    counts: dict[str, Any] = {"workers": workers, "kills": 0, "starts": 0, "finished_runs": 0, "lost": 0}
    while counts["kills"] < kills:
        out = folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        while not (out / "manifest.json").exists():  # a kill after it is written finds everything finished
            counts["starts"] += 1
            pids = fork_ranks(_prepare(sources, out, workers), folder / "killed.log", 1)
            ends = wait(pids, rng.uniform(0.0, 0.7 * usual) if counts["kills"] < kills else PATIENCE)
            if ends is None:
                kill(pids)
                counts["kills"] += 1
            elif ends != [0]:
                raise Lost(f"preparation ended with {ends}: {(folder / 'killed.log').read_text()[-2000:]}")
        if _data(out) != expected:
            raise Lost("the killed preparation differs from the uninterrupted one")
        counts["finished_runs"] += 1
    counts["seconds"] = round(time.monotonic() - began, 1)
    return counts
