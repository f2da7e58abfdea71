"""What every figure shares: its look, a colour for each mechanism, and how it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.records import write_file

COLOURS = {  # one mechanism, one colour, in every figure
    "softmax": "#4c72b0",
    "cosine_softmax": "#55a868",
    "lssa": "#dd8452",
    "lssar": "#c44e52",
}
OTHER_COLOURS = ("#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd", "#3b3b3b")


def pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'lssar[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False, "font.size": 9,
    })  # fmt: skip
    return plt


def colour(mechanism: str, index: int = 0) -> str:
    return COLOURS.get(mechanism.split(",")[0], OTHER_COLOURS[index % len(OTHER_COLOURS)])


def save(figure: Any, path: Path, overwrite: bool) -> Path:
    write_file(path, lambda p: figure.savefig(p, bbox_inches="tight"), overwrite)
    pyplot().close(figure)
    return path
