"""`lssar eval length`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from lssar.commands.common import (
    Progress,
    check_given,
    check_outputs,
    check_positive,
    draw,
    name_arms,
    print_csv,
    print_json,
    say_where,
    show_length_table,
    show_table,
)
from lssar.records import command_line, environment, write_json


@dataclass
class Length:
    """Loss by context length and by position, and of the last tokens of each chunk against the context they are given.

    Held-out text is split into chunks of the longest length, and these into shorter ones, so that every length is
    evaluated on the same tokens.
    """

    runs: tyro.conf.Positional[list[Path]]
    """Run folders."""
    multiples: list[int] = field(default_factory=list)
    """Lengths, as multiples of the training length; each must divide the largest. Default: 1 2 4 8 16; for mixed
    layouts 1 4 16 64 256 512, on held-out documents that are joined."""
    ntk: list[Literal["off", "length"]] = field(default_factory=lambda: ["off"])
    """Rotary base as trained, or scaled with the length (NTK-aware); several make several curves."""
    window: int | None = None
    """Evaluate every run with a sliding window of this many tokens."""
    data: Path | None = None
    """Folder of shards with held-out text; the run's own, if not given."""
    pieces: int = 64
    """At most this many chunks of the longest length."""
    batch_tokens: int | None = None
    """Tokens in one forward pass: 262,144 on a GPU, 16,384 on a CPU, if not given."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    out: Path = Path("out/length")
    """Path without suffix for the .json, .png and .svg."""
    overwrite: bool = False
    """Replace earlier results."""
    json: bool = False
    """Print the results as JSON instead of tables."""
    csv: bool = False
    """Print one line of CSV for each run and length instead of tables."""

    def run(self) -> None:
        from lssar.plots import plot_length
        from lssar.runs import Run

        check_given(self.runs, "run folders")
        check_positive(multiples=self.multiples, pieces=self.pieces, batch_tokens=self.batch_tokens, window=self.window)
        check_outputs(self.out, (".json", ".png", ".svg"), self.overwrite)
        runs = [Run.open(folder, self.device) for folder in self.runs]
        curves = [curve for run in runs for curve in self._curves(run)]
        name_arms(curves)
        result = {"command": command_line(), "environment": environment(), "curves": curves}
        files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
        if self.json:
            print_json(result)
        elif self.csv:
            about = ("run", "label", "step", "train_length")
            print_csv([{key: c[key] for key in about} | point for c in curves for point in c["by_length"]])
        else:
            show_length_table(curves)
            show_training_table(curves)
        say_where(files, machine := self.json or self.csv)
        say_where(draw(plot_length, result, self.out, self.overwrite), machine)

    def _curves(self, run: Any) -> list[dict[str, Any]]:
        from lssar.evaluation.length import evaluate_length

        recipe, model = run.recipe, run.model()
        lengths, pieces = self._pieces(run, model)
        about = {
            "run": run.folder.name, "label": run.name, "attention": recipe.mechanism, "step": run.step,
            "train_length": recipe.length, "recipe": recipe.to_dict(),
        }  # fmt: skip
        if (training := run.training()) is not None:
            about["training"] = training
        curves = []
        for ntk in self.ntk:
            words = ", NTK" if ntk == "length" else ""
            with Progress(f"evaluating {run.folder.name}{words}", len(lengths) * len(pieces)) as bar:
                result = evaluate_length(
                    model, pieces, lengths, ntk, self.window, self.batch_tokens or run.batch_tokens, run.dtype,
                    bar.advance,
                )  # fmt: skip
            curves.append({**about, **result})
        return curves

    def _pieces(self, run: Any, model: Any) -> tuple[list[int], list[Any]]:
        """Lengths, and held-out chunks of the longest."""
        from lssar.evaluation.length import held_out_documents, pieces_of
        from lssar.evaluation.long import far_multiples, is_long_reader, joined_pieces

        held_out = run.held_out(self.data).path
        far = not self.multiples and is_long_reader(model.config)
        multiples = self.multiples or (far_multiples() if far else [1, 2, 4, 8, 16])
        lengths = [run.recipe.length * multiple for multiple in multiples]
        if far:
            most = 2_097_152 if run.device.type == "cuda" else 262_144
            return lengths, joined_pieces(held_out, max(lengths), min(most, self.pieces * max(lengths)))
        documents = held_out_documents(held_out, run.recipe.vocab_size, max(lengths) + 1)
        return lengths, pieces_of(documents, max(lengths), self.pieces)


def show_training_table(curves: list[dict[str, Any]]) -> None:
    rows = []
    for name, training in {curve["run"]: curve["training"] for curve in curves if "training" in curve}.items():
        loss = "-" if training["val_loss"] is None else f"{training['val_loss']:.3f}"
        norm = "-" if training["grad_norm_99"] is None else f"{training['grad_norm_99']:.3f}"
        rows.append(
            [name, f"{training['tokens']:,}", f"{training['tokens_per_s']:,.0f}", loss, norm, str(training["spikes"])]
        )
    head = ["run", "tokens", "tokens/s", "held-out loss", "gradient norm, 99%", "spikes"]
    if rows:  # exports do not have them
        show_table(head, rows, "Training of these runs; tokens/s is the median over steps")
