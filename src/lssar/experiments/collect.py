"""Tables of experiments from the JSON files of their arms: means over seeds, beside the numbers of the paper."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lssar.evaluation.length import LAST_TOKENS, changes_from_first, interval
from lssar.evaluation.retrieval import wilson
from lssar.experiments.arms import Experiment, Row, Scale
from lssar.experiments.evaluations import Benchmarks, Evaluation, Length, Retrieval
from lssar.experiments.published import DOWNSTREAM, LOSSES, PASSKEY
from lssar.experiments.runner import earlier_folder, load_result, plain
from lssar.records import write_file, write_json
from lssar.tables import markdown_table


def load(scale: Scale) -> dict[str, dict[str, Any]]:
    """Finished arms by key; `earlier` holds the results of earlier trainings of the same arm."""
    read = lambda folder: (load_result(path) for path in sorted(folder.glob("*.json")))  # noqa: E731
    arms = {result["arm"]: result | {"earlier": []} for result in read(scale.results) if "arm" in result}
    for result in read(earlier_folder(scale.results)):
        if result["arm"] in arms:
            arms[result["arm"]]["earlier"].append(result)
    return arms


def mean_and_deviation(values: list[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "seeds": len(values)}


def collect(experiment: Experiment, scale: Scale, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The table of an experiment: a line for each row and evaluation with a finished arm, and what is missing."""
    lines: list[dict[str, Any]] = []
    missing: list[str] = []
    for row in experiment.rows_at(scale):
        keys = [scale.arm(row, seed).key for seed in range(min(row.seeds, scale.most_seeds))]
        if absent := [str(seed) for seed, key in enumerate(keys) if key not in arms]:
            missing.append(row.label + (f" (seed {', '.join(absent)})" if len(keys) > 1 else ""))
        finished = [arms[key] for key in keys if key in arms]
        there = [_with_nulls(arm, row, scale) if "diverged" in arm else arm for arm in finished]
        for evaluation in row.evaluations:
            done = [arm for arm in there if evaluation.key in arm["evaluations"]]
            if done:
                lines.append(_line(experiment, scale, row, evaluation, done))
            seeds = [arm["recipe"]["seed"] for arm in there if arm not in done]
            missing += [f"{row.label} ({evaluation.key} of seed {seed})" for seed in seeds]
    used = [arms[key] for line in lines for key in line["arms"]]
    about = {"experiment": experiment.name, "title": experiment.title, "question": experiment.question}
    return plain(
        {
            **about,
            "scale": scale.name,
            "command": f"lssar reproduce {experiment.name} --scale {scale.name}",
            "train_length": used[0]["recipe"]["length"] if used else scale.base.length,
            "about": setting_of(used),
            "at": list(experiment.at),
            "machines": machines([run for arm in used for run in (arm, *arm["earlier"])]),
            "rows": lines,
            "missing": list(dict.fromkeys(missing)),
        }
    )


def _with_nulls(arm: dict[str, Any], row: Row, scale: Scale) -> dict[str, Any]:
    """A diverged arm with a loss of null where its row has a loss."""
    base, found = arm["recipe"]["length"], {}
    for evaluation in row.evaluations:
        if isinstance(evaluation, Length):
            lengths = [multiple * base for multiple in evaluation.multiples(scale.farthest)]
            found[evaluation.key] = {
                "by_length": [{"length": length, "loss": None} for length in lengths],
                "last": [{"context": length, "tokens": LAST_TOKENS, "loss": None} for length in lengths],
            }
    return arm | {"evaluations": found}


