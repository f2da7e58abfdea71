"""What the commands share: a console, a progress bar, tables of a row each, and the last word about files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
console = Console()


class UsageError(ValueError):
    """A command line that cannot be run, whatever is on the disk."""

    exit_code = 2


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def say_where(files: list[Path]) -> None:
    console.print("written: " + ", ".join(str(path) for path in files), highlight=False, soft_wrap=True)


def check_outputs(out: Path | None, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Before the work, not after it: is there a file in the way?"""
    for path in [out.with_suffix(suffix) for suffix in suffixes] if out is not None else []:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; give another --out, or --overwrite")


def arm_label(recipe: Any, ntk: str, window: int | None) -> str:
    """A run's name in tables and figures: its mechanism, and how it is read where that is not plain."""
    power = "" if recipe.p is None else f", p={recipe.p:g}"
    window = recipe.window if window is None else window
    read = (", NTK" if ntk == "length" else "") + ("" if window is None else f", window {window}")
    return recipe.attention + power + read


def begin_figures(path: Path, settings: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Figures to add to: those that are there, if they were made with these settings; else none yet."""
    if not path.exists() or overwrite:
        return {"settings": settings, "arms": []}
    kept = json.loads(path.read_text())
    if kept.get("settings") != settings:
        raise FileExistsError(
            f"{path} holds figures with other settings ({kept.get('settings')}); give another --out, or --overwrite"
        )
    return kept


def held_out_folder(run: Path, recipe: Any, data: Path | None) -> Path:
    """Where the held-out shards of a run are, unless another folder is given."""
    from lssar.training.sources import data_folder

    return data or data_folder(recipe, run)


def draw(plot: Callable[..., Path], result: dict[str, Any], out: Path, overwrite: bool) -> list[Path]:
    """The figure as .png and .svg. The figures of `result` are safe by now: `lssar plot` can draw them elsewhere."""
    return [plot(result, out.with_suffix(suffix), overwrite) for suffix in (".png", ".svg")]


def length_table(curves: list[dict[str, Any]]) -> Table:
    lengths = sorted({point["length"] for curve in curves for point in curve["by_length"]})
    table = Table(title="held-out loss (nats a token) when read in pieces of each length; +- is 95% over pieces")
    table.add_column("run")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for curve in curves:
        cells = {p["length"]: f"{p['loss']:.3f} +-{(p['high'] - p['low']) / 2:.3f}" for p in curve["by_length"]}
        table.add_row(curve["label"], *(cells.get(length, "-") for length in lengths))
    return table


class TrainingLine:
    """A live line of progress: loss, speed, utilisation, time left. On no terminal, a line for every twentieth."""

    def __init__(self, steps: int, label: str):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.steps, self.label = steps, label
        self.live = Console(stderr=True).is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task(label, total=steps, note="")

    def __enter__(self) -> TrainingLine:
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def report(self, row: dict[str, Any]) -> None:
        note = f"loss {row['loss']:.3f}  {row['tokens_per_s'] / 1e3:.1f}K tokens/s"
        if "mfu" in row:
            note += f"  MFU {100 * row['mfu']:.0f}%"
        if "val_loss" in row:
            note += f"  held-out {row['val_loss']:.3f}"
        self.bar.update(self.task, completed=row["step"], note=note)
        step = row["step"]
        if not self.live and (step == self.steps or step * 20 // self.steps != (step - 1) * 20 // self.steps):
            print(f"{self.label} {step}/{self.steps} {note} {row['seconds_left']:.0f}s left", flush=True)
