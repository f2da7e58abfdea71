"""Make the released models: train, export, evaluate the exported weights, write the model card.

    python models/make.py tiny                             # models/tiny-long and models/tiny-softmax
    python models/make.py books-6m --texts DATA            # models/books-6m; DATA holds books as GPT-2 token ids
    python models/make.py card models/tiny-long            # the card again, from the JSON files in the folder

Every step is skipped if its result exists, so the same command continues after an interruption. `--limit SECONDS`
stops training in time. Runs the source tree it lies in; needs torch, tyro, rich, tokenizers and transformers.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lssar.tables import markdown_table  # noqa: E402 (the package need not be installed)

EOT = 50256
SAMPLE_CHARACTERS = 250_000
"""Of every fourth book, to train the tokenizer on."""


@dataclass(frozen=True)
class Release:
    """A released model: how it is trained and evaluated, and what its card says that no JSON file knows."""

    name: str
    train: tuple[str, ...]
    """Words after `lssar train`."""
    title: str
    data: str
    cannot: str
    tasks: tuple[str, ...]
    multiples: tuple[int, ...]
    samples: int
    pieces: int

    @property
    def command(self) -> str:
        return " ".join(("lssar train", *self.train))


TINY_DATA = (
    "The source of Python's standard library (16 MB of bytes, a tenth of the files held out; PSF License), and in 30% "
    "of the windows synthetic documents that ask for a passkey or for numbered words."
)
TINY_CANNOT = (
    "It has 0.8M parameters and was trained on 6M bytes: it writes text that looks like Python and means nothing. It "
    "finds a passkey; asked for one of several facts (needles) it mostly names another one. It knows no natural "
    "language and no facts, and is for demonstrations and tests only."
)
CONTROL_CANNOT = (
    "It has 0.8M parameters: it writes text that looks like Python and means nothing. In this budget it has hardly "
    "learned to copy a passkey even at its training length, so the demo compares what both learn in the same time, not "
    "only how far they extrapolate."
)
TINY = {"tasks": ("passkey", "needles"), "multiples": (1, 4, 16, 64, 512), "samples": 8, "pieces": 16}
RELEASES = (
    Release(
        "tiny-long", ("long-tiny", "--attention", "lssa+lssar", "--p-schedule", "3:0.4,7:0.7,15"),
        "a long reader of 0.8M parameters, on bytes", TINY_DATA, TINY_CANNOT, **TINY,
    ),
    Release(
        "tiny-softmax", ("long-tiny", "--attention", "softmax", "--layout", "uniform", "--p-schedule", "None"),
        "the softmax control of tiny-long: same size, data and seed", TINY_DATA, CONTROL_CANNOT, **TINY,
    ),
    Release(
        "books-6m", ("long-6m", "--data", "DATA"), "a long reader of 6.3M parameters, on English books",
        "393 public-domain and CC BY books (Project Gutenberg, Wright American Fiction, VWWP, ELTeC-eng; 40M GPT-2 "
        "tokens), in a byte-level BPE vocabulary of 4,096 trained on them; 42 other books are held out. In 25% of the "
        "windows synthetic documents ask for passkeys, needles in book text, or recall of pairs.",
        "It has 6.3M parameters: its sentences are mostly grammatical and its stories go nowhere. It knows no facts, "
        "follows no instructions, and repeats the views and language of books from before 1930. It answers the "
        "question forms that it was trained on, in their exact wording, and no others.",
        ("passkey", "needles", "recall"), (1, 4, 16, 64, 128, 512), 8, 16,
    ),
)  # fmt: skip


class Workshop:
    """Where things are made, and how much time is left."""

    def __init__(self, out: Path, work: Path, limit: float | None):
        self.out, self.work, self.limit, self.began = out, work, limit, time.monotonic()

    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - (time.monotonic() - self.began)

    def lssar(self, *words: str | Path) -> None:
        """Runs `lssar WORDS`; a failure ends the program with its status."""
        command = [sys.executable, "-m", "lssar.cli", *map(str, words)]
        paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        print("+ lssar", *words, flush=True)
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"})

    def make(self, release: Release, data: Path | None) -> bool:
        """Makes one release; False if time ran out before training ended."""
        run = self.work / "runs" / release.name
        words = [str(data) if word == "DATA" else word for word in release.train]
        if not finished(run):
            stop = [] if self.limit is None else ["--stop-after", f"{max(10.0, self.left() - 150):.0f}"]
            self.lssar("train", *words, "--out", run, *stop)
        if not finished(run):
            print("training is not finished: run the same command again", flush=True)
            return False
        folder = self.out / release.name
        if not folder.exists():
            self.lssar("export", run, folder, "--dtype", "bfloat16")
        released = as_run(folder, run, self.work / "released" / release.name)
        record_training(run, folder, release.command)
        self.evaluate(release, released, folder, data or run / "data")
        write_card(folder)
        return True

    def evaluate(self, release: Release, run: Path, folder: Path, data: Path) -> None:
        from lssar.evaluation.length import held_out_documents
        from lssar.training.recipes import read_recipe

        recipe = read_recipe(run)
        out = folder / "evaluation"
        # Loss to the longest multiple for which there is a held-out document.
        multiples = list(release.multiples)
        while len(multiples) > 1:
            try:
                held_out_documents(data, recipe.vocab_size, recipe.length * multiples[-1] + 1)
                break
            except ValueError:
                multiples.pop()
        if not (out / "length.json").exists():
            self.lssar(
                "eval", "length", run, "--multiples", *map(str, multiples), "--pieces", str(release.pieces), "--data",
                data, "--out", out / "length",
            )  # fmt: skip
        for task in release.tasks:
            # Five needles do not fit into windows of fewer than 256 bytes.
            lengths = [m for m in release.multiples if task != "needles" or recipe.length * m >= 256]
            stop = [] if self.limit is None else ["--stop-after", f"{max(5.0, self.left() - 60):.0f}"]
            self.lssar(
                "eval", "retrieval", run, "--tasks", task, "--multiples", *map(str, lengths), "--samples",
                str(release.samples), "--data", data, *stop, "--out", out / "retrieval",
            )  # fmt: skip
        if not (out / "diagnose.json").exists():
            self.lssar("diagnose", run, "--multiples", "1", "4", "16", "--data", data, "--out", out / "diagnose")
        for picture in (*out.glob("*.png"), *out.glob("*.svg")):
            picture.unlink()


def finished(run: Path) -> bool:
    from lssar.training.checkpoints import latest

    config = run / "config.json"
    if not config.exists() or (found := latest(run)) is None:
        return False
    return int(found.name.removeprefix("step-")) >= json.loads(config.read_text())["recipe"]["steps"]


def as_run(folder: Path, run: Path, out: Path) -> Path:
    """A run folder with the weights of the exported model, which are rounded: what is evaluated is what is released."""
    from safetensors.torch import load_file, save_file

    step = json.loads((folder / "export.json").read_text())["step"]
    checkpoint = out / "checkpoints" / f"step-{step:07d}"
    if not (checkpoint / "model.safetensors").exists():
        checkpoint.mkdir(parents=True, exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name.removeprefix("gpt."): value.float().contiguous() for name, value in weights.items()},
            checkpoint / "model.safetensors",
        )
        for name in ("config.json", "metrics.jsonl"):
            (out / name).write_text((run / name).read_text())
    return out


def record_training(run: Path, folder: Path, command: str) -> None:
    """The training curve and its provenance, in the exported folder."""
    from lssar.records import write_json
    from lssar.report.collect import thin
    from lssar.training.metrics import read_metrics, summarise

    rows = read_metrics(run)
    summary = {key: value for key, value in summarise(rows).items() if key != "curve"}
    record = {
        "run": folder.name, "command": command, "summary": summary, "training_curve": thin(rows, 200),
        "environment": json.loads((run / "config.json").read_text())["environment"],
    }  # fmt: skip
    write_json(folder / "evaluation" / "training.json", record, overwrite=True)


def prepare_books(texts: Path, work: Path, workshop: Workshop) -> Path:
    """GPT-2 ids (train*.u16.xz, val.u16.xz, gpt2.tiktoken) to shards of a small vocabulary."""
    from lssar.data.tokenizers import load_tokenizer

    data = work / "books-4k"
    if (data / "manifest.json").exists():
        return data
    gpt2 = load_tokenizer(texts / "gpt2.tiktoken")
    work.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[Path]] = {"train": [], "val": []}
    sample: list[str] = []
    for file in sorted(texts.glob("*.u16.xz")):
        split = "val" if file.name.startswith("val") else "train"
        ids = np.frombuffer(lzma.decompress(file.read_bytes()), "<u2")
        documents = [d for d in np.split(ids, np.flatnonzero(ids == EOT) + 1) if len(d) > 1]
        books = [gpt2.decode(document[document != EOT]) for document in documents]
        out = work / f"{file.name.split('.')[0]}.jsonl"
        out.write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
        files[split].append(out)
        if split == "train":
            sample += [book[:SAMPLE_CHARACTERS] for book in books[::4]]
        print(f"{file.name}: {len(books)} documents, {len(ids):,} GPT-2 ids", flush=True)
    tokenizer = work / "tokenizer.json"
    train_tokenizer(sample).save(str(tokenizer))
    workshop.lssar(
        "data", "prepare", *files["train"], "--val-sources", *files["val"], "--tokenizer", tokenizer, "--name",
        "books-4k", "--out", data,
    )  # fmt: skip
    return data


def train_tokenizer(texts: list[str], vocab: int = 4096) -> Any:
    """A byte-level BPE tokenizer. Digits are tokens of their own, so that all numbers of five digits are as long."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# The card


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "evaluation" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_card(folder: Path) -> None:
    """README.md of an exported model, every number from the JSON files beside it."""
    release = next(r for r in RELEASES if r.name == folder.name)
    export = json.loads((folder / "export.json").read_text())
    training, recipe = read(folder, "training"), export["recipe"]
    about = training["environment"]
    machine = about.get("gpu") or f"{about['cpu']}, {about['threads']} thread(s)"
    summary = training["summary"]
    powers = f"; powers `{recipe['p_schedule']}`" if recipe.get("p_schedule") else ""
    text = f"""---
library_name: lssar
pipeline_tag: text-generation
license: apache-2.0
---
# {release.name}: {release.title}

Layout `{recipe["layout"]}`, attention `{recipe["attention"]}`, trained at {recipe["length"]} tokens.
One of the [released models](../README.md) of [lssar](../../README.md).

```python
import lssar.hf  # lets transformers know the model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("models/{release.name}")
tokenizer = AutoTokenizer.from_pretrained("models/{release.name}")
```

## Training

- Data: {release.data}
- Command: `{release.command}`, then `python models/make.py` exports, evaluates and writes this card.
- {steps_text(summary["steps"], recipe["steps"])} of {recipe["batch_tokens"]:,} tokens ({summary["tokens"] / 1e6:.1f}M),
  {recipe["optimiser"]}, learning rate {recipe["lr"]:g}, seed {recipe["seed"]}{powers}.
- {machine}, torch {about["torch"]}, commit {about["commit"]}, {about["date"]};
  {summary["tokens_per_s"]:,.0f} tokens/s (median).
- Held-out loss at the end of training: {summary["val_loss"]:.3f} nats a token. Weights are released in bfloat16;
  all numbers below are of the rounded weights.

## Evaluation

{length_card(folder)}
{retrieval_card(folder)}
All results, with intervals: `evaluation/*.json`. To see them as a page: `lssar report models/{release.name}`.

## What it cannot do

{release.cannot} One seed; another seed or machine gives slightly other numbers.

## Licence

Weights and code: Apache-2.0.
"""
    (folder / "README.md").write_text(text)


