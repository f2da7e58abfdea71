"""The queue of arms: trains them, evaluates them, and records each in its own file.

RESULTS/ARM.json            one arm: its results so far, recipe, data, commit, machine
RESULTS/earlier/ARM-1.json  results of an earlier training of the same arm; the difference is noise
RUNS/ARM/                   its run folder: checkpoints, metrics and the evaluations made so far
RUNS/ARM/.arm.lock          held by the process that works on the arm, and released when that process ends
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lssar.data.folder import STDLIB, DataFolder, write_stdlib
from lssar.data.stream import TokenStream
from lssar.experiments.arms import Arm, Scale
from lssar.experiments.evaluations import HeldOut
from lssar.experiments.queue import JobFailed, Queue, Say, Stopped, device_is_lost
from lssar.model import GPT
from lssar.records import environment, write_json
from lssar.runs import Run
from lssar.training.checkpoints import latest
from lssar.training.loop import TrainingDiverged, train
from lssar.training.metrics import flops_per_token, read_metrics, summarise
from lssar.training.recipes import Recipe

Report = Callable[[dict[str, Any]], None]
Watch = Callable[[Arm], contextlib.AbstractContextManager[Report]]


@contextlib.contextmanager
def quietly(arm: Arm) -> Iterator[Report]:
    """Progress as plain lines, one for each tenth of the steps."""

    def report(row: dict[str, Any]) -> None:
        step, steps = row["step"], arm.recipe.steps
        if step == steps or step * 10 // steps != (step - 1) * 10 // steps:
            speed = f"{row['tokens_per_s'] / 1e3:.0f}K tokens/s"
            print(f"{arm.key} {step}/{steps} loss {row['loss']:.3f} {speed}", flush=True)

    yield report


@dataclass(frozen=True, kw_only=True)
class ArmQueue(Queue[Arm]):
    """Arms of experiments at one scale."""

    required: dict[str, tuple[str, ...]]
    """By arm, the keys of the evaluations without which it is not finished; others are made where possible."""
    scale: Scale
    data: Path
    command: str
    bench: Path | None = None
    """Folder of benchmark files."""
    compile: bool | None = None
    """Overrides the recipe; not part of an arm's identity."""
    watch: Watch = quietly
    """Shows the progress of a training."""
    noun: ClassVar[str] = "arm"

    def key(self, job: Arm) -> str:
        return job.key

    def folder(self, job: Arm) -> Path:
        return self.scale.runs / job.key

    def result(self, arm: Arm) -> Path:
        return self.scale.results / f"{arm.key}.json"

    def finished(self, job: Arm) -> bool:
        path = self.result(job)
        if not path.exists():
            return False
        result = load_result(path)
        return "diverged" in result or set(self.required[job.key]) <= set(result["evaluations"])

    def run(self, job: Arm, say: Say) -> None:
        if self.result(job).exists():
            say(f"{job.key}: some of its evaluations are missing")
        try:
            run_arm(self, job, say)
        finally:
            if torch.cuda.is_available():
                torch.compiler.reset()
                torch.cuda.empty_cache()

    def effort(self, job: Arm) -> float:
        return job.recipe.steps

    def expected_seconds(self, job: Arm) -> float | None:
        """Seconds that another seed of the arm took on a machine of the same kind, if one is recorded."""
        kind = lambda e: e.get("gpu") or e["cpu"]  # noqa: E731
        same = lambda content: {key: value for key, value in content.items() if key != "seed"}  # noqa: E731
        here, found = kind(environment()), []
        for path in self.scale.results.glob(f"{job.name}-seed*.json"):
            result = load_result(path)
            if kind(result["environment"]) == here and same(result["content"]) == same(job.content):
                training = result["training"]["tokens"] / result["training"]["tokens_per_s"]
                found.append(training + sum(made["seconds"] for made in result["evaluations"].values()))
        return max(found, default=None)


def prepare_data(scale: Scale, given: Path | None) -> Path:
    """The folder of shards that all arms share; those of the standard library are written on first use."""
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
    data = DataFolder(folder)
    if not (data.shards("train") and data.shards("val")):
        raise FileNotFoundError(
            f"no training and held-out shards (*train*.bin, *val*.bin) in {str(folder)!r}; make them with "
            f"`lssar data prepare ... --name {scale.data}`, or say where they are with --data FOLDER"
        )
    return folder


