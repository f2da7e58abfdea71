"""`lssar explore`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from lssar.commands.common import Progress, console, say_where


@dataclass
class Explore:
    """Write an HTML page that shows what each token of a text attends to, by layer and head; one run or two."""

    runs: tyro.conf.Positional[list[Path]]
    """One or two run folders or exported models, shown side by side."""
    text: Path | None = None
    """The text file to look at; it has to be given."""
    tokens: int = 4096
    """Number of tokens from the start of the text."""
    top: int = 32
    """Keys kept for each token; the page says how much weight is left out."""
    layers: list[int] = field(default_factory=list)
    """Layers to include, counted from 0; all, if not given."""
    out: Path = Path("explore.html")
    """File to write."""
    overwrite: bool = False
    """Replace an earlier page."""

    def run(self) -> None:
        from lssar.report.explorer import Subject, write_explorer
        from lssar.report.page import plotly
        from lssar.runs import Run

        plotly()
        if not 1 <= len(self.runs) <= 2:
            raise ValueError(f"name one run or two to compare; got {len(self.runs)}")
        if self.text is None:
            raise ValueError("name a text with --text FILE")
        if not self.text.is_file():
            raise FileNotFoundError(f"{self.text} is not a file; name a text with --text FILE")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1; got {self.tokens}")
        if self.out.exists() and not self.overwrite:
            raise FileExistsError(f"{self.out} exists; give another --out, or --overwrite")
        # A token is at least one byte, so text beyond this many characters cannot be needed.
        with self.text.open(encoding="utf-8", errors="replace") as file:
            content = file.read(16 * self.tokens + 1024)
        opened = [Run.open(folder, "cpu") for folder in self.runs]
        subjects = [Subject(run.folder.resolve().name, run.model(), run.tokenizer) for run in opened]
        layers = self.layers or None
        total = sum(len(layers or s.model.layers()) for s in subjects)
        with Progress("computing attention, layers", total) as bar:
            path = write_explorer(
                subjects, content, self.out, title=f"Attention in {self.text.name}", tokens=self.tokens, top=self.top,
                layers=layers, overwrite=self.overwrite, report=bar.advance,
            )  # fmt: skip
        say_where([path])
        size = path.stat().st_size / 1e6
        console.print(f"{size:.1f} MB, opens in any browser without a network", highlight=False)
