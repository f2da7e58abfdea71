"""Pre-training on orbits, fine-tuning on forces of some labelled systems, and forces for systems never labelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lssar.experiments.newton.model import OrbitModel
from lssar.experiments.newton.orbits import OrbitWorld, Systems, Tracks, draw, from_bins, shown, two_body_tracks
from lssar.experiments.newton.steps import EAGER, Batch, Execution, Steps

ROLES = {"pretrain": 0, "labels": 1, "test": 2, "probe": 3, "validate": 4}
"""What systems are for. Each use has a random stream of its own, so that no test system is ever labelled."""

REPORT_EVERY = 100
"""Steps."""

CHUNK = 4096
"""Systems that are worked out at once in pre-training."""


def random_stream(role: str, seed: int, *more: int) -> np.random.Generator:
    return np.random.default_rng([ROLES[role], seed, *more])


@dataclass(frozen=True)
class Labelled:
    """Two-body systems with their true states and forces at the tokens `at` (those of the planet)."""

    systems: Systems
    tracks: Tracks
    interval: Tensor  # (N,)
    shown: Tensor  # (N, L, .)
    at: Tensor  # (K,) tokens after which a force may be asked for
    steps: Tensor  # (K,) the steps in time that they belong to
    log_force: Tensor  # (N, K) float32


def labelled_systems(
    world: OrbitWorld, count: int, tokens: int, first: int, rng: np.random.Generator, device: torch.device | str = "cpu"
) -> Labelled:
    """Forces from step `first` on, when the masses have had time to show; `tokens` counts the interval's."""
    systems = draw(world, count, rng, planets=1, device=device)
    length = tokens - 1
    stride = 1 if world.encoding == "positions" else 2  # in bins, planet and star take turns
    last = (length + stride - 1) // stride
    if first >= last:
        raise ValueError(f"{tokens} tokens end before step {first}, the first that may have a label")
    steps = torch.arange(first, last, device=device)
    tracks = two_body_tracks(systems, int(steps[-1]) + 1)
    return Labelled(
        systems, tracks, systems.interval, shown(systems, length), steps * stride, steps,
        tracks.force[:, steps].log().float(),
    )  # fmt: skip


def true_state(data: Labelled) -> Tensor:
    """(N, K, 6) float32: position and velocity of the planet as seen from the star, and both masses."""
    x = data.tracks.positions[:, :, 0] - data.tracks.positions[:, :, 1]
    v = data.tracks.velocities[:, :, 0] - data.tracks.velocities[:, :, 1]
    masses = data.tracks.masses[:, None].expand(-1, len(data.steps), -1)
    return torch.cat([x[:, data.steps], v[:, data.steps], masses], -1).float()


def orbit_batches(
    world: OrbitWorld, batch: int, tokens: int, seed: int, device: torch.device | str, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless fresh systems (interval, shown); batch number `start` and on, the same whenever they are asked for."""
    each = max(1, CHUNK // batch)
    chunk, skip = divmod(start, each)
    while True:
        systems = draw(world, each * batch, random_stream("pretrain", seed, chunk), device=device)
        parts = zip(systems.interval.split(batch), shown(systems, tokens - 1).split(batch))
        for index, part in enumerate(parts):
            if index >= skip:
                yield part
        chunk, skip = chunk + 1, 0


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    steps: int
    batch: int
    lr: float
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.warmup) < 1 or self.lr <= 0:
            raise ValueError(f"steps, batch and warmup must be at least 1 and lr positive; got {self}")

    def rate(self, step: int) -> float:
        """Linear warm-up, cosine to 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))


class OutOfTime(Exception):
    """Told to stop: by the time limit or a signal. What is finished is on disk."""


def optimiser_of(model: nn.Module, settings: Optimisation) -> torch.optim.Optimizer:
    learned = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in learned if p.dim() >= 2], [p for p in learned if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)


def minimise(
    model: OrbitModel, optimiser: torch.optim.Optimizer, loss_of: Callable[..., Tensor],
    batch_of: Callable[[int], Batch], settings: Optimisation, how: Execution = EAGER, start: int = 0,
    stop: Callable[[], bool] = lambda: False, report: Callable[[int, float], None] | None = None,
) -> int:  # fmt: skip
    """Steps `start`.. on `loss_of(*batch_of(step))` until done or `stop()`; returns the step reached."""
    model.train()
    with Steps(model, optimiser, loss_of, settings.clip, how) as take:
        for step in range(start, settings.steps):
            if stop():
                return step
            loss = take(settings.rate(step), batch_of(step))
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == settings.steps:
                value = float(loss)  # also waits for a GPU, so that it is never far behind what `stop` knows
                if report is not None:
                    report(step + 1, value)
    return settings.steps