def run_arm(queue: ArmQueue, arm: Arm, say: Say) -> dict[str, Any]:
    """Train and evaluate what is missing, and record the results.

    An evaluation that fails affects neither the training nor other evaluations, which are recorded; the arm stays
    unfinished if the evaluation is a required one. A training that diverges is a result too: it is recorded without
    evaluations, and not repeated.
    """
    run = queue.folder(arm)
    try:
        _train(queue, arm, run)
    except TrainingDiverged as problem:
        say(f"{arm.key}: {problem}")
        steps = read_metrics(run)[-1]["step"]
        result = _about(queue, arm, GPT(arm.recipe.model()), arm.recipe, steps) | {"diverged": str(problem)}
        _record(queue.result(arm), result)
        return result
    opened = Run.open(run)
    model, recipe, step, device = opened.model(), opened.recipe, opened.step, opened.device.type
    scale = queue.scale
    held_out = HeldOut(
        queue.data, recipe, scale.eval_tokens, device, queue.bench, scale.bench_documents, scale.farthest,
        scale.far_tokens, scale.most_questions,
    )  # fmt: skip
    result = _about(queue, arm, model, recipe, step)
    made: dict[str, Any] = result["evaluations"]
    required = queue.required[arm.key]
    for evaluation in sorted(arm.evaluations, key=lambda evaluation: evaluation.key not in required):
        if evaluation.key not in required and evaluation.missing(queue.bench):
            continue
        part = run / "evaluations" / f"{evaluation.key}.json"
        if not part.exists():
            if (left := queue.time_left()) is not None and left <= 0:
                raise Stopped("out of time during evaluation")
            began = time.monotonic()
            try:
                results = evaluation.evaluate(model, held_out)
            except Exception as problem:
                if isinstance(problem, torch.OutOfMemoryError) or device_is_lost():
                    raise
                say(f"{arm.key}: {evaluation.key} failed; continuing\n{traceback.format_exc()}")
                continue
            write_json(part, plain({**results, "seconds": round(time.monotonic() - began, 1)}))
        made[evaluation.key] = json.loads(part.read_text())
        _record(queue.result(arm), result)
    _record(queue.result(arm), result)
    if failed := set(required) - set(made):
        raise JobFailed(f"{arm.key} is trained, but these evaluations failed: {', '.join(sorted(failed))}")
    for checkpoint in (run / "checkpoints").glob("step-*"):  # further evaluations need only the weights
        (checkpoint / "optimiser.safetensors").unlink(missing_ok=True)
    return result


def _about(queue: ArmQueue, arm: Arm, model: GPT, recipe: Recipe, step: int) -> dict[str, Any]:
    """The result of an arm without its evaluations."""
    run = queue.folder(arm)
    return {
        "arm": arm.key,
        "name": arm.name,
        "scale": queue.scale.name,
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
        "evaluations": {},
        "environment": json.loads((run / "config.json").read_text())["environment"],
    }


def _record(path: Path, result: dict[str, Any]) -> None:
    """Write the result file, unless the one that exists holds evaluations that this one lacks.

    Called after every evaluation, since the machine may be lost before the last. Results of an earlier training are
    moved aside, not replaced.
    """
    result = plain(result)
    if path.exists():
        before = load_result(path)
        if not set(before["evaluations"]) <= set(result["evaluations"]):
            return
        if before["environment"] != result["environment"]:  # that of the start of training
            folder = earlier_folder(path.parent)
            number = 1 + sum(1 for _ in folder.glob(f"{path.stem}-*.json"))
            write_json(folder / f"{path.stem}-{number}.json", before)
    write_json(path, result, overwrite=True)


def load_result(path: Path) -> dict[str, Any]:
    """The result file of an arm. Older files call the evaluations "readings"."""
    result = json.loads(path.read_text())
    if "readings" in result:
        result["evaluations"] = result.pop("readings")
    return result


def earlier_folder(results: Path) -> Path:
    """Folder of the results of earlier trainings of the same arms."""
    return results / "earlier"


def _train(queue: ArmQueue, arm: Arm, run: Path) -> None:
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
    with queue.watch(arm) as report:
        last = train(recipe, run, report=report, stop_after=left)
    if last["step"] < recipe.steps:
        raise Stopped(f"{arm.key} is at step {last['step']:,} of {recipe.steps:,}")


def identity(folder: Path, name: str) -> dict[str, Any]:
    """Identity of the tokens; does not depend on the folder."""
    data = DataFolder(folder)
    return {
        "name": name,
        "train": TokenStream(data.shards("train")).identity(),
        "val": TokenStream(data.shards("val")).identity(),
    }


def plain(value: Any) -> Any:
    """A value for JSON: floats with six significant digits; non-finite ones become null (a diverged arm)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def measured(results: Path, name: str, command: str, measure: Callable[[], Any]) -> Path:
    """Write the results of an experiment that need no training, unless they exist."""
    path = results / f"{name}.json"
    if not path.exists():
        write_json(path, plain({"command": command, "environment": environment(), "results": measure()}))
    return path