def setting_of(arms: list[dict[str, Any]]) -> str:
    """Model, data, training length, tokens and seeds of the arms, in one line."""

    def each(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    sizes = each(arm["recipe"]["size"] for arm in arms)
    tokens = each(f"{arm['training']['tokens'] / 1e6:.3g}M" for arm in arms)
    seeds = sorted({arm["recipe"]["seed"] for arm in arms})
    words = [
        f"{sizes} parameters", f"data {each(arm['data']['name'] for arm in arms)}",
        f"trained at length {each(arm['recipe']['length'] for arm in arms)} on {tokens} tokens",
        f"seed{'s' * (len(seeds) > 1)} {each(seeds)}{' at most' * (len(seeds) > 1)}",
    ]  # fmt: skip
    return "; ".join(words)


def machines(arms: list[dict[str, Any]]) -> list[str]:
    """Machine, versions, data and commits of the arms, a line for each combination."""
    commits: dict[str, set[str]] = {}
    for arm in arms:
        e, data = arm["environment"], arm["data"]
        where = e.get("gpu") or f"{e['cpu']}, {e['threads']} threads"
        line = f"{where}; torch {e['torch']}; {data['name']}, held-out digest {data['val']['digest'][:8]}"
        commits.setdefault(line, set()).add(short(e["commit"]))
    return [f"{line}; commit {', '.join(sorted(commits[line]))}" for line in sorted(commits)]


def short(commit: str | None) -> str:
    return str(commit)[:7]


def _line(
    experiment: Experiment, scale: Scale, row: Row, evaluation: Evaluation, arms: list[dict[str, Any]]
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "label": row.label,
        "attention": row.attention,
        "position": row.position,
        "layout": row.layout,
        "p": _final_power(scale, row),
        "evaluation": evaluation.key,
        "main": evaluation == row.evaluation,
        "arms": [arm["arm"] for arm in arms],
        "tokens": arms[0]["training"]["tokens"],
    }
    results = [arm["evaluations"][evaluation.key] for arm in arms]
    if isinstance(evaluation, Length):
        base = arms[0]["recipe"]["length"]
        line["loss"] = _by_multiple(results, "by_length", "length", base)
        line["last"] = _by_multiple(results, "last", "context", base)
        line["last_tokens"] = results[0]["last"][0]["tokens"]
        line["change"] = _changes(results, base)
    elif isinstance(evaluation, Retrieval):
        line["rate"] = _rates(results) if evaluation.questions is None else _rates_over_seeds(results)
        line["earlier"] = [
            {"commit": short(before["environment"]["commit"]), "rate": _rates([before["evaluations"][evaluation.key]])}
            for arm in arms for before in arm["earlier"] if evaluation.key in before["evaluations"]
        ]  # fmt: skip
    elif isinstance(evaluation, Benchmarks):
        line["accuracy"] = _accuracies(results)
    else:
        line["overflow"] = results[0]
    names = ("val_loss", "train_loss", "grad_norm_median", "grad_norm_99", "grad_norm_max", "spikes", "not_finite")
    line["training"] = {name: _worst(arm["training"][name] for arm in arms) for name in names}
    if row.paper is not None and evaluation == row.evaluation:
        others: dict[str, Any] = {"passkey": PASSKEY, "downstream": DOWNSTREAM}
        line["paper"] = (others | LOSSES)[experiment.name].get(row.paper, {})
    return line


def _final_power(scale: Scale, row: Row) -> float | None:
    powers = [s.p for layer in scale.recipe(row, 0).model().layer_configs for s in layer.specs if s.p is not None]
    return max(powers, default=None)


def _by_multiple(results: list[dict[str, Any]], curve: str, x: str, base: int) -> dict[str, Any]:
    """{multiple: mean, deviation over seeds, seeds}; a seed that diverged makes the mean null."""
    points: dict[str, Any] = {}
    for index, point in enumerate(results[0][curve]):
        values = [result[curve][index]["loss"] for result in results]
        whole = [value for value in values if value is not None]
        summary = mean_and_deviation(whole) if len(whole) == len(values) else {"mean": None, "seeds": len(values)}
        points[str(point[x] // base)] = summary | {"by_seed": values}
    return points


def _rates(results: list[dict[str, Any]]) -> dict[str, Any]:
    """{multiple: share of correct answers and its interval}, all seeds together."""
    rates: dict[str, Any] = {}
    for index, row in enumerate(results[0]["rows"]):
        counts = [result["rows"][index]["greedy"] for result in results]
        rates[row["multiple"]] = wilson(sum(c["right"] for c in counts), sum(c["of"] for c in counts))
    return rates


def _rates_over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """{multiple: mean rate over seeds and its range; the 95% interval where there is one seed}."""
    rates: dict[str, Any] = {}
    for index, row in enumerate(results[0]["rows"]):
        found = [result["rows"][index]["greedy"] for result in results]
        by_seed = [each["rate"] for each in found]
        low, high = (min(by_seed), max(by_seed)) if len(found) > 1 else (found[0]["low"], found[0]["high"])
        rates[row["multiple"]] = {
            "rate": statistics.fmean(by_seed), "low": low, "high": high, "by_seed": by_seed,
            "of": sum(each["of"] for each in found), "contexts": sum(each["contexts"] for each in found),
        }  # fmt: skip
    return rates


def _changes(results: list[dict[str, Any]], base: int) -> dict[str, Any] | None:
    """{multiple: change of the loss from 1x and its 95% interval, paired over pieces of text}, all seeds together."""
    curves = [changes_from_first(result["by_length"]) for result in results]
    points = results[0]["by_length"]
    if any(curve is None for curve in curves):
        return None
    pooled = [[change for curve in curves for change in (curve or [])[i]] for i in range(len(points))]
    return {str(point["length"] // base): interval(each) for point, each in zip(points, pooled)}


def _accuracies(results: list[dict[str, Any]]) -> dict[str, Any]:
    """{task: mean over seeds, standard error of one seed, chance}; normalised by length where lm-eval does."""
    found: dict[str, Any] = {}
    for task, row in results[0]["tasks"].items():
        metric = "acc_norm" if "acc_norm" in row["metrics"] else "acc"
        values = [result["tasks"][task]["metrics"][metric]["value"] for result in results]
        about = {"metric": metric, "stderr": row["metrics"][metric]["stderr"], "chance": row.get("chance", 0.0)}
        found[task] = mean_and_deviation(values) | about | {"documents": row["documents"]}
    return found


def _worst(values: Any) -> float | None:
    """The largest value over seeds; null (diverged) if any is."""
    values = list(values)
    return None if None in values else max(values)


@dataclass(frozen=True)
class Column:
    """A column of a Markdown table."""

    title: str
    cells: list[str]


def number(value: float | None, digits: int = 3) -> str:
    return "diverged" if value is None else f"{value:.{digits}f}"


def with_deviation(point: dict[str, Any] | None) -> str:
    if point is None:
        return "-"
    spread = f" ± {point['deviation']:.3f}" if point.get("deviation") is not None else ""
    return number(point["mean"]) + spread


def _is(row: dict[str, Any], evaluation: str) -> bool:
    return row["main"] if evaluation == "main" else row["evaluation"] == evaluation


def markdown(table: dict[str, Any], evaluation: str = "main", curve: str = "loss") -> str:
    """Loss by multiple of the training length; the numbers of the paper, if any, in columns after ours."""
    rows = [r for r in table["rows"] if _is(r, evaluation) and curve in r]
    at = [str(m) for m in table["at"] if any(str(m) in row[curve] for row in rows)]
    paper_at = sorted({int(m) for row in rows for m in row.get("paper", {})}) if curve == "loss" else []
    columns = [Column("", [row["label"] for row in rows])]
    columns += [Column(f"{m}x", [with_deviation(row[curve].get(m)) for row in rows]) for m in at]
    for m in paper_at:
        cells = [f"{row['paper'][str(m)]:.4f}" if str(m) in row.get("paper", {}) else "-" for row in rows]
        columns.append(Column(f"paper, {m}x", cells))
    return text_table(columns)


def rates_markdown(table: dict[str, Any], task: str) -> str:
    """Share of correct answers with its 95% interval; the numbers of the paper, if any, in columns after ours."""
    rows = []
    for row in table["rows"]:
        if row["evaluation"].startswith(task):
            rows.append(row)
            for before in row.get("earlier", []):
                rows.append({"label": f"{row['label']}, trained at {before['commit']}", "rate": before["rate"]})
    at = list(dict.fromkeys(m for row in rows for m in row["rate"]))
    columns = [Column("", [row["label"] for row in rows])]
    for m in at:
        found = [row["rate"].get(m) for row in rows]
        cells = [f"{r['rate']:.2f} ({r['low']:.2f} to {r['high']:.2f})" if r else "-" for r in found]
        columns.append(Column(f"{m}x", cells))
    for m in dict.fromkeys(m for row in rows for m in row.get("paper", {})):
        given = [row.get("paper", {}).get(m, "-") for row in rows]
        columns.append(Column(f"paper, {m}x", [f"{v:.2f}" if isinstance(v, float) else v for v in given]))
    return text_table(columns)


def accuracy_markdown(table: dict[str, Any]) -> str:
    """Accuracies with one standard error, the level of chance, and the numbers of the paper, if any."""
    rows = [row for row in table["rows"] if row["main"]]
    tasks = list(rows[0]["accuracy"])
    columns = [Column("", [row["label"] for row in rows] + ["chance"])]
    for task in tasks:
        cells = [f"{a['mean']:.3f} ± {a['stderr']:.3f}" for a in (row["accuracy"][task] for row in rows)]
        metric, chance = (rows[0]["accuracy"][task][name] for name in ("metric", "chance"))
        columns.append(Column(f"{task} ({metric})", [*cells, f"{chance:.3f}"]))
    for task in dict.fromkeys(task for row in rows for task in row.get("paper", {})):
        given = [row.get("paper", {}).get(task) for row in rows]
        columns.append(Column(f"paper, {task}", [*("-" if v is None else f"{v:.4f}" for v in given), "-"]))
    return text_table(columns)


def stability_markdown(table: dict[str, Any]) -> str:
    """Training metrics, and the attention rows lost in each dtype by the textbook and the stable form."""
    rows = [row for row in table["rows"] if row["main"]]
    overflow = {row["label"]: row["overflow"] for row in table["rows"] if "overflow" in row}
    columns = [
        Column("", [row["label"] for row in rows]),
        Column("held-out loss", [number(row["training"]["val_loss"]) for row in rows]),
        Column("gradient norm, median", [number(row["training"]["grad_norm_median"], 2) for row in rows]),
        Column("99%", [number(row["training"]["grad_norm_99"], 2) for row in rows]),
        Column("largest", [number(row["training"]["grad_norm_max"], 2) for row in rows]),
        Column("loss spikes", [str(row["training"]["spikes"]) for row in rows]),
        Column("non-finite steps", [str(row["training"]["not_finite"]) for row in rows]),
    ]
    for dtype in next(iter(overflow.values()))["dtypes"] if overflow else []:
        for form in ("textbook", "stable"):
            cells = []
            for row in rows:
                last = overflow[row["label"]]["by_length"][-1] if row["label"] in overflow else None
                cells.append(f"{last[form][dtype]} of {last['rows']}" if last else "-")
            columns.append(Column(f"{form}, {dtype}", cells))
    return text_table(columns)


def text_table(columns: list[Column]) -> str:
    return markdown_table((column.title for column in columns), zip(*(column.cells for column in columns)))


EVALUATION_WORDS = {"ntk": "with NTK", "posthoc": "with p = 15 applied after training"}


def sections(table: dict[str, Any]) -> list[tuple[str, str]]:
    """(caption, Markdown) of every table of an experiment: main evaluation, further ones, loss of the last tokens."""
    if not any(row["main"] for row in table["rows"]):
        return []
    if table["experiment"] == "stability":
        return [("Training, and rows lost at the longest evaluated length", stability_markdown(table))]
    if table["experiment"] in ("downstream", "larger-downstream"):
        return [("Accuracy, with one standard error over questions", accuracy_markdown(table))]
    if table["experiment"] in ("mixed", "larger"):
        return _far_sections(table)
    if table["experiment"] == "passkey":
        tasks = dict.fromkeys(row["evaluation"].split("-")[0] for row in table["rows"] if row["rate"])
        caption = "share of correct answers (95% interval), by context length as a multiple of the training length"
        return [(f"{task.capitalize()}: {caption}", rates_markdown(table, task)) for task in tasks]
    shown = [("Held-out loss (nats per token), by length as a multiple of the training length", markdown(table))]
    for key in dict.fromkeys(r["evaluation"] for r in table["rows"] if not r["main"] and "loss" in r):
        words = next(text for word, text in EVALUATION_WORDS.items() if word in key)
        shown.append((f"The same {words}", markdown(table, evaluation=key)))
    if len(table["at"]) > 1 and table["experiment"] in ("controls", "figure1"):
        tokens = table["rows"][0]["last_tokens"]
        shown.append((f"Loss of the same last {tokens} tokens, given this much context", markdown(table, curve="last")))
    return shown


FAR_TASKS = {
    "passkey": "Passkeys, one to a context",
    "needles": "Needles in real text, several to a context",
    "recall": "Recall of pairs, sixteen to a context",
}


def _far_sections(table: dict[str, Any]) -> list[tuple[str, str]]:
    """Tables of long readers: `mixed` and `larger`."""
    shown = [
        ("Held-out loss (nats per token), by length as a multiple of the training length", markdown(table)),
        ("Change of the loss from 1x on the same text, with its 95% interval over pieces of text", _change(table)),
    ]
    tokens = table["rows"][0]["last_tokens"]
    shown.append((f"Loss of the same last {tokens} tokens, given this much context", markdown(table, curve="last")))
    for task, words in FAR_TASKS.items():
        if any(row.get("rate") for row in table["rows"] if row["evaluation"].startswith(task)):
            caption = (
                f"{words}: share of correct answers; in brackets the range over seeds, for one seed the 95% interval"
            )
            shown.append((caption, rates_markdown(table, task)))
    return shown


def _change(table: dict[str, Any]) -> str:
    rows = [row for row in table["rows"] if row["main"] and row.get("change")]
    at = [m for m in dict.fromkeys(m for row in rows for m in row["change"]) if m != "1"]
    columns = [Column("", [row["label"] for row in rows])]
    for m in at:
        found = [row["change"].get(m) for row in rows]
        cells = [f"{c['loss']:+.3f} ± {(c['high'] - c['low']) / 2:.3f}" if c else "-" for c in found]
        columns.append(Column(f"{m}x", cells))
    return text_table(columns)


def write(experiment: Experiment, scale: Scale, picture: bool = True) -> tuple[dict[str, Any], list[Path]]:
    """Write the table of an experiment as JSON and Markdown, and its figure, from the arms finished so far."""
    from lssar.plots import plot_experiment

    table = collect(experiment, scale, load(scale))
    if not table["rows"]:
        return table, []
    folder = scale.tables
    text = f"# {table['title']}\n\n" + "\n".join(f"{caption}:\n\n{body}" for caption, body in sections(table))
    files = [write_json(folder / f"{experiment.name}.json", table, overwrite=True)]
    files.append(write_file(folder / f"{experiment.name}.md", lambda p: p.write_text(text), overwrite=True))
    if picture and any(row["main"] for row in table["rows"]):
        files.append(plot_experiment(table, experiment.draw, folder / f"{experiment.name}.png", overwrite=True))
    return table, files


def measured_markdown(path: Path) -> str:
    """Synthetic attention rows lost by the textbook and the stable form (stability experiment)."""
    result = json.loads(path.read_text())
    measured = result["results"] if "results" in result else result["figures"]
    rows = [row for row in measured if row["p"] in (1, 3, 15, 63)]
    columns = [
        Column("mechanism", [row["attention"] for row in rows]),
        Column("keys", [f"{row['length']}, {row['keys']}" for row in rows]),
        Column("p", [f"{row['p']:g}" for row in rows]),
    ]
    for form in ("textbook", "stable"):
        for dtype in rows[0][form]:
            columns.append(Column(f"{form}, {dtype}", [str(row[form][dtype]) for row in rows]))
    return f"Of {rows[0]['rows']} synthetic rows, lost (non-finite, or without any weight):\n\n{text_table(columns)}"
