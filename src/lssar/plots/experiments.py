"""Figures of reproduced tables and figures, a function for each way to draw one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lssar.plots.style import GREY, LOOKS, caption, colour, flat_limits, look, pyplot, save

Row = dict[str, Any]


def plot_experiment(table: dict[str, Any], draw: str, path: Path, overwrite: bool = False) -> Path:
    """Draw a reproduced table or figure, from the JSON of `lssar reproduce`."""
    rows = [row for row in table["rows"] if row["main"]]
    panels = {
        "bars": _bars, "curves": _curves, "sweep": _sweep, "training": _training, "rates": _rates,
        "accuracy": _accuracies, "far": _far,
    }  # fmt: skip
    figure = panels[draw](rows, table)
    caption(figure, table["about"])
    return save(figure, path, overwrite)


# What several figures share.


def _own_power(row: Row) -> bool:
    return row["p"] is None or (row["attention"] in ("lssar", "lssa+lssar") and row["p"] == 15)


def _look(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """A mechanism keeps its look; NTK, a window, another power or a uniform layout beside mixed ones make a variant."""
    evaluated = any(word in row["evaluation"] for word in ("ntk", "window", "posthoc"))
    beside_mixed = row["layout"] == "uniform" and any(other["layout"] != "uniform" for other in rows)
    if row["position"] == "alibi":
        return look("alibi", 0) | ({"mfc": "white"} if beside_mixed else {})
    style = look(row["attention"], 1, variant=evaluated or beside_mixed or not _own_power(row))
    if "posthoc" in row["evaluation"] or "window" in row["evaluation"]:
        style["ls"] = (0, (1, 1))
    return style


def _multiples(axis: Any, title: str, at: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set(title=title, xlabel="length / training length", xticks=at, xticklabels=[f"{m:g}x" for m in at])


def _by_seed(points: dict[str, Any]) -> dict[int, list[float]]:
    """{multiple: values of the seeds} without points at which a seed diverged."""
    found = {int(m): point.get("by_seed", [point["mean"]]) for m, point in points.items()}
    return {m: values for m, values in found.items() if None not in values}


def _band(axis: Any, at: list[int], values: list[list[float]], **style: Any) -> None:
    """Mean over seeds, and a band of one standard deviation."""
    means = [fmean(each) for each in values]
    axis.plot(at, means, **style)
    spread = [stdev(each) if len(each) > 1 else 0.0 for each in values]
    low, high = ([m + sign * s for m, s in zip(means, spread)] for sign in (-1, 1))
    axis.fill_between(at, low, high, color=style["color"], alpha=0.15, lw=0)


def _end_legend(axes: Sequence[Any]) -> None:
    """Right of the last axis, a legend of the curves of all."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes[-1].legend(list(found.values()), list(found), fontsize=7, handlelength=3.5, **place)


# Figures.


