"""The queue: trains arms, reads them, and records each in a file of its own. Stop it whenever you like.

RESULTS/ARM.json            one arm: figures read so far, recipe, data, commit, machine
RESULTS/earlier/ARM-1.json  the same of a training before that, where one was made again: what differs is noise
RUNS/ARM/                   its run folder: checkpoints, metrics and the readings done so far
RUNS/ARM.lock               held by the process that works on it. The lock is the kernel's (flock), so it ends with the
                            process, however that ends: there are no stale ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lssar.data.stream import TokenStream
from lssar.experiments.arms import Arm, Scale
from lssar.experiments.readings import HeldOut
from lssar.records import environment, write_json
from lssar.training.checkpoints import latest
from lssar.training.loop import load_run, train
from lssar.training.metrics import flops_per_token, read_metrics, summarise
from lssar.training.sources import STDLIB, write_stdlib

LOOK_AGAIN = 0.05
"""Seconds."""

Say = Callable[[str], None]
Report = Callable[[dict[str, Any]], None]
Watch = Callable[[Arm], contextlib.AbstractContextManager[Report]]


class Stopped(Exception):
    """Out of time, or asked to stop; what is done is kept."""


class ReadingFailed(Exception):
    """A required one; what went wrong has been said."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What the workers need to know; plain, so that it can be sent to another process."""

    arms: tuple[Arm, ...]
    required: dict[str, tuple[str, ...]]
    """Keys of the readings without which an arm is not finished, by arm; the others are read in passing."""
    scale: Scale
    data: Path
    command: str
    bench: Path | None = None
    """Folder of benchmark files."""
    deadline: float | None = None
    """Of time.time()."""
    whole_arms: bool = False
    """Begin none that would likely not be finished by the deadline, judged by other seeds of the same or, where there
    are none, by the slowest that this process has done."""
    compile: bool | None = None
    """In place of the recipe's; not part of an arm's identity."""

    def result(self, arm: Arm) -> Path:
        return self.scale.results / f"{arm.key}.json"

    def run(self, arm: Arm) -> Path:
        return self.scale.runs / arm.key

    def finished(self, arm: Arm) -> bool:
        path = self.result(arm)
        return path.exists() and set(self.required[arm.key]) <= set(json.loads(path.read_text())["readings"])

    def time_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.time()


def prepare_data(scale: Scale, given: Path | None) -> Path:
    """The folder of shards that all arms share; the standard library's are made on first use."""
    if scale.data == STDLIB and given is None:
        folder = scale.runs / STDLIB
        if not folder.exists():
            temporary = folder.with_name(f".{STDLIB}-{os.getpid()}")
            write_stdlib(temporary)
            try:
                temporary.rename(folder)
            except OSError:  # another process was faster
                shutil.rmtree(temporary)
        return folder
    folder = given or Path("data") / scale.data
    if not any(folder.glob("*train*.bin")) or not any(folder.glob("*val*.bin")):
        raise FileNotFoundError(
            f"no training and held-out shards (*train*.bin, *val*.bin) in {str(folder)!r}; make them with "
            f"`lssar data prepare ... --name {scale.data}`, or say where they are with --data FOLDER"
        )
    return folder


@contextlib.contextmanager
def quietly(arm: Arm) -> Iterator[Report]:
    """Progress in plain lines, a tenth of the steps at a time."""

    def report(row: dict[str, Any]) -> None:
        step, steps = row["step"], arm.recipe.steps
        if step == steps or step * 10 // steps != (step - 1) * 10 // steps:
            speed = f"{row['tokens_per_s'] / 1e3:.0f}K tokens/s"
            print(f"{arm.key} {step}/{steps} loss {row['loss']:.3f} {speed}", flush=True)

    yield report


def work_through(queue: Queue, workers: int = 1, watch: Watch = quietly, say: Say = print) -> list[str]:
    """Work on all arms until they are finished or time is up; returns the keys of those that failed."""
    queue.scale.runs.mkdir(parents=True, exist_ok=True)
    if workers == 1:
        return _work(queue, watch, say)
    context = multiprocessing.get_context("spawn")
    failures: Any = context.Queue()
    threads = max(1, torch.get_num_threads() // workers)
    processes = [context.Process(target=_worker, args=(queue, failures, threads, workers)) for _ in range(workers)]
    for process in processes:
        process.start()

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)  # the step under way is finished and saved

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
        raise RuntimeError(f"workers ended with {[process.exitcode for process in processes]}; see above")
    return failed


