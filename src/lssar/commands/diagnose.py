"""`lssar diagnose`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from lssar.commands.common import check_outputs, check_positive, console, print_json, say_where, show_table
from lssar.records import command_line, environment, write_json

WORDS = {
    "entropy": "entropy (nats)",
    "effective": "effective keys",
    "above_mean": "keys above the mean, %",
    "matters": "keys that matter, %",
    "largest": "largest weight",
    "first_token": "weight on first token",
}


@dataclass
class Diagnose:
    """What attention rows look like by layer, head and length: entropy, keys that matter, attention sinks.

    Prints the mean over layers and heads with the lowest and highest head; the figure has a heat map of every head.
    """

    folder: tyro.conf.Positional[Path]
    """Run folder or exported model."""
    multiples: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Lengths, as multiples of the training length."""
    rows: int = 16
    """Last rows of each length that the statistics are taken over."""
    documents: int = 2
    """Held-out documents."""
    data: Path | None = None
    """Folder of shards with held-out text; the run's own, if not given."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    out: Path = Path("out/diagnose")
    """Path without suffix for the .json and .png."""
    overwrite: bool = False
    """Replace earlier results."""
    json: bool = False
    """Print the results as JSON instead of a table."""

    def run(self) -> None:
        import torch

        from lssar.evaluation.diagnostics import diagnose
        from lssar.evaluation.length import held_out_documents, pieces_of
        from lssar.plots import plot_diagnostics
        from lssar.runs import Run

        check_positive(multiples=self.multiples, rows=self.rows, documents=self.documents)
        check_outputs(self.out, (".json", ".png"), self.overwrite)
        run = Run.open(self.folder, self.device)
        recipe = run.recipe
        lengths = [recipe.length * multiple for multiple in self.multiples]
        documents = held_out_documents(run.held_out(self.data).path, recipe.vocab_size, max(lengths) + 1)
        pieces = pieces_of(documents[: self.documents], max(lengths), self.documents)
        ids = torch.stack([piece[:-1] for piece in pieces]).to(run.device)
        with console.status("computing attention rows"):
            result = diagnose(run.model(), ids, lengths, self.rows)
        result |= {"run": self.folder.name, "attention": recipe.mechanism, "label": run.name, "step": run.step}
        result |= {"train_length": recipe.length, "recipe": recipe.to_dict()}
        result |= {"command": command_line(), "environment": environment()}
        files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
        if self.json:
            print_json(result)
        else:
            title = f"{run.name} ({self.folder.name}): mean over all layers and heads, and range over heads"
            show_table(["", *(f"{length:,} tokens" for length in lengths)], summary(result), title)
        files.append(plot_diagnostics(result, self.out.with_suffix(".png"), self.overwrite))
        say_where(files, self.json)


def summary(result: dict[str, Any]) -> list[list[str]]:
    """For each statistic and length the mean over heads, and the heads' range."""
    rows = []
    for name, by_length in result["statistics"].items():
        scale = 100 if name in ("above_mean", "matters") else 1
        cells = []
        for layers in by_length:
            heads = [scale * value for layer in layers for value in layer]
            cells.append(f"{sum(heads) / len(heads):.3g} ({min(heads):.3g} to {max(heads):.3g})")
        rows.append([WORDS.get(name, name), *cells])
    return rows
