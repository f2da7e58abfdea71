"""What is checked before a run starts or resumes, and what is then recorded in its folder.

Nothing is written until every check has passed: a failed start leaves no run folder that refuses the corrected command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lssar.data.folder import STDLIB, DataFolder, find_data, write_stdlib
from lssar.data.stream import TokenStream
from lssar.records import environment, read_sealed_json, warn, write_sealed_json
from lssar.training.distributed import Processes
from lssar.training.recipes import CONFIG, Recipe, read_recipe

MAY_CHANGE = (
    "keep",
    "compile",
    "parallel",
    "context_parallel",
    "micro_batch",
    "checkpoint_layers",
    "save_every",
    "eval_every",
    "max_non_finite",
    "skip_non_finite",
    "data",
)
"""Fields of a recipe that may differ when a run resumes. Data may lie elsewhere, but must hold the same tokens. How a
step is divided over processes and passes may change: a run resumes on another number of processes."""


def resolve(recipe: Recipe, run: Path, w: Processes) -> tuple[Recipe, DataFolder]:
    """The recipe as it will be recorded, with the data's vocabulary and absolute path; and the checked data."""
    recipe.micro_steps(w.size)
    kept = read_recipe(run) if (run / CONFIG).exists() else None
    path = find_data(recipe.data, run)
    if recipe.data == STDLIB:
        w.on_main(lambda: write_stdlib(path))
        data = DataFolder(path, recipe.vocab_size)
    else:
        path = path.absolute()
        recipe = recipe.replace(data=str(path))
        data = DataFolder(path, recipe.vocab_size)
    if kept is not None and not data.shards("train"):
        raise FileNotFoundError(
            f"the data of {run} is not in {str(path)!r} any more; say where it is with --data FOLDER"
        )
    data.training_shards()
    w.on_main(data.check)
    if w.main and not data.shards("val"):
        warn(f"nothing in {path} is held out: `lssar eval` will need --data FOLDER with other text")
    vocab_size = data.vocab_size if kept is None else kept.vocab_size
    if data.vocab_size > vocab_size:
        raise ValueError(f"{path} has a vocabulary of {data.vocab_size} ids, the model of {run} has {vocab_size}")
    recipe = recipe.replace(vocab_size=vocab_size)
    if kept is not None:
        _compare(recipe, kept, run)
    return recipe, data


def _compare(recipe: Recipe, kept: Recipe, run: Path) -> None:
    """A folder holds one run: ValueError if the recipe differs from the one that it was started with."""
    ours, theirs = recipe.to_dict(), kept.to_dict()
    changed = [key for key in ours if key not in MAY_CHANGE and ours[key] != theirs[key]]
    if changed:
        listed = ", ".join(f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in changed)
        raise ValueError(
            f"{run} holds a run with other settings: {listed}. Resume it as it is: `lssar train {run}`; "
            "for a new run, give another folder: --out FOLDER"
        )


def record(recipe: Recipe, data: DataFolder, run: Path, w: Processes) -> None:
    """Write config.json for a new run; for one that exists, check that the data is the same."""
    w.on_main(lambda: _record(recipe, data, run, w))


def _record(recipe: Recipe, data: DataFolder, run: Path, w: Processes) -> None:
    path = run / CONFIG
    tokens = {split: TokenStream(shards).identity() for split in ("train", "val") if (shards := data.shards(split))}
    if not path.exists():
        config: dict[str, Any] = {
            "recipe": recipe.to_dict(), "model": recipe.model().to_dict(), "processes": w.size, "data": tokens,
            "environment": environment(),
        }  # fmt: skip
        write_sealed_json(path, config)
        return
    config = read_sealed_json(path)
    if (before := config.get("data", tokens)) != tokens:
        differing = [split for split in {**before, **tokens} if before.get(split) != tokens.get(split)]
        raise ValueError(
            f"the {' and '.join(differing)} shards in {data.path} are not those that {run} was started with; restore "
            "them, say where they are with --data FOLDER, or start a new run with --out FOLDER"
        )
    if config["recipe"]["data"] != recipe.data:
        config["recipe"]["data"] = recipe.data
        write_sealed_json(path, config, overwrite=True)
