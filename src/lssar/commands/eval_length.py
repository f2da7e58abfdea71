"""`lssar eval length`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.table import Table

from lssar.commands.common import (
    DEVICE,
    arm_label,
    check_outputs,
    console,
    draw,
    held_out_folder,
    length_table,
    progress,
    say_where,
)
from lssar.records import command_line, environment, write_json


@dataclass
class Length:
    """Loss by length, by position, and of the last tokens against the context that they are given."""

    runs: tyro.conf.Positional[list[Path]]
    multiples: list[int] = field(default_factory=list)
    """Of the training length; each must divide the largest. Default: 1 2 4 8 16; for mixed layouts 1 4 16 64 256 512,
    on held-out documents that are joined."""
    ntk: list[Literal["off", "length"]] = field(default_factory=lambda: ["off"])
    """Rotary base as trained, or stretched by length (NTK-aware); several make several curves."""
    window: int | None = None
    """Read every run through a sliding window of so many tokens."""
    data: Path | None = None
    pieces: int = 64
    """At most so many pieces of the longest length."""
    batch_tokens: int = 16_384
    device: str = DEVICE
    out: Path = Path("out/length")
    """Path without suffix for the .json, .png and .svg."""
    overwrite: bool = False

    def run(self) -> None:
        from lssar.evaluation.length import evaluate_length, held_out_documents, pieces_of
        from lssar.evaluation.long import far_multiples, is_long_reader, joined_pieces
        from lssar.plots import plot_length
        from lssar.training.loop import load_run
        from lssar.training.metrics import read_metrics, summarise

        check_outputs(self.out, (".json", ".png", ".svg"), self.overwrite)
        curves: list[dict[str, Any]] = []
        for folder in self.runs:
            model, recipe, step = load_run(folder, self.device)
            held_out = held_out_folder(folder, recipe, self.data)
            far = not self.multiples and is_long_reader(model.config)
            multiples = self.multiples or (far_multiples() if far else [1, 2, 4, 8, 16])
            lengths = [recipe.length * multiple for multiple in multiples]
            if far:
                most = 2_097_152 if self.device.startswith("cuda") else 262_144
                pieces = joined_pieces(held_out, max(lengths), min(most, self.pieces * max(lengths)))
            else:
                documents = held_out_documents(held_out, recipe.vocab_size, max(lengths) + 1)
                pieces = pieces_of(documents, max(lengths), self.pieces)
            with progress() as bar:
                for ntk in self.ntk:
                    task = bar.add_task(f"{folder.name} ntk {ntk}", total=len(lengths) * len(pieces))
                    dtype = torch.bfloat16 if self.device == "cuda" and recipe.dtype == "bfloat16" else None
                    result = evaluate_length(
                        model, pieces, lengths, ntk, self.window, self.batch_tokens, dtype, partial(bar.advance, task)
                    )
                    label = arm_label(recipe, ntk, self.window)
                    kept = {"run": folder.name, "label": label, "attention": recipe.attention, "step": step}
                    kept["training"] = summarise(read_metrics(folder))
                    curves.append({**kept, "train_length": recipe.length, "recipe": recipe.to_dict(), **result})
        console.print(length_table(curves))
        console.print(training_table(curves))
        result = {"command": command_line(), "environment": environment(), "curves": curves}
        files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
        say_where(files)
        say_where(draw(plot_length, result, self.out, self.overwrite))


def training_table(curves: list[dict[str, Any]]) -> Table:
    table = Table(title="training of these runs; tokens/s is the median over steps")
    for column in ("run", "tokens", "tokens/s", "held-out loss", "gradient norm 99%", "spikes"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, training in {curve["run"]: curve["training"] for curve in curves}.items():
        loss = "-" if training["val_loss"] is None else f"{training['val_loss']:.3f}"
        norm = "-" if training["grad_norm_99"] is None else f"{training['grad_norm_99']:.3f}"
        row = (f"{training['tokens']:,}", f"{training['tokens_per_s']:,.0f}", loss, norm, str(training["spikes"]))
        table.add_row(name, *row)
    return table
