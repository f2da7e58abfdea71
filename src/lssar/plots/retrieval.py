"""Retrieval by length and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import caption, describe, distinct_labels, looks, pyplot, save


def plot_retrieval(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Heat maps of correct answers over length and depth, a row for each run, a column for each task; below, rates."""
    plt = pyplot()
    arms = [arm for arm in result["arms"] if arm["rows"]]
    tasks = list(dict.fromkeys(row["task"] for arm in arms for row in arm["rows"]))
    rules = {"greedy": "correct answers", "choice": "correct answer most likely\n(black: chance)"}
    labels, styles = distinct_labels(arms), looks([arm["attention"] for arm in arms])
    figure, axes = plt.subplots(
        len(arms) + len(rules), len(tasks), figsize=(3.1 * len(tasks) + 0.5, 1.7 * len(arms) + 4.4), squeeze=False,
        height_ratios=[1.0] * len(arms) + [1.3] * len(rules), layout="constrained",
    )  # fmt: skip
    multiples = sorted({row["length"] // arm["train_length"] for arm in arms for row in arm["rows"]})
    image = None
    for line, arm, label in zip(axes, arms, labels):
        for axis, task in zip(line, tasks):
            rows = _retrieval_rows(arm, task)
            axis.grid(False)
            if arm is arms[0]:
                axis.set_title(task)
            if not rows:
                axis.axis("off")
                continue
            depths = [cell["depth"] for cell in rows[0]["cells"]]
            at = {row["length"] // arm["train_length"]: row["cells"] for row in rows}
            grid = [  # lengths that were not evaluated stay empty
                [at[m][i]["greedy"]["rate"] if m in at else float("nan") for m in multiples] for i in range(len(depths))
            ]
            image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axis.set_xticks(range(len(multiples)), [f"{m}x" for m in multiples])
            axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
            if task == tasks[0]:
                axis.set_ylabel(f"{label}\ndepth")
    if image is not None:
        figure.colorbar(image, ax=axes[: len(arms)].ravel().tolist(), label="correct answers", shrink=0.8)
    curves = list(zip(arms, labels, styles))
    for line, (rule, title) in zip(axes[len(arms) :], rules.items()):
        for axis, task in zip(line, tasks):
            chances = [_retrieval_curve(axis, arm, task, rule, label=label, **style) for arm, label, style in curves]
            if not axis.lines:
                axis.axis("off")
                continue
            if rule == "choice" and any(chances):
                axis.axhline(max(filter(None, chances)), color="black", lw=0.8)
            axis.set_xscale("log", base=2)
            axis.set(ylim=(-0.03, 1.03), xlabel="length / training length")
        line[0].set_ylabel(title)
    axes[len(arms)][0].legend(fontsize=7, handlelength=3)
    caption(figure, describe([arm["recipe"] for arm in arms]))
    return save(figure, path, overwrite)


def _retrieval_rows(arm: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return sorted((row for row in arm["rows"] if row["task"] == task), key=lambda row: row["length"])


def _retrieval_curve(axis: Any, arm: dict[str, Any], task: str, rule: str, **style: Any) -> float | None:
    """Draw a rate by length with its interval; returns the level of chance."""
    rows = [row for row in _retrieval_rows(arm, task) if rule in row]
    if not rows:
        return None
    at = [row["length"] / arm["train_length"] for row in rows]
    if arm["window"] is not None or arm["ntk"] == "length":
        style["mfc"] = "white"
    axis.plot(at, [row[rule]["rate"] for row in rows], **style)
    bounds = [[row[rule][side] for row in rows] for side in ("low", "high")]
    axis.fill_between(at, *bounds, color=style["color"], alpha=0.12, lw=0)
    return rows[0].get("chance")
