"""Tables of a sweep in Markdown, and the places in documents that they go to, so that no number is typed by hand.

A table is placed between `<!-- newton: PATH TABLE... -->` and `<!-- end newton -->`; PATH is relative to the document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lssar.tables import markdown_table

BLOCK = re.compile(r"(<!-- newton: (\S+) (.*?) -->\n).*?(<!-- end newton -->)", re.S)
CLOSE = 0.05
"""An exponent is found when it is this close to Newton's."""

Row = dict[str, Any]


def _groups(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _mean(rows: list[Row], key: str, form: str = ".3f") -> str:
    """Mean over seeds and, of several, their standard deviation."""
    values = [row[key] for row in rows]
    spread = f" ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{spread}"


def exponent_table(result: Row) -> str:
    """Exponents by world, labels, mechanism and start: mean and deviation over seeds."""
    arms = [row | {"who": f"`{row['mechanism']}`, {row['start']}"} for row in result["arms"]]
    for row in result["oracles"]:
        if "labels" in row:
            arms.append(row | {"who": "nearest neighbours on the true state", "mechanism": "", "start": ""})
    lines = []
    worlds = list(dict.fromkeys(row["world"] for row in arms))
    who = list(dict.fromkeys(row["who"] for row in arms))
    ordered = sorted(arms, key=lambda r: (worlds.index(r["world"]), r["labels"], who.index(r["who"])))
    for (world, labels, name), rows in _groups(ordered, "world", "labels", "who").items():
        error = [row["standard_errors"][e] for row in rows for e in ("m1", "m2", "r")]
        lines.append(
            [world, f"{labels:,}", name, *(_mean(rows, e) for e in ("m1", "m2", "r")), f"{np.mean(error):.3f}",
             _mean(rows, "error"), _mean(rows, "r2"), str(len(rows))]
        )  # fmt: skip
    head = ["world", "labelled systems", "model", "m1", "m2", "r", "standard error", "largest error", "R²", "seeds"]
    return markdown_table(head, lines)


def comparison_table(result: Row) -> str:
    """Largest exponent error at each number of labels, a column a mechanism; what is best in a row is bold."""
    parts = []
    for (world,), arms in _groups(result["arms"], "world").items():
        mechanisms = list(dict.fromkeys(row["mechanism"] for row in arms))
        lines = []
        for (start, labels), rows in sorted(_groups(arms, "start", "labels").items(), key=lambda g: (g[0][0], g[0][1])):
            cells = {m: [row for row in rows if row["mechanism"] == m] for m in mechanisms}
            means = {m: float(np.mean([row["error"] for row in cell])) for m, cell in cells.items() if cell}
            best = min(means, key=lambda m: means[m])
            shown = [f"**{_mean(cells[m], 'error')}**" if m == best else _mean(cells[m], "error") if cells[m] else "-"
                     for m in mechanisms]  # fmt: skip
            lines.append([world, start, f"{labels:,}", *shown])
        parts.append(markdown_table(["world", "start", "labelled systems", *(f"`{m}`" for m in mechanisms)], lines))
    return "\n".join(parts)


def law_table(result: Row) -> str:
    """What symbolic regression makes of the predictions, draw by draw."""
    lines = []
    for row in result["laws"]:
        for law in row["laws"]:
            lines.append(
                [row["arm"], law["operators"], str(law["draw"]), f"`{law['law']}`", str(law["size"]),
                 f"{law['r2']:.3f}", "yes" if law["newton"] else "no"]
            )  # fmt: skip
    return markdown_table(
        ["arm", "operators", "draw", "F, in units of geometric means", "size", "R²", "m1 m2 / r²?"], lines
    )


def pretraining_table(result: Row) -> str:
    rows = _groups(result["pretrained"], "world", "mechanism")
    return markdown_table(
        ["world", "mechanism", "parameters", "sequences", "loss", "RMS error of a step", "of no motion",
         "of going straight on", "seconds", "seeds"],
        ([world, f"`{mechanism}`", f"{jobs[0]['parameters']:,}", f"{jobs[0]['sequences']:,}",
          _mean(jobs, "loss", ".4f"), _mean(jobs, "rms_error", ".4f"), f"{jobs[0]['rms_error_no_motion']:.4f}",
          f"{jobs[0]['rms_error_straight_on']:.4f}", _mean(jobs, "seconds", ".0f"), str(len(jobs))]
         for (world, mechanism), jobs in rows.items()),
    )  # fmt: skip


def identifiability_table(result: Row) -> str:
    return markdown_table(
        ["world", "star's motion, bins (median)", "motion below one bin", "planet mass, share of var(log F)",
         "F, 99% / 1%"],
        ([world, f"{v['star_swing_bins_median']:.3g}", f"{100 * v['star_swing_below_one_bin']:.0f}%",
          f"{100 * v['planet_mass_share_of_var_log_force']:.0f}%", f"{v['force_ratio_99_to_1']:.3g}"]
         for world, v in result["identifiability"].items()),
    )  # fmt: skip


def probe_table(result: Row) -> str:
    return markdown_table(
        ["job", "slope (oracle 1)", "correlation", "distance from the diagonal", "R² of the model", "of the oracle",
         "functions"],
        ([row["job"], *(f"{row[key]:.2f}" for key in ("slope", "correlation", "error", "model_r2", "oracle_r2")),
          str(row["functions"])] for row in result["probes"]),
    )  # fmt: skip


def law_counts(result: Row) -> list[tuple[str, str]]:
    """For each arm: how many draws gave Newton's form, by operators."""
    counts = []
    for row in result["laws"]:
        sets = _groups(row["laws"], "operators").items()
        counts.append(
            (row["arm"], ", ".join(f"{sum(law['newton'] for law in laws)} of {len(laws)} draws ({name} operators)"
                                   for (name,), laws in sets))
        )  # fmt: skip
    return counts


def findings(result: Row) -> str:
    """The findings in sentences, from the results."""
    lines = []
    for (world, mechanism, start), rows in _groups(result["arms"], "world", "mechanism", "start").items():
        by_labels = _groups(rows, "labels")
        enough = [n for (n,), arms in sorted(by_labels.items()) if all(row["error"] <= CLOSE for row in arms)]
        if enough:
            seeds = len(by_labels[min(enough),])
            every = f"in each of {seeds} seeds" if seeds > 1 else "(one seed)"
            text = f"with {min(enough):,} labelled systems all three exponents are within {CLOSE} {every}"
        else:
            (most,), arms = max(by_labels.items())
            text = f"not found: with {most:,} labelled systems the largest error is {_mean(arms, 'error')}"
        lines.append(f"- {world}, `{mechanism}`, {start}: {text}.")
    if result["laws"]:
        lines += [f"- {name}: symbolic regression gives m1 m2 / r² in {text}." for name, text in law_counts(result)]
    return "\n".join(lines) + "\n"


def source(result: Row) -> str:
    done = f"{len(result['arms'])} of {result['wanted']} arms"
    earlier = result.get("earlier", [])
    if not earlier:
        return f"{_session(result)}; {done}. Command: `{result['command']}`.\n"
    lines = [f"- {_session(session)}: `{session['command']}`\n" for session in (*earlier, result)]
    return f"{done}, in {len(lines)} sessions:\n\n{''.join(lines)}"


def _session(record: Row) -> str:
    machine = record["environment"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{where}; torch {machine['torch']}, {machine['date'][:10]}, commit {str(machine['commit'])[:12]}"


TABLES: dict[str, Callable[[Row], str]] = {
    "source": source,
    "findings": findings,
    "identifiability": identifiability_table,
    "pretraining": pretraining_table,
    "comparison": comparison_table,
    "exponents": exponent_table,
    "laws": law_table,
    "probe": probe_table,
}


def filled(page: Path) -> str:
    """The document with its tables filled from the results."""

    def block(match: re.Match[str]) -> str:
        path = page.parent / match[2]
        if unknown := set(match[3].split()) - set(TABLES):
            raise ValueError(f"{page}: unknown table {', '.join(sorted(unknown))}; known: {', '.join(TABLES)}")
        if not path.exists():
            return match[1] + f"Not run yet: {match[2]} is not there.\n" + match[4]
        result = json.loads(path.read_text())
        return match[1] + "\n".join(TABLES[name](result) for name in match[3].split()) + match[4]

    return BLOCK.sub(block, page.read_text())
