"""`lssar eval downstream`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.table import Table

from lssar.commands.common import DEVICE, arm_label, begin_figures, console, progress, say_where
from lssar.evaluation.benchmarks import (
    BENCHMARKS,
    RULER,
    benchmark,
    chance,
    evaluate_benchmark,
    find_file,
    read_documents,
    shown,
    table_of,
)
from lssar.records import command_line, environment, write_json

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass
class Downstream:
    """Zero-shot benchmarks for runs and Hugging Face folders side by side, with standard errors and chance.

    The figures are written after every task; the same command goes on where it ended, and a command with other models
    or tasks and the same --out adds to what is there."""

    models: tyro.conf.Positional[list[Path]]
    """Run folders, or folders that transformers can load (lm-eval is needed for these)."""
    data: Path | None = None
    """Folder with NAME.jsonl or NAME.jsonl.xz; without it lm-eval downloads its tasks by their own names."""
    tasks: list[str] = field(default_factory=list)
    """lm-eval's names; those with a file in --data, if not given."""
    ruler: list[int] = field(default_factory=list)
    """Lengths at which to ask RULER's needle tasks too; these are generated, and need lm-eval."""
    limit: int | None = None
    """At most so many documents of a task."""
    max_length: int | None = None
    """Context in tokens; the training length, if not given. What is longer loses its beginning."""
    ntk: Literal["off", "length"] = "off"
    window: int | None = None
    tokenizer: str | None = None
    """Of runs: bytes, gpt2, or a file; that of the run's data, if not given."""
    harness: Literal["auto", "lm-eval", "builtin"] = "auto"
    """lm-eval where it is installed, or the built-in one, which asks the same and scores the same."""
    batch_tokens: int | None = None
    """Tokens at once: 262,144 on a GPU, 16,384 on a CPU, if not given."""
    device: str = DEVICE
    out: Path = Path("out/downstream")
    """Path without suffix for the .json."""
    overwrite: bool = False
    """Begin anew where there are figures of other settings."""

    def run(self) -> None:
        harness = self._harness()
        if harness == "lm-eval" and self.data is not None:
            for name in OFFLINE:  # before anything of Hugging Face's is imported
                os.environ.setdefault(name, "1")
        tasks = self._tasks()
        result = begin_figures(self._json, {"limit": self.limit}, self.overwrite)
        for folder in self.models:
            model = _Model(self, folder, harness)
            arm = model.arm(result)
            todo = [task for task in self._all(tasks) if task not in arm["tasks"]]
            with progress() as bar:
                line = bar.add_task(arm["label"], total=len(todo))
                for task in todo:
                    bar.update(line, description=f"{arm['label']}: {task}")
                    start = time.perf_counter()
                    row = model.measure(task)
                    arm["tasks"][task] = row | {"seconds": round(time.perf_counter() - start, 3)}
                    write_json(self._json, result, overwrite=True)
                    bar.advance(line)
                    if not bar.console.is_terminal:
                        _say(arm["label"], task, arm["tasks"][task])
        console.print(downstream_table(result))
        console.print("+- is one standard error; * is not two of them above chance, or above one answer for all.")
        say_where([write_json(self._json, result, overwrite=True)])

    @property
    def _json(self) -> Path:
        return self.out.with_suffix(".json")

    def _harness(self) -> str:
        there = importlib.util.find_spec("lm_eval") is not None
        if self.harness == "auto":
            chosen = "lm-eval" if there else "builtin"
        else:
            chosen = self.harness
        if chosen == "lm-eval" and not there:
            raise ImportError("--harness lm-eval needs lm-eval: pip install 'lssar[eval]', or --harness builtin")
        if chosen == "builtin":
            if self.data is None:
                raise ValueError("give --data FOLDER with NAME.jsonl files; only lm-eval downloads its tasks")
            if self.ruler:
                raise ValueError("--ruler needs lm-eval: pip install 'lssar[eval]'")
        return chosen

    def _tasks(self) -> list[str]:
        if self.data is None:
            return self.tasks or list(BENCHMARKS)
        if not self.data.is_dir():
            raise FileNotFoundError(f"no folder {str(self.data)!r} with benchmark files")
        if self.tasks:
            for name in self.tasks:
                find_file(name, self.data)
            return self.tasks
        there = [name for name in BENCHMARKS if any(self.data.glob(f"{name}*.jsonl*"))]
        if not there:
            raise FileNotFoundError(f"no benchmark file (such as hellaswag.jsonl) in {str(self.data)!r}")
        return there

    def _all(self, tasks: list[str]) -> Iterator[str]:
        yield from tasks
        for length in self.ruler:
            yield from (f"{name}_{length}" for name in RULER)


