"""Results of a sweep: formulas fitted to stored predictions, oracles as upper bounds, everything as one value.

OUT/laws/ARM.json       formulas
OUT/oracles.json        laws fitted to the true forces and to nearest neighbours
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from lssar.experiments.newton.arms import DRAWN
from lssar.experiments.newton.families import (
    Family,
    Job,
    families_in,
    jobs_of,
    label_pool,
    test_points,
    test_systems,
)
from lssar.experiments.newton.law import OPERATORS, Engine, exponents, nearest_neighbours, r_squared, symbolic_laws
from lssar.experiments.newton.orbits import WORLDS, identifiability
from lssar.experiments.newton.training import true_state
from lssar.experiments.queue import print_line
from lssar.records import write_json

TRUE = "true-forces"
"""Stands for an arm: the law fitted to the true forces, an upper bound."""


def read_predictions(out: Path, arm: str) -> dict[str, np.ndarray]:
    return load_file(Path(out) / "predictions" / f"{arm}.safetensors")


def read_laws(
    out: Path, everything: bool = False, engine: Engine = "operon", operators: tuple[str, ...] = tuple(OPERATORS),
    draws: int = 5, size: int = 1000, workers: int = 1, say: Callable[[str], None] = print_line,
) -> None:  # fmt: skip
    """Formulas for the true forces and for finished arms, into OUT/laws; existing ones are kept."""
    wanted: list[tuple[Family, str]] = []
    for family in families_in(out):
        jobs = jobs_of((family,))
        finished = [arm for job in jobs for arm, _, _ in job.arms() if (out / "arms" / f"{arm}.json").exists()]
        chosen = finished if everything else best_arms(family, out)
        wanted += [(family, name) for name in (*([f"{family.world}-{TRUE}"] if chosen else []), *chosen)]
    todo = [(family, name) for family, name in wanted if not (out / "laws" / f"{name}.json").exists()]
    read = partial(_read_law, out=out, engine=engine, operators=operators, draws=draws, size=size)
    if workers == 1 or len(todo) < 2:
        for family, name in todo:
            say(read(family, name))
        return
    with ProcessPoolExecutor(min(workers, len(todo)), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(read, family, name) for family, name in todo]):
            say(future.result())


def _read_law(
    family: Family, name: str, out: Path, engine: Engine, operators: tuple[str, ...], draws: int, size: int
) -> str:  # fmt: skip
    points = test_points(family)
    if not name.endswith(TRUE):
        points = points.with_force(read_predictions(out, name)["log_force"])
    laws = symbolic_laws(points, draws, size, 0, engine, operators)
    write_json(out / "laws" / f"{name}.json", {"arm": name, "engine": engine, "laws": laws}, overwrite=True)
    return f"{name}: F = {laws[0]['law']}"


# Oracles: upper bounds for the arms.


def oracles(family: Family) -> list[dict[str, Any]]:
    """Upper bounds: the law fitted to true forces, and to the nearest labelled states (k = 2, as in the original)."""
    points = test_points(family)
    test, step = test_systems(family)
    asked = true_state(test)[torch.arange(family.tests), step[:, 0]].numpy()
    rows: list[dict[str, Any]] = [{"oracle": "true forces", "world": family.world, **exponents(points), "r2": 1.0}]
    for seed in family.seeds:
        data = label_pool(family, seed)
        states, forces = true_state(data), data.log_force
        for labels in family.labels:
            told = nearest_neighbours(states[:labels].flatten(0, 1).numpy(), forces[:labels].flatten().numpy(), asked)
            rows.append(
                {"oracle": "nearest neighbours", "world": family.world, "labels": labels, "seed": seed,
                 **exponents(points.with_force(told)), "r2": r_squared(told, points.log_force)}
            )  # fmt: skip
    return rows


def collect(out: Path) -> dict[str, Any]:
    """Everything that is there, as one value: what tables, figures and documents are made from."""
    families = families_in(out)

    def read(kind: str, names: list[str]) -> list[dict[str, Any]]:
        paths = [out / kind / f"{name}.json" for name in names]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    jobs = jobs_of(families)
    arms = [arm for job in jobs for arm, _, _ in job.arms()]
    cases = [[family.world, n, seed] for family in families for seed in family.seeds for n in family.labels]
    path = out / "oracles.json"
    kept = json.loads(path.read_text()) if path.exists() else None
    if not isinstance(kept, dict) or kept["cases"] != cases:
        kept = {"cases": cases, "rows": [row for family in families for row in oracles(family)]}
        write_json(path, kept, overwrite=True)
    laws = read("laws", [*(f"{family.world}-{TRUE}" for family in families), *arms])
    return {
        "settings": json.loads((out / "settings.json").read_text()),
        "identifiability": {name: identifiability(world) for name, world in WORLDS.items()},
        "oracles": kept["rows"],
        "pretrained": read("pretrained", [job.name for job in jobs]),
        "arms": read("arms", arms),
        "laws": laws,
        "probes": read("probes", [job.name for job in jobs]),
        "wanted": len(arms),
        "forces": [row for family in families for row in _forces(family, out)],
        "orbits": _orbits(families[0], out),
    }


def best_arms(family: Family, out: Path) -> list[str]:
    """For each mechanism the pre-trained arm with most labels and the first seed, if it is finished."""
    if "pretrained" not in family.starts:
        return []
    jobs = [Job(family, mechanism, family.seeds[0]) for mechanism in family.mechanisms]
    arms = [f"{job.name}-pretrained-{max(family.labels)}" for job in jobs]
    return [arm for arm in arms if (out / "arms" / f"{arm}.json").exists()]


def _forces(family: Family, out: Path, points: int = 250) -> list[dict[str, Any]]:
    """Some log forces, true and predicted, for the figure."""
    true = test_points(family).log_force[:points]
    rows = []
    for arm in best_arms(family, out):
        told = read_predictions(out, arm)["log_force"][:points]
        rows.append(
            {"arm": arm, "true": np.round(true, 3).tolist(), "predicted": np.round(told, 3).astype(float).tolist()}
        )
    return rows


def _orbits(family: Family, out: Path) -> dict[str, Any]:
    """A few test systems with the forces that the best arms give them all along, for the drawing."""
    data, _ = test_systems(family)

    def plain(x: Any) -> list[Any]:
        return np.round(np.asarray(x, dtype=np.float64), 3).tolist()

    return {
        "world": family.world,
        "positions": plain(data.tracks.positions[:DRAWN, data.steps]),
        "true": plain(data.log_force[:DRAWN]),
        "predicted": {arm: plain(read_predictions(out, arm)["drawn"]) for arm in best_arms(family, out)},
    }
