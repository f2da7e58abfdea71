"""`lssar eval` (of which `length` is here), `lssar diagnose` and `lssar generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.table import Table

from lssar.commands.common import arm_label, check_outputs, console, progress, say_where
from lssar.records import command_line, environment, write_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def held_out_folder(run: Path, recipe: Any, data: Path | None) -> Path:
    """Where the held-out shards of a run are, unless another folder is given."""
    from lssar.training.sources import data_folder

    return data or data_folder(recipe, run)


@dataclass
class Length:
    """Loss by length, by position, and of the last tokens against the context that they are given."""

    runs: tyro.conf.Positional[list[Path]]
    multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Of the training length; each must divide the largest."""
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
        from lssar.plots import plot_length
        from lssar.training.loop import load_run
        from lssar.training.metrics import read_metrics, summarise

        check_outputs(self.out, (".json", ".png", ".svg"), self.overwrite)
        curves: list[dict[str, Any]] = []
        for folder in self.runs:
            model, recipe, step = load_run(folder, self.device)
            lengths = [recipe.length * multiple for multiple in self.multiples]
            documents = held_out_documents(
                held_out_folder(folder, recipe, self.data), recipe.vocab_size, max(lengths) + 1
            )
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


def draw(plot: Callable[..., Path], result: dict[str, Any], out: Path, overwrite: bool) -> list[Path]:
    """The figure as .png and .svg. The figures of `result` are safe by now: `lssar plot` can draw them elsewhere."""
    return [plot(result, out.with_suffix(suffix), overwrite) for suffix in (".png", ".svg")]


@dataclass
class Plot:
    """Draw JSON files of `lssar eval length`, `lssar demo` or `lssar eval retrieval` in one figure: some may be made
    elsewhere, or later. Of a run whose retrieval was read at several steps the last is drawn."""

    files: tyro.conf.Positional[list[Path]]
    out: Path | None = None
    """Path without suffix for the .png and .svg; beside the first JSON, if not given."""
    overwrite: bool = False

    def run(self) -> None:
        from lssar.plots import plot_length, plot_retrieval

        if not self.files:
            raise ValueError("which JSON files? See `lssar plot --help`")
        results = [json.loads(file.read_text()) for file in self.files]
        kind = "arms" if "arms" in results[0] else "curves"
        for file, result in zip(self.files, results):
            if kind not in result:
                what = {"arms": "figures of retrieval", "curves": "curves of loss by length"}[kind]
                raise ValueError(f"{file} holds no {what}")
        drawn = [entry for result in results for entry in result[kind]]
        plot: Callable[..., Path] = plot_length
        if kind == "arms":
            plot = plot_retrieval
            in_order = sorted(drawn, key=lambda arm: arm["step"])
            last = {(arm["run"], arm["ntk"], arm["window"]): arm for arm in in_order}
            drawn = [arm for arm in drawn if arm is last[arm["run"], arm["ntk"], arm["window"]]]
        say_where(draw(plot, {kind: drawn}, self.out or self.files[0], self.overwrite))


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


def length_table(curves: list[dict[str, Any]]) -> Table:
    lengths = sorted({point["length"] for curve in curves for point in curve["by_length"]})
    table = Table(title="held-out loss (nats a token) when read in pieces of each length; +- is 95% over pieces")
    table.add_column("run")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for curve in curves:
        cells = {p["length"]: f"{p['loss']:.3f} +-{(p['high'] - p['low']) / 2:.3f}" for p in curve["by_length"]}
        table.add_row(curve["label"], *(cells.get(length, "-") for length in lengths))
    return table


class Evaluate:
    """Evaluate runs: `lssar eval length | retrieval | downstream RUN...`."""

    @classmethod
    def parse(cls, arguments: list[str]) -> Any:
        from lssar.commands.downstream import Downstream
        from lssar.commands.retrieval import Retrieval

        kinds: dict[str, Any] = {"length": Length, "retrieval": Retrieval, "downstream": Downstream}
        if not arguments or arguments[0] not in kinds:
            raise ValueError(f"`lssar eval` wants one of: {', '.join(kinds)}")
        return tyro.cli(kinds[arguments[0]], prog=f"lssar eval {arguments[0]}", args=arguments[1:])


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


@dataclass
class Generate:
    """Continue a prompt, streamed as it comes."""

    folder: tyro.conf.Positional[Path]
    """Run folder."""
    prompt: str = "\n"
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0
    ntk: Literal["off", "length"] = "off"
    tokenizer: str | None = None
    """bytes, gpt2, or a file; that of the run's data, if not given."""
    device: str = DEVICE

    def run(self) -> None:
        from lssar.data.tokenizers import load_tokenizer
        from lssar.training.loop import load_run
        from lssar.training.sources import data_folder, tokenizer_of

        model, recipe, _ = load_run(self.folder, self.device)
        model.ntk = self.ntk
        folder = data_folder(recipe, self.folder)
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else tokenizer_of(folder, recipe.vocab_size)
        ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(self.prompt).tolist()]], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        made: list[int] = []
        shown = ""
        sys.stdout.write(self.prompt)
        for token in model.generate(ids, self.tokens, self.temperature, self.top_k, generator):
            if int(token) == tokenizer.eot:
                break
            made.append(int(token))
            text = tokenizer.decode(made)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        sys.stdout.write("\n")
