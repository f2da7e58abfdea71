"""Where a step of training goes: its time, and the kernels that take most of it, on one GPU with random tokens.

PYTHONPATH=src python benchmarks/training_step.py books-51m lssar softmax
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lssar.model import GPT
from lssar.training.optimisers import make_optimisers
from lssar.training.recipes import Recipe, recipe

KERNELS = 25


def training_step(model: GPT, r: Recipe, p: float | None = None) -> Callable[[], float]:
    """A function that makes an optimisation step of the recipe, on the same random tokens each time; returns the loss.

    p: a power that is an input of the compiled graph, as under a schedule; None: the power in the model's config.
    """
    device, micro_steps = model.embed.weight.device, r.micro_steps(1)
    optimisers = make_optimisers(model, r)
    if r.compile:
        model.compile()
    ids = torch.randint(0, r.vocab_size, (r.micro_batch, r.length + 1), device=device)

    def step() -> float:
        model.set_power(p)
        total = torch.zeros((), device=device)
        for _ in range(micro_steps):
            with torch.autocast(device.type, torch.bfloat16, enabled=r.dtype == "bfloat16"):
                loss = model(ids[:, :-1], targets=ids[:, 1:]) / micro_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), r.clip)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return total.item()

    return step


def measure(name: str, mechanism: str) -> None:
    r = recipe(name, attention=mechanism)
    torch.manual_seed(0)
    step = training_step(GPT(r.model()).cuda(), r)
    for _ in range(4):
        step()
    began, steps = time.perf_counter(), 8
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - began) / steps
    print(f"{name}, {mechanism}: step {1e3 * seconds:.1f} ms, {r.batch_tokens / seconds / 1e3:.0f}K tokens/s")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
    kernels = sorted(profiled.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"kernels {sum(kernel.self_device_time_total for kernel in kernels) / 1e3:.1f} ms a step, of which")
    for kernel in kernels[:KERNELS]:
        print(f"{kernel.self_device_time_total / 1e3:8.2f} ms {kernel.count:5d}x {kernel.key[:100]}", flush=True)


if __name__ == "__main__":
    name, *mechanisms = sys.argv[1:] or ["books-51m"]
    for mechanism in mechanisms or ["lssar"]:
        measure(name, mechanism)
