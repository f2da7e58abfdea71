"""`lssar eval retrieval`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from lssar.commands.common import (
    Progress,
    UsageError,
    check_given,
    check_positive,
    find_or_add_arm,
    open_results,
    print_csv,
    print_json,
    say,
    say_where,
    show_table,
)
from lssar.data.tasks import TASKS
from lssar.evaluation.retrieval import DEPTHS
from lssar.records import write_json

Rule = Literal["greedy", "choice"]


@dataclass
class Retrieval:
    """Passkey, needles in held-out text, associative recall and selective copy, by length and depth.

    Results are written after every task and length: the same command resumes, and a command with other runs, lengths or
    tasks and the same --out adds to them."""

    runs: tyro.conf.Positional[list[Path]]
    """Run folders."""
    tasks: list[str] = field(default_factory=list)
    """passkey, needles, recall, copy. Default: all; with --protocol long those that the run was trained on."""
    multiples: list[int] = field(default_factory=list)
    """Lengths, as multiples of the training length. Default: 1 2 4 8 16 32 64; with --protocol long 1 4 16 64 512."""
    protocol: Literal["auto", "short", "long"] = "auto"
    """long: at least 100 questions at each length, without wrong answers to compare with. auto: long if the first run
    has a mixed layout."""
    samples: int = 16
    """Number of contexts at each length (for passkeys, at each length and depth); with --protocol short."""
    depths: list[float] = field(default_factory=lambda: list(DEPTHS))
    """Positions of passkeys and needles (0: start of the context, 1: its end); with --protocol short."""
    ntk: Literal["off", "length"] = "off"
    """Rotary base as trained, or scaled with the length (NTK-aware)."""
    window: int | None = None
    """Evaluate the runs with a sliding window of this many tokens."""
    data: Path | None = None
    """Folder of shards whose held-out documents the needles are hidden in; the run's own, if not given."""
    tokenizer: str | None = None
    """bytes, gpt2, or a file; that of the run's data, if not given."""
    seed: int = 0
    """Seed of the contexts."""
    batch_tokens: int | None = None
    """Tokens in one forward pass: 524,288 on a GPU, 16,384 on a CPU, if not given."""
    stop_after: float | None = None
    """Seconds after which no further task and length is started; the same command resumes."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    out: Path = Path("out/retrieval")
    """Path without suffix for the .json, .png and .svg."""
    overwrite: bool = False
    """Start over where there are results with other settings."""
    json: bool = False
    """Print the results as JSON instead of tables."""
    csv: bool = False
    """Print one line of CSV for each run, task and length instead of tables."""

    def run(self) -> None:
        from lssar.plots import plot_retrieval
        from lssar.runs import Run

        self._choose_protocol()
        self._check()
        settings: dict[str, Any] = {"samples": self.samples, "depths": self.depths, "seed": self.seed}
        if self.protocol == "long":
            settings = {"protocol": "long", "seed": self.seed}
        result = open_results(self._json, settings, self.overwrite)
        began = time.monotonic()
        for run in [Run.open(folder, self.device) for folder in self.runs]:
            arm = self._arm(result, run)
            self._evaluate(run, arm, result, began)
        if not any(arm["rows"] for arm in result["arms"]):
            raise ValueError("--stop-after is too short: no task was finished at any length")
        write_json(self._json, result, overwrite=True)
        rules: tuple[Rule, ...] = ("greedy", "choice") if self.protocol == "short" else ("greedy",)
        if self.json:
            print_json(result)
        elif self.csv:
            print_csv([row for arm in result["arms"] for row in csv_rows(arm)])
        else:
            for rule in rules:
                show_retrieval_table(result, rule)
            say("In brackets the 95% Wilson interval. " + CHANCE)
        files = [self._json]
        for suffix in (".png", ".svg"):
            files.append(plot_retrieval(result, self.out.with_suffix(suffix), overwrite=True))
        say_where(files, self.json or self.csv)
        missing = sum(1 for arm in result["arms"] for _ in self._todo(arm, arm["train_length"]))
        if missing:
            print(f"{missing} combinations of task and length are left; the same command resumes", file=sys.stderr)

    def _evaluate(self, run: Any, arm: dict[str, Any], result: dict[str, Any], began: float) -> None:
        todo = list(self._todo(arm, run.recipe.length))
        if not todo:
            return
        model, maker = run.model(), self._maker(run)
        with Progress(arm["label"], len(todo)) as bar:
            for number, (task, length) in enumerate(todo):
                if self.stop_after is not None and time.monotonic() - began > self.stop_after:
                    return
                label = f"{arm['label']}: {task}, {length:,} tokens"
                bar.update(number, label=label)
                arm["rows"].append(row := self._measure(model, maker, task, length, run))
                write_json(self._json, result, overwrite=True)
                bar.update(number + 1, found(row), label)

    @property
    def _json(self) -> Path:
        return self.out.with_suffix(".json")

    def _choose_protocol(self) -> None:
        """Fill in what was left to the protocol."""
        from lssar.evaluation.long import is_long_reader, retrieval_multiples
        from lssar.runs import Run

        recipe = Run.open(self.runs[0], "cpu").recipe if self.runs else None
        if self.protocol == "auto":
            self.protocol = "long" if recipe is not None and is_long_reader(recipe.model()) else "short"
        if self.protocol == "long":
            trained = [task for task in (recipe.retrieval_tasks if recipe else ()) if task != "copy"]
            self.tasks = self.tasks or trained or ["passkey", "needles", "recall"]
            self.multiples = self.multiples or retrieval_multiples()
        self.tasks = self.tasks or list(TASKS)
        self.multiples = self.multiples or [1, 2, 4, 8, 16, 32, 64]

    def _check(self) -> None:
        check_given(self.runs, "run folders")
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise UsageError(f"unknown retrieval task {unknown[0]!r}; known: {', '.join(TASKS)}")
        check_positive(
            multiples=self.multiples, samples=self.samples, batch_tokens=self.batch_tokens, window=self.window
        )
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(f"depths must lie in 0 to 1; got {self.depths}")

    def _arm(self, result: dict[str, Any], run: Any) -> dict[str, Any]:
        recipe = run.recipe
        window = self.window if self.window is not None else recipe.window
        identity = {"run": run.folder.name, "step": run.step, "ntk": self.ntk, "window": window}
        about = {
            "label": run.name, "attention": recipe.mechanism, "train_length": recipe.length,
            "recipe": recipe.to_dict(), "rows": [],
        }  # fmt: skip
        return find_or_add_arm(result, identity, about)

    def _todo(self, arm: dict[str, Any], train_length: int) -> Iterator[tuple[str, int]]:
        done = {(row["task"], row["length"]) for row in arm["rows"]}
        for multiple in sorted(self.multiples):
            for task in self.tasks:
                if (task, train_length * multiple) not in done:
                    yield task, train_length * multiple

    def _maker(self, run: Any) -> Any:
        from lssar.data.stream import TokenStream
        from lssar.data.tasks import TaskMaker, background_of
        from lssar.data.tokenizers import load_tokenizer

        held_out = run.held_out(self.data)
        if self.tokenizer:
            tokenizer = load_tokenizer(self.tokenizer)
        else:
            tokenizer = run.tokenizer if run.has_tokenizer else held_out.tokenizer()
        text = None
        if "needles" in self.tasks:
            text = background_of(TokenStream(held_out.held_out_shards()), tokenizer.eot)
        return TaskMaker(tokenizer, text)

    def _measure(self, model: Any, maker: Any, task: str, length: int, run: Any) -> dict[str, Any]:
        from lssar.evaluation.long import retrieval_settings
        from lssar.evaluation.retrieval import evaluate_retrieval
        from lssar.model import PREFILL_CHUNK

        on_gpu = run.device.type == "cuda"
        batch_tokens = self.batch_tokens or (524_288 if on_gpu else 16_384)
        size: dict[str, Any] = {"samples": self.samples, "depths": self.depths}
        if self.protocol == "long":
            size = retrieval_settings(maker, task, model.config.train_length) | {"chunk": PREFILL_CHUNK}
            if on_gpu:
                size["chunk"] = None  # whole contexts, which is fastest where there is memory
        start = time.perf_counter()
        row = evaluate_retrieval(
            model, maker, task, length, **size, seed=self.seed, ntk=self.ntk, window=self.window,
            batch_tokens=batch_tokens, dtype=run.dtype,
        )  # fmt: skip
        return row | {"seconds": round(time.perf_counter() - start, 3)}


def found(row: dict[str, Any]) -> str:
    """The result of one task and length in a few words."""
    choice = f", most likely {100 * row['choice']['rate']:.0f}%" if "choice" in row else ""
    return f"decoded correctly {100 * row['greedy']['rate']:.0f}%{choice} ({row['seconds']:.1f} s)"


def csv_rows(arm: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for row in arm["rows"]:
        flat = {key: arm[key] for key in ("run", "label", "step", "ntk", "window", "train_length")}
        flat |= {key: row[key] for key in ("task", "length")}
        for rule in ("greedy", "choice"):
            flat |= {f"{rule}_{key}": row.get(rule, {}).get(key) for key in ("rate", "low", "high")}
        rows.append(flat | {"chance": row.get("chance")})
    return rows


CHANCE = "Chance: about 0 for decoding; one in the number of offered answers for the most likely one."


def show_retrieval_table(result: dict[str, Any], rule: Rule) -> None:
    what = {"greedy": "Decoded correctly, %", "choice": "Correct answer most likely, %"}[rule]
    multiples = sorted({row["length"] // arm["train_length"] for arm in result["arms"] for row in arm["rows"]})
    lines = []
    for task in dict.fromkeys(row["task"] for arm in result["arms"] for row in arm["rows"]):
        for arm in result["arms"]:
            rows = {row["length"] // arm["train_length"]: row for row in arm["rows"] if row["task"] == task}
            if not any(rule in row for row in rows.values()):
                continue
            chance = next((f" (chance {100 * row['chance']:.0f})" for row in rows.values() if "chance" in row), "")
            name = task + (chance if rule == "choice" else "")
            lines.append([name, arm["label"], *(_cell(rows.get(m), rule) for m in multiples)])
    head = ["task", "run", *(f"{m}x" for m in multiples)]
    show_table(head, lines, f"{what}, by context length as a multiple of the training length", keys=2)


def _cell(row: dict[str, Any] | None, rule: Rule) -> str:
    if row is None or rule not in row:
        return "-"
    found = row[rule]
    return f"{100 * found['rate']:.0f} ({100 * found['low']:.0f}-{100 * found['high']:.0f})"