def finetune(
    model: OrbitModel, data: Labelled, targets: Tensor, settings: Optimisation, seed: int, how: Execution = EAGER,
    stop: Callable[[], bool] = lambda: False, chosen: Tensor | None = None,
) -> tuple[float, float]:  # fmt: skip
    """All weights and a new head, on `targets` (n, K) of the first n systems of `data`; returns mean and deviation.

    The head says (target - mean) / deviation with the labels' own mean and deviation. `chosen` (n, K) bool: only these
    tokens are labelled. OutOfTime if `stop()` comes first.
    """
    count = len(targets)
    if not 1 <= count <= len(data.systems):
        raise ValueError(f"{count} labelled systems asked for; there are {len(data.systems)}")
    torch.manual_seed(seed)
    model.new_force_head()
    labels = targets if chosen is None else targets[chosen]
    mean, deviation = float(labels.mean()), float(labels.std())
    wanted = (targets - mean) / deviation
    weight = None if chosen is None else chosen.float()
    rng, batch = random_stream("labels", seed, count), min(settings.batch, count)
    order = np.stack([rng.choice(count, batch, replace=False) for _ in range(settings.steps)])
    batches = torch.from_numpy(order).to(targets.device)  # at once: a copy a step would keep a GPU waiting

    def loss_of(rows: Tensor) -> Tensor:
        square = (model.force(data.interval[rows], data.shown[rows], data.at) - wanted[rows]).square()
        return square.mean() if weight is None else (square * weight[rows]).sum() / weight[rows].sum()

    how = how.for_tokens(settings.steps * batch * data.shown.shape[1])
    optimiser = optimiser_of(model, settings)
    if minimise(model, optimiser, loss_of, lambda step: (batches[step],), settings, how, 0, stop) < settings.steps:
        raise OutOfTime
    return mean, deviation


@torch.no_grad()
def predict(model: OrbitModel, data: Labelled, mean: float, deviation: float, how: Execution = EAGER) -> Tensor:
    """What the head was trained to say, (N, K), float32; a log force, usually."""
    model.eval()
    parts = []
    batch = 2048 if data.shown.is_cuda else 256
    for interval, tokens in zip(data.interval.split(batch), data.shown.split(batch)):
        with how.autocast(tokens.device):
            parts.append(model.force(interval, tokens, data.at))
    return torch.cat(parts).float() * deviation + mean


@torch.no_grad()
def validation(model: OrbitModel, tokens: int, how: Execution = EAGER, count: int = 512) -> dict[str, float]:
    """Error of the predicted next step on new two-body systems: the loss, and the error in units of length.

    For comparison the errors of guessing no motion, and motion as in the last step.
    """
    world, device = model.world, next(model.parameters()).device
    systems = draw(world, count, random_stream("validate", 0), planets=1, device=device)
    model.eval()
    losses, said = [], []
    for interval, part in zip(systems.interval.split(128), shown(systems, tokens - 1).split(128)):
        with how.autocast(device):
            losses.append(model.next_loss(interval, part).float())
            said.append(model.next_shown(interval, part))
    stride = 1 if world.encoding == "positions" else 2
    steps = (tokens - 1) // stride
    true = two_body_tracks(systems, steps).positions
    if world.encoding == "positions":
        predicted = (torch.cat(said).double() * (world.extent / 4)).unflatten(-1, (2, 2))[:, :-1]
    else:
        flat = from_bins(torch.cat(said), world)[:, : steps * 2 - 1]  # what follows each token
        predicted = torch.cat([flat.new_zeros(len(flat), 1, 2), flat], 1).unflatten(1, (steps, 2))[:, 1:]
    late = slice(steps // 2, None)  # when there has been something to learn from
    error = (predicted - true[:, 1:])[:, late]
    still = (true[:, :-1] - true[:, 1:])[:, late]
    straight = (2 * true[:, 1:-1] - true[:, :-2] - true[:, 2:])[:, late]
    return {
        "loss": float(torch.stack(losses).mean()),
        "rms_error": float(error.square().mean().sqrt()),
        "rms_error_no_motion": float(still.square().mean().sqrt()),
        "rms_error_straight_on": float(straight.square().mean().sqrt()),
    }
