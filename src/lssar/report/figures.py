"""Plotly figures of a report, from the dicts that evaluations write. Colours follow the run in every chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lssar.plots.style import COLOURS, OTHER_COLOURS
from lssar.report.collect import RunRecord, mechanism_of
from lssar.report.page import Chart, plotly

PALETTE = ("#c44e52", "#4c8bd6", "#4aa564", "#e08a3c", "#9a7fd1", "#b08968", "#d977b8", "#8c96a3", "#c9a93b", "#3fa7b8")
"""Legible on light and on dark ground."""

STATISTICS = {
    "entropy": ("Entropy, nats", "How spread a row is; log n when all keys count the same."),
    "effective": ("Effective keys, exp(entropy)", "The number of equally weighted keys with the same entropy."),
    "above_mean": ("Share of keys above the mean", "What a threshold at the row's mean lets through."),
    "first_token": ("Weight of the first token (sink)", "A sink collects weight that has nowhere else to go."),
    "matters": ("Share of keys that matter", "Keys whose weight exceeds 1/1024 of the uniform weight."),
    "largest": ("Largest weight", "1 when a single key takes the whole row."),
}


def colours(runs: Sequence[RunRecord]) -> dict[str, str]:
    """A colour for each run name: that of its mechanism in all figures if it is free, else the next of the palette."""
    chosen: dict[str, str] = {}
    for run in runs:
        wanted = COLOURS.get(mechanism_of(run.recipe))
        free = [shade for shade in PALETTE if shade not in chosen.values()]
        if wanted is not None and wanted not in chosen.values() and wanted in PALETTE:
            chosen[run.name] = wanted
        else:
            chosen[run.name] = free[0] if free else OTHER_COLOURS[len(chosen) % len(OTHER_COLOURS)]
    return chosen


def _figure(x: str, y: str, **layout: Any) -> Any:
    plotly()
    import plotly.graph_objects as go

    axis = {"automargin": True, "showline": True, "zeroline": False, "fixedrange": True}
    base = {
        "template": {}, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "font": {"size": 12}, "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.28, "x": 0, "yanchor": "top"},
        "xaxis": {**axis, "title": {"text": x}, "gridcolor": "#ccc"},
        "yaxis": {**axis, "title": {"text": y}, "gridcolor": "#ccc"},
    }  # fmt: skip
    figure = go.Figure(layout=base)
    return figure.update_layout(**layout)


def _transparent(colour: str, share: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"


def _band(figure: Any, x: list[float], low: list[float], high: list[float], colour: str, group: str) -> None:
    figure.add_scatter(
        x=x + x[::-1], y=high + low[::-1], fill="toself", mode="lines", line={"width": 0}, hoverinfo="skip",
        fillcolor=_transparent(colour, 0.16), showlegend=False, legendgroup=group,
    )  # fmt: skip


def _tokens_axis(figure: Any, values: Iterable[float], train_length: int | None) -> None:
    """Powers of two on a logarithmic axis, and a line at the training length."""
    ticks = sorted(set(values))
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,.0f}" for tick in ticks], tickangle=-45)
    if train_length:
        line = {"type": "line", "xref": "x", "yref": "paper", "x0": train_length, "x1": train_length, "y0": 0, "y1": 1}
        figure.update_layout(shapes=[{**line, "line": {"dash": "dot", "width": 1}}])


def training_charts(runs: Sequence[RunRecord], shades: dict[str, str]) -> list[Chart]:
    """Training and held-out loss, gradient norm and learning rate by step."""
    runs = [run for run in runs if run.training]
    if not runs:
        return []
    loss = _figure("step", "nats a token")
    for run in runs:
        at = [row["step"] for row in run.training]
        shade = shades[run.name]
        losses = [row["loss"] for row in run.training]
        loss.add_scatter(x=at, y=losses, mode="lines", name=run.label, line={"color": shade, "width": 1.5})
        held_out = [(row["step"], row["val_loss"]) for row in run.training if "val_loss" in row]
        if held_out:
            loss.add_scatter(
                x=[step for step, _ in held_out], y=[value for _, value in held_out], mode="markers+lines",
                name=f"{run.label}, held out", line={"color": shade, "dash": "dot", "width": 1.5}, marker={"size": 7},
            )  # fmt: skip
    top = sorted(row["loss"] for run in runs for row in run.training[len(run.training) // 50 :])
    if top:
        low = min(top[0], *(row["val_loss"] for run in runs for row in run.training if "val_loss" in row), top[0])
        high = top[int(0.98 * (len(top) - 1))]
        loss.update_yaxes(range=[low - 0.05 * (high - low), high + 0.1 * (high - low)])
    charts = [
        Chart("Loss while training", loss, "Dotted: held-out text. The first steps are off the scale.", height=360)
    ]
    for key, title, unit in (("grad_norm", "Gradient norm", "norm"), ("lr", "Learning rate", "rate")):
        shown = [run for run in runs if any(key in row for row in run.training)]
        if not shown:
            continue
        figure = _figure("step", unit)
        for run in shown:
            rows = [row for row in run.training if key in row]
            figure.add_scatter(
                x=[row["step"] for row in rows], y=[row[key] for row in rows], mode="lines", name=run.label,
                line={"color": shades[run.name], "width": 1.3},
            )  # fmt: skip
        if key == "grad_norm":
            figure.update_yaxes(type="log")
        charts.append(Chart(title, figure, height=360))
    return charts


def length_charts(curves: Sequence[dict[str, Any]], labels: dict[str, str], shades: dict[str, str]) -> list[Chart]:
    """Loss by length, of the last tokens against context, and by position."""
    if not curves:
        return []
    train_lengths = {curve["train_length"] for curve in curves}
    train = train_lengths.pop() if len(train_lengths) == 1 else None
    last = curves[0]["last"][0]["tokens"] if curves[0].get("last") else 0
    views = [
        ("by_length", "length", "Loss by length", "The same held-out tokens, cut into chunks of each length."),
        ("last", "context", f"Loss of the last {last} tokens", "The same tokens, with more and more context before."),
    ]
    charts = []
    for key, x, title, note in views:
        figure = _figure("tokens", "nats a token")
        for curve in curves:
            points = curve.get(key, [])
            at, shade = [p[x] for p in points], shades[curve["run"]]
            name = curve_label(curve, labels)
            _band(figure, at, [p["low"] for p in points], [p["high"] for p in points], shade, name)
            figure.add_scatter(
                x=at, y=[p["loss"] for p in points], mode="lines+markers", name=name, legendgroup=name,
                line={"color": shade, "dash": _dash(curve)},
                customdata=[[p[x] / curve["train_length"], p["low"], p["high"]] for p in points],
                hovertemplate="%{x:,} tokens (%{customdata[0]:g}x)<br>loss %{y:.3f} "
                "(%{customdata[1]:.3f} to %{customdata[2]:.3f})",
            )  # fmt: skip
        _tokens_axis(figure, (p[x] for curve in curves for p in curve.get(key, [])), train)
        charts.append(Chart(title, figure, note + " Bands: 95% intervals. Dotted: training length.", height=360))
    figure = _figure("position of the token", "nats a token")
    for curve in curves:
        bins = curve["by_position"]
        figure.add_scatter(
            x=[(b["start"] + b["stop"]) / 2 for b in bins], y=[b["loss"] for b in bins], mode="lines",
            name=curve_label(curve, labels), line={"color": shades[curve["run"]], "dash": _dash(curve)},
        )  # fmt: skip
    ends = [b["stop"] for curve in curves for b in curve["by_position"]]
    ticks = [2**i for i in range(4, 24, 2) if 2**i <= max(ends)]
    _tokens_axis(figure, ticks, train)
    charts.append(Chart("Loss by position", figure, "In the longest chunks, averaged in growing bins.", height=360))
    return charts


def curve_label(entry: dict[str, Any], labels: dict[str, str]) -> str:
    """The run's label, with what was changed at test time."""
    parts = [labels.get(entry["run"], entry["run"])]
    if entry.get("ntk") == "length":
        parts.append("NTK")
    if entry.get("window") is not None and entry.get("window") != entry.get("recipe", {}).get("window"):
        parts.append(f"window {entry['window']}")
    return ", ".join(parts)


