"""Records of a run: one JSON line a step, optional TensorBoard or Weights & Biases, spikes and a summary."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lssar.model import GPT
from lssar.records import naming, warn, write_file

PEAK_TFLOPS = {  # dense bfloat16, by the vendors' data sheets
    "H200": 989, "H100": 989, "GH200": 989, "A100": 312, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71, "B200": 2250,
}  # fmt: skip


def flops_per_token(model: GPT, length: int) -> float:
    """Forward and backward: 6 for each weight, and attention's two products over the keys that a row sees."""
    config = model.config
    seen = sum(mean_visible(length, layer.window) for layer in config.layer_configs)
    return 6 * model.parameter_count() + 12 * config.width * seen


def mean_visible(length: int, window: int | None) -> float:
    """Mean over the rows of a sequence of how many keys each sees, its own included."""
    window = min(window or length, length)
    return window * (length - (window - 1) / 2) / length


def peak_flops() -> float | None:
    """Peak FLOPs a second of this process's GPU, if it is known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((1e12 * value for key, value in PEAK_TFLOPS.items() if key in name), None)


class SpikeDetector:
    """Marks a loss that lies far above what came just before: more than 4 deviations of a running mean."""

    def __init__(self, memory: float = 0.98):
        self.memory, self.mean, self.variance, self.seen = memory, 0.0, 0.0, 0

    def __call__(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        known = self.seen >= 50
        spike = known and loss > self.mean + 4 * math.sqrt(self.variance) + 1e-3
        share = max(1 - self.memory, 1 / (self.seen + 1))
        if not spike:
            difference = loss - self.mean
            self.mean += share * difference
            self.variance = (1 - share) * (self.variance + share * difference**2)
        self.seen += 1
        return spike


Logger = Literal["tensorboard", "wandb"]
METRICS = "metrics.jsonl"


class Metrics:
    """`metrics.jsonl`, one line a step; when a run resumes, lines after the checkpoint are dropped.

    `log` names services that receive the same numbers through their own packages.
    """

    def __init__(self, run: Path, from_step: int, log: Sequence[Logger] = (), config: dict[str, Any] | None = None):
        self.path = run / METRICS
        kept: list[dict[str, Any]] = []
        if self.path.exists():
            kept = [row for row in read_metrics(run) if row["step"] <= from_step]
            text = "".join(_line(row) for row in kept)
            write_file(self.path, lambda path: path.write_text(text), overwrite=True)
        if len(kept) < from_step:
            warn(f"{self.path} has {len(kept)} of the {from_step} steps before the checkpoint")
        self.loggers = [LOGGERS[name](run, from_step, config or {}) for name in log]
        self.file = self.path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        with naming(self.path):
            self.file.write(_line(row))
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
        for logger in self.loggers:
            logger.write(row["step"], numbers)

    def close(self) -> None:
        with naming(self.path):
            self.file.close()
        for logger in self.loggers:
            logger.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All undamaged lines, with a message if others were found. A last line that was cut off is dropped without one."""
    path = run / METRICS
    rows, damaged = [], []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            damaged.append(number)
    if damaged:
        warn(f"{path}: {len(damaged)} damaged lines are left out, the first is line {damaged[0]}")
    return rows


def _line(row: dict[str, Any]) -> str:
    """A row as a line, with a checksum of its text as the last field."""
    text = json.dumps(row)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line, or None if the line is damaged. Lines without a checksum are only checked for their fields."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    crc = row.pop("crc", None)
    if crc is not None and crc != zlib.crc32(json.dumps(row).encode()):
        return None
    return row if set(EVERY_ROW) <= set(row) and isinstance(row["step"], int) else None


EVERY_ROW = ("step", "loss", "grad_norm", "tokens", "tokens_per_s", "spike", "finite")
"""Fields that every line of `metrics.jsonl` has."""


def summarise(rows: list[dict[str, Any]], points: int = 64) -> dict[str, Any]:
    """A summary of training: last losses, gradient norms, spikes, speed, and a thinned curve."""
    if not rows:
        raise ValueError(f"{METRICS} holds no undamaged line")
    after = rows[len(rows) // 10 :]  # without the first tenth, which is mostly warm-up and has other norms
    norms = sorted(row["grad_norm"] for row in after if math.isfinite(row["grad_norm"]))
    speeds = [row["tokens_per_s"] for row in rows]
    curve = []
    for i in range(points):
        part = rows[i * len(rows) // points : (i + 1) * len(rows) // points]
        if part:
            loss = statistics.fmean(row["loss"] for row in part)
            curve.append({"step": part[-1]["step"], "loss": loss, "grad_norm": max(row["grad_norm"] for row in part)})
    return {
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "val_loss": rows[-1].get("val_loss"),
        "train_loss": statistics.fmean(row["loss"] for row in rows[-min(50, len(rows)) :]),
        "grad_norm_median": statistics.median(norms) if norms else None,
        "grad_norm_99": norms[int(0.99 * (len(norms) - 1))] if norms else None,
        "grad_norm_max": norms[-1] if norms else None,
        "spikes": sum(row["spike"] for row in rows),
        "not_finite": sum(not row["finite"] for row in rows),
        "tokens_per_s": statistics.median(speeds),
        "curve": curve,
    }


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, from_step: int, config: dict[str, Any]):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"--log tensorboard needs the package: pip install 'lssar[tensorboard]' ({error})"
            ) from error
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=from_step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of project `lssar` at wandb.ai, or offline with WANDB_MODE=offline; resumed with the run folder."""

    def __init__(self, run: Path, from_step: int, config: dict[str, Any]):
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"--log wandb needs the package: pip install 'lssar[wandb]' ({error})") from error
        identity = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
        self.session = wandb.init(
            project="lssar", name=run.name, id=identity, resume="allow", dir=str(run), config=config
        )  # fmt: skip

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.session.log(numbers, step=step)

    def close(self) -> None:
        self.session.finish()


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
