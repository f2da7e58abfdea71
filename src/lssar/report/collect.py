"""Everything a report shows, gathered from run folders, exported models and JSON files of evaluations."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lssar.layouts import UNIFORM, mechanism_name

EVALUATION = "evaluation"
"""Folder in a run or an exported model whose JSON files belong to it; `lssar report --compute` writes there."""

CURVE_POINTS = 400
"""Training curves are averaged down to about this many points."""


@dataclass
class RunRecord:
    """A run folder, an exported model, or a run that is known from its evaluations alone."""

    name: str
    folder: Path | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    """Rows of metrics, thinned: step, tokens, loss, and where known grad_norm, lr, val_loss."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Numbers about the training that need every row of metrics: steps, tokens, tokens_per_s, spikes."""
    label: str = ""


@dataclass
class Collected:
    runs: list[RunRecord] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    arms: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)

    def run(self, name: str) -> RunRecord:
        for record in self.runs:
            if record.name == name:
                return record
        self.runs.append(RunRecord(name))
        return self.runs[-1]

    def of(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """What is known about one run, by kind."""
        kinds = {"length": self.curves, "retrieval": self.arms, "diagnostics": self.diagnostics}
        return {kind: [entry for entry in entries if entry["run"] == name] for kind, entries in kinds.items()}


def collect(paths: Sequence[Path]) -> Collected:
    """Reads run folders, exported models and result files, in the order given."""
    if not paths:
        raise ValueError("name at least one run folder, exported model or result file: `lssar report RUN...`")
    found = Collected()
    for path in paths:
        if path.is_dir():
            _add_folder(found, path)
        elif path.is_file():
            _add_results(found, path)
        else:
            raise FileNotFoundError(f"{path} does not exist; give run folders, exported models or JSON result files")
    _label(found.runs)
    return found


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error


def _add_folder(found: Collected, folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} is neither a run folder nor an exported model: it has no config.json")
    kept = read_json(config)
    record = found.run(folder.resolve().name)
    record.folder = folder
    if "recipe" in kept:
        record.recipe, record.model = kept["recipe"], kept.get("model", {})
        record.environment = kept.get("environment", {})
    elif (exported := folder / "export.json").is_file():
        origin = read_json(exported)
        record.recipe, record.model = origin.get("recipe", {}), kept.get("model", {})
        record.environment = origin.get("training", {}).get("environment", {}) or origin.get("environment", {})
        record.commands += [command for command in [origin.get("command")] if command]
        found_name = origin.get("run")
        if found_name:
            _rename(found, found_name, record.name)
    else:
        raise ValueError(f"{config} is not the configuration of a run or of an exported model")
    if (folder / "metrics.jsonl").is_file():
        _add_metrics(record, folder)
    for file in sorted((folder / EVALUATION).glob("*.json")):
        _add_results(found, file, record.name)


def _rename(found: Collected, old: str, new: str) -> None:
    """Evaluations made before an export go by the name of the run."""
    for entry in (*found.curves, *found.arms, *found.diagnostics):
        if entry["run"] == old:
            entry["run"] = new


def _add_metrics(record: RunRecord, folder: Path) -> None:
    from lssar.training.metrics import read_metrics, summarise

    rows = read_metrics(folder)
    if rows:
        record.training = thin(rows)
        record.summary = {key: value for key, value in summarise(rows).items() if key != "curve"}


def thin(rows: list[dict[str, Any]], points: int = CURVE_POINTS) -> list[dict[str, Any]]:
    """Means over about `points` equal parts; gradient norms keep their maximum, held-out losses all stay."""
    out = []
    size = max(1, -(-len(rows) // points))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        row = {"step": part[-1]["step"], "loss": statistics.fmean(r["loss"] for r in part)}
        if "tokens" in part[-1]:
            row["tokens"] = part[-1]["tokens"]
        if "grad_norm" in part[-1]:
            row["grad_norm"] = max(r["grad_norm"] for r in part)
        if "lr" in part[-1]:
            row["lr"] = part[-1]["lr"]
        if held_out := [r["val_loss"] for r in part if r.get("val_loss") is not None]:
            row["val_loss"] = held_out[-1]
        out.append(row)
    return out


def _add_results(found: Collected, path: Path, owner: str | None = None) -> None:
    """Adds one JSON file of `lssar eval length`, `eval retrieval`, `diagnose` or `demo`."""
    result = read_json(path)
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no evaluation: expected a JSON object")
    if "curves" in result:
        entries, into = result["curves"], found.curves
    elif "arms" in result:
        entries, into = [arm for arm in result["arms"] if arm.get("rows")], found.arms
    elif "statistics" in result and "lengths" in result:
        entries, into = [result], found.diagnostics
    elif "training_curve" in result:
        record = found.run(owner or result["run"])
        record.training, record.summary = result["training_curve"], result.get("summary", {})
        return
    else:
        raise ValueError(
            f"{path} holds no evaluation that a report shows; give files of `lssar eval length`, `lssar eval "
            "retrieval` or `lssar diagnose`"
        )
    for entry in entries:
        entry = {**entry, "run": owner or entry["run"]}
        into.append(entry)
        record = found.run(entry["run"])
        record.recipe = record.recipe or entry.get("recipe", {})
        training = entry.get("training") or {}
        if not record.training and training.get("curve"):
            record.training = training["curve"]
            record.summary = {key: value for key, value in training.items() if key != "curve"}
        command = entry.get("command") or result.get("command")
        if command and command not in record.commands:
            record.commands.append(command)
        record.environment = record.environment or entry.get("environment") or result.get("environment") or {}


def _label(runs: Iterable[RunRecord]) -> None:
    """A short name for each run: its mechanism where no other run has it and no folder names it, else its own name."""
    runs = list(runs)
    mechanisms = Counter(_mechanism(run) for run in runs)
    for run in runs:
        mechanism = _mechanism(run)
        run.label = mechanism if mechanism and mechanisms[mechanism] == 1 and run.folder is None else run.name


def _mechanism(run: RunRecord) -> str:
    attention, p = mechanism_of(run.recipe), run.recipe.get("p")
    return f"{attention}, p={p:g}" if attention and p is not None else attention


def mechanism_of(recipe: dict[str, Any]) -> str:
    """`Recipe.mechanism` of a recipe as a file has it; empty where the file has none."""
    return mechanism_name(str(recipe.get("attention", "")), str(recipe.get("layout") or UNIFORM))
