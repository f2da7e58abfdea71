"""`lssar report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from lssar.commands.common import console, say_where


@dataclass
class Report:
    """Write one HTML page about runs: training, loss by length, retrieval, diagnostics, configuration, provenance."""

    runs: tyro.conf.Positional[list[Path]]
    """Run folders, exported models, and JSON files of `lssar eval length`, `lssar eval retrieval` or `lssar diagnose`.
    Files in RUN/evaluation are found by themselves."""
    out: Path = Path("report.html")
    """File to write."""
    title: str | None = None
    """Title of the page."""
    compute: bool = False
    """First evaluate what is missing, into RUN/evaluation."""
    multiples: list[int] = field(default_factory=lambda: [1, 4, 16])
    """For --compute: lengths as multiples of the training length."""
    samples: int = 2
    """For --compute: contexts at each length, for passkeys at each length and depth."""
    tasks: list[str] = field(default_factory=lambda: ["passkey"])
    """For --compute: retrieval tasks."""
    pieces: int = 8
    """For --compute: chunks of held-out text of the longest length."""
    data: Path | None = None
    """For --compute: folder of shards with held-out text; the run's own, if not given."""
    overwrite: bool = False
    """Replace an earlier page."""

    def run(self) -> None:
        from lssar.report.page import plotly
        from lssar.report.report import write_report

        plotly()
        if self.out.exists() and not self.overwrite:
            raise FileExistsError(f"{self.out} exists; give another --out, or --overwrite")
        if self.compute:
            self._compute()
        path = write_report(self.runs, self.out, self.title, self.overwrite)
        say_where([path])
        size = path.stat().st_size / 1e6
        console.print(f"{size:.1f} MB, opens in any browser without a network", highlight=False)

    def _compute(self) -> None:
        """Evaluates each run folder for which there is no result of a kind yet."""
        from lssar.commands.diagnose import Diagnose
        from lssar.commands.eval_length import Length
        from lssar.commands.eval_retrieval import Retrieval
        from lssar.report.collect import EVALUATION, collect

        found = collect(self.runs)
        for folder in self.runs:
            if not folder.is_dir():
                continue
            known = found.of(folder.resolve().name)
            out = folder / EVALUATION
            if not known["length"]:
                Length([folder], multiples=self.multiples, pieces=self.pieces, data=self.data, out=out / "length").run()
            if not known["retrieval"]:
                Retrieval(
                    [folder], tasks=self.tasks, multiples=self.multiples, samples=self.samples, data=self.data,
                    out=out / "retrieval",
                ).run()  # fmt: skip
            if not known["diagnostics"]:
                Diagnose(folder, multiples=self.multiples, data=self.data, out=out / "diagnose").run()
