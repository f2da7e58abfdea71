"""Checkpoints: a folder each, written completely or not at all; safetensors and JSON, nothing that unpickles.

RUN/checkpoints/step-0000200/{model.safetensors, optimiser.safetensors, state.json, checksums.json}

Where parameters are divided over processes, each process writes its part, in the background: see `sharded.py`. Either
kind can be loaded on any number of processes.

A checkpoint is only saved if its weights are finite. Checksums are compared before one is used; a damaged one is passed
over with a message, and the next older one serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lssar.records import checksum, naming, read_json, remove_temporary, sync, warn
from lssar.training import sharded
from lssar.training.distributed import Processes, lost_connection

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SEPARATOR = "/"
"""Between the name of a weight and that of its moment, in the flat names of safetensors."""

MODEL, OPTIMISER, STATE, CHECKSUMS = "model.safetensors", "optimiser.safetensors", "state.json", "checksums.json"
RNG = "rng"
"""Name of the random state among the tensors of the optimiser."""


class Saver:
    """Saves and restores the checkpoints of a run; every process has one and calls the same methods.

    Sharded checkpoints are written in the background, at most one at a time. At the end of a `with` block the last one
    is awaited, unless the block ends because another process is lost: then it cannot be finished.
    """

    def __init__(
        self, run: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer], w: Processes, keep: int
    ) -> None:
        self.run, self.model, self.optimisers, self.w, self.keep = run, model, optimisers, w, keep
        # Its own group: collectives of the background thread must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if sharded.is_sharded(model) else None
        self.under_way: tuple[Path, sharded.BackgroundSave] | None = None

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Save, or begin to, the checkpoint of `step`; False if weights or moments are not finite."""
        self.wait()
        if self.group is None:
            made = save(self.run, step, self.model, self.optimisers, state, self.w, self.keep)
            return made is not None
        weights: dict[str, Any] = get_model_state_dict(self.model)
        moments: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimisers)
        flat = _flat(moments)
        if self.w.any(not sharded.all_finite([*weights.values(), *flat.values()])):
            if self.w.main:
                _not_finite(step)
            return False
        state = {**state, "step": step, "param_groups": moments["param_groups"]}
        path = folder(self.run, step)

        def finish(sums: dict[str, str]) -> None:
            _complete(path, state, sums)
            _remove_old(self.run, self.keep)

        flat[RNG] = torch.get_rng_state()
        self.under_way = path, sharded.save(_hidden(path), weights, flat, self.group, finish)
        return True

    def wait(self) -> None:
        """Until no save is under way; raises its error if it failed."""
        if self.under_way is None:
            return
        path, save_under_way = self.under_way
        self.under_way = None
        try:
            save_under_way.wait()
        except CheckpointException as error:
            if self.w.main:
                shutil.rmtree(_hidden(path), ignore_errors=True)
            raise OSError(None, f"{sharded.reason(error)}; what was finished before is not lost", str(path)) from error

    def restore(self, step: int) -> dict[str, Any]:
        """Load an undamaged checkpoint, each process its part; returns the plain state."""
        path = folder(self.run, step)
        if self.group is None:
            return restore(path, self.model, self.optimisers)
        weights: dict[str, Any] = get_model_state_dict(self.model)
        moments: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimisers)
        flat = _flat(moments) | {RNG: torch.get_rng_state()}
        tensors = {**weights, **flat}
        sharded.load_into(path, _tensor_files(path, whole=True), tensors, self.group)
        state = read_json(path / STATE, dict)
        set_model_state_dict(self.model, {name: tensors[name] for name in weights})
        torch.set_rng_state(tensors[RNG])
        nested = _nested({name: tensors[name] for name in flat if name != RNG}, state.pop("param_groups"))
        set_optimizer_state_dict(self.model, self.optimisers, nested)
        return state

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.wait()
        elif not lost_connection(error):
            with contextlib.suppress(Exception):  # the first error is the one to report
                self.wait()


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimisers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    w: Processes,
    keep: int,
) -> Path | None:
    """Write a plain checkpoint of `step` and remove all but the newest `keep`; `state` is plain values.

    Returns None, and writes nothing, if weights or moments are not finite. Every process must call it.
    """
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL)
    moments: dict[str, Any] = get_optimizer_state_dict(model, optimisers, options=FULL)
    path = folder(run, step)
    finite = True
    if w.main:
        flat = {name: value.contiguous() for name, value in _flat(moments).items()}
        finite = sharded.all_finite([*weights.values(), *flat.values()])
        if finite:
            tensors = {MODEL: {key: value.contiguous() for key, value in weights.items()},
                       OPTIMISER: {**flat, RNG: torch.get_rng_state()}}  # fmt: skip
            _write(path, tensors, {**state, "step": step, "param_groups": moments["param_groups"]})
            _remove_old(run, keep)
        else:
            _not_finite(step)
    return path if w.from_main(int(finite)) else None


def _not_finite(step: int) -> None:
    warn(f"step {step}: weights or optimiser state are not finite, so no checkpoint is saved")


