"""The training loop: from a recipe and a folder to a trained run, whole or resumed."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lssar.data.batches import TokenBatches
from lssar.model import GPT
from lssar.records import environment, write_json
from lssar.training import checkpoints
from lssar.training.distributed import Processes, distribute, gradient_sync, world
from lssar.training.metrics import Metrics, SpikeDetector, flops_per_token, peak_flops
from lssar.training.optimisers import make_optimisers
from lssar.training.recipes import Recipe, learning_rate, power
from lssar.training.sources import open_data

Report = Callable[[dict[str, Any]], None]


def train(
    recipe: Recipe, run: Path, report: Report = lambda row: None, stop_after: float | None = None
) -> dict[str, Any]:
    """Train into the folder `run`, going on from its last checkpoint if there is one.

    `report` is called with each row of metrics (main process only). The run ends early, with a checkpoint, on SIGTERM
    or SIGINT, or after `stop_after` seconds. Returns the last row.
    """
    with world() as w, stop_signal() as stopped:
        torch.manual_seed(recipe.seed)
        if w.main:
            _claim(run, recipe, w)
        w.barrier()
        model = GPT(recipe.model()).to(w.device)
        module = distribute(model, recipe.parallel, w)
        optimisers = make_optimisers(model, recipe)
        micro_steps = recipe.micro_steps(w.size)
        train_data, val_data = open_data(recipe, run, w)
        val_start = val_data.state_dict() if val_data is not None else {}
        step = 0
        if (found := checkpoints.latest(run)) is not None:
            state = checkpoints.restore(found, model, optimisers)
            train_data.load_state_dict(state["data"])
            step = state["step"]
        if recipe.compile:
            model.compile()
        forward = _forward(module, recipe, w)

        def save() -> None:
            checkpoints.save(run, step, model, optimisers, {"data": train_data.state_dict()}, w, recipe.keep)

        metrics = Metrics(run, step) if w.main else None
        spike = SpikeDetector()
        speed = _Speed(recipe, model, w)
        began = time.monotonic()
        row: dict[str, Any] = {"step": step}
        batches = iter(train_data)
        while step < recipe.steps:
            rate = learning_rate(recipe, step)
            p = power(recipe, step)
            model.set_power(p)
            for group in (group for optimiser in optimisers for group in optimiser.param_groups):
                group["lr"] = rate * group["rate_factor"]
            loss = torch.zeros((), device=w.device)
            for micro in range(micro_steps):
                with gradient_sync(module, micro == micro_steps - 1):
                    part = forward(next(batches)) / micro_steps
                    part.backward()
                loss += part.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            step += 1

            value = float(w.mean(loss))
            row = {
                "step": step,
                "loss": value,
                "grad_norm": float(norm),
                "lr": rate,
                "tokens": step * recipe.batch_tokens,
            }
            row |= speed(step) | ({} if p is None else {"p": p})
            row["spike"] = spike(value)
            row["finite"] = bool(torch.isfinite(loss) & torch.isfinite(norm))
            last = step == recipe.steps
            if val_data is not None and (step % recipe.eval_every == 0 or last):
                val_data.load_state_dict(val_start)
                row["val_loss"] = _validate(val_data, forward, recipe, w)
                speed.pause()
            if metrics is not None:
                metrics.write(row)
                report(row)
            out_of_time = stop_after is not None and time.monotonic() - began > stop_after
            ending = last or w.any(stopped() or out_of_time)
            if ending or step % recipe.save_every == 0:
                save()
                speed.pause()
            if ending:
                break
        if metrics is not None:
            metrics.close()
        return row


def _claim(run: Path, recipe: Recipe, w: Processes) -> None:
    """A folder holds one run: its recipe is written once, and a different one is refused."""
    path = run / "config.json"
    if path.exists():
        kept = Recipe.from_dict(json.loads(path.read_text())["recipe"]).to_dict()  # fields since added: as they were
        changed = {key: value for key, value in recipe.to_dict().items() if kept.get(key) != value}
        changed = {
            key: value for key, value in changed.items() if key not in ("keep", "compile", "save_every", "eval_every")
        }
        if changed:
            raise ValueError(
                f"{run} holds a run with other settings: {', '.join(f'{k}={kept.get(k)!r}' for k in changed)}"
            )
        return
    config = {
        "recipe": recipe.to_dict(),
        "model": recipe.model().to_dict(),
        "processes": w.size,
        "environment": environment(),
    }
    write_json(path, config)


def load_run(run: Path, device: torch.device | str = "cpu") -> tuple[GPT, Recipe, int]:
    """The model of a run with its last weights, its recipe, and the step it is at."""
    run = Path(run)
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"{run} is no run folder: it has no config.json")
    recipe = Recipe.from_dict(json.loads((run / "config.json").read_text())["recipe"])
    found = checkpoints.latest(run)
    if found is None:
        raise FileNotFoundError(f"{run} has no finished checkpoint yet")
    model = GPT(recipe.model())
    model.load_state_dict(checkpoints.load_weights(found))
    return model.to(device).eval(), recipe, int(found.name.removeprefix("step-"))


def _forward(module: nn.Module, recipe: Recipe, w: Processes) -> Callable[[Any], torch.Tensor]:
    def loss(batch: Any) -> torch.Tensor:
        move = {"device": w.device, "non_blocking": True}
        inputs, targets = batch.inputs.to(**move), batch.targets.to(**move)
        documents = None if batch.cu_seqlens is None else batch.cu_seqlens.to(**move)
        with torch.autocast(w.device.type, torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
            return module(inputs, targets=targets, cu_seqlens=documents)

    return loss


def _validate(data: TokenBatches, forward: Callable, recipe: Recipe, w: Processes) -> float:
    """Mean loss over the next batches of the held-out shards."""
    batches = iter(data)
    # With gradients the compiled graph of training serves; without them another would be compiled, which takes longer
    # than short runs. Several processes would wait for a backward that never comes.
    with torch.set_grad_enabled(recipe.compile and w.size == 1):
        losses = [forward(next(batches)).detach() for _ in range(recipe.eval_batches)]
    return float(w.mean(torch.stack(losses).mean()))


class _Speed:
    """Tokens a second and model FLOPs utilisation since the last row, pauses left out."""

    def __init__(self, recipe: Recipe, model: GPT, w: Processes):
        self.recipe, self.flops, self.peak, self.size = (
            recipe,
            flops_per_token(model, recipe.length),
            peak_flops(),
            w.size,
        )
        self.then = time.perf_counter()

    def pause(self) -> None:
        self.then = time.perf_counter()

    def __call__(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        rate = self.recipe.batch_tokens / (now - self.then)
        self.then = now
        row = {
            "tokens_per_s": round(rate, 1),
            "seconds_left": round((self.recipe.steps - step) * self.recipe.batch_tokens / rate, 1),
        }
        if self.peak is not None:
            row["mfu"] = round(rate * self.flops / (self.peak * self.size), 4)
        return row


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT has come; the step under way is finished and saved. A second one ends at once."""
    caught: list[int] = []
    before = {}

    def handler(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not in the main thread: signals are somebody else's
            before[number] = signal.signal(number, handler)
    try:
        yield lambda: bool(caught)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
