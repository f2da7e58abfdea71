"""Records of a run: one JSON line a step, TensorBoard where it is installed, and what stands out."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from lssar.model import GPT

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
    """Of this process's card, where it is known."""
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


class Metrics:
    """`metrics.jsonl`, appended a line at a time; on resuming, lines after the checkpoint are dropped."""

    def __init__(self, run: Path, from_step: int):
        self.path = run / "metrics.jsonl"
        if self.path.exists():
            kept = [row for row in read_metrics(run) if row["step"] <= from_step]
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            temporary.replace(self.path)
        self.file = self.path.open("a", buffering=1)
        self.board = _tensorboard(run)

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Whole lines; the last one may have been cut off with the process."""
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def summarise(rows: list[dict[str, Any]], points: int = 64) -> dict[str, Any]:
    """What training said of itself: last losses, gradient norms, what stood out, speed, and a thinned curve."""
    after = rows[len(rows) // 10 :]  # the first tenth, warm-up for the most part, has norms of its own
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


def _tensorboard(run: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run / "tensorboard"))
