"""Newton's law: errors, forces, orbits and the probe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lssar.plots.style import OTHER_COLOURS, colour, pyplot, save


def plot_law_errors(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: largest exponent error and R^2 against labelled systems; a band covers the seeds."""
    plt = pyplot()
    worlds = list(dict.fromkeys(row["world"] for row in result["arms"]))
    figure, axes = plt.subplots(len(worlds), 2, figsize=(10, 3.6 * len(worlds)), squeeze=False)
    for line, world in zip(axes, worlds):
        arms = [row for row in result["arms"] if row["world"] == world]
        curves = list(dict.fromkeys((row["mechanism"], row["start"]) for row in arms))
        for axis, statistic, title in ((line[0], "error", "largest exponent error"), (line[1], "r2", "R² of log F")):
            for index, (mechanism, start) in enumerate(curves):
                rows = [row for row in arms if (row["mechanism"], row["start"]) == (mechanism, start)]
                shade = colour(mechanism, index) if "," not in mechanism else OTHER_COLOURS[0]
                look = {"ls": "-"} if start == "pretrained" else {"ls": "--", "mfc": "white"}
                _seed_curve(axis, rows, statistic, color=shade, label=f"{mechanism}, {start}", **look)
            known = [row for row in result["oracles"] if row["world"] == world and "labels" in row]
            _seed_curve(axis, known, statistic, color="black", ls=":", label="nearest neighbours, true state")
            axis.set_xscale("log", base=2)
            axis.set(title=f"{world}: {title}", xlabel="labelled systems")
        line[0].axhline(0.05, color="black", lw=0.7)
        line[0].set_yscale("log")
        line[1].set_ylim(bottom=max(-0.5, line[1].get_ylim()[0]))
        line[0].legend(fontsize=6, ncol=2)
    figure.tight_layout()
    return save(figure, path, overwrite)


def _seed_curve(axis: Any, rows: list[dict[str, Any]], statistic: str, **style: Any) -> None:
    labels = sorted({row["labels"] for row in rows})
    values = [[row[statistic] for row in rows if row["labels"] == n] for n in labels]
    if labels:
        axis.plot(labels, [sum(v) / len(v) for v in values], marker="o", ms=4, **style)
        axis.fill_between(labels, [min(v) for v in values], [max(v) for v in values], color=style["color"], alpha=0.1)


def plot_forces(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: predicted against true force on systems never labelled, a panel an arm."""
    plt = pyplot()
    rows = result["forces"]
    columns = min(5, max(1, len(rows)))
    lines = -(-max(1, len(rows)) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.6 * columns, 2.7 * lines), squeeze=False)
    for axis, row in zip(axes.flat, rows):
        true, predicted = ([math.exp(x) for x in row[key]] for key in ("true", "predicted"))
        axis.scatter(true, predicted, s=3, alpha=0.5, color=colour(row["arm"].split("-")[1]))
        axis.plot([min(true), max(true)], [min(true), max(true)], color="black", lw=0.7)
        axis.set(xscale="log", yscale="log", xlabel="true force")
        axis.set_title(row["arm"], fontsize=6)
    for axis in list(axes.flat)[len(rows) :]:
        axis.axis("off")
    axes[0][0].set_ylabel("predicted force")
    figure.tight_layout()
    return save(figure, path, overwrite)


def plot_orbits(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: orbits never labelled, with the forces on the first body: true in grey, predicted in colour.

    The models say how strong the force is; arrows are drawn towards the other body.
    """
    plt = pyplot()
    orbits = result["orbits"]
    arms, systems = orbits["predicted"], orbits["positions"][:4]
    figure, axes = plt.subplots(
        max(1, len(arms)), len(systems), figsize=(2.6 * len(systems), 2.6 * max(1, len(arms))), squeeze=False
    )
    for line, (arm, predicted) in zip(axes, arms.items()):
        for axis, track, true, told in zip(line, systems, orbits["true"], predicted):
            first, second = ([step[body] for step in track] for body in (0, 1))
            axis.plot(*zip(*second), ".", ms=2, color="#8c8c8c")
            axis.plot(*zip(*first), ".", ms=4, color="black")
            size = max(abs(x) for point in (*first, *second) for x in point)
            marked = range(0, len(first), max(1, len(first) // 14))
            plain = {"headlength": 0, "headaxislength": 0, "headwidth": 1, "width": 0.018, "color": "#c8c8c8"}
            for forces, style in ((true, plain), (told, {"width": 0.006, "color": colour(arm.split("-")[1])})):
                arrows = []
                for at in marked:
                    (x, y), (u, v) = first[at], second[at]
                    share = 0.5 * size * math.exp((forces[at] - max(true)) / 2) / math.hypot(u - x, v - y)
                    arrows.append((x, y, share * (u - x), share * (v - y)))
                axis.quiver(*zip(*arrows), angles="xy", scale_units="xy", scale=1, **style)
            axis.set_aspect("equal")
            axis.tick_params(labelsize=5)
        line[0].set_ylabel(arm, fontsize=5)
    figure.suptitle("force on the first body (length: square root of it): grey true, colour predicted", fontsize=8)
    figure.tight_layout()
    return save(figure, path, overwrite)


def plot_inductive_bias(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: how far apart models put pairs of states, against an oracle that knows the state."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(4.2, 4))
    for index, row in enumerate(result["probes"]):
        shade = colour(row["mechanism"], index) if "," not in row["mechanism"] else OTHER_COLOURS[0]
        axis.plot(*zip(*row["points"]), "o-", ms=3, color=shade, label=row["job"])
    high = max((x for row in result["probes"] for point in row["points"] for x in point), default=1.0)
    axis.plot([0, high], [0, high], color="black", lw=0.7, ls=":")
    axis.set(xlabel="distance by the oracle", ylabel="distance by the model", title="pairs of states, random functions")
    axis.legend(fontsize=6)
    return save(figure, path, overwrite)