def steps_text(done: int, planned: int) -> str:
    if done == planned:
        return f"{done:,} steps"
    return f"stopped at step {done:,} of {planned:,}, with the learning rate still above 0; steps"


def length_card(folder: Path) -> str:
    curves = read(folder, "length").get("curves", [])
    if not curves:
        return ""
    points = curves[0]["by_length"]
    times = [f"{p['length'] / curves[0]['train_length']:g}x" for p in points]
    about = (
        "Held-out loss, nats a token, of the same text cut into chunks of each length "
        f"({points[0]['pieces']} x {points[-1]['length']:,} tokens):"
    )
    return f"{about}\n\n{markdown_table(times, [[format(p['loss'], '.3f') for p in points]])}"


def retrieval_card(folder: Path) -> str:
    arms = read(folder, "retrieval").get("arms", [])
    if not arms:
        return ""
    rows, length = arms[0]["rows"], arms[0]["train_length"]
    times = sorted({row["length"] // length for row in rows})
    table = []
    for task in dict.fromkeys(row["task"] for row in rows):
        found = {row["length"] // length: row["greedy"] for row in rows if row["task"] == task}
        cells = [f"{found[m]['rate']:.2f} ({found[m]['of']})" if m in found else "-" for m in times]
        table.append([task, *cells])
    about = "Share of answers decoded correctly (number of questions):"
    return f"{about}\n\n{markdown_table(['task', *(f'{m}x' for m in times)], table)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["tiny", "books-6m", "card"])
    parser.add_argument("folders", type=Path, nargs="*", help="of `card`")
    parser.add_argument("--texts", type=Path, help="folder with train*.u16.xz, val.u16.xz, gpt2.tiktoken")
    parser.add_argument("--out", type=Path, default=ROOT / "models")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "models", help="runs and prepared data")
    parser.add_argument("--limit", type=float, help="seconds in all")
    arguments = parser.parse_args()
    if arguments.target == "card":
        for folder in arguments.folders:
            write_card(folder)
        return
    workshop = Workshop(arguments.out, arguments.work, arguments.limit)
    data = None
    if arguments.target == "books-6m":
        if arguments.texts is None:
            parser.error("books-6m needs --texts")
        data = prepare_books(arguments.texts, arguments.work, workshop)
    chosen = [r for r in RELEASES if r.name.startswith(arguments.target)]
    made = [workshop.make(release, data) for release in chosen]
    if not all(made):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
