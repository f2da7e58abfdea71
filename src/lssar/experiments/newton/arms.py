"""One job: pre-train, fine-tune this and a fresh model on each number of labels, probe.

OUT/pretrained/JOB.json error of the predicted next step, cost, machine
OUT/arms/ARM.json       an arm's exponents and R^2; an arm with this file is not run again
OUT/predictions/ARM.safetensors    its log forces for the test systems, used by `read_laws` and the figures
OUT/probes/JOB.json     the inductive-bias probe
OUT/work/JOB            weights of an unfinished job, and its lock while a process works on it
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from lssar.experiments.newton.families import Arm, Job, label_pool, test_points, test_systems
from lssar.experiments.newton.law import exponents, r_squared
from lssar.experiments.newton.model import OrbitModel, orbit_model_config
from lssar.experiments.newton.orbits import WORLDS
from lssar.experiments.newton.probe import inductive_bias
from lssar.experiments.newton.steps import EAGER, Execution
from lssar.experiments.newton.training import (
    OutOfTime,
    finetune,
    minimise,
    optimiser_of,
    orbit_batches,
    predict,
    validation,
)
from lssar.experiments.queue import print_line
from lssar.records import environment, write_file, write_json
from lssar.specs import parse_spec
from lssar.training import checkpoints
from lssar.training.distributed import Processes

DRAWN = 6
"""Test systems whose forces are stored along the whole orbit, for the figure."""


def missing(job: Job, out: Path) -> tuple[list[Arm], bool]:
    """The missing parts of a job: its arms, and whether the probe is one."""
    family = job.family
    arms = [arm for arm in job.arms() if not (out / "arms" / f"{arm[0]}.json").exists()]
    probe = family.probe is not None and job.seed in family.probe_seeds
    return arms, probe and not (out / "probes" / f"{job.name}.json").exists()


def run_job(
    job: Job, out: Path, device: str, stop: Callable[[], bool] = lambda: False, keep_weights: bool = False,
    say: Callable[[str], None] = print_line, how: Execution = EAGER,
) -> bool:  # fmt: skip
    """Run the missing parts of a job; True when it is complete, False when stopped before that."""
    arms, probe = missing(job, out)
    if not arms and not probe:
        return True
    if stop():
        return False
    how = dataclasses.replace(how, dtype=job.family.dtype)
    try:
        starts = {"fresh": _new_model(job, device)}
        if probe or any(start == "pretrained" for _, start, _ in arms):
            starts["pretrained"] = _pretrained(job, out, device, how, stop, say)
        if arms:
            _arms(job, arms, starts, out, device, how, stop, say)
        if probe:
            _probe(job, starts["pretrained"], out, how, stop, say)
    except OutOfTime:
        return False
    if not keep_weights:
        shutil.rmtree(out / "work" / job.name, ignore_errors=True)
    return True


def _new_model(job: Job, device: str) -> OrbitModel:
    torch.manual_seed(job.seed)
    world = WORLDS[job.family.world]
    config = orbit_model_config(job.family.size, parse_spec(job.mechanism), world, job.family.tokens)
    return OrbitModel(config, world).to(device)


def _pretrained(
    job: Job, out: Path, device: str, how: Execution, stop: Callable[[], bool], say: Callable[[str], None]
) -> OrbitModel:  # fmt: skip
    family, settings = job.family, job.family.pretrain
    model = _new_model(job, device)
    optimiser = optimiser_of(model, settings)
    folder, record = out / "work" / job.name, out / "pretrained" / f"{job.name}.json"
    processes = Processes(0, 1, torch.device(device))
    step, seconds = 0, 0.0
    if (found := checkpoints.latest(folder)) is not None:
        state = checkpoints.restore(found, model, [optimiser])
        step, seconds = state["step"], state["seconds"]
    batches = orbit_batches(model.world, settings.batch, family.tokens, job.seed, device, start=step)
    began = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step == settings.steps or step * 5 // settings.steps != (step - 100) * 5 // settings.steps:
            say(f"{job.name}: pre-training {step}/{settings.steps}, loss {loss:.4g}")

    reached = minimise(
        model, optimiser, model.next_loss, lambda _: next(batches), settings,
        how.for_tokens(settings.steps * settings.batch * family.tokens), step, stop, report,
    )  # fmt: skip
    if reached > step:
        seconds += time.monotonic() - began
        checkpoints.save(folder, reached, model, [optimiser], {"seconds": seconds}, processes, keep=1)
    if reached < settings.steps:
        say(f"{job.name}: stopped at step {reached}; the same command resumes")
        raise OutOfTime
    if not record.exists():
        told = {
            "job": job.name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed,
            "parameters": model.parameter_count(), "steps": settings.steps,
            "sequences": settings.steps * settings.batch, "seconds": round(seconds, 1),
            **validation(model, family.tokens, how), "environment": environment(),
        }  # fmt: skip
        write_json(record, told)
        errors = f"{told['rms_error']:.3g} (of no motion {told['rms_error_no_motion']:.3g})"
        say(f"{job.name}: RMS error of the next step {errors}")
    return model


def _arms(
    job: Job, arms: list[Arm], starts: dict[str, OrbitModel], out: Path, device: str, how: Execution,
    stop: Callable[[], bool], say: Callable[[str], None],
) -> None:  # fmt: skip
    family = job.family
    data = label_pool(family, job.seed, device)
    test, step = test_systems(family, device)
    points = test_points(family)
    for name, start, labels in arms:
        began = time.monotonic()
        model = copy.deepcopy(starts[start])
        scale = finetune(model, data, data.log_force[:labels], family.finetune, job.seed, how, stop)
        told = predict(model, test, *scale, how)
        log_force = told.gather(1, step)[:, 0].cpu().numpy().astype(np.float64)
        kept = {"log_force": log_force.astype(np.float32), "drawn": told[:DRAWN].cpu().numpy()}
        write_file(out / "predictions" / f"{name}.safetensors", partial(save_file, kept), overwrite=True)
        record = {
            "arm": name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed, "start": start,
            "labels": labels, **exponents(points.with_force(log_force)), "r2": r_squared(log_force, points.log_force),
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        write_json(out / "arms" / f"{name}.json", record, overwrite=True)
        say(f"{name}: F ~ m1^{record['m1']:.3f} m2^{record['m2']:.3f} r^{record['r']:.3f}, R^2 {record['r2']:.4f}")


def _probe(
    job: Job, model: OrbitModel, out: Path, how: Execution, stop: Callable[[], bool], say: Callable[[str], None]
) -> None:  # fmt: skip
    family = job.family
    assert family.probe is not None
    result = inductive_bias(
        model, family.tokens, family.first, family.probe, family.probe_functions, job.seed, how=how,
        stop=stop,
    )  # fmt: skip
    about = {"job": job.name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed}
    write_json(out / "probes" / f"{job.name}.json", {**about, **result}, overwrite=True)
    say(f"{job.name}: inductive bias, slope {result['slope']:.2f} (1: the oracle's), R^2 {result['model_r2']:.2f}")