def _bars(rows: list[Row], table: dict[str, Any]) -> Any:
    """Loss at the training length, ours and the paper's, each less that of its softmax."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.4 * len(rows) + 1.6), sharey=True)
    labels = [row["label"] for row in rows]
    ours = [row["loss"]["1"]["mean"] for row in rows]
    paper = [row.get("paper", {}).get("1") for row in rows]
    for axis, values, title in ((axes[0], ours, f"{table['scale']} scale"), (axes[1], paper, "the paper")):
        base = next((v for row, v in zip(rows, values) if row["attention"] == "softmax"), None)
        for at, (row, value) in enumerate(zip(rows, values)):
            if value is None or base is None:
                axis.text(0, at, " diverged" if axis is axes[0] and value is None else " no softmax yet", va="center")
                continue
            shade = colour("softmax") if row["attention"] == "softmax" else GREY
            shade = colour("lssa") if "softplus" in row["attention"] else shade
            axis.barh(at, value - base, color=shade, height=0.6)
            axis.text(max(value - base, 0), at, f" {value:.4g}", va="center", fontsize=8)
        axis.axvline(0, color=colour("softmax"), lw=1)
        axis.set(title=f"{title}: loss minus that of softmax", yticks=range(len(rows)), yticklabels=labels)
        axis.margins(x=0.25)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


def _curves(rows: list[Row], table: dict[str, Any]) -> Any:
    """Loss by length, and its change from the training length on the scale of the flat curves.

    Mechanisms with a look of their own are coloured, the others grey. With the paper's curves, those on the right.
    """
    plt = pyplot()
    paper = any(len(row.get("paper", {})) > 1 for row in rows)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2))
    shown = [row for row in rows if _highlighted(row)]
    for row in sorted(rows, key=lambda row: row in shown):
        style = _look(row, rows) if row in shown else {"color": GREY, "lw": 0.9, "zorder": 1}
        label = {"label": row["label"]} if row in shown else {}
        values = _by_seed(row["loss"])
        _band(axes[0], list(values), list(values.values()), **style, **label)
        if paper:
            told = {int(m): [v] for m, v in row.get("paper", {}).items()}
        else:
            told = {m: [b - a for a, b in zip(values[1], each)] for m, each in values.items()} if 1 in values else {}
        _band(axes[1], list(told), list(told.values()), **style, **label)
    if len(shown) < len(rows):
        axes[0].plot([], [], color=GREY, lw=0.9, label="other mechanisms")
        axes[1].plot([], [], color=GREY, lw=0.9, label="other mechanisms")
    axes[0].set_ylabel("loss, nats per token")
    _focus(axes[0], [_by_seed(row["loss"]) for row in shown])
    if paper:
        _focus(axes[1], [{int(m): [v] for m, v in row.get("paper", {}).items()} for row in shown])
        titles = ("loss by length", "the paper (124M, FineWeb-10B)")
    else:
        axes[1].axhline(0, color="black", lw=0.8)
        curves = [_by_seed(row["loss"]) for row in shown]
        limits = flat_limits([[fmean(v) - fmean(c[1]) for v in c.values()] for c in curves if 1 in c])
        if limits is not None:
            axes[1].set_ylim(*limits)
        axes[1].set_ylabel("nats per token")
        titles = ("loss by length", "change from the training length (steep curves leave the axis)")
    for axis, title in zip(axes, titles):
        _multiples(axis, title, table["at"])
    _end_legend(axes)
    figure.tight_layout()
    return figure


def _highlighted(row: Row) -> bool:
    known = row["attention"] in LOOKS and _own_power(row)
    return (known and "posthoc" not in row["evaluation"]) or row["position"] == "alibi"


def _focus(axis: Any, curves: Sequence[dict[int, list[float]]]) -> None:
    """Axis limits from the highlighted curves; others may leave the axis."""
    values = [value for curve in curves for each in curve.values() for value in each]
    if values:
        margin = 0.06 * (max(values) - min(values) or 1.0)
        axis.set_ylim(min(values) - margin, max(values) + margin)


def _far(rows: list[Row], table: dict[str, Any]) -> Any:
    """Loss by length, passkeys and needles side by side, for the rows with several seeds and two that are published."""
    plt = pyplot()
    wanted = [row for row in rows if len(row["arms"]) > 1 or "the paper" in row["label"] or row["position"] == "alibi"]
    wanted = wanted if any(len(row["arms"]) > 1 for row in rows) else rows[:6]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9))
    for row in wanted:
        values = _by_seed(row["loss"])
        _band(axes[0], list(values), list(values.values()), **_look(row, wanted), label=row["label"])
    at = [m for m in sorted({int(m) for row in wanted for m in row["loss"]}) if m != 256]  # too close to 512
    _multiples(axes[0], "loss by length", at)
    axes[0].set_ylabel("nats per token")
    _clip(axes[0], [_by_seed(row["loss"]) for row in wanted])
    for axis, task, title in (
        (axes[1], "passkey", "passkeys found"),
        (axes[2], "needles", "needles in real text found"),
    ):
        for row in wanted:
            lines = [r for r in table["rows"] if r["label"] == row["label"] and r["evaluation"].startswith(task)]
            rates = {float(m): each for line in lines for m, each in line["rate"].items()}
            if rates:
                style = _look(row, wanted)
                axis.plot(list(rates), [each["rate"] for each in rates.values()], **style, label=row["label"])
                bounds = [[each[side] for each in rates.values()] for side in ("low", "high")]
                axis.fill_between(list(rates), *bounds, color=style["color"], alpha=0.12, lw=0)
        _multiples(axis, title, at)
        axis.set_ylim(-0.03, 1.05)
    _end_legend(axes)
    figure.tight_layout()
    return figure


def _clip(axis: Any, curves: Sequence[dict[int, list[float]]], room: float = 0.35) -> None:
    """Cut off curves that rise by more than `room` above the best at 1x, and say where they end."""
    first = [fmean(curve[1]) for curve in curves if 1 in curve]
    values = [fmean(each) for curve in curves for each in curve.values()]
    if not first or max(values) <= min(first) + room:
        return
    low, top = min(values), min(first) + room
    axis.set_ylim(low - 0.05 * (top - low), top)
    found = 0
    for curve in filter(None, curves):
        end, last = max(curve), fmean(curve[max(curve)])
        over = [m for m, each in curve.items() if fmean(each) > top]
        if over:
            at, share = min(over), 0.98 - 0.05 * found
            found += 1
            axis.text(at, low + share * (top - low), f"→ {last:.2f} at {end}x", fontsize=7, va="top")


def _sweep(rows: list[Row], table: dict[str, Any]) -> Any:
    """Loss against p at three lengths, a panel for each family."""
    plt = pyplot()
    families = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(1, len(families), figsize=(4.6 * len(families), 3.6), squeeze=False, sharey=True)
    for axis, family in zip(axes[0], families):
        members = [row for row in rows if row["attention"] == family]
        for multiple, alpha, ls in (("1", 0.4, (0, (1, 1))), ("4", 0.7, (0, (4, 2))), ("16", 1.0, "-")):
            known = [(r["p"], r["loss"][multiple]["mean"]) for r in members if multiple in r["loss"]]
            known = [(p, loss) for p, loss in known if loss is not None]
            style = look(family) | {"ls": ls, "alpha": alpha}
            axis.plot(*zip(*known) if known else ([], []), **style, label=f"at {multiple}x")
        axis.set_xscale("log", base=2)
        axis.set(
            title=family, xlabel="p", xticks=[r["p"] for r in members], xticklabels=[f"{r['p']:g}" for r in members]
        )
        axis.legend()
    axes[0][0].set_ylabel("loss, nats per token")
    figure.tight_layout()
    return figure


def _training(rows: list[Row], table: dict[str, Any]) -> Any:
    """Gradient norms and held-out loss against p."""
    plt = pyplot()
    families = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    names = {"grad_norm_99": "99%", "grad_norm_median": "median"}
    for family in families:
        members = [row for row in rows if row["attention"] == family]
        for axis, keys in ((axes[0], tuple(names)), (axes[1], ("val_loss",))):
            for key in keys:
                known = [(r["p"], r["training"][key]) for r in members if r["training"][key] is not None]
                style = look(family, variant=key == "grad_norm_median")
                label = f"{family}, {names[key]}" if key in names else family
                axis.plot(*zip(*known) if known else ([], []), **style, label=label)
    for axis, title in zip(axes, ("gradient norm before clipping", "held-out loss at the training length")):
        powers = sorted({row["p"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set(title=title, xlabel="p", xticks=powers, xticklabels=[f"{p:g}" for p in powers])
        axis.legend(fontsize=7)
    axes[0].set_yscale("log")
    figure.tight_layout()
    return figure


def _rates(rows: list[Row], table: dict[str, Any]) -> Any:
    """Share of correct answers against context length, a panel for each task."""
    plt = pyplot()
    lines = table["rows"]
    tasks = list(dict.fromkeys(row["evaluation"].split("-")[0] for row in lines if row["rate"]))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks) + 2, 3.6), squeeze=False, sharey=True)
    for axis, task in zip(axes[0], tasks):
        members = [row for row in lines if row["evaluation"].startswith(task)]
        for row in members:
            style = _look(row, members)
            at = [float(m) for m in row["rate"]]
            found = list(row["rate"].values())
            axis.plot(at, [r["rate"] for r in found], label=row["label"], **style)
            bounds = [[r[side] for r in found] for side in ("low", "high")]
            axis.fill_between(at, *bounds, color=style["color"], alpha=0.1, lw=0)
        _multiples(axis, task, [2**i for i in range(5)])
        axis.set_ylim(-0.02, 1.02)
    axes[0][0].set_ylabel("share of correct answers")
    _end_legend(axes[0])
    figure.tight_layout()
    return figure


def _accuracies(rows: list[Row], table: dict[str, Any]) -> Any:
    """Zero-shot accuracy above chance, a group of bars for each task."""
    plt = pyplot()
    tasks = list(rows[0]["accuracy"])
    figure, axis = plt.subplots(figsize=(1.5 * len(tasks) + 2, 3.6))
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        found = [row["accuracy"][task] for task in tasks]
        at = [i + (index - (len(rows) - 1) / 2) * width for i in range(len(tasks))]
        above = [a["mean"] - a["chance"] for a in found]
        errors = [a["stderr"] for a in found]
        axis.bar(at, above, width, yerr=errors, label=row["label"], color=colour(row["attention"]))
    axis.axhline(0, color="black", lw=1)
    names = [f"{task}\n(chance {rows[0]['accuracy'][task]['chance']:.2f})" for task in tasks]
    axis.set(xticks=range(len(tasks)), xticklabels=names, ylabel="accuracy above chance (one standard error)")
    axis.legend(fontsize=7)
    figure.tight_layout()
    return figure
