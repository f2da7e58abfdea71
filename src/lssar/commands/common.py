"""What the commands share: errors, help, the console, progress, output as tables or JSON, and names of runs."""

from __future__ import annotations

import ast
import csv
import inspect
import itertools
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lssar.records import command_line, environment, read_json
from lssar.runs import unique_names
from lssar.tables import terminal_table
from lssar.training.recipes import Recipe

console = Console()


class UsageError(ValueError):
    """A command line that is wrong in itself, independent of any files."""

    exit_code = 2


def field_docs(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, from its source, without line breaks."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, after in itertools.pairwise(body.body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def explain_flags(kind: type) -> None:
    """Make the texts under the fields of a dataclass the help of its flags; tyro alone would keep their line breaks."""
    hints = get_type_hints(kind, include_extras=True)
    for name, text in field_docs(kind).items():
        kind.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(help=text)]


def check_given(paths: Sequence[Any], what: str) -> None:
    if not paths:
        raise UsageError(f"give one or more {what}")


def check_positive(**flags: int | list[int] | None) -> None:
    """UsageError for a flag with a number below 1."""
    for name, value in flags.items():
        least = min(value, default=None) if isinstance(value, list) else value
        if least is not None and least < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {least}")


class Progress:
    """Progress of a long task, on stderr: a live line in a terminal, elsewhere a plain line now and then.

    Plain lines come at every twentieth of the task, at most one in five seconds and at least one a minute.
    """

    def __init__(self, label: str, total: float | None, seconds: float = 5.0) -> None:
        self.label, self.total, self.completed, self.note = label, total, 0.0, ""
        screen = Console(stderr=True)
        self.live, self._seconds = screen.is_terminal, seconds
        self._began = self._said = time.monotonic()
        self._first = 0.0
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24)]
        columns += [MofNCompleteColumn()] if total is not None and total > 1 else []  # not for a share
        self._bar = RichProgress(
            *columns, TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=screen,
            transient=True, disable=not self.live,
        )  # fmt: skip
        self._task = self._bar.add_task(label, total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def begin_at(self, completed: float) -> None:
        """What an earlier process did, which says nothing about the time left."""
        self.completed = self._first = completed

    def advance(self, amount: float = 1) -> None:
        self.update(self.completed + amount)

    def update(self, completed: float, note: str = "", label: str | None = None, total: float | None = None) -> None:
        before, self.completed, self.note = self.completed, completed, note
        self.label, self.total = label or self.label, total if total is not None else self.total
        if self.live:
            self._bar.update(
                self._task, description=self.label, completed=completed, note=note, total=self.total, refresh=False
            )
            return
        now = time.monotonic()
        share = 0.0 if not self.total else completed / self.total
        passed = bool(self.total) and int(20 * share) != int(20 * before / self.total)  # type: ignore[operator]
        if (passed and now - self._said >= self._seconds) or now - self._said >= 60:
            self._said = now
            print(self._line(share, now - self._began), file=sys.stderr, flush=True)

    def _line(self, share: float, elapsed: float) -> str:
        parts = [f"{self.label}: {100 * share:.0f}%" if self.total else self.label]
        parts += [self.note] if self.note else []
        done = self.completed - self._first
        if self.total and done > 0:
            parts.append(f"{duration(elapsed * (self.total - self.completed) / done)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time in words of at most two units: `45 s`, `3 min`, `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class TrainingProgress(Progress):
    """Progress of training: loss, speed, utilisation and time left."""

    def report(self, row: dict[str, Any]) -> None:
        """Called by the training loop with each row of metrics."""
        note = f"loss {row['loss']:.3f}, {row['tokens_per_s'] / 1e3:.1f}K tokens/s"
        if "mfu" in row:
            note += f", MFU {100 * row['mfu']:.0f}%"
        if "val_loss" in row:
            note += f", held-out loss {row['val_loss']:.3f}"
        if not self._first:
            self.begin_at(row["step"] - 1)
        self.update(row["step"], note)


def say(text: str) -> None:
    """A line that is part of the output, as it is: not wrapped, not coloured."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def say_where(files: Iterable[Path], machine: bool = False) -> None:
    """The files that were written; on stderr where stdout is for a program (`machine`)."""
    text = "written: " + ", ".join(str(path) for path in files)
    if machine:
        print(text, file=sys.stderr, flush=True)
    else:
        say(text)


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", keys: int = 1) -> None:
    say(terminal_table(head, rows, console.width, title, keys))


def print_json(result: Any) -> None:
    sys.stdout.write(json.dumps(result, indent=1, allow_nan=False) + "\n")


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    """Columns for all plain values of the rows; lists are in the JSON alone."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def check_outputs(out: Path | None, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Raise an error before the work starts if an output file exists and may not be replaced."""
    for path in [out.with_suffix(suffix) for suffix in suffixes] if out is not None else []:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; give another --out, or --overwrite")


def settings_label(ntk: str, window: int | None) -> str:
    """NTK and window, to be appended to the name of a run."""
    return (", NTK" if ntk == "length" else "") + ("" if window is None else f", window {window}")


def name_arms(arms: Sequence[dict[str, Any]]) -> None:
    """Set the label of every arm of a result (a run, a step, settings of the evaluation); no two are the same."""
    of_runs = [arm for arm in arms if "recipe" in arm]
    recipes = [Recipe.from_dict(arm["recipe"]) for arm in of_runs]
    by_run = {arm.get("run", arm.get("model")): recipe for arm, recipe in zip(of_runs, recipes)}
    names = dict(zip(by_run, unique_names(list(by_run.values()), [Path(str(name)) for name in by_run])))
    for arm, recipe in zip(of_runs, recipes):
        name = names[arm.get("run", arm.get("model"))]
        window = recipe.window if arm["window"] is None else arm["window"]
        arm["label"] = name + settings_label(arm["ntk"], None if f", window {window}" in name else window)
    labels = [arm["label"] for arm in arms]
    for arm in of_runs:
        if labels.count(arm["label"]) > 1:
            arm["label"] += f", step {arm['step']}"


def find_or_add_arm(result: dict[str, Any], identity: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """The arm of a result with this identity. If there is none, one is added, with `about` and its provenance."""
    for arm in result["arms"]:
        if all(arm.get(key) == value for key, value in identity.items()):
            return arm
    arm = {**identity, **about, "command": command_line(), "environment": environment()}
    result["arms"].append(arm)
    name_arms(result["arms"])
    return arm


def open_results(path: Path, settings: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Results to add to: those in the file, if they were made with these settings; else none yet."""
    if not path.exists() or overwrite:
        return {"settings": settings, "arms": []}
    kept = read_json(path, dict)
    if kept.get("settings") != settings or not isinstance(kept.get("arms"), list):
        raise FileExistsError(
            f"{path} holds results with other settings ({kept.get('settings')}); give another --out, or --overwrite"
        )
    return kept


def draw(plot: Callable[..., Path], result: dict[str, Any], out: Path, overwrite: bool) -> list[Path]:
    """The figure as .png and .svg. The JSON is written before: `lssar plot` can draw it elsewhere."""
    return [plot(result, out.with_suffix(suffix), overwrite) for suffix in (".png", ".svg")]


def show_length_table(curves: list[dict[str, Any]]) -> None:
    lengths = sorted({point["length"] for curve in curves for point in curve["by_length"]})
    rows = []
    for curve in curves:
        cells = {p["length"]: f"{p['loss']:.3f} ±{(p['high'] - p['low']) / 2:.3f}" for p in curve["by_length"]}
        rows.append([curve["label"], *(cells.get(length, "-") for length in lengths)])
    title = "Held-out loss (nats per token), by length of the chunks; ± is the 95% interval over chunks"
    show_table(["run", *(f"{length:,}" for length in lengths)], rows, title)
