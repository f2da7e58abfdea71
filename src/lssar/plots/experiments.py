"""Reproduced tables and figures: a function for each way to draw one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.plots.style import COLOURS, colour, pyplot, save


def plot_experiment(table: dict[str, Any], draw: str, path: Path, overwrite: bool = False) -> Path:
    """A reproduced table or figure, from the JSON of `lssar reproduce`."""
    rows = [row for row in table["rows"] if row["main"]]
    panels = {"bars": _bars, "curves": _curves, "sweep": _sweep, "training": _training, "rates": _rates}
    panels["accuracy"] = _accuracies
    return save(panels[draw](rows, table), path, overwrite)


def _style(rows: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A mechanism (and position) keeps its colour; how it is read, and a power that is not its own, change the line."""
    row = rows[index]
    families = list(dict.fromkeys((r["attention"], r["position"]) for r in rows))
    strange = [family for family in families if family[0] not in COLOURS or family[1] != "rope"]
    family = (row["attention"], row["position"])
    own = row["p"] is None or (row["attention"] == "lssar" and row["p"] == 15)
    ways = (("posthoc", (0, (1, 1))), ("window", ":"), ("ntk", "--"))
    line = next((ls for word, ls in ways if word in row["evaluation"]), "-" if own else (0, (3, 1, 1, 1)))
    if not own and row["p"] == 3:
        line = (0, (5, 3))
    return {"color": colour("" if family in strange else family[0], strange.index(family) if family in strange else 0),
            "ls": line}  # fmt: skip


def _multiples(axis: Any, title: str, at: list[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set(title=title, xlabel="multiple of the training length", xticks=at, xticklabels=[f"{m:g}x" for m in at])


def _bars(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
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
            axis.barh(at, value - base, color=colour(row["attention"], at), height=0.6)
            axis.text(max(value - base, 0), at, f" {value:.4g}", va="center", fontsize=8)
        axis.set(title=f"{title}: loss less softmax's", yticks=range(len(rows)), yticklabels=labels)
        axis.margins(x=0.25)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


def _curves(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Loss by length, last tokens by context, and the paper's curves where it has them."""
    plt = pyplot()
    paper = any(len(row.get("paper", {})) > 1 for row in rows)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for index, row in enumerate(rows):
        style = _style(rows, index)
        panels = [(axes[0], row["loss"])]
        panels.append((axes[1], {m: {"mean": v} for m, v in row.get("paper", {}).items()} if paper else row["last"]))
        for axis, points in panels:
            known = [(int(m), p) for m, p in points.items() if p["mean"] is not None]
            at, means = [m for m, _ in known], [p["mean"] for _, p in known]
            spread = [p.get("deviation") or 0.0 for _, p in known]
            axis.plot(at, means, marker="o", ms=3, label=row["label"], **style)
            low, high = ([m + sign * s for m, s in zip(means, spread)] for sign in (-1, 1))
            axis.fill_between(at, low, high, color=style["color"], alpha=0.15)
    titles = ["mean loss, read in pieces of this length"]
    titles.append(
        "the paper (124M)" if paper else f"loss of the last {rows[0]['last_tokens']} tokens, given this context"
    )
    for axis, title in zip(axes, titles):
        _multiples(axis, title, table["at"])
    axes[0].set_ylabel("nats a token")
    axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3)
    figure.tight_layout()
    return figure


def _sweep(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Loss against p at some lengths, a panel a family."""
    plt = pyplot()
    families = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(1, len(families), figsize=(4.6 * len(families), 3.6), squeeze=False, sharey=True)
    for axis, family in zip(axes[0], families):
        members = [row for row in rows if row["attention"] == family]
        for index, multiple in enumerate(("1", "4", "16")):
            known = [(r["p"], r["loss"][multiple]["mean"]) for r in members if multiple in r["loss"]]
            known = [(p, loss) for p, loss in known if loss is not None]
            alpha = (0.35, 0.65, 1.0)[index]
            axis.plot(
                *zip(*known) if known else ([], []), "o-", ms=3, color=colour(family), alpha=alpha, label=f"{multiple}x"
            )
        axis.set_xscale("log", base=2)
        axis.set(
            title=family, xlabel="p", xticks=[r["p"] for r in members], xticklabels=[f"{r['p']:g}" for r in members]
        )
        axis.legend()
    axes[0][0].set_ylabel("nats a token")
    figure.tight_layout()
    return figure


def _training(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Largest and median gradient norm against p."""
    plt = pyplot()
    families = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for family in families:
        members = [row for row in rows if row["attention"] == family]
        for axis, names in ((axes[0], ("grad_norm_median", "grad_norm_max")), (axes[1], ("val_loss",))):
            for name, ls in zip(names, ("-", ":")):
                known = [(r["p"], r["training"][name]) for r in members if r["training"][name] is not None]
                label = f"{family}, {name.replace('grad_norm_', '').replace('val_loss', 'held-out loss')}"
                axis.plot(
                    *zip(*known) if known else ([], []), marker="o", ms=3, ls=ls, color=colour(family), label=label
                )
    for axis, title in zip(axes, ("gradient norm before clipping", "loss at the training length")):
        powers = sorted({row["p"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set(title=title, xlabel="p", xticks=powers, xticklabels=[f"{p:g}" for p in powers])
        axis.legend(fontsize=7)
    axes[0].set_yscale("log")
    figure.tight_layout()
    return figure


def _rates(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Share of answers decoded right against context, a panel a task."""
    plt = pyplot()
    lines = table["rows"]
    tasks = list(dict.fromkeys(row["evaluation"].split("-")[0] for row in lines if row["rate"]))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks) + 2, 3.6), squeeze=False, sharey=True)
    for axis, task in zip(axes[0], tasks):
        members = [row for row in lines if row["evaluation"].startswith(task)]
        for index, row in enumerate(members):
            style = _style(members, index)
            at = [float(m) for m in row["rate"]]
            found = list(row["rate"].values())
            axis.plot(at, [r["rate"] for r in found], marker="o", ms=3, label=row["label"], **style)
            axis.fill_between(
                at, [r["low"] for r in found], [r["high"] for r in found], color=style["color"], alpha=0.1
            )
        _multiples(axis, task, [2**i for i in range(5)])
        axis.set_ylim(-0.02, 1.02)
    axes[0][0].set_ylabel("decoded right")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3)
    figure.tight_layout()
    return figure


def _accuracies(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Zero-shot accuracy, a group of bars a task, chance as a line."""
    plt = pyplot()
    tasks = list(rows[0]["accuracy"])
    figure, axis = plt.subplots(figsize=(1.5 * len(tasks) + 2, 3.6))
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        found = [row["accuracy"][task] for task in tasks]
        at = [i + (index - (len(rows) - 1) / 2) * width for i in range(len(tasks))]
        errors = [a["stderr"] for a in found]
        axis.bar(at, [a["mean"] for a in found], width, yerr=errors, label=row["label"], color=colour(row["attention"]))
    for i, task in enumerate(tasks):
        axis.hlines(rows[0]["accuracy"][task]["chance"], i - 0.45, i + 0.45, color="black", lw=1, ls=":")
    axis.set(xticks=range(len(tasks)), xticklabels=tasks, ylabel="accuracy (dotted: chance)")
    axis.legend(fontsize=7)
    figure.tight_layout()
    return figure
