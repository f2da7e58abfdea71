"""Time and memory of the contestants of `lssar bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import colour, pyplot, save

_STYLES = {
    "fused": "-",
    "tiled": "-",
    "eager": ":",
    "compiled": "-.",
    "sdpa": "--",
    "cudnn": "--",
    "flash": "-.",
    "flex": ":",
}


def plot_benchmark(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Time and memory against length, a row of panels for each head size, dtype and window."""
    plt = pyplot()
    rows = result["rows"]
    modes = [mode for mode in ("forward", "backward", "both") if any(f"{mode}_ms" in row for row in rows)]
    settings = sorted({_setting(row) for row in rows})
    columns = [*(f"{mode}_ms" for mode in modes), "peak_extra_mib"]
    figure, axes = plt.subplots(
        len(settings), len(columns), figsize=(3.4 * len(columns), 3 * len(settings)), squeeze=False
    )
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for line, setting in zip(axes, settings):
        for axis, column in zip(line, columns):
            for index, name in enumerate(names):
                implementation, mechanism = name.split(":")
                points = sorted(
                    (row["length"], row[column])
                    for row in rows
                    if row["contestant"] == name and _setting(row) == setting and column in row
                )
                if points:
                    axis.plot(
                        *zip(*points), marker="o", ms=3, label=name, color=colour(mechanism, index),
                        ls=_STYLES.get(implementation, "-"),
                    )  # fmt: skip
            axis.set_xscale("log", base=2)
            if any(y > 0 for line in axis.lines for y in line.get_ydata()):  # peaks too small to see are 0
                axis.set_yscale("log")
            what = "peak extra memory, MiB" if column == "peak_extra_mib" else f"{column.removesuffix('_ms')}, ms"
            head_size, dtype, window = setting
            within = f", window {window}" if window else ""
            axis.set(xlabel="length", title=f"{what} (d {head_size}, {dtype}{within})")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    return save(figure, path, overwrite)


def _setting(row: dict[str, Any]) -> tuple[int, str, int]:
    return row["head_size"], row["dtype"], row.get("window") or 0
