"""`lssar demo-train`: train short, evaluate long, on any machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lssar.commands.common import Progress, TrainingProgress, console, say_where, show_length_table
from lssar.records import command_line, environment, write_json


@dataclass
class DemoTrain:
    """Train small models at a short length, then evaluate them on held-out text up to 16 times as long."""

    attention: list[str] = field(default_factory=lambda: ["softmax", "lssar", "cosine_softmax"])
    """Mechanisms to compare; cosine_softmax is the control: LSSA's scores under plain softmax."""
    steps: int = 500
    """Training steps of 2,048 bytes each, the same for every mechanism."""
    length: int = 128
    """Training length, in bytes."""
    multiples: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Lengths to evaluate, as multiples of the training length."""
    size: str = "0.8m"
    """Model size."""
    heads: int | None = None
    """Number of heads, if not the one of the size. Small heads make the loss of cosine mechanisms rise with length."""
    text: Path | None = None
    """A text file or folder of your own in place of Python's standard library."""
    pieces: int = 24
    """Held-out chunks of the longest length."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    out: Path = Path("out/demo")
    """Folder for the runs, demo.json, demo.png and demo.svg; finished runs there are reused, figures are replaced."""

    def run(self) -> None:
        from lssar.evaluation.length import evaluate_length, held_out_documents, pieces_of
        from lssar.plots import plot_length
        from lssar.runs import Run
        from lssar.training import recipe, train

        data = {} if self.text is None else {"data": str(self._shards(self.text))}
        console.print(
            f"{len(self.attention)} models of {self.size} parameters, {self.steps} steps of 2,048 bytes at length "
            f"{self.length}; then held-out text in pieces of up to {max(self.multiples)} times that."
        )
        curves: list[dict[str, Any]] = []
        for name in self.attention:
            settings = recipe(
                "tiny-cpu", attention=name, size=self.size, steps=self.steps, length=self.length,
                micro_batch=max(1, 2048 // self.length), seed=self.seed, heads=self.heads, **data,
            )  # fmt: skip
            heads = "" if self.heads is None else f"-heads{self.heads}"
            folder = self.out / "runs" / f"{name}-{self.size}{heads}-{self.length}-{self.steps}-seed{self.seed}"
            with TrainingProgress(f"training {name}", self.steps) as line:
                if train(settings, folder, report=line.report)["step"] < self.steps:
                    raise KeyboardInterrupt  # what is trained is kept; the same command resumes
            run = Run.open(folder)
            lengths = [self.length * multiple for multiple in self.multiples]
            documents = held_out_documents(run.data.path, run.recipe.vocab_size, max(lengths) + 1)
            pieces = pieces_of(documents, max(lengths), self.pieces)
            with Progress(f"evaluating {name}", len(lengths) * len(pieces)) as bar:
                curve = evaluate_length(run.model(), pieces, lengths, report=bar.advance)
            about = {"run": folder.name, "label": name, "attention": name, "step": run.step}
            curves.append({**about, "train_length": self.length, "recipe": settings.to_dict(), **curve})
        show_length_table(curves)
        for curve in curves:
            console.print(verdict(curve), highlight=False)
        result = {"command": command_line(), "environment": environment(), "curves": curves}
        files = [write_json(self.out / "demo.json", result, overwrite=True)]
        files += [plot_length(result, self.out / f"demo.{suffix}", overwrite=True) for suffix in ("png", "svg")]
        say_where(files)

    def _shards(self, text: Path) -> Path:
        from lssar.data.prepare import Settings, prepare
        from lssar.data.tokenizers import load_tokenizer

        if not text.exists():
            raise FileNotFoundError(f"{text} does not exist")
        folder = self.out / "data"
        settings = Settings(name="text", sources=[str(text)], val_share=0.1)
        prepare(settings, load_tokenizer("bytes"), folder, workers=1, overwrite=True)
        return folder


def verdict(curve: dict[str, Any]) -> str:
    """One line that sums up the results."""
    first, last = curve["by_length"][0], curve["by_length"][-1]
    change = last["loss"] - first["loss"]
    multiple = last["length"] // first["length"]
    word = "rises" if change > 0.1 else "falls" if change < -0.1 else "stays"
    return (
        f"{curve['label']}: loss {word}: {first['loss']:.3f} at 1x, {last['loss']:.3f} at {multiple}x ({change:+.3f})"
    )
