"""`lssar train RECIPE [flags]`, also under torchrun."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from lssar.commands.common import TrainingLine, console
from lssar.training.recipes import RECIPES, Recipe


@dataclass
class Train:
    """Train a model: `lssar train RECIPE [flags]`, or go on with `lssar train RUN`."""

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    out: Path | None = None
    """Run folder; runs/RECIPE-ATTENTION-SEED, if not given. A run that is there already goes on."""
    stop_after: float | None = None
    """Seconds after which to save and end; the same command goes on later."""

    @classmethod
    def parse(cls, arguments: list[str]) -> Train:
        if not arguments or arguments[0].startswith("-"):
            raise ValueError(f"`lssar train` wants a recipe ({', '.join(RECIPES)}) or a run folder first")
        name, *rest = arguments
        config = Path(name) / "config.json"
        if name in RECIPES:
            default = cls(RECIPES[name])
        elif config.exists():
            default = cls(Recipe.from_dict(json.loads(config.read_text())["recipe"]), out=Path(name))
        else:
            raise ValueError(f"{name!r} is neither a recipe ({', '.join(RECIPES)}) nor a run folder with a config.json")
        made = tyro.cli(cls, default=default, prog=f"lssar train {name}", args=rest)
        if made.out is None:
            r = made.recipe
            power = f"-p{r.p:g}" if r.p is not None else ""
            made.out = Path("runs") / f"{name}-{r.attention}{power}-seed{r.seed}"
        return made

    def run(self) -> None:
        from lssar.training.loop import train

        assert self.out is not None
        main = int(os.environ.get("RANK", 0)) == 0
        if main:
            console.print(f"run folder: {self.out}", highlight=False)
        line = TrainingLine(self.recipe.steps, str(self.recipe.attention))
        with line:
            last = train(self.recipe, self.out, report=line.report, stop_after=self.stop_after)
        if main:
            done = "finished" if last["step"] >= self.recipe.steps else "stopped; the same command goes on"
            shown = {key: last[key] for key in ("step", "loss", "val_loss", "tokens") if key in last}
            console.print(f"{done}: {shown}; metrics: {self.out / 'metrics.jsonl'}", highlight=False, soft_wrap=True)