def _worker(queue: Queue, failures: Any, threads: int, workers: int) -> None:
    torch.set_num_threads(threads)  # more than there are cores wait for each other
    os.setsid()  # Ctrl-C reaches the parent alone, which passes it on once: a second signal would end at once
    for key in _work(queue, quietly, lambda text: print(text, flush=True), workers):
        failures.put(key)


def _work(queue: Queue, watch: Watch, say: Say, workers: int = 1) -> list[str]:
    failed: list[str] = []
    pace = 0.0  # seconds a step of the slowest arm so far, while so many workers shared the machine
    for number, arm in enumerate(queue.arms, 1):
        if queue.finished(arm):
            continue
        with _claim(queue.run(arm)) as mine:
            if not mine or queue.finished(arm):  # another process has it, or had it while we looked
                continue
            left = queue.time_left() if queue.whole_arms else None
            likely = 0.0 if left is None else _seconds_of_another_seed(queue, arm) or pace * arm.recipe.steps
            if left is not None and left < likely:
                likely *= min(1.0, _at_work(queue) / workers)  # with fewer at work it goes faster
            if left is not None and left < likely:
                say(f"{arm.key} would take {likely:.0f} s, and {max(left, 0):.0f} s are left: not begun")
                continue
            again = " (its figures are there, but not all that is asked for now)" if queue.result(arm).exists() else ""
            say(f"arm {number} of {len(queue.arms)}: {arm.key}{again}")
            began = time.monotonic()
            try:
                run_arm(queue, arm, watch, say)
                pace = max(pace, (time.monotonic() - began) / arm.recipe.steps)
            except Stopped as reason:
                say(f"stopped: {reason}; the same command goes on")
                return failed
            except ReadingFailed as reason:
                say(f"{reason}; the others go on")
                failed.append(arm.key)
            except Exception:
                failed.append(arm.key)
                if device_is_lost():  # whatever is begun next would fail as well
                    say(f"{arm.key}: the device is lost to this process, which ends\n{traceback.format_exc()}")
                    return failed
                say(f"{arm.key} failed; the others go on\n{traceback.format_exc()}")
            if torch.cuda.is_available():
                torch.compiler.reset()
                torch.cuda.empty_cache()
    return failed


def _seconds_of_another_seed(queue: Queue, arm: Arm) -> float | None:
    """By its record, on a machine like this one: mechanisms differ in speed by more than machines' loads do."""
    kind = lambda e: e.get("gpu") or e["cpu"]  # noqa: E731
    here, found = kind(environment()), []
    for path in queue.scale.results.glob(f"{arm.name}-seed*.json"):
        result = json.loads(path.read_text())
        if kind(result["environment"]) == here:
            training = result["training"]["tokens"] / result["training"]["tokens_per_s"]
            found.append(training + sum(reading["seconds"] for reading in result["readings"].values()))
    return max(found, default=None)


def _at_work(queue: Queue) -> int:
    """How many arms are held, by this process too."""
    held = 0
    for run in map(queue.run, queue.arms):
        if _lock(run).exists():
            with _claim(run) as free:
                held += not free
    return held


