"""Rows of attention: how they spread with length, and what each head does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import caption, look, pyplot, save


def plot_dilution(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """How attention rows spread as the context grows: the statistics of `lssar rows` against n."""
    plt = pyplot()
    panels = {
        "peak": "largest weight",
        "entropy": "entropy, nats",
        "effective": "effective number of keys",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.2))
    for axis, (statistic, title) in zip(axes, panels.items()):
        for mechanism in result["mechanisms"]:
            rows = [row for row in result["rows"] if row["mechanism"] == mechanism]
            axis.plot([r["n"] for r in rows], [r[statistic] for r in rows], label=mechanism, **look(mechanism))
        axis.set(xscale="log", title=title, xlabel="keys in the row, n")
        axis.set_xscale("log", base=2)
        if statistic == "effective":
            axis.set_yscale("log")
        if statistic == "peak":
            axis.set_ylim(0, 1.02)
    axes[0].legend(handlelength=3.5)
    s = result["settings"]
    caption(figure, f"synthetic keys, head size {s['head_size']}, {s['queries']} queries, seed {s['seed']}; no model")
    return save(figure, path, overwrite)


STATISTICS = {
    "entropy": "entropy, nats",
    "effective": "effective number of keys",
    "above_mean": "share of keys above the mean",
    "matters": "share of keys that matter",
    "largest": "largest weight",
    "first_token": "weight of the first token",
}


def plot_diagnostics(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """A heat map, layers by heads, for each statistic and length; a row of maps shares its colours."""
    plt = pyplot()
    statistics, lengths = result["statistics"], result["lengths"]
    figure, axes = plt.subplots(
        len(statistics), len(lengths), figsize=(2.6 * len(lengths) + 1.5, 2.0 * len(statistics)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (name, by_length) in zip(axes, statistics.items()):
        low = min(min(map(min, layers)) for layers in by_length)
        high = max(max(map(max, layers)) for layers in by_length)
        for axis, length, layers in zip(line, lengths, by_length):
            image = axis.imshow(layers, vmin=low, vmax=high, aspect="auto", cmap="viridis")
            axis.set(title=f"{length:,} tokens", xlabel="head", ylabel="layer")
            axis.set(xticks=range(len(layers[0])), yticks=range(len(layers)))
            axis.grid(False)
        figure.colorbar(image, ax=line, label=STATISTICS.get(name, name))
    figure.suptitle(f"Attention rows of {result.get('run', 'the model')} ({result.get('attention', '')})", fontsize=10)
    return save(figure, path, overwrite)
