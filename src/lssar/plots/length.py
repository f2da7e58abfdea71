"""Loss by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import colour, pyplot, save


def plot_length(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Loss by length, of the last tokens against context, and by position; a curve a run, bands for its interval."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for index, curve in enumerate(result["curves"]):
        style = {"color": colour(curve["attention"], index), "ls": "--" if curve["ntk"] == "length" else "-"}
        for axis, points, x in ((axes[0], curve["by_length"], "length"), (axes[1], curve["last"], "context")):
            at = [p[x] for p in points]
            axis.plot(at, [p["loss"] for p in points], "o", ms=3, label=curve["label"], **style)
            axis.fill_between(
                at, [p["low"] for p in points], [p["high"] for p in points], color=style["color"], alpha=0.12
            )
        bins = curve["by_position"]
        axes[2].plot(
            [(b["start"] + b["stop"]) / 2 for b in bins], [b["loss"] for b in bins], label=curve["label"], **style
        )
    last = result["curves"][0]["last"][0]["tokens"]
    titles = (
        "mean loss, read in pieces of this length",
        f"loss of the last {last} tokens, given this context",
        "loss by position",
    )
    for axis, title in zip(axes, titles):
        axis.set_xscale("log", base=2)
        axis.axvline(result["curves"][0]["train_length"], color="black", lw=0.7, ls=":")
        axis.set(title=title, xlabel="tokens (dotted: training length)")
    axes[0].set_ylabel("nats a token")
    axes[0].legend()
    figure.tight_layout()
    return save(figure, path, overwrite)
