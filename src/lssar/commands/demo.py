"""`lssar demo`: two released models look for a key in a text much longer than any that they were trained on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lssar.commands.common import Progress, console, say_where, show_length_table, show_table
from lssar.records import command_line, environment, write_file, write_json

if TYPE_CHECKING:
    from lssar.runs import Run

MODELS = Path(__file__).parents[3] / "models"
"""In a checkout; the wheel has no models."""
NAMES = ("tiny-softmax", "tiny-long")
PAGE_TOKENS = 2048
"""Length in tokens of the text that the attention page shows."""


@dataclass
class Demo:
    """Hide a key in a text far longer than the training length, and ask a softmax model and a long reader for it.

    Both models have 0.8M parameters and were trained on the same bytes at length 128. Nothing is trained or downloaded.
    """

    models: Path = MODELS
    """Folder with the released models tiny-softmax and tiny-long."""
    multiples: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    """Lengths of the text, as multiples of the training length."""
    samples: int = 1
    """Texts for each length and depth of the key."""
    pieces: int = 3
    """Held-out chunks of the longest length for the loss."""
    seed: int = 0
    """Seed of the texts and keys."""
    out: Path = Path("out/demo")
    """Folder for demo.json, the figures, report.html and attention.html; earlier ones there are replaced."""

    def run(self) -> None:
        from lssar.data.folder import DataFolder, write_stdlib
        from lssar.locks import hold
        from lssar.runs import Run

        began = time.monotonic()
        for name in NAMES:
            if not (self.models / name / "export.json").is_file():
                raise FileNotFoundError(
                    f"{self.models / name} is no released model; run this in a checkout of the repository, or give "
                    "--models FOLDER"
                )
        runs = [Run.open(self.models / name, "cpu") for name in NAMES]
        with hold(self.out / "data", "writing data"):
            write_stdlib(self.out / "data")
        data = DataFolder(self.out / "data", runs[0].recipe.vocab_size)
        longest = runs[0].recipe.length * max(self.multiples)
        console.print(
            f"Two models of 0.8M parameters, trained on windows of {runs[0].recipe.length} bytes. A key is hidden in "
            f"up to {longest:,} bytes of Python source that neither has seen, and asked for at the end.",
            highlight=False,
        )
        arms, curves, diagnostics = [], [], []
        for run in runs:
            model = run.model()
            arms.append(self._retrieval(run, model, data))
            curves.append(self._length(run, model, data))
            diagnostics.append(self._diagnostics(run, model, data))
        show_found(arms)
        show_length_table(curves)
        files = self._write(runs, data, arms, curves, diagnostics)
        for run, arm in zip(runs, arms):
            console.print(outcome(arm), highlight=False)
            if run.step < run.recipe.steps:
                console.print(
                    f"note: {arm['label']} was stopped at step {run.step:,} of {run.recipe.steps:,}; the "
                    "comparison is not fair until it is trained to the end (python models/make.py tiny)",
                    highlight=False,
                )
        say_where(files)
        console.print(f"finished in {time.monotonic() - began:.0f} s; open report.html and attention.html in a browser")

    def _retrieval(self, run: Run, model: Any, data: Any) -> dict[str, Any]:
        """Answers by length and depth, in the form of `lssar eval retrieval`."""
        from lssar.data.stream import TokenStream
        from lssar.data.tasks import TaskMaker, background_of
        from lssar.evaluation.retrieval import evaluate_retrieval

        text = background_of(TokenStream(data.held_out_shards()), data.eot)
        maker = TaskMaker(run.tokenizer, text, passkey_in_background=True)
        rows = []
        with Progress(f"{run.folder.name}: looking for the key", len(self.multiples)) as bar:
            for multiple in self.multiples:
                length = run.recipe.length * multiple
                rows.append(evaluate_retrieval(model, maker, "passkey", length, samples=self.samples, seed=self.seed))
                bar.advance()
        about = {"run": run.folder.name, "step": run.step, "ntk": "off", "window": None, "label": run.folder.name}
        return about | self._about(run) | {"rows": rows}

    def _about(self, run: Run) -> dict[str, Any]:
        return {
            "attention": run.recipe.mechanism, "train_length": run.recipe.length, "recipe": run.recipe.to_dict(),
            "command": command_line(), "environment": environment(),
        }  # fmt: skip

    def _length(self, run: Run, model: Any, data: Any) -> dict[str, Any]:
        from lssar.evaluation.length import evaluate_length, held_out_documents, pieces_of

        lengths = [run.recipe.length * multiple for multiple in self.multiples]
        documents = held_out_documents(data.path, run.recipe.vocab_size, max(lengths) + 1)
        pieces = pieces_of(documents, max(lengths), self.pieces)
        with Progress(f"{run.folder.name}: loss by length", len(lengths) * len(pieces)) as bar:
            curve = evaluate_length(model, pieces, lengths, report=bar.advance)
        return {"run": run.folder.name, "label": run.folder.name, "step": run.step, **self._about(run), **curve}

    def _diagnostics(self, run: Run, model: Any, data: Any) -> dict[str, Any]:
        import torch

        from lssar.evaluation.diagnostics import diagnose
        from lssar.evaluation.length import held_out_documents, pieces_of

        lengths = [run.recipe.length * multiple for multiple in self.multiples[:3]]
        documents = held_out_documents(data.path, run.recipe.vocab_size, max(lengths) + 1)
        ids = torch.stack([piece[:-1] for piece in pieces_of(documents, max(lengths), 1)])
        about = {"run": run.folder.name, "step": run.step, "attention": run.recipe.mechanism}
        return diagnose(model, ids, lengths, rows=4) | about

    def _write(
        self, runs: list[Run], data: Any, arms: list[dict[str, Any]], curves: list[dict[str, Any]],
        diagnostics: list[dict[str, Any]],
    ) -> list[Path]:  # fmt: skip
        """JSON, figures, and the two pages; those need the extras `plots` and `report`."""
        from lssar.plots import plot_length, plot_retrieval
        from lssar.report.collect import collect
        from lssar.report.report import report_html

        about = {"command": command_line(), "environment": environment()}
        length = write_json(self.out / "length.json", about | {"curves": curves}, overwrite=True)
        found = write_json(self.out / "retrieval.json", about | {"arms": arms}, overwrite=True)
        rows = [
            write_json(self.out / f"diagnose-{result['run']}.json", about | result, overwrite=True)
            for result in diagnostics
        ]
        figures = [
            plot_length({"curves": curves}, self.out / "length.png", overwrite=True),
            plot_retrieval({"arms": arms}, self.out / "retrieval.png", overwrite=True),
        ]
        trained = [file for run in runs for file in [run.folder / "evaluation" / "training.json"] if file.is_file()]
        page = report_html(collect([*trained, length, found, *rows]), "Train short, read long: the demo")
        report = write_file(self.out / "report.html", lambda p: p.write_text(page, encoding="utf-8"), overwrite=True)
        return [length, found, *figures, report, self._attention_page(runs, data)]

    def _attention_page(self, runs: list[Run], data: Any) -> Path:
        """What the last tokens of a text with a hidden key attend to, in both models."""
        import numpy as np

        from lssar.data.stream import TokenStream
        from lssar.data.tasks import TaskMaker, background_of
        from lssar.report.explorer import Subject, write_explorer

        tokenizer = runs[0].tokenizer
        text = background_of(TokenStream(data.held_out_shards()), data.eot)
        maker = TaskMaker(tokenizer, text, passkey_in_background=True)
        sample = maker.make("passkey", np.random.default_rng(self.seed), PAGE_TOKENS, [0.2])
        query = sample.queries[0]
        content = tokenizer.decode(np.concatenate([sample.context[1:], query.prompt, query.answer]))
        subjects = [Subject(run.folder.name, run.model(), tokenizer) for run in runs[::-1]]
        with console.status("computing attention"):
            return write_explorer(
                subjects, content, self.out / "attention.html", title="A key hidden in Python source",
                tokens=PAGE_TOKENS, overwrite=True,
            )  # fmt: skip


def show_found(arms: list[dict[str, Any]]) -> None:
    lengths = [f"{row['length']:,} ({row['length'] // arms[0]['train_length']}x)" for row in arms[0]["rows"]]
    rows = [[arm["label"], *(f"{r['greedy']['right']} of {r['greedy']['of']}" for r in arm["rows"])] for arm in arms]
    title = "Keys found in Python source, by length of the text in bytes (multiple of the training length)"
    show_table(["model", *lengths], rows, title)


def outcome(arm: dict[str, Any]) -> str:
    """One line: how far the model finds the key."""
    far = [row["length"] // arm["train_length"] for row in arm["rows"] if row["greedy"]["rate"] >= 0.5]
    last = arm["rows"][-1]
    times = last["length"] // arm["train_length"]
    found = f"{last['greedy']['right']} of {last['greedy']['of']} keys at {times}x"
    reach = f"finds most keys up to {max(far)}x its training length" if far else "finds few keys at any length"
    return f"{arm['label']}: {reach}; {found}"
