"""`lssar plot`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from lssar.commands.common import UsageError, draw, say_where
from lssar.records import read_json


@dataclass
class Plot:
    """Draw JSON results of `lssar eval length`, `lssar demo-train` or `lssar eval retrieval` in one figure.

    Of a run whose retrieval was evaluated at several steps, the last step is drawn."""

    files: tyro.conf.Positional[list[Path]]
    """JSON files."""
    out: Path | None = None
    """Path without suffix for the .png and .svg; beside the first JSON, if not given."""
    overwrite: bool = False
    """Replace earlier figures."""

    def run(self) -> None:
        from lssar.plots import plot_length, plot_retrieval

        if not self.files:
            raise UsageError("give one or more JSON files; see `lssar plot --help`")
        results = [read_json(file, dict) for file in self.files]
        kind = "arms" if "arms" in results[0] else "curves"
        for file, result in zip(self.files, results):
            if not isinstance(result.get(kind), list) or not result[kind]:
                what = {"arms": "results of retrieval", "curves": "curves of loss by length"}[kind]
                raise ValueError(f"{file} holds no {what}")
        drawn = [entry for result in results for entry in result[kind]]
        plot: Callable[..., Path] = plot_length
        if kind == "arms":
            plot = plot_retrieval
            in_order = sorted(drawn, key=lambda arm: arm["step"])
            last = {(arm["run"], arm["ntk"], arm["window"]): arm for arm in in_order}
            drawn = [arm for arm in drawn if arm is last[arm["run"], arm["ntk"], arm["window"]]]
        say_where(draw(plot, {kind: drawn}, self.out or self.files[0], self.overwrite))