def _dash(entry: dict[str, Any]) -> str:
    return "dash" if entry.get("ntk") == "length" else "solid"


def retrieval_charts(arms: Sequence[dict[str, Any]], labels: dict[str, str], shades: dict[str, str]) -> list[Chart]:
    """Rates by length for each task, then a heat map, length by depth, for each task and run."""
    tasks = list(dict.fromkeys(row["task"] for arm in arms for row in arm["rows"]))
    multiples = sorted({row["length"] / arm["train_length"] for arm in arms for row in arm["rows"]})
    charts = []
    for task in tasks:
        figure = _figure("length / training length", "answers decoded correctly")
        for arm in arms:
            rows = sorted((row for row in arm["rows"] if row["task"] == task), key=lambda row: row["length"])
            if not rows:
                continue
            at = [row["length"] / arm["train_length"] for row in rows]
            shade, name = shades[arm["run"]], curve_label(arm, labels)
            _band(figure, at, [r["greedy"]["low"] for r in rows], [r["greedy"]["high"] for r in rows], shade, name)
            figure.add_scatter(
                x=at, y=[r["greedy"]["rate"] for r in rows], mode="lines+markers", name=name, legendgroup=name,
                line={"color": shade, "dash": _dash(arm)},
                customdata=[[r["greedy"]["right"], r["greedy"]["of"], r["length"]] for r in rows],
                hovertemplate="%{x:g}x (%{customdata[2]:,} tokens)<br>%{customdata[0]} of %{customdata[1]} right",
            )  # fmt: skip
        figure.update_xaxes(type="log", tickvals=multiples, ticktext=[f"{m:g}x" for m in multiples])
        figure.update_yaxes(range=[-0.04, 1.04], tickformat=".0%")
        charts.append(Chart(f"{task}: answers decoded correctly", figure, "Bands: 95% Wilson intervals.", height=330))
    for task in tasks:
        maps = [_retrieval_map(arm, task, multiples, curve_label(arm, labels)) for arm in arms]
        charts += _in_one_row([chart for chart in maps if chart is not None])
    return charts


