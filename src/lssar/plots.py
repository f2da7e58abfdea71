"""Every figure. Matplotlib is an extra: a clear error says so where it is missing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lssar.records import write_file

COLOURS = {  # one mechanism, one colour, in every figure
    "softmax": "#4c72b0",
    "cosine_softmax": "#55a868",
    "lssa": "#dd8452",
    "lssar": "#c44e52",
}
_OTHERS = ("#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd", "#3b3b3b")
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


def _pyplot():
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
    return COLOURS.get(mechanism.split(",")[0], _OTHERS[index % len(_OTHERS)])


def _save(figure: Any, path: Path, overwrite: bool) -> Path:
    write_file(path, lambda p: figure.savefig(p, bbox_inches="tight"), overwrite)
    _pyplot().close(figure)
    return path


def plot_dilution(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """How rows spread as the context grows: the statistics of `lssar rows` against n."""
    plt = _pyplot()
    panels = {
        "peak": "largest weight",
        "entropy": "entropy, nats",
        "effective": "effective number of keys",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.2))
    for axis, (statistic, title) in zip(axes, panels.items()):
        for mechanism in result["mechanisms"]:
            rows = [row for row in result["rows"] if row["mechanism"] == mechanism]
            axis.plot(
                [r["n"] for r in rows],
                [r[statistic] for r in rows],
                "o-",
                ms=3,
                color=colour(mechanism),
                label=mechanism,
            )
        axis.set(xscale="log", title=title, xlabel="keys in the row, n")
        axis.set_xscale("log", base=2)
        if statistic == "effective":
            axis.set_yscale("log")
        if statistic == "peak":
            axis.set_ylim(0, 1.02)
    axes[0].legend()
    return _save(figure, path, overwrite)


def plot_benchmark(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Time and memory against length, a row of panels for each head size and dtype."""
    plt = _pyplot()
    rows = result["rows"]
    modes = [mode for mode in ("forward", "backward", "both") if any(f"{mode}_ms" in row for row in rows)]
    settings = sorted({(row["head_size"], row["dtype"]) for row in rows})
    columns = [*(f"{mode}_ms" for mode in modes), "peak_extra_mib"]
    figure, axes = plt.subplots(
        len(settings), len(columns), figsize=(3.4 * len(columns), 3 * len(settings)), squeeze=False
    )
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for line, (head_size, dtype) in zip(axes, settings):
        for axis, column in zip(line, columns):
            for index, name in enumerate(names):
                implementation, mechanism = name.split(":")
                points = sorted(
                    (row["length"], row[column])
                    for row in rows
                    if row["contestant"] == name
                    and (row["head_size"], row["dtype"]) == (head_size, dtype)
                    and column in row
                )
                if points:
                    axis.plot(
                        *zip(*points), marker="o", ms=3, label=name, color=colour(mechanism, index),
                        ls=_STYLES.get(implementation, "-"),
                    )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            what = "peak extra memory, MiB" if column == "peak_extra_mib" else f"{column.removesuffix('_ms')}, ms"
            axis.set(xlabel="length", title=f"{what} (d {head_size}, {dtype})")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    return _save(figure, path, overwrite)


