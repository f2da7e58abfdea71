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

import tyro

from lssar.commands.common import (
    Progress,
    UsageError,
    check_given,
    find_or_add_arm,
    open_results,
    print_csv,
    print_json,
    say,
    say_where,
    show_table,
)
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
from lssar.records import warn, write_json

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass
class Downstream:
    """Zero-shot benchmarks for runs and Hugging Face folders side by side, with standard errors and chance.

    Results are written after every task: the same command resumes, and a command with other models or tasks and the
    same --out adds to them."""

    models: tyro.conf.Positional[list[Path]]
    """Run folders, or folders that transformers can load (lm-eval is needed for these)."""
    data: Path | None = None
    """Folder with NAME.jsonl or NAME.jsonl.xz; without it lm-eval downloads its tasks by their own names."""
    tasks: list[str] = field(default_factory=list)
    """Names of tasks, as lm-eval has them; all that have a file in --data, if not given."""
    ruler: list[int] = field(default_factory=list)
    """Lengths at which to run RULER's needle tasks too; these are generated, and need lm-eval."""
    limit: int | None = None
    """At most this many documents of a task."""
    max_length: int | None = None
    """Context in tokens; the training length, if not given. Longer inputs lose their beginning."""
    ntk: Literal["off", "length"] = "off"
    """Rotary base as trained, or scaled with the length (NTK-aware)."""
    window: int | None = None
    """Evaluate the runs with a sliding window of this many tokens."""
    tokenizer: str | None = None
    """Tokenizer of the runs: bytes, gpt2, or a file; that of the run's data, if not given."""
    harness: Literal["auto", "lm-eval", "builtin"] = "auto"
    """auto: lm-eval where it is installed, otherwise the built-in harness, which uses the same prompts and metrics."""
    batch_tokens: int | None = None
    """Tokens in one forward pass: 262,144 on a GPU, 16,384 on a CPU, if not given."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    out: Path = Path("out/downstream")
    """Path without suffix for the .json."""
    overwrite: bool = False
    """Start over where there are results with other settings."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    csv: bool = False
    """Print one line of CSV for each model, task and metric instead of a table."""

    def run(self) -> None:
        harness = self._harness()
        if harness == "lm-eval" and self.data is not None:
            for name in OFFLINE:  # before anything of Hugging Face's is imported
                os.environ.setdefault(name, "1")
        check_given(self.models, "run or model folders")
        tasks = self._tasks()
        result = open_results(self._json, {"limit": self.limit}, self.overwrite)
        failed: list[str] = []
        for folder in self.models:
            model = _Model(self, folder, harness)
            failed += self._evaluate(model, model.arm(result), tasks, result)
        files = [write_json(self._json, result, overwrite=True)]
        if self.json:
            print_json(result)
        elif self.csv:
            print_csv([row for arm in result["arms"] for row in csv_rows(arm)])
        elif any(arm["tasks"] for arm in result["arms"]):
            show_table(*table_of(result), "Zero-shot accuracy in %, and perplexity", keys=2)
            say("+- is one standard error; * is less than two of them above chance, or above one answer for all.")
        say_where(files, self.json or self.csv)
        if failed:
            raise ValueError(f"without {', '.join(failed)}: see the warnings above")

    def _evaluate(self, model: _Model, arm: dict[str, Any], tasks: list[str], result: dict[str, Any]) -> list[str]:
        """Run what is missing; returns the tasks that could not be run, each of which is warned about."""
        failed = []
        todo = [task for task in self._all(tasks) if task not in arm["tasks"]]
        with Progress(arm["label"], len(todo)) as bar:
            for number, task in enumerate(todo):
                bar.update(number, label=f"{arm['label']}: {task}")
                start = time.perf_counter()
                try:
                    row = model.measure(task)
                except (ValueError, OSError, AssertionError) as error:  # lm-eval asserts what its tasks need
                    warn(f"{task} is left out: {error}")
                    failed.append(task)
                    continue
                if truncated := row.get("truncated"):
                    warn(
                        f"{task}: {truncated} answers are longer than the context of {model.max_length} tokens; only "
                        "their last tokens are scored. --max-length N sets a longer context"
                    )
                arm["tasks"][task] = row | {"seconds": round(time.perf_counter() - start, 3)}
                write_json(self._json, result, overwrite=True)
                metrics = ", ".join(f"{metric} {shown(value, metric)}" for metric, value in row["metrics"].items())
                bar.update(number + 1, metrics)
        return failed

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
                raise UsageError("give --data FOLDER with NAME.jsonl files; only lm-eval downloads its tasks")
            if self.ruler:
                raise UsageError("--ruler needs lm-eval: pip install 'lssar[eval]'")
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
    """One model and the settings of its evaluation."""

    def __init__(self, command: Downstream, folder: Path, harness: str) -> None:
        self.command, self.folder, self.harness = command, folder, harness
        self.is_run = (folder / "checkpoints").is_dir()
        self.run: Any = None
        self.max_length: Any = command.max_length
        if self.is_run:
            from lssar.data.tokenizers import load_tokenizer
            from lssar.runs import Run

            self.run = run = Run.open(folder, command.device)
            self.model, self.dtype = run.model(), run.dtype
            self.tokenizer = load_tokenizer(command.tokenizer) if command.tokenizer else run.tokenizer
            self.model.ntk = command.ntk
            self.model.window = command.window if command.window is not None else self.model.window
            self.max_length = command.max_length or run.recipe.length
            self.batch_tokens = command.batch_tokens or run.batch_tokens
        elif not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} is neither a run folder nor a Hugging Face model: it has no config.json")
        elif harness != "lm-eval":
            raise ValueError(f"{folder} is a Hugging Face folder, which needs --harness lm-eval")
        elif command.ntk != "off" or command.window is not None:
            raise UsageError("--ntk and --window are for runs; a Hugging Face folder is evaluated as its config says")
        self._lm: Any = None

    @property
    def lm(self) -> Any:
        from lssar.hf import lm_eval as ours
        from lssar.runs import pick_device

        if self._lm is None:
            if self.is_run:
                self._lm = ours.LssarLM(
                    self.model, self.tokenizer, self.max_length, self.batch_tokens, str(self.run.device), self.dtype,
                    self.command.ntk, self.command.window,
                )  # fmt: skip
            else:
                self._lm = ours.huggingface_lm(self.folder, self.max_length, str(pick_device(self.command.device)))
        return self._lm

    def arm(self, result: dict[str, Any]) -> dict[str, Any]:
        c = self.command
        harness = self.harness
        if harness == "lm-eval":
            from lssar.hf.lm_eval import version

            harness = f"lm-eval {version()}"
        identity: dict[str, Any] = {"model": self.folder.name, "max_length": self.max_length, "harness": harness}
        about: dict[str, Any] = {"label": self.folder.name, "tasks": {}}
        if self.is_run:
            recipe = self.run.recipe
            window = c.window if c.window is not None else recipe.window
            identity |= {"step": self.run.step, "ntk": c.ntk, "window": window}
            about |= {"attention": recipe.mechanism, "recipe": recipe.to_dict()}
        return find_or_add_arm(result, identity, about)

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
        about: dict[str, Any] = {"file": find_file(task, c.data).name}
        if self.harness == "builtin":
            return about | evaluate_benchmark(
                self.model, self.tokenizer, task, documents, self.max_length, self.batch_tokens, self.dtype
            )
        from lssar.hf.lm_eval import metrics_of, run_tasks, write_tasks

        with tempfile.TemporaryDirectory() as folder:
            found = run_tasks(self.lm, [task], write_tasks({task: documents}, Path(folder)))
        if truncated := getattr(self.lm, "truncated", 0):
            about["truncated"] = truncated
        questions = [benchmark(task).question(document) for document in documents]
        return about | {"documents": len(documents), **chance(questions), "metrics": metrics_of(found, task)}


def csv_rows(arm: dict[str, Any]) -> list[dict[str, Any]]:
    about = {key: arm[key] for key in ("model", "label", "max_length", "harness")}
    return [
        about | {"task": task, "documents": row["documents"], "metric": metric, **value, "chance": row.get("chance")}
        for task, row in arm["tasks"].items()
        for metric, value in row["metrics"].items()
    ]
