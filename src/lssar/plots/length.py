"""Loss by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import caption, describe, distinct_labels, flat_limits, looks, pyplot, save


def plot_length(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Loss by length, its change from the shortest length, of the last tokens against context, and by position.

    The bands of the change are paired 95% intervals over the same pieces of text; curves recorded without the values
    of their pieces have none.
    """
    plt = pyplot()
    curves = result["curves"]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6))
    styles = looks([curve["attention"] for curve in curves])
    for curve, label, style in zip(curves, distinct_labels(curves), styles):
        if curve["ntk"] == "length":
            style = style | {"mfc": "white"}
        at = [point["length"] for point in curve["by_length"]]
        axes[0].plot(at, [point["loss"] for point in curve["by_length"]], label=label, **style)
        change = paired_change(curve["by_length"])
        axes[1].plot(at, [mean for mean, _ in change], **style)
        if all(half is not None for _, half in change):
            low, high = ([mean + sign * (half or 0.0) for mean, half in change] for sign in (-1, 1))
            axes[1].fill_between(at, low, high, color=style["color"], alpha=0.15, lw=0)
        context = [point["context"] for point in curve["last"]]
        axes[2].plot(context, [point["loss"] for point in curve["last"]], **style)
        bins = curve["by_position"]
        middle = [(b["start"] + b["stop"]) / 2 for b in bins]
        axes[3].plot(middle, [b["loss"] for b in bins], **(style | {"marker": ""}))
    last = curves[0]["last"][0]["tokens"]
    titles = (
        "loss by length", "change from the shortest length\n(steep curves leave the axis)",
        f"loss of the last {last} tokens by context", "loss by position",
    )  # fmt: skip
    axes[1].axhline(0, color="black", lw=0.8)
    limits = flat_limits([[mean for mean, _ in paired_change(curve["by_length"])] for curve in curves])
    if limits is not None:
        axes[1].set_ylim(*limits)
    for axis, title in zip(axes, titles):
        axis.set_xscale("log", base=2)
        axis.axvline(curves[0]["train_length"], color="black", lw=0.7, ls=":")
        axis.set(title=title, xlabel="tokens (dotted: training length)")
    axes[0].set_ylabel("nats per token")
    figure.tight_layout()
    figure.legend(loc="upper left", bbox_to_anchor=(1.0, 0.95), fontsize=8, handlelength=3.5)
    tokens = [curve.get("training", {}).get("tokens") for curve in curves]
    caption(figure, describe([curve["recipe"] for curve in curves if "recipe" in curve], tokens))
    return save(figure, path, overwrite)


def paired_change(points: list[dict[str, Any]]) -> list[tuple[float, float | None]]:
    """The change of the loss from the first point, and half its 95% interval, paired over pieces of text."""
    first = points[0]
    if any("values" not in point for point in points):
        return [(point["loss"] - first["loss"], None) for point in points]
    found: list[tuple[float, float | None]] = []
    for point in points:
        changes = [value - base for value, base in zip(point["values"], first["values"], strict=True)]
        mean = sum(changes) / len(changes)
        spread = sum((change - mean) ** 2 for change in changes) / max(1, len(changes) - 1)
        found.append((mean, 1.96 * (spread / len(changes)) ** 0.5))
    return found
