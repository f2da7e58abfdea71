"""What the commands share: a console, a progress bar, tables of a row each, and the last word about files."""

from __future__ import annotations

from pathlib import Path

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
