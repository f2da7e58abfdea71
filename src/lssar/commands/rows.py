"""`lssar rows`: attention rows over synthetic keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lssar.commands.common import console, say_where, show_table
from lssar.records import write_json


@dataclass
class RowsDemo:
    """How attention rows over synthetic keys change as their number grows 1x to 64x: a table and a picture."""

    out: Path = Path("out/rows")
    """Folder for rows.json and rows.png; earlier ones there are replaced."""
    seed: int = 0
    """Seed of the synthetic queries and keys."""

    def run(self) -> None:
        from lssar.evaluation.dilution import dilution
        from lssar.plots import plot_dilution

        with console.status("computing attention rows"), torch.no_grad():
            result = dilution(seed=self.seed)
        rows = []
        for n in dict.fromkeys(row["n"] for row in result["rows"]):
            cells = [row for row in result["rows"] if row["n"] == n]
            rows.append([str(n), *(f"{c['peak']:.3f}  H {c['entropy']:.2f}  {c['effective']:.0f} keys" for c in cells)])
        title = "One relevant key among n: largest weight, entropy H (nats), effective number of keys exp(H)"
        show_table(["n", *result["mechanisms"]], rows, title)
        console.print("cosine_softmax is the control: LSSA's scores (cosine, log n) under plain softmax.")
        files = [write_json(self.out / "rows.json", result, overwrite=True)]
        files.append(plot_dilution(result, self.out / "rows.png", overwrite=True))
        say_where(files)
