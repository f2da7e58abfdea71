"""The training loop: trains a recipe into a run folder, or resumes it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lssar.data.batches import Batch
from lssar.data.folder import DataFolder
from lssar.locks import hold
from lssar.model import GPT
from lssar.training import checkpoints, start
from lssar.training.distributed import Processes, distribute, gradient_sync, world
from lssar.training.initialise import materialise, meta_model
from lssar.training.metrics import Logger, Metrics, SpikeDetector, flops_per_token, peak_flops
from lssar.training.optimisers import make_optimisers
from lssar.training.recipes import Recipe, learning_rate, power
from lssar.training.sources import open_data

Report = Callable[[dict[str, Any]], None]


class TrainingDiverged(ValueError):
    """Loss or gradients were not finite for too long; the last finite checkpoint is kept."""


def train(
    recipe: Recipe,
    run: Path,
    report: Report = lambda row: None,
    stop_after: float | None = None,
    log: Sequence[Logger] = (),
) -> dict[str, Any]:
    """Train into the folder `run`, resuming from its newest undamaged checkpoint if there is one.

    `report` is called with each row of metrics (main process only); `log` names services that receive them as well. The
    run ends early, with a checkpoint, on SIGTERM or SIGINT, or after `stop_after` seconds. Returns the last row.
    Raises TrainingDiverged when loss or gradients stay non-finite, or weights are when the run ends, and FolderInUse if
    another process trains there.
    """
    run = Path(run)
    with world(recipe.context_parallel) as w, _alone(run, w), stop_signal() as stopped:
        recipe, data = start.resolve(recipe, run, w)
        trainer = _Trainer(recipe, data, run, w)
        start.record(recipe, data, run, w)
        trainer.resume()
        metrics = Metrics(run, trainer.step, log, recipe.to_dict()) if w.main else None
        try:
            with trainer.saver:
                return _train(trainer, metrics, report, stopped, stop_after)
        finally:
            if metrics is not None:
                metrics.close()


@contextlib.contextmanager
def _alone(run: Path, w: Processes) -> Iterator[None]:
    """The main process holds the lock of the run for as long as it trains."""
    with contextlib.ExitStack() as stack:
        w.on_main(lambda: stack.enter_context(hold(run, "training")))
        yield


def _train(
    trainer: _Trainer,
    metrics: Metrics | None,
    report: Report,
    stopped: Callable[[], bool],
    stop_after: float | None,
) -> dict[str, Any]:
    recipe, w = trainer.recipe, trainer.w
    spike = SpikeDetector()
    speed = _Speed(recipe, trainer.model, w)
    began = time.monotonic()
    row: dict[str, Any] = {"step": trainer.step}
    non_finite = 0
    while trainer.step < recipe.steps:
        row = trainer.take_step()
        row |= speed(trainer.step)
        row["spike"] = spike(row["loss"])
        non_finite = 0 if row["finite"] else non_finite + 1
        last = trainer.step == recipe.steps
        if trainer.held_out is not None and (trainer.step % recipe.eval_every == 0 or last):
            row["val_loss"] = trainer.validate()
            speed.pause()
        if metrics is not None:
            metrics.write(row)
            report(row)
        if non_finite == recipe.max_non_finite:
            what = f"loss or gradient were not finite in the {non_finite} steps up to step {trainer.step}"
            raise TrainingDiverged(_diverged(trainer, what))
        out_of_time = stop_after is not None and time.monotonic() - began > stop_after
        ending = last or w.any(stopped() or out_of_time)
        if ending or trainer.step % recipe.save_every == 0:
            saved = trainer.save()
            speed.pause()
            if ending and not saved:
                what = f"step {trainer.step} is not saved, since weights or optimiser state are not finite"
                raise TrainingDiverged(_diverged(trainer, what))
        if ending:
            break
    return row


def _diverged(trainer: _Trainer, what: str) -> str:
    trainer.saver.wait()
    kept = checkpoints.latest(trainer.run)
    where = (
        f"the last finite checkpoint is {kept}" if kept is not None else "no finite checkpoint was saved before that"
    )
    return (
        f"training diverged: {what}; {where}. "
        "Try a lower --lr, a longer --warmup, a smaller --clip or --dtype float32 in a new run (--out FOLDER), or "
        "resume this one with --skip-non-finite, which leaves such steps out"
    )


class _Trainer:
    """Model, optimisers and data of a run, and where it is."""

    def __init__(self, recipe: Recipe, data: DataFolder, run: Path, w: Processes):
        self.recipe, self.run, self.w = recipe, run, w
        torch.manual_seed(recipe.seed)
        sharded = recipe.parallel == "fsdp" and w.size > 1
        self.model = meta_model(recipe.model()) if sharded else GPT(recipe.model()).to(w.device)
        self.module = distribute(self.model, recipe.parallel, w, getattr(torch, recipe.dtype))
        if sharded:
            materialise(self.model, w.device)
        self.optimisers = make_optimisers(self.model, recipe)
        self.micro_steps = recipe.micro_steps(w.size)
        self.batches, self.held_out = open_data(recipe, data, w)
        self.held_out_start = self.held_out.state_dict() if self.held_out is not None else {}
        self.saver = checkpoints.Saver(run, self.model, self.optimisers, w, recipe.keep)
        self.step = 0
        if recipe.compile:
            self.model.compile()

    def resume(self) -> None:
        """Continue from the newest undamaged checkpoint, if there is one."""
        found: list[Path] = []

        def find() -> None:
            checkpoints.clean(self.run)
            before = checkpoints.checkpoints(self.run)
            if (path := checkpoints.newest(self.run, True, lambda: self.model, self.optimisers)) is not None:
                found.append(path)
                for damaged in before[before.index(path) + 1 :]:
                    checkpoints.set_aside(damaged)

        self.w.on_main(find)
        step = self.w.from_main(checkpoints.step_of(found[0]) if found else -1)
        if step >= 0:
            state = self.saver.restore(step)
            self.batches.load_state_dict(state["data"])
            self.step = state["step"]

    def save(self) -> bool:
        """Whether a checkpoint was saved, or is being saved; False if the weights are not finite."""
        return self.saver.save(self.step, {"data": self.batches.state_dict()})

    def take_step(self) -> dict[str, Any]:
        """One optimisation step; returns its row of metrics."""
        recipe = self.recipe
        rate, p = learning_rate(recipe, self.step), power(recipe, self.step)
        self.model.set_power(p)
        for group in (group for optimiser in self.optimisers for group in optimiser.param_groups):
            group["lr"] = rate * group["rate_factor"]
        loss = torch.zeros((), device=self.w.device)
        for micro in range(self.micro_steps):
            with gradient_sync(self.module, micro == self.micro_steps - 1):
                part = self.loss(next(self.batches)) / self.micro_steps
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        loss = self.w.mean(loss)
        finite = torch.isfinite(loss) & torch.isfinite(norm)  # the same in every process
        for optimiser in self.optimisers:
            if not recipe.skip_non_finite or finite:
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        row = {
            "step": self.step, "loss": float(loss), "grad_norm": float(norm), "lr": rate,
            "tokens": self.step * recipe.batch_tokens, "finite": bool(finite),
        }  # fmt: skip
        return row | ({} if p is None else {"p": p})

    def loss(self, batch: Batch) -> torch.Tensor:
        move: dict[str, Any] = {"device": self.w.device, "non_blocking": True}
        inputs, targets = batch.inputs.to(**move), batch.targets.to(**move)
        documents = None if batch.cu_seqlens is None else batch.cu_seqlens.to(**move)
        with torch.autocast(self.w.device.type, torch.bfloat16, enabled=self.recipe.dtype == "bfloat16"):
            return self.module(inputs, targets=targets, cu_seqlens=documents)

    def validate(self) -> float:
        """Mean loss over the first batches of the held-out shards, the same ones every time."""
        assert self.held_out is not None
        self.held_out.load_state_dict(self.held_out_start)
        # With gradients the compiled graph of training serves; without them another would be compiled, which takes
        # longer than short runs. Several processes would wait for a backward that never comes.
        with torch.set_grad_enabled(self.recipe.compile and self.w.size == 1):
            losses = [self.loss(next(self.held_out)).detach() for _ in range(self.recipe.eval_batches)]
        return float(self.w.mean(torch.stack(losses).mean()))


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
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            before[number] = signal.signal(number, handler)
    try:
        yield lambda: bool(caught)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
