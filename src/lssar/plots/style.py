"""What every figure shares: colours and markers of the mechanisms, labels that differ, captions, and saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lssar.records import write_file

# Okabe and Ito's palette, which colour-blind readers can tell apart; each mechanism also has a marker and a line.
LOOKS: dict[str, tuple[str, str, Any]] = {
    "softmax": ("#0072b2", "o", "-"),
    "cosine_softmax": ("#009e73", "s", (0, (5, 2))),
    "lssa": ("#e69f00", "^", (0, (4, 1.5, 1, 1.5))),
    "lssar": ("#d55e00", "D", "-"),
    "ssmax": ("#56b4e9", "v", (0, (1, 1))),
    "lssa+lssar": ("#cc79a7", "P", "-"),
}
COLOURS = {name: colour for name, (colour, _, _) in LOOKS.items()}
"""One mechanism, one colour, in every figure."""
OTHER_COLOURS = ("#000000", "#999999", "#7a5195", "#8c6d31", "#4b8b3b", "#b2182b", "#5d6d7e")
OTHER_MARKERS = ("X", "h", "<", ">", "p", "d", "*")
GREY = "#b0b0b0"


def pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'lssar[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "legend.frameon": False, "font.size": 9, "axes.titlesize": 10,
    })  # fmt: skip
    return plt


def colour(mechanism: str, index: int = 0) -> str:
    return COLOURS.get(mechanism.split(",")[0], OTHER_COLOURS[index % len(OTHER_COLOURS)])


def look(mechanism: str, index: int = 0, variant: bool = False) -> dict[str, Any]:
    """Colour, marker and line of a mechanism; a variant of it (NTK, another p, another seed) has hollow markers.

    Mechanisms without a look of their own get one by `index`.
    """
    name = mechanism.split(",")[0]
    other = (OTHER_COLOURS[index % len(OTHER_COLOURS)], OTHER_MARKERS[index % len(OTHER_MARKERS)], "-")
    shade, marker, line = LOOKS.get(name, other)
    style = {"color": shade, "marker": marker, "ls": line, "ms": 4.5}
    return style | ({"mfc": "white", "ls": (0, (2, 1.2))} if variant else {})


def looks(mechanisms: Sequence[str]) -> list[dict[str, Any]]:
    """A look for each curve of a figure: the first of a mechanism has its own, further ones are variants of it."""
    unknown = list(dict.fromkeys(name for name in mechanisms if name.split(",")[0] not in LOOKS))
    seen: dict[str, int] = {}
    found = []
    lines = ("-", (0, (2, 1.2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (7, 2)))
    for name in mechanisms:
        number = seen[name] = seen.get(name, -1) + 1
        style = look(name, unknown.index(name) if name in unknown else 0, variant=number > 0)
        found.append(style | ({"ls": lines[number % len(lines)]} if number > 0 else {}))
    return found


def distinct_labels(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The labels of curves or arms; equal ones get the settings of their recipes in which they differ, or the run."""
    labels = [entry["label"] for entry in entries]
    for label in {name for name in labels if labels.count(name) > 1}:
        same = [i for i, name in enumerate(labels) if name == label]
        recipes = [entries[i].get("recipe", {}) for i in same]
        keys = [key for key in recipes[0] if key != "data" and any(r.get(key) != recipes[0][key] for r in recipes)]
        for i, recipe in zip(same, recipes):
            labels[i] = ", ".join([label, *(f"{key} {recipe.get(key)}" for key in keys)])
    for label in {name for name in labels if labels.count(name) > 1}:
        for i in (i for i, name in enumerate(labels) if name == label):
            labels[i] = f"{label} ({entries[i].get('run', i + 1)})"
    return labels


def describe(recipes: Sequence[dict[str, Any]], tokens: Sequence[int | None] = ()) -> str:
    """Model, data, training length, tokens and seeds of the runs in a figure, in one line."""

    def each(key: str) -> str:
        return ", ".join(dict.fromkeys(str(recipe[key]) for recipe in recipes if key in recipe))

    data = ", ".join(dict.fromkeys(Path(str(recipe.get("data", ""))).name or "stdlib" for recipe in recipes))
    counts = dict.fromkeys(f"{count / 1e6:.3g}M tokens" for count in tokens if count)
    words = [f"{each('size')} model", data, f"trained at {each('length')} tokens", *counts, f"seed {each('seed')}"]
    return "; ".join(words)


def flat_limits(curves: Sequence[Sequence[float]], most: float = 0.25) -> tuple[float, float] | None:
    """Limits of an axis that the flattest curves of changes fill; None if no curve stays within `most`."""
    flat = [value for curve in curves if curve and max(map(abs, curve)) <= most for value in curve]
    if not flat:
        return None
    low, high = min(*flat, -0.02), max(*flat, 0.02)
    return low - 0.15 * (high - low), high + 0.15 * (high - low)


def caption(figure: Any, text: str) -> None:
    """A line below the figure."""
    figure.text(0.005, -0.005, text, fontsize=7, color="#555555", va="top", ha="left")


def save(figure: Any, path: Path, overwrite: bool) -> Path:
    write_file(path, lambda p: figure.savefig(p, bbox_inches="tight"), overwrite)
    pyplot().close(figure)
    return path
