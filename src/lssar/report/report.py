"""The report on one or more runs: summary, training, loss by length, retrieval, diagnostics, provenance."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lssar.report import figures
from lssar.report.collect import Collected, RunRecord, collect
from lssar.report.page import Section, report_page, text, write_page

NOT_A_CHOICE = ("data", "keep", "save_every", "eval_every", "eval_batches", "compile")
"""Recipe fields that say how a run was done, not what it is: last in the table."""


def write_report(paths: Sequence[Path], out: Path, title: str | None = None, overwrite: bool = False) -> Path:
    """One self-contained HTML page about run folders, exported models and result files."""
    return write_page(Path(out), report_html(collect([Path(p) for p in paths]), title), overwrite)


def report_html(found: Collected, title: str | None = None) -> str:
    runs = found.runs
    shades = figures.colours(runs)
    labels = {run.name: run.label for run in runs}
    sections = [
        Section("summary", "Summary", body=_summary(found, shades)),
        Section("training", "Training", charts=figures.training_charts(runs, shades)),
        Section(
            "length", "Loss by length",
            "<p>Loss on held-out text when the context grows beyond the training length.</p>",
            figures.length_charts(found.curves, labels, shades),
        ),
        Section(
            "retrieval", "Retrieval",
            "<p>Whether facts far back in the context are found: the whole answer, decoded greedily. "
            "Depth 0% is the start of the context.</p>",
            figures.retrieval_charts(found.arms, labels, shades),
        ),
        Section(
            "diagnostics", "Diagnostics", _diagnostics_lead(found),
            figures.diagnostics_charts(found.diagnostics, labels),
        ),
        Section("configuration", "Configuration", body=_configuration(runs, shades)),
        Section("provenance", "Provenance", body=_provenance(runs, shades)),
    ]  # fmt: skip
    missing = [s.title.lower() for s in sections if not s.charts and not s.body]
    sections = [s for s in sections if s.charts or s.body]
    if missing:
        hint = f"<p>Not evaluated yet: {text(', '.join(missing))}. <code>lssar report --compute</code> adds it.</p>"
        sections[0].lead += hint
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    names = ", ".join(run.label for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    return report_page(title or "Train short, read long", f"{names} · {when}", sections)


def _swatch(name: str, shades: dict[str, str]) -> str:
    return f'<span class="swatch" style="background:{shades[name]}"></span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    def cell(tag: str, value: str, number: bool) -> str:
        return f"<{tag}{' class=number' if number else ''}>{value}</{tag}>"

    top = "".join(cell("th", text(name), number) for name, number in zip(head, numeric))
    body = "".join(
        f"<tr>{''.join(cell('td', value, number) for value, number in zip(row, numeric))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _summary(found: Collected, shades: dict[str, str]) -> str:
    lengths = sorted({p["length"] / c["train_length"] for c in found.curves for p in c["by_length"]})
    if len(lengths) > 4:  # the ends and two between
        lengths = [lengths[i * (len(lengths) - 1) // 3] for i in range(4)]
    farthest = max((row["length"] / a["train_length"] for a in found.arms for row in a["rows"]), default=None)
    tasks = list(dict.fromkeys(row["task"] for arm in found.arms for row in arm["rows"]))
    head = ["run", "attention", "parameters", "trained at", "tokens", "held-out loss"]
    head += [f"loss {m:g}x" for m in lengths] + [f"{task} {farthest:g}x" for task in tasks]
    rows = []
    for run in found.runs:
        known = found.of(run.name)
        curve = next((c for c in known["length"] if c.get("ntk") == "off"), None)
        losses = {p["length"] / curve["train_length"]: p["loss"] for p in curve["by_length"]} if curve else {}
        rates = {
            row["task"]: row["greedy"]["rate"]
            for arm in known["retrieval"]
            for row in arm["rows"]
            if row["length"] / arm["train_length"] == farthest and arm.get("ntk", "off") == "off"
        }
        held_out = run.summary.get("val_loss")
        tokens = run.summary.get("tokens")
        rows.append([
            _swatch(run.name, shades) + text(run.label), f"<code>{text(_attention(run))}</code>", _parameters(run),
            text(run.recipe.get("length", "-")), "-" if tokens is None else f"{tokens / 1e6:,.1f}M",
            "-" if held_out is None else f"{held_out:.3f}",
            *(f"{losses[m]:.3f}" if m in losses else "-" for m in lengths),
            *(f"{100 * rates[task]:.0f}%" if task in rates else "-" for task in tasks),
        ])  # fmt: skip
    return _table(head, rows, [False, False] + [True] * (len(head) - 2))


def _attention(run: RunRecord) -> str:
    """The mechanism or layout, and the power where the recipe sets one."""
    shown = str(run.recipe.get("layout") or run.recipe.get("attention", "-"))
    return shown if run.recipe.get("p") is None else f"{shown}, p={run.recipe['p']:g}"


def _parameters(run: RunRecord) -> str:
    """Counted from a model of this configuration on the meta device; - where it cannot be made."""
    if not run.model:
        return text(run.recipe.get("size", "-"))
    import torch

    from lssar.model import GPT, ModelConfig

    try:
        with torch.device("meta"):
            count = GPT(ModelConfig.from_dict(run.model)).parameter_count()
    except (ValueError, TypeError):
        return "-"
    return f"{count / 1e6:,.1f}M"


def _diagnostics_lead(found: Collected) -> str:
    lengths = figures.diagnosed_lengths(found.diagnostics)
    options = "".join(f"<option>{length:,} tokens</option>" for length in lengths)
    return (
        "<p>What attention rows look like by layer and head, averaged over the last rows of held-out text.</p>"
        f'<div class="controls"><label>Context <select data-group="diagnostics">{options}</select></label></div>'
    )


def _configuration(runs: Sequence[RunRecord], shades: dict[str, str]) -> str:
    """The recipes side by side; fields that differ come first."""
    runs = [run for run in runs if run.recipe]
    if not runs:
        return ""
    names = list(dict.fromkeys(name for run in runs for name in run.recipe))
    values = {name: [json.dumps(run.recipe.get(name)) for run in runs] for name in names}
    different = [name for name in names if len(set(values[name])) > 1]
    same = sorted((name for name in names if name not in different), key=lambda name: name in NOT_A_CHOICE)
    head = "".join(f"<th>{_swatch(run.name, shades)}{text(run.label)}</th>" for run in runs)

    def rows(chosen: Sequence[str]) -> str:
        return "".join(
            f"<tr><td>{text(name)}</td>{''.join(f'<td><code>{text(value)}</code></td>' for value in values[name])}</tr>"
            for name in chosen
        )

    def table(chosen: Sequence[str]) -> str:
        return (
            f'<div class="scroll"><table><thead><tr><th>field</th>{head}</tr></thead><tbody>{rows(chosen)}</tbody>'
            "</table></div>"
        )

    parts = [table(different)] if different and len(runs) > 1 else []
    shared = "Fields that are the same" if parts else "Recipe"
    parts.append(f"<details><summary>{shared}</summary>{table(same if parts else names)}</details>")
    return "".join(parts)


def _provenance(runs: Sequence[RunRecord], shades: dict[str, str]) -> str:
    parts = []
    for run in runs:
        about: dict[str, Any] = {}
        if run.folder is not None:
            about["folder"] = run.folder
        about |= run.environment
        rows = "".join(
            f"<tr><td>{text(key)}</td><td><code>{text(value)}</code></td></tr>" for key, value in about.items()
        )
        commands = "".join(f"<pre>{text(command)}</pre>" for command in run.commands)
        opened = " open" if len(runs) == 1 else ""
        parts.append(
            f"<details{opened}><summary>{_swatch(run.name, shades)}{text(run.label)}</summary>{commands}"
            f'<div class="scroll"><table><tbody>{rows}</tbody></table></div></details>'
        )
    return "".join(parts)
