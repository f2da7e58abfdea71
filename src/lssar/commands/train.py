"""`lssar train RECIPE [flags]`, also under torchrun."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from lssar.commands.common import TrainingProgress, UsageError, console, field_docs, print_json, say
from lssar.runs import run_label
from lssar.training.metrics import Logger
from lssar.training.recipes import RECIPES, Recipe, read_recipe, refuse_ignored

SECTIONS = {"size": "model", "data": "data", "steps": "optimisation", "seed": "run"}
"""Groups of flags in `lssar train RECIPE --help`, by the field of `Recipe` that each begins with."""

NOT_IN_RECIPE = ("out", "stop_after", "log")
"""Flags of `lssar train` that are not part of the recipe."""


@dataclass(frozen=True)
class DryRun:
    """Flags of the dry run."""

    dry_run: bool = False
    """Print parameters, memory of a process, communication, expected speed and cost, and train nothing."""
    processes: int = 1
    """For --dry-run: number of processes, one for each card; --context-parallel of them share each sequence."""
    card: str = "h200"
    """For --dry-run: the card, h200, h100, a100, b200 or cpu."""
    price: float | None = None
    """For --dry-run: US dollars for an hour of one card; a typical price, if not given."""
    json: bool = False
    """Print the dry run as JSON."""


@dataclass
class Train:
    """Train a model from a recipe, or resume a run."""

    recipe: Recipe
    out: Path
    stop_after: float | None = None
    log: tuple[Logger, ...] = ()
    dry: DryRun = DryRun()

    @classmethod
    def parse(cls, arguments: list[str]) -> Train:
        """`RECIPE [flags]` or `RUN [flags]`: the first word gives the defaults of all flags."""
        if not arguments or arguments[0] in ("-h", "--help"):
            print(usage(), flush=True)
            sys.exit(0 if arguments else 2)
        name, *rest = arguments
        config = Path(name) / "config.json"
        if name in RECIPES:
            recipe, out = RECIPES[name], None
        elif config.exists():
            recipe, out = read_recipe(Path(name)), Path(name)
        elif name.startswith("-"):
            raise UsageError(f"`lssar train` needs a recipe ({', '.join(RECIPES)}) or a run folder before its flags")
        else:
            raise UsageError(f"{name!r} is neither a recipe ({', '.join(RECIPES)}) nor a run folder with a config.json")
        flags = tyro.cli(
            flags_for(recipe, out), prog=f"lssar train {name}", args=rest, description=cls.__doc__,
            config=(tyro.conf.OmitArgPrefixes,),
        )  # fmt: skip
        values = {key: value for section in vars(flags).values() for key, value in vars(section).items()}
        out, stop_after, log = (values.pop(name) for name in NOT_IN_RECIPE)
        dry = DryRun(**{field.name: values.pop(field.name) for field in dataclasses.fields(DryRun)})
        recipe = Recipe(**values)
        if any(word.partition("=")[0] == "--attention" for word in rest):
            refuse_ignored("attention", recipe.layout)
        return cls(recipe, out or Path("runs") / _folder(name, recipe), stop_after, log, dry)

    def run(self) -> None:
        if self.dry.dry_run:
            self._plan()
            return
        from lssar.training.loop import train

        main = int(os.environ.get("RANK", 0)) == 0
        if main:
            say(f"run folder: {self.out}")
        began = time.monotonic()
        with TrainingProgress(f"training {run_label(self.recipe)}", self.recipe.steps) as line:
            last = train(self.recipe, self.out, report=line.report, stop_after=self.stop_after, log=self.log)
        finished = last["step"] >= self.recipe.steps
        if main:
            done = "finished" if finished else "stopped and saved"
            shown = {key: last[key] for key in ("step", "loss", "val_loss", "tokens") if key in last}
            say(f"{done}: {shown}; metrics: {self.out / 'metrics.jsonl'}")
        if not finished:
            if self.stop_after is None or time.monotonic() - began < self.stop_after:
                raise KeyboardInterrupt  # a signal, which the training loop has answered with a checkpoint
            if main:
                say("the same command resumes")

    def _plan(self) -> None:
        from lssar.training.plan import describe, plan

        made = plan(self.recipe, self.dry.processes, self.dry.card, self.dry.price)
        if self.dry.json:
            print_json(made.to_dict())
        else:
            say(describe(made, console.width))


def usage() -> str:
    """Help of `lssar train` without a recipe."""
    lines = ["usage: lssar train RECIPE [flags]", "       lssar train RUN [flags]", ""]
    lines += ["Train a model from a recipe, or resume a run folder. Recipes:", ""]
    for name, recipe in RECIPES.items():
        data = recipe.data.removeprefix("data/")
        lines.append(f"  {name:<20} model {recipe.size} on {data}, {recipe.steps * recipe.batch_tokens:,} tokens")
    lines += ["", "Flags, with the defaults of the recipe: `lssar train RECIPE --help`. Groups:", ""]
    for section, names in sections().items():
        words = ", ".join("--" + name.replace("_", "-") for name in names)
        lines += textwrap.wrap(words, 80, initial_indent=f"  {section:<14}", subsequent_indent=" " * 16)
    return "\n".join(lines)


def sections() -> dict[str, list[str]]:
    """Names of the flags in each group."""
    grouped: dict[str, list[str]] = {}
    for field in dataclasses.fields(Recipe):
        if field.name in SECTIONS:
            names = grouped.setdefault(SECTIONS[field.name], [])
        names.append(field.name)
    dry = [field.name for field in dataclasses.fields(DryRun)]
    return {**grouped, "run": [*NOT_IN_RECIPE, *grouped["run"]], "dry run": dry}


def _folder(name: str, recipe: Recipe) -> str:
    """A run's folder: its mechanism, and its layout and power where they are not those of the named recipe."""
    usual = RECIPES.get(name, recipe)
    layout = "" if recipe.layout in (usual.layout, recipe.mechanism) else f"-{recipe.layout}"
    power = "" if recipe.p is None else f"-p{recipe.p:g}"
    schedule = "" if recipe.p_schedule in (None, usual.p_schedule) else f"-p{recipe.p_schedule}"
    return re.sub(r"[^\w.,+@-]+", "-", f"{name}-{recipe.mechanism}{layout}{power}{schedule}-seed{recipe.seed}")


