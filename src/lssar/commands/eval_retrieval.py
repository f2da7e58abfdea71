"""`lssar eval retrieval`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.table import Table

from lssar.commands.common import (
    DEVICE,
    UsageError,
    arm_label,
    begin_figures,
    console,
    held_out_folder,
    progress,
    say_where,
)
from lssar.data.tasks import TASKS
from lssar.evaluation.retrieval import DEPTHS
from lssar.records import command_line, environment, write_json

Rule = Literal["greedy", "choice"]


@dataclass
class Retrieval:
    """Passkey, needles in held-out text, associative recall and selective copy, by length and depth.

    The figures are written after every task and length; the same command goes on where it ended, and a command with
    other runs, lengths or tasks and the same --out adds to what is there."""

    runs: tyro.conf.Positional[list[Path]]
    tasks: list[str] = field(default_factory=list)
    """passkey, needles, recall, copy. Default: all; with --protocol long those that the run was trained on."""
    multiples: list[int] = field(default_factory=list)
    """Of the training length. Default: 1 2 4 8 16 32 64; with --protocol long 1 4 16 64 512."""
    protocol: Literal["auto", "short", "long"] = "auto"
    """long: at least 100 questions at each length, without wrong answers to compare with. auto: long if the first run
    has a mixed layout."""
    samples: int = 16
    """Contexts at each length, for the passkey at each length and depth; with --protocol short."""
    depths: list[float] = field(default_factory=lambda: list(DEPTHS))
    """Positions of passkeys and needles (0: start of the context, 1: its end); with --protocol short."""
    ntk: Literal["off", "length"] = "off"
    """Rotary base as trained, or stretched by length (NTK-aware)."""
    window: int | None = None
    """Read the runs through a sliding window of so many tokens."""
    data: Path | None = None
    """Folder of shards whose held-out documents the needles are put in; the run's own, if not given."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file; that of the run's data, if not given."""
    seed: int = 0
    batch_tokens: int | None = None
    """Tokens read at once: 524,288 on a GPU, 16,384 on a CPU, if not given."""
    stop_after: float | None = None
    """Seconds after which no further task and length is begun; the same command goes on later."""
    device: str = DEVICE
    out: Path = Path("out/retrieval")
    """Path without suffix for the .json, .png and .svg."""
    overwrite: bool = False
    """Begin anew where there are figures of other settings."""

    def run(self) -> None:
        from lssar.plots import plot_retrieval
        from lssar.training.loop import load_run

        self._choose_protocol()
        self._check()
        settings: dict[str, Any] = {"samples": self.samples, "depths": self.depths, "seed": self.seed}
        if self.protocol == "long":
            settings = {"protocol": "long", "seed": self.seed}
        result = begin_figures(self._json, settings, self.overwrite)
        began = time.monotonic()
        for folder in self.runs:
            model, recipe, step = load_run(folder, self.device)
            arm = self._arm(result, folder, recipe, step)
            todo = list(self._todo(arm, recipe.length))
            maker = self._maker(folder, recipe)
            dtype = torch.bfloat16 if self.device.startswith("cuda") and recipe.dtype == "bfloat16" else None
            with progress() as bar:
                bars = bar.add_task(arm["label"], total=len(todo))
                for task, length in todo:
                    if self.stop_after is not None and time.monotonic() - began > self.stop_after:
                        break
                    bar.update(bars, description=f"{arm['label']}: {task}, {length:,} tokens")
                    arm["rows"].append(self._measure(model, maker, task, length, dtype))
                    write_json(self._json, result, overwrite=True)
                    bar.advance(bars)
                    if not bar.console.is_terminal:
                        _say(arm["label"], arm["rows"][-1])
            del model
        if not any(arm["rows"] for arm in result["arms"]):
            raise ValueError("--stop-after left no time for a single task and length")
        rules: tuple[Rule, ...] = ("greedy", "choice") if self.protocol == "short" else ("greedy",)
        for rule in rules:
            console.print(retrieval_table(result, rule))
        console.print("In brackets the 95% Wilson interval. " + CHANCE, highlight=False)
        files = [self._json]
        for suffix in (".png", ".svg"):
            files.append(plot_retrieval(result, self.out.with_suffix(suffix), overwrite=True))
        say_where(files)
        missing = sum(1 for arm in result["arms"] for _ in self._todo(arm, arm["train_length"]))
        if missing:
            console.print(f"{missing} of the tasks and lengths are left; the same command goes on", highlight=False)

    @property
    def _json(self) -> Path:
        return self.out.with_suffix(".json")

    def _choose_protocol(self) -> None:
        """Fill in what was left to the protocol."""
        from lssar.evaluation.long import is_long_reader, retrieval_multiples
        from lssar.training.recipes import read_recipe

        recipe = read_recipe(self.runs[0]) if self.runs else None
        if self.protocol == "auto":
            self.protocol = "long" if recipe is not None and is_long_reader(recipe.model()) else "short"
        if self.protocol == "long":
            trained = [task for task in (recipe.retrieval_tasks if recipe else ()) if task != "copy"]
            self.tasks = self.tasks or trained or ["passkey", "needles", "recall"]
            self.multiples = self.multiples or retrieval_multiples()
        self.tasks = self.tasks or list(TASKS)
        self.multiples = self.multiples or [1, 2, 4, 8, 16, 32, 64]

    def _check(self) -> None:
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise UsageError(f"unknown retrieval task {unknown[0]!r}; known: {', '.join(TASKS)}")
        if self.samples < 1 or min(self.multiples, default=0) < 1:
            raise UsageError("samples and multiples must be at least 1")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(f"depths must lie in 0 to 1; got {self.depths}")

    def _arm(self, result: dict[str, Any], folder: Path, recipe: Any, step: int) -> dict[str, Any]:
        window = self.window if self.window is not None else recipe.window
        identity = {"run": folder.name, "step": step, "ntk": self.ntk, "window": window}
        for arm in result["arms"]:
            if all(arm[key] == value for key, value in identity.items()):
                return arm
        label = arm_label(recipe, self.ntk, self.window)
        arm = {
            **identity, "label": label, "attention": recipe.attention, "train_length": recipe.length,
            "recipe": recipe.to_dict(), "command": command_line(), "environment": environment(), "rows": [],
        }  # fmt: skip
        result["arms"].append(arm)
        return arm

    def _todo(self, arm: dict[str, Any], train_length: int) -> Iterator[tuple[str, int]]:
        done = {(row["task"], row["length"]) for row in arm["rows"]}
        for multiple in sorted(self.multiples):
            for task in self.tasks:
                if (task, train_length * multiple) not in done:
                    yield task, train_length * multiple

    def _maker(self, folder: Path, recipe: Any) -> Any:
        from lssar.data.stream import TokenStream
        from lssar.data.tasks import TaskMaker, background_of
        from lssar.data.tokenizers import load_tokenizer
        from lssar.evaluation.length import held_out_shards
        from lssar.training.sources import data_folder, tokenizer_of

        own, held_out = data_folder(recipe, folder), held_out_folder(folder, recipe, self.data)
        folder_of_it = own if own.exists() else held_out
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else tokenizer_of(folder_of_it, recipe.vocab_size)
        text = None
        if "needles" in self.tasks:
            text = background_of(TokenStream(held_out_shards(held_out)), tokenizer.eot)
        return TaskMaker(tokenizer, text)

    def _measure(self, model: Any, maker: Any, task: str, length: int, dtype: torch.dtype | None) -> dict[str, Any]:
        from lssar.evaluation.long import retrieval_settings
        from lssar.evaluation.retrieval import evaluate_retrieval
        from lssar.model import PREFILL_CHUNK

        batch_tokens = self.batch_tokens or (524_288 if self.device.startswith("cuda") else 16_384)
        size: dict[str, Any] = {"samples": self.samples, "depths": self.depths}
        if self.protocol == "long":
            size = retrieval_settings(maker, task, model.config.train_length) | {"chunk": PREFILL_CHUNK}
            if self.device.startswith("cuda"):
                size["chunk"] = None  # whole contexts, which is fastest where there is memory
        start = time.perf_counter()
        row = evaluate_retrieval(
            model, maker, task, length, **size, seed=self.seed, ntk=self.ntk, window=self.window,
            batch_tokens=batch_tokens, dtype=dtype,
        )  # fmt: skip
        return row | {"seconds": round(time.perf_counter() - start, 3)}


def _say(label: str, row: dict[str, Any]) -> None:
    """A line for a log, where there is no bar."""
    choice = f", likeliest {100 * row['choice']['rate']:.0f}%" if "choice" in row else ""
    found = f"decoded right {100 * row['greedy']['rate']:.0f}%{choice}"
    print(f"{label}: {row['task']}, {row['length']:,} tokens: {found} ({row['seconds']:.1f}s)", flush=True)


CHANCE = "By chance next to nothing is decoded right; of the answers offered one in their number is the likeliest."


def retrieval_table(result: dict[str, Any], rule: Rule) -> Table:
    what = {"greedy": "decoded right, %", "choice": "right answer likeliest, %"}[rule]
    multiples = sorted({row["length"] // arm["train_length"] for arm in result["arms"] for row in arm["rows"]})
    table = Table(title=f"{what}, by multiple of the training length")
    table.add_column("task")
    table.add_column("run")
    for multiple in multiples:
        table.add_column(f"{multiple}x", justify="right")
    for task in dict.fromkeys(row["task"] for arm in result["arms"] for row in arm["rows"]):
        for arm in result["arms"]:
            rows = {row["length"] // arm["train_length"]: row for row in arm["rows"] if row["task"] == task}
            if not any(rule in row for row in rows.values()):
                continue
            chance = next((f" (chance {100 * row['chance']:.0f})" for row in rows.values() if "chance" in row), "")
            name = task + (chance if rule == "choice" else "")
            table.add_row(name, arm["label"], *(_cell(rows.get(m), rule) for m in multiples))
        table.add_section()
    return table


def _cell(row: dict[str, Any] | None, rule: Rule) -> str:
    if row is None or rule not in row:
        return "-"
    found = row[rule]
    return f"{100 * found['rate']:.0f} ({100 * found['low']:.0f}-{100 * found['high']:.0f})"