def _in_one_row(charts: list[Chart]) -> list[Chart]:
    """Charts that are compared with each other begin a row of their own."""
    for chart in charts[:1]:
        chart.starts_row = True
    return charts


def _retrieval_map(arm: dict[str, Any], task: str, multiples: list[float], label: str) -> Chart | None:
    rows = {row["length"] / arm["train_length"]: row for row in arm["rows"] if row["task"] == task}
    depths = sorted({cell["depth"] for row in rows.values() for cell in row.get("cells", [])})
    if not depths:
        return None
    cells = {(m, cell["depth"]): cell["greedy"] for m, row in rows.items() for cell in row["cells"]}
    grid = [[_rate(cells.get((m, depth))) for m in multiples] for depth in depths]
    counts = [[_count(cells.get((m, depth))) for m in multiples] for depth in depths]
    figure = _figure("length / training length", "depth of the answer")
    figure.add_heatmap(
        z=grid, x=[f"{m:g}x" for m in multiples], y=[f"{100 * depth:.0f}%" for depth in depths], zmin=0, zmax=1,
        colorscale="Viridis", xgap=1, ygap=1, customdata=counts, hoverongaps=False,
        colorbar={"tickformat": ".0%", "thickness": 10, "len": 1, "outlinewidth": 0},
        hovertemplate="%{x}, depth %{y}<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
    return Chart(f"{task} · {label}", figure, height=230)


def _rate(cell: dict[str, Any] | None) -> float | None:
    return None if cell is None else cell["rate"]


def _count(cell: dict[str, Any] | None) -> str:
    return "not evaluated" if cell is None else f"{cell['right']} of {cell['of']} right"


def diagnostics_charts(results: Sequence[dict[str, Any]], labels: dict[str, str]) -> list[Chart]:
    """A heat map, layer by head, for each statistic and run; its traces are the lengths, chosen by a select box."""
    charts = []
    lengths = diagnosed_lengths(results)
    for name, (title, note) in STATISTICS.items():
        found = [result for result in results if name in result["statistics"]]
        values = [v for r in found for layers in r["statistics"][name] for heads in layers for v in heads]
        if not values:
            continue
        low, high = min(0.0, *values), max(values)
        row = []
        for result in found:
            figure = _figure("head", "layer")
            for length in lengths:
                layers = result["statistics"][name]
                grid = layers[result["lengths"].index(length)] if length in result["lengths"] else []
                figure.add_heatmap(
                    z=grid, x=[str(i) for i in range(len(grid[0]) if grid else 0)],
                    y=[str(i) for i in range(len(grid))], zmin=low, zmax=max(high, low + 1e-9), colorscale="Viridis",
                    xgap=1, ygap=1, colorbar={"thickness": 10, "outlinewidth": 0},
                    visible=length == lengths[0],
                    hovertemplate="layer %{y}, head %{x}<br>%{z:.4g}<extra></extra>",
                )  # fmt: skip
            figure.update_xaxes(type="category", showgrid=False)
            figure.update_yaxes(type="category", showgrid=False, autorange="reversed")
            label = labels.get(result["run"], result["run"])
            row.append(Chart(f"{title} · {label}", figure, note, group="diagnostics", height=260))
        charts += _in_one_row(row)
    return charts


def diagnosed_lengths(results: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({length for result in results for length in result["lengths"]})