class _Model:
    """One model and how it is asked."""

    def __init__(self, command: Downstream, folder: Path, harness: str) -> None:
        self.command, self.folder, self.harness = command, folder, harness
        self.is_run = (folder / "checkpoints").is_dir()
        self.recipe: Any = None
        if self.is_run:
            from lssar.data.tokenizers import load_tokenizer
            from lssar.training.loop import load_run
            from lssar.training.sources import data_folder, tokenizer_of

            self.model, self.recipe, self.step = load_run(folder, command.device)
            given = command.tokenizer
            of_data = data_folder(self.recipe, folder)
            self.tokenizer = load_tokenizer(given) if given else tokenizer_of(of_data, self.recipe.vocab_size)
            self.model.ntk = command.ntk
            self.model.window = command.window if command.window is not None else self.model.window
            on_gpu = command.device.startswith("cuda")
            self.dtype = torch.bfloat16 if on_gpu and self.recipe.dtype == "bfloat16" else None
            self.max_length = command.max_length or self.recipe.length
            self.batch_tokens = command.batch_tokens or (262_144 if on_gpu else 16_384)
        elif not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} is no run folder, nor a model folder of Hugging Face's: no config.json")
        elif harness != "lm-eval":
            raise ValueError(f"{folder} is a Hugging Face folder, which needs --harness lm-eval")
        elif command.ntk != "off" or command.window is not None:
            raise ValueError("--ntk and --window are for runs; a Hugging Face folder is read as its config says")
        else:
            self.max_length = command.max_length
        self._lm: Any = None

    @property
    def lm(self) -> Any:
        from lssar.hf import lm_eval as ours

        if self._lm is None:
            if self.is_run:
                self._lm = ours.LssarLM(
                    self.model, self.tokenizer, self.max_length, self.batch_tokens, self.command.device, self.dtype,
                    self.command.ntk, self.command.window,
                )  # fmt: skip
            else:
                self._lm = ours.huggingface_lm(self.folder, self.max_length, self.command.device)
        return self._lm

    def arm(self, result: dict[str, Any]) -> dict[str, Any]:
        c = self.command
        harness = self.harness
        if harness == "lm-eval":
            from lssar.hf.lm_eval import version

            harness = f"lm-eval {version()}"
        identity: dict[str, Any] = {"model": self.folder.name, "max_length": self.max_length, "harness": harness}
        label, about = self.folder.name, {}
        if self.is_run:
            window = c.window if c.window is not None else self.recipe.window
            identity |= {"step": self.step, "ntk": c.ntk, "window": window}
            label = arm_label(self.recipe, c.ntk, c.window)
            about = {"attention": self.recipe.attention, "recipe": self.recipe.to_dict()}
        for arm in result["arms"]:
            if all(arm.get(key) == value for key, value in identity.items()):
                return arm
        arm = {
            **identity,
            "label": label,
            **about,
            "command": command_line(),
            "environment": environment(),
            "tasks": {},
        }
        result["arms"].append(arm)
        return arm

    def measure(self, task: str) -> dict[str, Any]:
        c = self.command
        name, _, length = task.rpartition("_")
        if name in RULER:
            from lssar.hf.lm_eval import metrics_of, run_ruler

            found = run_ruler(self.lm, name, int(length), c.limit or 100)
            return {"documents": c.limit or 100, "metrics": metrics_of(found, task)}
        if c.data is None:
            from lssar.hf.lm_eval import metrics_of, run_tasks

            found = run_tasks(self.lm, [task], limit=c.limit)
            return {"documents": found["n-samples"].get(task, {}).get("effective"), "metrics": metrics_of(found, task)}
        documents = read_documents(task, c.data, c.limit)
        about = {"file": find_file(task, c.data).name}
        if self.harness == "builtin":
            return about | evaluate_benchmark(
                self.model, self.tokenizer, task, documents, self.max_length, self.batch_tokens, self.dtype
            )
        from lssar.hf.lm_eval import metrics_of, run_tasks, write_tasks

        with tempfile.TemporaryDirectory() as folder:
            found = run_tasks(self.lm, [task], write_tasks({task: documents}, Path(folder)))
        questions = [benchmark(task).question(document) for document in documents]
        return about | {"documents": len(documents), **chance(questions), "metrics": metrics_of(found, task)}


def _say(label: str, task: str, row: dict[str, Any]) -> None:
    """A line for a log, where there is no bar."""
    found = ", ".join(f"{metric} {shown(value, metric)}" for metric, value in row["metrics"].items())
    print(f"{label}: {task}: {found} ({row['seconds']:.1f}s)", flush=True)


def downstream_table(result: dict[str, Any]) -> Table:
    heads, rows = table_of(result)
    table = Table(title="zero-shot, %; perplexity as it is")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table