def _flat(moments: dict[str, Any]) -> dict[str, Any]:
    """The optimisers' tensors by name of the weight and of the moment."""
    return {
        f"{name}{SEPARATOR}{moment}": value
        for name, state_of in moments["state"].items()
        for moment, value in state_of.items()
    }


def _nested(flat: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The inverse of `_flat`."""
    moments: dict[str, Any] = {"state": {}, "param_groups": groups}
    for key, value in flat.items():
        name, moment = key.split(SEPARATOR)
        moments["state"].setdefault(name, {})[moment] = value
    return moments


def _remove_old(run: Path, keep: int) -> None:
    for old in checkpoints(run)[:-keep]:
        _remove(old)


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is hidden first: a process killed while it deletes leaves no half of one."""
    hidden = _hidden(path)
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _hidden(path: Path) -> Path:
    """The name of a checkpoint while it is written or deleted."""
    return path.with_name(f".{path.name}")


def _write(path: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    temporary = _hidden(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming(path), _as_os_error():
            temporary.mkdir(parents=True)
            for name, values in tensors.items():
                save_file(values, temporary / name)
            _complete(path, state, {name: checksum(temporary / name) for name in tensors})
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _complete(path: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    """Add the state and all checksums to the tensors in the hidden folder, and give it its name."""
    temporary = _hidden(path)
    (temporary / STATE).write_text(json.dumps(state))
    sums = {**sums, STATE: checksum(temporary / STATE)}
    (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for file in [*temporary.iterdir(), temporary]:  # on the disk before the final name exists
        sync(file)
    set_aside(path)
    os.replace(temporary, path)
    sync(path.parent)
    shutil.rmtree(_aside(path), ignore_errors=True)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """safetensors reports a full disk as an error of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(None, str(error)) from error


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if _is_checkpoint(path))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name.removeprefix("step-").isdigit()


def clean(run: Path) -> None:
    """Remove what a killed process left. Only for the process that holds the run's lock."""
    for leftover in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for name in ("config.json", "metrics.jsonl"):
        remove_temporary(run / name)


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that it no longer counts as one; it stays until its step is saved again."""
    if path.exists():
        shutil.rmtree(_aside(path), ignore_errors=True)
        os.replace(path, _aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged-{path.name}")


def newest(
    run: Path,
    whole: bool = False,
    model: Callable[[], nn.Module] | None = None,
    optimisers: Sequence[torch.optim.Optimizer] = (),
) -> Path | None:
    """The newest undamaged checkpoint, with a message for each that is passed over.

    Only the weights are checked, which is all that evaluation needs, or with `whole` what training needs. One without
    checksums is compared with `model` and `optimisers`, if given. None if there are no checkpoints; a ValueError if
    there are some, all damaged.
    """
    found = checkpoints(run)
    faults: list[str] = []
    for path in reversed(found):
        fault = damage(path, whole, model, optimisers)
        if fault is None:
            if faults:
                warn(f"using {path.name} of {run}, the next older checkpoint")
            return path
        faults.append(fault)
        warn(f"checkpoint {path.name} is damaged and not used: {fault}")
    if not found:
        return None
    raise ValueError(f"{run}: all {len(found)} checkpoints are damaged; the newest: {faults[0]}")


def latest(run: Path) -> Path | None:
    """The newest checkpoint by name, not checked."""
    found = checkpoints(run)
    return found[-1] if found else None


def damage(
    path: Path,
    whole: bool,
    model: Callable[[], nn.Module] | None = None,
    optimisers: Sequence[torch.optim.Optimizer] = (),
) -> str | None:
    """What is wrong with a checkpoint, its weights alone or the whole of it; or None. For `model`, see `newest`."""
    try:
        sums = _sums(path)
        needed = _needed(path, whole)
        if missing := [name for name in needed if not (path / name).is_file()]:
            return f"{path / missing[0]} is missing"
        if sums is None:
            if any(sharded.is_shard(name) for name in needed):  # only the list tells whether all shards are there
                return f"{path / CHECKSUMS} is missing"
            warn(f"{path} has no {CHECKSUMS}, so only its form is checked")
            return _malformed(path, whole, model() if model is not None else None, optimisers)
        if unlisted := [file.name for file in path.iterdir() if sharded.is_shard(file.name) and file.name not in sums]:
            return f"{path / CHECKSUMS} does not list {unlisted[0]}"
        with ThreadPoolExecutor(8) as threads:  # hashing is done outside Python's lock
            found = list(threads.map(lambda name: checksum(path / name), needed))
        for name, value in zip(needed, found):
            if value != sums.get(name):
                return f"the checksum of {path / name} differs from the one recorded when it was saved"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _sums(path: Path) -> dict[str, str] | None:
    return read_json(path / CHECKSUMS, dict) if (path / CHECKSUMS).exists() else None


def _needed(path: Path, whole: bool) -> list[str]:
    return [*_tensor_files(path, whole), *([STATE] if whole else [])]


def _tensor_files(path: Path, whole: bool) -> list[str]:
    """Names of the files with weights, or with `whole` all tensors, that a checkpoint should have."""
    kinds = (sharded.WEIGHTS, sharded.MOMENTS) if whole else (sharded.WEIGHTS,)
    names = {*(_sums(path) or ()), *(file.name for file in path.iterdir())}
    if any(sharded.is_shard(name) for name in names):
        return sorted(name for name in names if sharded.is_shard(name, kinds))
    return [MODEL, OPTIMISER] if whole else [MODEL]


def _malformed(
    path: Path, whole: bool, model: nn.Module | None, optimisers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """For checkpoints without checksums: what in the form of their files would not load."""
    weights = load_weights(path)
    if model is not None and (fault := _misfit(weights, model)):
        return f"{path / MODEL} does not fit the model: {fault}"
    if not whole:
        return None
    state, tensors = read_json(path / STATE, dict), _read(path / OPTIMISER)
    groups, data = state.get("param_groups"), state.get("data")
    settings = [set(group) for optimiser in optimisers for group in optimiser.param_groups]
    if state.get("step") != step_of(path) or not isinstance(groups, list) or not isinstance(data, dict):
        return f"{path / STATE} is incomplete, or of another step"
    if not isinstance(data.get("settings"), dict) or not _is_count(data.get("position")):
        return f"{path / STATE}: the position in the data is incomplete"
    if not all(_is_group(group, settings) for group in groups):
        return f"{path / STATE}: the settings of the optimiser are incomplete"
    if sorted(name for group in groups for name in group["params"]) != sorted(weights):
        return f"{path / STATE}: the optimiser has other weights than {MODEL}"
    random = tensors.pop(RNG, torch.empty(0))
    if random.dtype != torch.uint8 or random.shape != torch.get_rng_state().shape:
        return f"{path / OPTIMISER}: the random state is missing, or has another size"
    faults = (_missing_moments(path, group["params"], tensors, weights) for group in groups)
    return next(filter(None, faults), None)


def _missing_moments(
    path: Path, names: list[str], tensors: dict[str, Tensor], weights: dict[str, Tensor]
) -> str | None:
    """What is wrong with the moments of a group of weights, all of which have the same kinds of them; or None."""
    kinds = {kind for name, _, kind in (key.partition(SEPARATOR) for key in tensors) if name in names}
    for name in names:
        moments = [tensors.get(f"{name}{SEPARATOR}{kind}") for kind in kinds]
        if not all(moment is not None and moment.shape in ((), weights[name].shape) for moment in moments):
            return f"{path / OPTIMISER}: the moments of {name} are incomplete, or have another shape"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_group(group: Any, settings: list[set[str]]) -> bool:
    """Whether it is the record of an optimiser's group of weights, with all settings that one of ours has."""
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return False
    named = all(isinstance(name, str) for name in group["params"])
    return named and (not settings or any(keys <= set(group) for keys in settings))


def _misfit(weights: dict[str, Tensor], model: nn.Module) -> str | None:
    """The first difference between saved weights and those that the model has; or None."""
    expected = model.state_dict()
    for name in [*expected, *weights]:
        there, here = (list(x[name].shape) if name in x else "missing" for x in (weights, expected))
        if there != here:
            return f"{name} is {there} in the file and {here} in the model"
    return None


def check_fit(path: Path, weights: dict[str, Tensor], model: nn.Module) -> None:
    """ValueError if weights from `path` are those of another model than the one that the recipe describes."""
    if fault := _misfit(weights, model):
        raise ValueError(f"{path}: the weights do not fit the model that the recipe describes: {fault}")


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint or of an exported model, whole, in CPU memory."""
    return _load(path, whole=False)


def load_all(path: Path) -> dict[str, Tensor]:
    """Weights, optimiser state and random state of a checkpoint, whole, in CPU memory, under the names of the files."""
    return _load(path, whole=True)


def _load(path: Path, whole: bool) -> dict[str, Tensor]:
    names = _tensor_files(path, whole) if path.is_dir() else [MODEL]
    for name in names:
        if not (path / name).exists():
            raise FileNotFoundError(f"{path} holds no checkpoint: {name} is missing")
    if sharded.is_shard(names[0]):
        try:
            return sharded.load_whole(path, names)
        except SafetensorError as error:
            raise ValueError(f"{path / names[0]} is damaged: {error}") from error
    return {key: value for name in names for key, value in _read(path / name).items()}


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def restore(path: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Load weights, moments and random state of an undamaged checkpoint; returns the plain state."""
    state = read_json(path / STATE, dict)
    tensors = load_all(path)
    torch.set_rng_state(tensors.pop(RNG))
    flat = {key: tensors.pop(key) for key in list(tensors) if SEPARATOR in key}
    check_fit(path, tensors, model)
    set_model_state_dict(model, dict[str, Any](tensors), options=FULL)
    set_optimizer_state_dict(model, optimisers, _nested(flat, state.pop("param_groups")), options=FULL)
    return state
