"""Newton's law: errors, forces, orbits and the probe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lssar.plots.style import caption, colour, look, pyplot, save

FOUND = 0.05
"""An exponent is found when it is this close to Newton's."""
STARTS = {"pretrained": "pre-trained on orbits", "fresh": "not pre-trained"}


def plot_law_errors(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """How many labelled systems the models need to find the exponents of Newton's law, and in which worlds they do.

    Left: the world with several numbers of labels, a curve for each mechanism and start, with a band over seeds. Right:
    every world with its largest number of labels.
    """
    plt = pyplot()
    worlds = list(dict.fromkeys(row["world"] for row in result["arms"]))
    main = max(worlds, key=lambda world: len({row["labels"] for row in result["arms"] if row["world"] == world}))
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=[1.3, 1])
    arms = [row for row in result["arms"] if row["world"] == main]
    for mechanism, start in dict.fromkeys((row["mechanism"], row["start"]) for row in arms):
        rows = [row for row in arms if (row["mechanism"], row["start"]) == (mechanism, start)]
        style = look(mechanism, 2) if "," not in mechanism else look("", 2)
        style |= {"ls": "-"} if start == "pretrained" else {"ls": (0, (2, 1.5)), "mfc": "white", "alpha": 0.6}
        _seed_curve(axes[0], rows, "error", **style, label=f"{mechanism}, {STARTS[start]}")
    known = [row for row in result["oracles"] if row["world"] == main and "labels" in row]
    _seed_curve(axes[0], known, "error", color="black", ls=":", marker=".", label="nearest neighbours, true state")
    axes[0].set_xscale("log", base=2)
    labels = sorted({row["labels"] for row in arms})
    axes[0].set(title=f"world {main}: error by labels", xlabel="labelled systems", xticks=labels,
                xticklabels=[f"{n:,}" for n in labels], ylabel="largest error of the three exponents")  # fmt: skip
    _errors_by_world(axes[1], result, worlds)
    for axis in axes:
        axis.set_yscale("log")
        axis.axhspan(axis.get_ylim()[0], FOUND, color="#009e73", alpha=0.08, lw=0)
        axis.axhline(FOUND, color="black", lw=0.8)
    axes[0].text(labels[0], 0.95 * FOUND, "law found below this line", fontsize=7, va="top")
    figure.tight_layout()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 0.95), fontsize=7,
                  handlelength=3.5)  # fmt: skip
    caption(figure, _setting(result))
    return save(figure, path, overwrite)


def _errors_by_world(axis: Any, result: dict[str, Any], worlds: list[str]) -> None:
    for at, world in enumerate(worlds):
        rows = [row for row in result["arms"] if row["world"] == world]
        rows = [row for row in rows if row["labels"] == max(r["labels"] for r in rows)]
        kinds = list(dict.fromkeys((row["mechanism"], row["start"]) for row in rows))
        for index, (mechanism, start) in enumerate(kinds):
            values = [row["error"] for row in rows if (row["mechanism"], row["start"]) == (mechanism, start)]
            style = look(mechanism, 2) if "," not in mechanism else look("", 2)
            face = style["color"] if start == "pretrained" else "white"
            x = at + 0.6 * ((index + 0.5) / len(kinds) - 0.5)
            axis.plot([x], [sum(values) / len(values)], marker=style["marker"], color=style["color"], mfc=face, ms=6)
        known = [row for row in result["oracles"] if row["world"] == world and "labels" in row]
        most = max((row["labels"] for row in known), default=None)
        errors = [row["error"] for row in known if row["labels"] == most]
        if errors:
            level = sum(errors) / len(errors)
            axis.plot([at - 0.38, at + 0.38], [level, level], color="black", ls=":")
    axis.set(title="every world, with most labels (hollow: not pre-trained)", xticks=range(len(worlds)))
    axis.set_xticklabels(worlds, fontsize=8)


def _setting(result: dict[str, Any]) -> str:
    sizes = ", ".join(dict.fromkeys(str(family["size"]) for family in result["settings"]))
    tokens = ", ".join(dict.fromkeys(f"{family['world']} {family['tokens']}" for family in result["settings"]))
    seeds = max(len(family["seeds"]) for family in result["settings"])
    return f"{sizes} model; simulated orbits, tokens of a sequence: {tokens}; up to {seeds} seeds (band: their range)"


def _seed_curve(axis: Any, rows: list[dict[str, Any]], statistic: str, **style: Any) -> None:
    labels = sorted({row["labels"] for row in rows})
    values = [[row[statistic] for row in rows if row["labels"] == n] for n in labels]
    if labels:
        axis.plot(labels, [sum(v) / len(v) for v in values], **style)
        bounds = [[min(v) for v in values], [max(v) for v in values]]
        axis.fill_between(labels, *bounds, color=style["color"], alpha=0.08, lw=0)


def plot_forces(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: predicted against true force on test systems, a panel for each arm."""
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
        axis.set_title(_arm_title(row["arm"]), fontsize=7)
    for axis in list(axes.flat)[len(rows) :]:
        axis.axis("off")
    axes[0][0].set_ylabel("predicted force")
    figure.tight_layout()
    caption(figure, _setting(result))
    return save(figure, path, overwrite)


def _arm_title(arm: str) -> str:
    """`wellposed-lssar-seed0-pretrained-4096` in words."""
    words = arm.split("-")
    seed = next((i for i, word in enumerate(words) if word.startswith("seed")), None)
    if seed is None:
        return arm
    return f"{'-'.join(words[:seed])}\n{words[seed].replace('seed', 'seed ')}, {words[-1]} labels"


def plot_orbits(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: orbits of test systems, with the forces on the first body: true in grey, predicted in colour.

    The models predict the strength of the force; arrows point towards the other body.
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
        line[0].set_ylabel(_arm_title(arm), fontsize=6)
    figure.suptitle("force on the first body (length: its square root): grey true, colour predicted", fontsize=8)
    figure.tight_layout()
    caption(figure, _setting(result))
    return save(figure, path, overwrite)


def plot_inductive_bias(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: how far apart models put pairs of states, against an oracle that knows the state."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(4.2, 4))
    for row in result["probes"]:
        style = look(row["mechanism"], 2) if "," not in row["mechanism"] else look("", 2)
        axis.plot(*zip(*row["points"]), **style, label=row["mechanism"])
    high = max((x for row in result["probes"] for point in row["points"] for x in point), default=1.0)
    axis.plot([0, high], [0, high], color="black", lw=0.7, ls=":")
    axis.set(xlabel="distance by the oracle", ylabel="distance by the model", title="pairs of states, random functions")
    axis.legend(fontsize=6, handlelength=3.5)
    caption(figure, _setting(result))
    return save(figure, path, overwrite)
