"""`lssar diagnose`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro

from lssar.commands.common import DEVICE, check_outputs, console, held_out_folder, say_where
from lssar.records import command_line, environment, write_json


@dataclass
class Diagnose:
    """What attention rows look like by layer, head and length: entropy, keys that matter, sinks; as heat maps."""

    folder: tyro.conf.Positional[Path]
    """Run folder."""
    multiples: list[int] = field(default_factory=lambda: [1, 4, 16])
    rows: int = 16
    documents: int = 2
    data: Path | None = None
    device: str = DEVICE
    out: Path = Path("out/diagnose")
    """Path without suffix for the .json and .png."""
    overwrite: bool = False

    def run(self) -> None:
        from lssar.evaluation.diagnostics import diagnose
        from lssar.evaluation.length import held_out_documents, pieces_of
        from lssar.plots import plot_diagnostics
        from lssar.training.loop import load_run

        check_outputs(self.out, (".json", ".png"), self.overwrite)
        model, recipe, step = load_run(self.folder, self.device)
        lengths = [recipe.length * multiple for multiple in self.multiples]
        data = held_out_folder(self.folder, recipe, self.data)
        documents = held_out_documents(data, recipe.vocab_size, max(lengths) + 1)[: self.documents]
        ids = torch.stack([piece[:-1] for piece in pieces_of(documents, max(lengths), self.documents)]).to(self.device)
        with console.status("reading attention rows"):
            result = diagnose(model, ids, lengths, self.rows)
        result |= {"run": self.folder.name, "attention": recipe.attention, "step": step}
        result |= {"command": command_line(), "environment": environment()}
        files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
        files.append(plot_diagnostics(result, self.out.with_suffix(".png"), self.overwrite))
        say_where(files)
