"""A run folder as one value: recipe, model, tokenizer, data, and how to evaluate it on a device.

Commands, experiments and integrations open runs here, so that rules such as "bfloat16 on a GPU if the run was trained
in bfloat16" exist once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lssar.data.folder import DataFolder, find_data
from lssar.data.tokenizers import Tokenizer, load_tokenizer
from lssar.layouts import UNIFORM
from lssar.model import GPT
from lssar.records import read_json
from lssar.training import checkpoints
from lssar.training.initialise import meta_model
from lssar.training.metrics import read_metrics, summarise
from lssar.training.recipes import Recipe, read_recipe, recipe_in


@dataclass(frozen=True)
class Run:
    """A trained run, made by `Run.open`."""

    folder: Path
    recipe: Recipe
    device: torch.device

    @classmethod
    def open(cls, folder: Path | str, device: torch.device | str | None = None) -> Run:
        """Open a run folder or an exported model; `device` defaults to CUDA where there is a GPU. Weights are read by
        `model()`."""
        folder = Path(folder)
        if (folder / EXPORT).is_file():
            return ExportedRun(folder, read_export(folder), pick_device(device))
        return cls(folder, read_recipe(folder), pick_device(device))

    @cached_property
    def checkpoint(self) -> Path:
        """The newest undamaged checkpoint; a message on stderr names any that is passed over."""
        found = checkpoints.newest(self.folder, model=lambda: meta_model(self.recipe.model()))
        if found is None:
            raise FileNotFoundError(f"{self.folder} has no finished checkpoint yet")
        return found

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""
        return checkpoints.step_of(self.checkpoint)

    def model(self) -> GPT:
        """A new model with the weights of the checkpoint, in evaluation mode, on the device."""
        model = GPT(self.recipe.model())
        weights = self._weights()
        checkpoints.check_fit(self.checkpoint, weights, model)
        model.load_state_dict(weights)
        return model.to(self.device).eval()

    def _weights(self) -> dict[str, Tensor]:
        return checkpoints.load_weights(self.checkpoint)

    def training(self) -> dict[str, Any] | None:
        """A summary of `metrics.jsonl`; None for an export, which has none."""
        return summarise(read_metrics(self.folder))

    @cached_property
    def data(self) -> DataFolder:
        """The data that the run was trained on."""
        return DataFolder(find_data(self.recipe.data, self.folder), self.recipe.vocab_size)

    def held_out(self, folder: Path | None = None) -> DataFolder:
        """The run's own data, or that of another folder with the same vocabulary."""
        return self.data if folder is None else DataFolder(Path(folder), self.recipe.vocab_size)

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer` can be read: the run's data may have been moved."""
        return self.data.path.exists()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run's data."""
        return self.data.tokenizer()

    @property
    def dtype(self) -> torch.dtype | None:
        """Autocast dtype for evaluation; None for the dtype of the weights. See `evaluation_dtype`."""
        return evaluation_dtype(self.recipe, self.device)

    @property
    def batch_tokens(self) -> int:
        """Tokens to evaluate in one forward pass, if the user does not say."""
        return evaluation_batch(self.device)

    @property
    def name(self) -> str:
        """Mechanism, layout and power. Among several runs, `unique_names` adds what tells them apart."""
        return run_label(self.recipe)


EXPORT = "export.json"


def read_export(folder: Path) -> Recipe:
    """The recipe of the run that `lssar export` wrote into the folder."""
    path = folder / EXPORT
    record = read_json(path, dict)
    if not isinstance(record.get("step"), int):
        raise ValueError(f"{path}: no step in it; not written by `lssar export`, or damaged")
    return recipe_in(record, path, "not written by `lssar export`")


class ExportedRun(Run):
    """A folder written by `lssar export`, such as a released model: the weights of one step, and their tokenizer."""

    @property
    def checkpoint(self) -> Path:
        return self.folder

    @property
    def step(self) -> int:
        return read_json(self.folder / EXPORT, dict)["step"]

    def model(self) -> GPT:
        """A new model in float32, also if the file has another dtype."""
        return super().model()

    def _weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("gpt."): value.float() for name, value in super()._weights().items()}

    def training(self) -> None:
        return None

    @property
    def has_tokenizer(self) -> bool:
        return True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if read_json(self.folder / EXPORT, dict).get("tokenizer") == "bytes":
            return load_tokenizer("bytes")  # the same ids as tokenizer.json, without the tokenizers library
        return load_tokenizer(self.folder / "tokenizer.json")


def evaluation_dtype(recipe: Recipe, device: torch.device | str) -> torch.dtype | None:
    """bfloat16 on a GPU for a run trained in bfloat16; elsewhere None, the dtype of the weights."""
    return torch.bfloat16 if torch.device(device).type == "cuda" and recipe.dtype == "bfloat16" else None


def evaluation_batch(device: torch.device | str) -> int:
    """Tokens of one forward pass in evaluation, if the user does not say."""
    return 262_144 if torch.device(device).type == "cuda" else 16_384


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for, checked; CUDA where there is a GPU, if none is given."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use cpu, cuda, or cuda:N") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported; use cpu, cuda, or cuda:N")
    if picked.type == "cuda" and (picked.index or 0) >= count:
        seen = f"only {count} CUDA device(s)" if count else "no CUDA device"
        raise ValueError(f"device {str(device)!r} is not available: PyTorch sees {seen} here")
    return picked


def run_label(recipe: Recipe) -> str:
    """Name of a mechanism in tables and figures: attention, layout and power where they are not the default."""
    words = [recipe.mechanism]
    if recipe.layout not in (UNIFORM, recipe.mechanism):
        words.append(recipe.layout)
    if recipe.p is not None:
        words.append(f"p={recipe.p:g}")
    return ", ".join(words)


NOT_IN_NAMES = ("attention", "layout", "p", "data", "compile", "parallel", "context_parallel", "keep", "save_every",
                "eval_every", "eval_batches", "micro_batch", "checkpoint_layers")  # fmt: skip
"""Recipe fields that are in every name already, or that do not change what a run learns."""


def unique_names(recipes: Sequence[Recipe], folders: Sequence[Path] | None = None) -> list[str]:
    """A name for each run, different for different runs: its label, and the settings in which equal labels differ.

    Runs with the same settings are told apart by their folders' names.
    """
    names = [run_label(recipe) for recipe in recipes]
    for label in {name for name in names if names.count(name) > 1}:
        same = [index for index, name in enumerate(names) if name == label]
        fields = [recipes[index].to_dict() for index in same]
        differing = [
            key for key in fields[0] if key not in NOT_IN_NAMES and any(f[key] != fields[0][key] for f in fields)
        ]
        for index, values in zip(same, fields):
            names[index] = ", ".join([label, *(_setting(key, values[key]) for key in differing)])
    repeated = {name for name in names if names.count(name) > 1}
    if folders is not None:
        names = [f"{name} ({folder.name})" if name in repeated else name for name, folder in zip(names, folders)]
    return names


def _setting(key: str, value: Any) -> str:
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