def flags_for(recipe: Recipe, out: Path | None) -> Any:
    """A dataclass with one dataclass of flags for each section, whose defaults are the recipe's values."""
    hints, helps = get_type_hints(Recipe, include_extras=True), field_docs(Recipe)
    hints |= {"out": Path | None, "stop_after": float | None, "log": tuple[Logger, ...], **get_type_hints(DryRun)}
    helps |= field_docs(DryRun) | {
        "out": "Run folder; runs/RECIPE-ATTENTION-seedN, if not given. A run that is there already is resumed.",
        "stop_after": "Seconds after which to save and stop; the same command resumes.",
        "log": "Where to send the metrics besides metrics.jsonl: tensorboard, wandb (each needs its package).",
    }
    defaults = {"out": out, "stop_after": None, "log": ()} | {
        f.name: getattr(value, f.name) for value in (recipe, DryRun()) for f in dataclasses.fields(value)
    }
    made = []
    for section, names in sections().items():
        fields = [
            (name, Annotated[hints[name], tyro.conf.arg(help=helps.get(name))], dataclasses.field(default=value))
            for name, value in ((name, defaults[name]) for name in names)
        ]
        kind = dataclasses.make_dataclass(f"{section.title().replace(' ', '')}Flags", fields, frozen=True)
        made.append((section.replace(" ", "_"), kind, dataclasses.field(default=kind())))
    return dataclasses.make_dataclass("TrainFlags", made)
