"""A dry run of an arm: shapes from fake tensors, memory from the tensors that autograd would keep."""

from __future__ import annotations

import shlex
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lssar.data.folder import STDLIB
from lssar.experiments.arms import Arm, Scale
from lssar.model import GPT
from lssar.training.recipes import Recipe, recipe

STATE_BYTES = 16
"""Bytes for each parameter in float32: the weight, its gradient, two moments of AdamW."""


def plan(arm: Arm, scale: Scale) -> dict[str, Any]:
    """Shapes, steps, tokens, parameters and bytes of one process, and the command that trains the arm."""
    r = arm.recipe
    shapes = _fake_step(r)
    state, kept = STATE_BYTES * shapes["parameters"], shapes.pop("kept_bytes")
    return {
        "arm": arm.key,
        **shapes,
        "steps": r.steps,
        "tokens_per_step": r.batch_tokens,
        "tokens": r.steps * r.batch_tokens,
        "processes": scale.processes,
        "micro_steps": r.micro_steps(scale.processes),
        "micro_batch": [r.micro_batch, r.length],
        "state_gib": round(state / 2**30, 2),
        "activations_gib": round(kept / 2**30, 2),
        "memory_gib": round((state + kept) / 2**30, 2),
        "command": train_command(arm, scale),
    }


def _fake_step(r: Recipe) -> dict[str, Any]:
    """A forward on fake tensors, on the CPU's path: what is kept for the backward is the same set of tensors."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        held.append(x)  # alive until all are counted, so that no two share an address
        return x

    held: list[torch.Tensor] = []
    with FakeTensorMode():
        model = GPT(r.model())
        for parameter in model.parameters():  # those are counted as state
            kept[parameter.untyped_storage()._cdata] = 0
        weights = set(kept)
        ids = torch.zeros(r.micro_batch, r.length, dtype=torch.int64)
        half = torch.autocast("cpu", torch.bfloat16, enabled=r.dtype == "bfloat16")
        with half, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = model.hidden(ids)
            logits = model.logits(hidden)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        # The backward begins with the gradients of the logits, in float32 and as they were.
        gradients = logits.numel() * (4 + logits.element_size())
        return {
            "parameters": model.parameter_count(),
            "layers": len(model.blocks),
            "hidden": list(hidden.shape),
            "logits": list(logits.shape),
            "loss": list(loss.shape),
            "kept_bytes": sum(size for at, size in kept.items() if at not in weights) + gradients,
        }


def train_command(arm: Arm, scale: Scale) -> str:
    """The line that trains the arm by itself, into the folder where the queue looks for it."""
    base = recipe(scale.recipe_name).to_dict()
    changes = {k: v for k, v in arm.recipe.to_dict().items() if v != base[k] and k != "data"}
    flags = [word for k, v in changes.items() for word in _flag(k, v)]
    data = arm.data if arm.data == STDLIB else f"data/{arm.data}"
    words = ["train", scale.recipe_name, "--data", data, *flags, "--out", str(scale.runs / arm.key)]
    launcher = ["lssar"]
    if scale.processes > 1:
        launcher = ["torchrun", "--nproc-per-node", str(scale.processes), "-m", "lssar.cli"]
    return shlex.join([*launcher, *words])


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


def describe(arm: Arm, scale: Scale) -> str:
    p = plan(arm, scale)
    return (
        f"{p['arm']}: {p['parameters']:,} parameters, {p['layers']} layers; {p['steps']:,} steps of "
        f"{p['tokens_per_step']:,} tokens ({p['tokens']:,} in all)\n"
        f"  a step of one of {p['processes']} processes: {p['micro_steps']} x {p['micro_batch']} tokens -> hidden "
        f"{p['hidden']} -> logits {p['logits']}\n"
        f"  memory of a process: about {p['memory_gib']:g} GiB ({p['state_gib']:g} weights, gradients and moments, "
        f"{p['activations_gib']:g} kept for the backward)\n"
        f"  evaluations: {', '.join(evaluation.key for evaluation in arm.evaluations)}\n"
        f"  {p['command']}"
    )
