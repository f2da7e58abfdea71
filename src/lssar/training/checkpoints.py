"""Checkpoints: a folder each, written whole or not at all; safetensors and JSON, nothing that unpickles.

RUN/checkpoints/step-0000200/{model.safetensors, optimiser.safetensors, state.json}
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lssar.training.distributed import Processes

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEPARATOR = "/"
"""Between a weight's name and its moment's, in the flat names of safetensors."""


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    w: Processes,
    keep: int,
) -> Path:
    """Write the checkpoint of `step`; `state` is plain values. Every process must call it."""
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL)
    moments: dict[str, Any] = get_optimizer_state_dict(model, optimisers, options=FULL)
    path = run / "checkpoints" / f"step-{step:07d}"
    if w.main:
        temporary = path.with_name(f".{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        flat = {
            f"{name}{SEPARATOR}{moment}": value.contiguous()
            for name, state_of in moments["state"].items()
            for moment, value in state_of.items()
        }
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary / "model.safetensors")
        save_file({**flat, "rng": torch.get_rng_state()}, temporary / "optimiser.safetensors")
        text = json.dumps({**state, "step": step, "param_groups": moments["param_groups"]})
        (temporary / "state.json").write_text(text)
        for file in temporary.iterdir():  # on the disk before the name says so
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
        for old in checkpoints(run)[:-keep]:
            shutil.rmtree(old)
    w.barrier()
    return path


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def latest(run: Path) -> Path | None:
    found = checkpoints(run)
    return found[-1] if found else None


def load_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    file = path / "model.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{path} holds no checkpoint: {file.name} is missing")
    return load_file(file, device=str(device))


def restore(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put weights, moments and random state back; returns the plain state."""
    weights: dict[str, Any] = dict(load_weights(path))
    set_model_state_dict(model, weights, options=FULL)
    state = json.loads((path / "state.json").read_text())
    tensors = load_file(path / "optimiser.safetensors")
    torch.set_rng_state(tensors.pop("rng"))
    moments: dict[str, Any] = {"state": {}, "param_groups": state.pop("param_groups")}
    for key, value in tensors.items():
        name, moment = key.split(SEPARATOR)
        moments["state"].setdefault(name, {})[moment] = value
    set_optimizer_state_dict(model, optimisers, moments, options=FULL)
    return state