def plot_length(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Loss by length, of the last tokens against context, and by position; a curve a run, bands for its interval."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for index, curve in enumerate(result["curves"]):
        style = {"color": colour(curve["attention"], index), "ls": "--" if curve["ntk"] == "length" else "-"}
        for axis, points, x in ((axes[0], curve["by_length"], "length"), (axes[1], curve["last"], "context")):
            at = [p[x] for p in points]
            axis.plot(at, [p["loss"] for p in points], "o", ms=3, label=curve["label"], **style)
            axis.fill_between(
                at, [p["low"] for p in points], [p["high"] for p in points], color=style["color"], alpha=0.12
            )
        bins = curve["by_position"]
        axes[2].plot(
            [(b["start"] + b["stop"]) / 2 for b in bins], [b["loss"] for b in bins], label=curve["label"], **style
        )
    last = result["curves"][0]["last"][0]["tokens"]
    titles = (
        "mean loss, read in pieces of this length",
        f"loss of the last {last} tokens, given this context",
        "loss by position",
    )
    for axis, title in zip(axes, titles):
        axis.set_xscale("log", base=2)
        axis.axvline(result["curves"][0]["train_length"], color="black", lw=0.7, ls=":")
        axis.set(title=title, xlabel="tokens (dotted: training length)")
    axes[0].set_ylabel("nats a token")
    axes[0].legend()
    figure.tight_layout()
    return _save(figure, path, overwrite)


def plot_diagnostics(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """A heat map, layers by heads, for each statistic and length."""
    plt = _pyplot()
    statistics, lengths = result["statistics"], result["lengths"]
    figure, axes = plt.subplots(
        len(statistics), len(lengths), figsize=(2.6 * len(lengths) + 1, 2.0 * len(statistics)), squeeze=False
    )
    for line, (name, by_length) in zip(axes, statistics.items()):
        low = min(min(map(min, layers)) for layers in by_length)
        high = max(max(map(max, layers)) for layers in by_length)
        for axis, length, layers in zip(line, lengths, by_length):
            image = axis.imshow(layers, vmin=low, vmax=high, aspect="auto", cmap="viridis")
            axis.set(title=f"{name}, {length} tokens", xlabel="head", ylabel="layer")
            axis.grid(False)
        figure.colorbar(image, ax=line)
    return _save(figure, path, overwrite)


def plot_retrieval(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Heat maps of right answers over length and depth, a row an arm and a column a task; below, rates by length."""
    plt = _pyplot()
    arms = [arm for arm in result["arms"] if arm["rows"]]
    tasks = list(dict.fromkeys(row["task"] for arm in arms for row in arm["rows"]))
    rules = {"greedy": "decoded right", "choice": "likeliest is right\n(black: by chance)"}
    figure, axes = plt.subplots(
        len(arms) + len(rules), len(tasks), figsize=(3.1 * len(tasks) + 0.5, 1.7 * len(arms) + 4.4), squeeze=False,
        height_ratios=[1.0] * len(arms) + [1.3] * len(rules), layout="constrained",
    )  # fmt: skip
    multiples = sorted({row["length"] // arm["train_length"] for arm in arms for row in arm["rows"]})
    image = None
    for line, arm in zip(axes, arms):
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
            grid = [  # lengths that were not read stay empty
                [at[m][i]["greedy"]["rate"] if m in at else float("nan") for m in multiples] for i in range(len(depths))
            ]
            image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axis.set_xticks(range(len(multiples)), [f"{m}x" for m in multiples])
            axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
            if task == tasks[0]:
                axis.set_ylabel(f"{arm['label']}\ndepth")
    if image is not None:
        figure.colorbar(image, ax=axes[: len(arms)].ravel().tolist(), label="decoded right", shrink=0.8)
    for line, (rule, title) in zip(axes[len(arms) :], rules.items()):
        for axis, task in zip(line, tasks):
            chances = [_retrieval_curve(axis, arm, index, task, rule) for index, arm in enumerate(arms)]
            if not axis.lines:
                axis.axis("off")
                continue
            if rule == "choice" and any(chances):
                axis.axhline(max(filter(None, chances)), color="black", lw=0.8)
            axis.set_xscale("log", base=2)
            axis.set(ylim=(-0.03, 1.03), xlabel="length / training length")
        line[0].set_ylabel(title)
    axes[len(arms)][0].legend(fontsize=7)
    return _save(figure, path, overwrite)


def _retrieval_rows(arm: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return sorted((row for row in arm["rows"] if row["task"] == task), key=lambda row: row["length"])


def _retrieval_curve(axis: Any, arm: dict[str, Any], index: int, task: str, rule: str) -> float | None:
    """A rate by length with its interval; what chance gives."""
    rows = [row for row in _retrieval_rows(arm, task) if rule in row]
    if not rows:
        return None
    at = [row["length"] / arm["train_length"] for row in rows]
    shade = colour(arm["attention"], index)
    line = ":" if arm["window"] is not None else "--" if arm["ntk"] == "length" else "-"
    axis.plot(at, [row[rule]["rate"] for row in rows], "o", ls=line, ms=3, color=shade, label=arm["label"])
    axis.fill_between(
        at, [row[rule]["low"] for row in rows], [row[rule]["high"] for row in rows], color=shade, alpha=0.12
    )
    return rows[0].get("chance")


def plot_experiment(table: dict[str, Any], draw: str, path: Path, overwrite: bool = False) -> Path:
    """A reproduced table or figure, from the JSON of `lssar reproduce`."""
    rows = [row for row in table["rows"] if row["main"]]
    panels = {"bars": _bars, "curves": _curves, "sweep": _sweep, "training": _training, "rates": _rates}
    panels["accuracy"] = _accuracies
    return _save(panels[draw](rows, table), path, overwrite)


def _style(rows: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A mechanism (and position) keeps its colour; how it is read, and a power that is not its own, change the line."""
    row = rows[index]
    families = list(dict.fromkeys((r["attention"], r["position"]) for r in rows))
    strange = [family for family in families if family[0] not in COLOURS or family[1] != "rope"]
    family = (row["attention"], row["position"])
    own = row["p"] is None or (row["attention"] == "lssar" and row["p"] == 15)
    ways = (("posthoc", (0, (1, 1))), ("window", ":"), ("ntk", "--"))
    line = next((ls for word, ls in ways if word in row["reading"]), "-" if own else (0, (3, 1, 1, 1)))
    if not own and row["p"] == 3:
        line = (0, (5, 3))
    return {"color": colour("" if family in strange else family[0], strange.index(family) if family in strange else 0),
            "ls": line}  # fmt: skip


def _multiples(axis: Any, title: str, at: list[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set(title=title, xlabel="multiple of the training length", xticks=at, xticklabels=[f"{m:g}x" for m in at])


def _bars(rows: list[dict[str, Any]], table: dict[str, Any]) -> Any:
    """Loss at the training length, ours and the paper's, each less that of its softmax."""
    plt = _pyplot()
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
    plt = _pyplot()
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
    plt = _pyplot()
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
    plt = _pyplot()
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
    plt = _pyplot()
    lines = table["rows"]
    tasks = list(dict.fromkeys(row["reading"].split("-")[0] for row in lines if row["rate"]))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks) + 2, 3.6), squeeze=False, sharey=True)
    for axis, task in zip(axes[0], tasks):
        members = [row for row in lines if row["reading"].startswith(task)]
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
    plt = _pyplot()
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


def plot_law_errors(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: largest exponent error and R^2 against labelled systems; a band covers the seeds."""
    plt = _pyplot()
    worlds = list(dict.fromkeys(row["world"] for row in result["arms"]))
    figure, axes = plt.subplots(len(worlds), 2, figsize=(10, 3.6 * len(worlds)), squeeze=False)
    for line, world in zip(axes, worlds):
        arms = [row for row in result["arms"] if row["world"] == world]
        curves = list(dict.fromkeys((row["mechanism"], row["start"]) for row in arms))
        for axis, statistic, title in ((line[0], "error", "largest exponent error"), (line[1], "r2", "R² of log F")):
            for index, (mechanism, start) in enumerate(curves):
                rows = [row for row in arms if (row["mechanism"], row["start"]) == (mechanism, start)]
                shade = colour(mechanism, index) if "," not in mechanism else _OTHERS[0]
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
    return _save(figure, path, overwrite)


def _seed_curve(axis: Any, rows: list[dict[str, Any]], statistic: str, **style: Any) -> None:
    labels = sorted({row["labels"] for row in rows})
    values = [[row[statistic] for row in rows if row["labels"] == n] for n in labels]
    if labels:
        axis.plot(labels, [sum(v) / len(v) for v in values], marker="o", ms=4, **style)
        axis.fill_between(labels, [min(v) for v in values], [max(v) for v in values], color=style["color"], alpha=0.1)


def plot_forces(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: predicted against true force on systems never labelled, a panel an arm."""
    plt = _pyplot()
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
    return _save(figure, path, overwrite)


def plot_orbits(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: orbits never labelled, with the forces on the first body: true in grey, predicted in colour.

    The models say how strong the force is; arrows are drawn towards the other body.
    """
    plt = _pyplot()
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
    return _save(figure, path, overwrite)


def plot_inductive_bias(result: dict[str, Any], path: Path, overwrite: bool = False) -> Path:
    """Newton: how far apart models put pairs of states, against an oracle that knows the state."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(4.2, 4))
    for index, row in enumerate(result["probes"]):
        shade = colour(row["mechanism"], index) if "," not in row["mechanism"] else _OTHERS[0]
        axis.plot(*zip(*row["points"]), "o-", ms=3, color=shade, label=row["job"])
    high = max((x for row in result["probes"] for point in row["points"] for x in point), default=1.0)
    axis.plot([0, high], [0, high], color="black", lw=0.7, ls=":")
    axis.set(xlabel="distance by the oracle", ylabel="distance by the model", title="pairs of states, random functions")
    axis.legend(fontsize=6)
    return _save(figure, path, overwrite)
