"""Checkpoints: a folder each, written completely or not at all; safetensors and JSON, nothing that unpickles.

RUN/checkpoints/step-0000200/{model.safetensors, optimiser.safetensors, state.json, checksums.json}

A checkpoint is only saved if its weights are finite. Checksums are compared before one is used; a damaged one is passed
over with a message, and the next older one serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lssar.records import checksum, naming, read_json, remove_temporary, sync, warn
from lssar.training.distributed import Processes

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEPARATOR = "/"
"""Between the name of a weight and that of its moment, in the flat names of safetensors."""

MODEL, OPTIMISER, STATE, CHECKSUMS = "model.safetensors", "optimiser.safetensors", "state.json", "checksums.json"
WHOLE = (MODEL, OPTIMISER, STATE)
"""What training needs; evaluation needs MODEL alone."""


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    w: Processes,
    keep: int,
) -> Path | None:
    """Write the checkpoint of `step` and remove all but the newest `keep`; `state` is plain values.

    Returns None, and writes nothing, if weights or moments are not finite. Every process must call it.
    """
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL)
    moments: dict[str, Any] = get_optimizer_state_dict(model, optimisers, options=FULL)
    path = folder(run, step)
    finite = True
    if w.main:
        flat = {
            f"{name}{SEPARATOR}{moment}": value.contiguous()
            for name, state_of in moments["state"].items()
            for moment, value in state_of.items()
        }
        finite = _all_finite([*weights.values(), *flat.values()])
        if finite:
            tensors = {MODEL: {key: value.contiguous() for key, value in weights.items()},
                       OPTIMISER: {**flat, "rng": torch.get_rng_state()}}  # fmt: skip
            _write(path, tensors, {**state, "step": step, "param_groups": moments["param_groups"]})
            for old in checkpoints(run)[:-keep]:
                _remove(old)
        else:
            warn(f"step {step}: weights or optimiser state are not finite, so no checkpoint is saved")
    return path if w.from_main(int(finite)) else None


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is hidden first: a process killed while it deletes leaves no half of one."""
    hidden = path.with_name(f".{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point())


def _write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming(path), _as_os_error():
            temporary.mkdir(parents=True)
            for name, values in tensors.items():
                save_file(values, temporary / name)
            (temporary / STATE).write_text(json.dumps(state))
            sums = {name: checksum(temporary / name) for name in WHOLE}
            (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=1))
            for file in [*temporary.iterdir(), temporary]:  # on the disk before the final name exists
                sync(file)
            set_aside(path)
            os.replace(temporary, path)
            sync(path.parent)
            shutil.rmtree(_aside(path), ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """safetensors reports a full disk as an error of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(None, str(error)) from error


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if _is_checkpoint(path))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name.removeprefix("step-").isdigit()


def clean(run: Path) -> None:
    """Remove what a killed process left. Only for the process that holds the run's lock."""
    for leftover in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in ("config.json", "metrics.jsonl"):
        remove_temporary(run / name)


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that it no longer counts as one; it stays until its step is saved again."""
    if path.exists():
        shutil.rmtree(_aside(path), ignore_errors=True)
        os.replace(path, _aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged-{path.name}")


def newest(run: Path, files: Iterable[str] = (MODEL,)) -> Path | None:
    """The newest checkpoint whose `files` are undamaged, with a message for each that is passed over.

    None if there are no checkpoints; a ValueError if there are some, all damaged.
    """
    found = checkpoints(run)
    faults: list[str] = []
    for path in reversed(found):
        fault = damage(path, files)
        if fault is None:
            if faults:
                warn(f"using {path.name} of {run}, the next older checkpoint")
            return path
        faults.append(fault)
        warn(f"checkpoint {path.name} is damaged and not used: {fault}")
    if not found:
        return None
    raise ValueError(f"{run}: all {len(found)} checkpoints are damaged; the newest: {faults[0]}")


def latest(run: Path) -> Path | None:
    """The newest checkpoint by name, not checked."""
    found = checkpoints(run)
    return found[-1] if found else None


def damage(path: Path, files: Iterable[str]) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = read_json(path / CHECKSUMS, dict) if (path / CHECKSUMS).exists() else None
        if sums is None:
            warn(f"{path} has no {CHECKSUMS}, so only its form is checked")
        for name in files:
            file = path / name
            if not file.is_file():
                return f"{file} is missing"
            if sums is not None and checksum(file) != sums.get(name):
                return f"the checksum of {file} differs from the one recorded when it was saved"
            if sums is None and (fault := _malformed(file)):
                return fault
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _malformed(file: Path) -> str | None:
    """For checkpoints without checksums: whether a file can be read at all."""
    if file.name == STATE:
        state = read_json(file, dict)
        whole = isinstance(state.get("step"), int) and isinstance(state.get("param_groups"), list)
        return None if whole else f"{file} is incomplete"
    try:
        load_file(file)
    except SafetensorError as error:
        return f"{file}: {error}"
    return None


def load_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    file = path / MODEL
    if not file.exists():
        raise FileNotFoundError(f"{path} holds no checkpoint: {file.name} is missing")
    try:
        return load_file(file, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def restore(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Load weights, moments and random state of an undamaged checkpoint; returns the plain state."""
    weights: dict[str, Any] = dict(load_weights(path))
    set_model_state_dict(model, weights, options=FULL)
    state = read_json(path / STATE, dict)
    tensors = load_file(path / OPTIMISER)
    torch.set_rng_state(tensors.pop("rng"))
    moments: dict[str, Any] = {"state": {}, "param_groups": state.pop("param_groups")}
    for key, value in tensors.items():
        name, moment = key.split(SEPARATOR)
        moments["state"].setdefault(name, {})[moment] = value
    set_optimizer_state_dict(model, optimisers, moments, options=FULL)
    return state
