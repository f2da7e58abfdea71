"""A dry run of an arm: shapes, memory by tracing a step with fake tensors, and the command that trains it."""

from __future__ import annotations

import shlex
from typing import Any

from lssar.data.folder import STDLIB
from lssar.experiments.arms import Arm, Scale
from lssar.training.footprint import footprint
from lssar.training.initialise import meta_model
from lssar.training.recipes import recipe

STATE_BYTES = 16
"""Bytes for each parameter in float32: the weight, its gradient, two moments of AdamW."""


def plan(arm: Arm, scale: Scale) -> dict[str, Any]:
    """Shapes, steps, tokens, parameters and bytes of one process, and the command that trains the arm."""
    r, config = arm.recipe, arm.recipe.model()
    parameters = meta_model(config).parameter_count()
    traced = footprint(
        config, r.micro_batch, r.length, half=r.dtype == "bfloat16", compiled=False, sharded=False, loss=True
    )
    state, kept = STATE_BYTES * parameters, traced.peak
    return {
        "arm": arm.key,
        "parameters": parameters,
        "layers": config.layers,
        "hidden": [r.micro_batch, r.length, config.width],
        "logits": [r.micro_batch, r.length, config.vocab_size],
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
        f"{p['activations_gib']:g} activations without torch.compile)\n"
        f"  evaluations: {', '.join(evaluation.key for evaluation in arm.evaluations)}\n"
        f"  {p['command']}"
    )