def device_is_lost() -> bool:
    """After some errors, not after all, no call to the GPU succeeds in this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _lock(run: Path) -> Path:
    return run.with_name(run.name + ".lock")


@contextlib.contextmanager
def _claim(run: Path) -> Iterator[bool]:
    with open(_lock(run), "w") as handle:
        for attempt in range(2):  # `_at_work` of another process holds a free one, too, for an instant
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt:
                    yield False
                    return
                time.sleep(LOOK_AGAIN)
        yield True


def run_arm(queue: Queue, arm: Arm, watch: Watch = quietly, say: Say = print) -> dict[str, Any]:
    """Train what is left to train, read what is left to read, record.

    A reading that fails costs neither the training nor the other readings: they are recorded, and if it is a required
    one the arm stays unfinished.
    """
    run = queue.run(arm)
    _train(queue, arm, run, watch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, recipe, step = load_run(run, device)
    scale = queue.scale
    held_out = HeldOut(queue.data, recipe, scale.read_tokens, device, queue.bench, scale.bench_documents)
    started = json.loads((run / "config.json").read_text())["environment"]
    result = {
        "arm": arm.key,
        "name": arm.name,
        "scale": scale.name,
        "command": queue.command,
        "content": arm.content,
        "recipe": recipe.to_dict() | {"data": arm.data},
        "model": recipe.model().to_dict(),
        "parameters": model.parameter_count(),
        "flops": round(flops_per_token(model, recipe.length) * recipe.steps * recipe.batch_tokens),
        "data": identity(queue.data, arm.data),
        "seed": recipe.seed,
        "step": step,
        "training": summarise(read_metrics(run)),
        "readings": {},
        "environment": started,
    }
    readings: dict[str, Any] = result["readings"]
    required = queue.required[arm.key]
    for reading in sorted(arm.readings, key=lambda reading: reading.key not in required):
        if reading.key not in required and reading.missing(queue.bench):
            continue  # in passing only where it can be had
        part = run / "readings" / f"{reading.key}.json"
        if not part.exists():
            if (left := queue.time_left()) is not None and left <= 0:
                raise Stopped("out of time while reading")
            began = time.monotonic()
            try:
                figures = reading.read(model, held_out)
            except Exception:
                if device_is_lost():
                    raise
                say(f"{arm.key}: reading {reading.key} failed; the others go on\n{traceback.format_exc()}")
                continue
            write_json(part, plain({**figures, "seconds": round(time.monotonic() - began, 1)}))
        readings[reading.key] = json.loads(part.read_text())
        _record(queue.result(arm), result)
    _record(queue.result(arm), result)
    if lost := set(required) - set(readings):
        raise ReadingFailed(f"{arm.key} is trained, but not read: {', '.join(sorted(lost))}")
    for checkpoint in (run / "checkpoints").glob("step-*"):  # further readings need the weights alone
        (checkpoint / "optimiser.safetensors").unlink(missing_ok=True)
    return result


def _record(path: Path, result: dict[str, Any]) -> None:
    """After every reading, since the machine may go before the last; but never in place of a file that has more.

    Figures of another training are put aside, not replaced.
    """
    result = plain(result)
    if path.exists():
        before = json.loads(path.read_text())
        if not set(before["readings"]) <= set(result["readings"]):
            return
        if before["environment"] != result["environment"]:  # which is the one that training began in
            folder = earlier_folder(path.parent)
            number = 1 + sum(1 for _ in folder.glob(f"{path.stem}-*.json"))
            write_json(folder / f"{path.stem}-{number}.json", before)
    write_json(path, result, overwrite=True)


def earlier_folder(results: Path) -> Path:
    """Of trainings that were made again."""
    return results / "earlier"


def _train(queue: Queue, arm: Arm, run: Path, watch: Watch) -> None:
    recipe = arm.recipe.replace(data=str(queue.data))
    if queue.compile is not None:
        recipe = recipe.replace(compile=queue.compile)
    if (done := latest(run)) is not None and done.name == f"step-{recipe.steps:07d}":
        return
    if queue.scale.processes > 1:
        raise ValueError(f"train this arm under torchrun first (`--dry-run` prints the line): {run} is not trained")
    left = queue.time_left()
    if left is not None and left <= 0:
        raise Stopped("out of time")
    with watch(arm) as report:
        last = train(recipe, run, report=report, stop_after=left)
    if last["step"] < recipe.steps:
        raise Stopped(f"{arm.key} is at step {last['step']:,} of {recipe.steps:,}")


def identity(folder: Path, name: str) -> dict[str, Any]:
    """Which tokens, wherever they lie."""
    streams = {split: TokenStream(sorted(folder.glob(f"*{split}*.bin"))).identity() for split in ("train", "val")}
    return {"name": name, **streams}


def plain(value: Any) -> Any:
    """For JSON: floats to six figures, what is not finite to null (a diverged arm is a result too)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def measured(results: Path, name: str, command: str, measure: Callable[[], Any]) -> Path:
    """Figures of an experiment that need no training, in a file of their own; kept once they are there."""
    path = results / f"{name}.json"
    if not path.exists():
        write_json(path, plain({"command": command, "environment": environment(), "figures": measure()}))
    return path
