"""What the commands share: a console, a progress bar, tables of a row each, and the last word about files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()


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
