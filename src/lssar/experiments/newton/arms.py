"""The sweep as a queue of jobs: pre-train, fine-tune this and a fresh model on each number of labels, probe.

OUT/settings.json       what is swept; worlds, mechanisms and seeds may be added, another sweep may not use the folder
OUT/pretrained/JOB.json how well the next step is foretold, what it cost, the machine
OUT/arms/ARM.json       an arm's exponents and R^2; an arm that is there is not run again
OUT/predictions/ARM.safetensors    its log forces for the test systems, which `read_laws` and the figures use later
OUT/laws/ARM.json       formulas
OUT/probes/JOB.json     the inductive-bias probe
OUT/work/JOB            weights while a job is under way
"""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from lssar.experiments.newton.law import (
    OPERATORS,
    Engine,
    Points,
    exponents,
    nearest_neighbours,
    r_squared,
    symbolic_laws,
)
from lssar.experiments.newton.model import OrbitModel, orbit_model_config
from lssar.experiments.newton.orbits import WORLDS, identifiability
from lssar.experiments.newton.probe import inductive_bias
from lssar.experiments.newton.training import (
    Labelled,
    Optimisation,
    OutOfTime,
    finetune,
    labelled_systems,
    minimise,
    optimiser_of,
    orbit_batches,
    predict,
    random_stream,
    true_state,
    validation,
)
from lssar.records import environment, write_file, write_json
from lssar.specs import parse_spec
from lssar.training import checkpoints
from lssar.training.distributed import World as Processes
from lssar.training.loop import stop_signal

MECHANISMS = ("lssar", "softmax", "lssa", "lssar,p=3", "cosine_softmax")
STARTS = ("pretrained", "fresh")
DRAWN = 6
"""Test systems whose forces are kept all along their orbits, for the drawing."""
TRUE = "true-forces"
"""In the place of an arm: the law read from the true forces, a ceiling."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Arms that differ in mechanism, seed, start and labels, and in nothing else."""

    world: str
    size: str
    tokens: int
    """Of a sequence; the first names the interval."""
    first: int = 8
    """The step from which forces are labelled and asked for."""
    mechanisms: tuple[str, ...] = MECHANISMS
    seeds: tuple[int, ...] = (0, 1, 2)
    labels: tuple[int, ...] = (8, 64, 512, 4096)
    """Numbers of labelled systems; smaller sets are part of the larger ones."""
    starts: tuple[str, ...] = STARTS
    pretrain: Optimisation
    finetune: Optimisation
    probe: Optimisation | None = None
    probe_functions: int = 20
    probe_seeds: tuple[int, ...] = (0,)
    dtype: str = "float32"
    tests: int = 2000

    def __post_init__(self) -> None:
        if self.world not in WORLDS:
            raise ValueError(f"unknown world {self.world!r}; known: {', '.join(WORLDS)}")
        if unknown := set(self.starts) - set(STARTS):
            raise ValueError(f"unknown start {sorted(unknown)}; known: {', '.join(STARTS)}")
        if not self.labels or min(self.labels) < 2:
            raise ValueError(f"numbers of labelled systems must be at least 2; got {self.labels}")
        for mechanism in self.mechanisms:
            parse_spec(mechanism)
        labelled_systems(WORLDS[self.world], 1, self.tokens, self.first, np.random.default_rng(0))


SCALES: dict[str, tuple[Family, ...]] = {
    "ci": (  # shows that all parts work together
        Family(
            world="wellposed", size="ci", tokens=16, first=6, mechanisms=("lssar",), seeds=(0,), labels=(1024,),
            starts=("pretrained",), pretrain=Optimisation(steps=300, batch=32, lr=6e-3),
            finetune=Optimisation(steps=400, batch=32, lr=6e-3), tests=600,
        ),
    ),
    "smoke": (
        Family(
            world="wellposed", size="60k", tokens=24, mechanisms=("lssar", "softmax"), seeds=(0,), labels=(4096,),
            pretrain=Optimisation(steps=1200, batch=32, lr=4e-3), finetune=Optimisation(steps=1000, batch=64, lr=3e-3),
        ),
    ),
    "h200": (  # about eight minutes on one H200
        Family(
            world="wellposed", size="10m", tokens=64, dtype="bfloat16",
            pretrain=Optimisation(steps=1500, batch=256, lr=1e-3, warmup=100),
            finetune=Optimisation(steps=600, batch=64, lr=6e-4),
            probe=Optimisation(steps=100, batch=100, lr=3e-4), probe_functions=10,
        ),
        *(  # is it the masses, the bins or the model?
            Family(
                world=world, size="10m", tokens=256, mechanisms=("lssar", "softmax"), seeds=(0,), labels=(4096,),
                dtype="bfloat16", pretrain=Optimisation(steps=1500, batch=64, lr=6e-4, warmup=100),
                finetune=Optimisation(steps=800, batch=64, lr=6e-4),
            )
            for world in ("original", "heavy", "wellposed-bins")
        ),
    ),
}  # fmt: skip
SCALES["109m"] = tuple(  # the original's model; hours, not minutes
    dataclasses.replace(family, size="109m", tokens=1000, labels=(1000, 9000)) for family in SCALES["h200"][1:3]
)


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Job:
    family: Family
    mechanism: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family.world}-{self.mechanism.replace(',', '-').replace('=', '')}-seed{self.seed}"

    def arms(self) -> Iterator[tuple[str, str, int]]:
        """(name, start, labels), the most telling first."""
        for labels in sorted(self.family.labels, reverse=True):
            for start in self.family.starts:
                yield f"{self.name}-{start}-{labels}", start, labels


def jobs_of(families: tuple[Family, ...]) -> list[Job]:
    """Seed by seed, so that a time limit costs seeds and not mechanisms."""
    seeds = sorted({seed for family in families for seed in family.seeds})
    return [
        Job(family, mechanism, seed)
        for seed in seeds
        for family in families
        if seed in family.seeds
        for mechanism in family.mechanisms
    ]


# The systems.


def test_systems(family: Family, device: str = "cpu") -> tuple[Labelled, torch.Tensor]:
    """The same for every arm, and never labelled; with them the step (N, 1) of each at which its force is read."""
    data = labelled_systems(
        WORLDS[family.world], family.tests, family.tokens, family.first, random_stream("test", 0), device
    )
    K = len(data.at)
    step = random_stream("test", 1).integers(K // 2, K, family.tests)  # late, when the past has told enough
    return data, torch.from_numpy(step).to(device)[:, None]


def label_pool(family: Family, seed: int, device: str = "cpu") -> Labelled:
    """As many systems as the largest number of labels asks for; a smaller number takes the first ones."""
    rng = random_stream("labels", seed)
    return labelled_systems(WORLDS[family.world], max(family.labels), family.tokens, family.first, rng, device)


def test_points(family: Family) -> Points:
    """States at which laws are read, with the true forces."""
    data, step = test_systems(family)
    m1, m2 = data.tracks.masses.numpy().T
    at = data.steps[step[:, 0]][:, None]
    force, r = (x.gather(1, at)[:, 0].numpy() for x in (data.tracks.force, data.tracks.distance))
    return Points(m1, m2, r, np.log(force))


# One job.


def run_job(
    job: Job, out: Path, device: str, stop: Callable[[], bool] = lambda: False, keep_weights: bool = False,
    say: Callable[[str], None] = _print,
) -> bool:  # fmt: skip
    """Do what is missing of a job; True when nothing is, False when told to stop before that."""
    missing = [arm for arm in job.arms() if not (out / "arms" / f"{arm[0]}.json").exists()]
    family = job.family
    probed = family.probe is None or job.seed not in family.probe_seeds
    probed = probed or (out / "probes" / f"{job.name}.json").exists()
    if not missing and probed:
        return True
    if stop():
        return False
    try:
        starts = {"fresh": _new_model(job, device)}
        if not probed or any(start == "pretrained" for _, start, _ in missing):
            starts["pretrained"] = _pretrained(job, out, device, stop, say)
        if missing:
            _arms(job, missing, starts, out, device, stop, say)
        if not probed:
            _probe(job, starts["pretrained"], out, stop, say)
    except OutOfTime:
        return False
    if not keep_weights:
        shutil.rmtree(out / "work" / job.name, ignore_errors=True)
    return True


def _new_model(job: Job, device: str) -> OrbitModel:
    torch.manual_seed(job.seed)
    world = WORLDS[job.family.world]
    config = orbit_model_config(job.family.size, parse_spec(job.mechanism), world, job.family.tokens)
    return OrbitModel(config, world).to(device)


def _pretrained(
    job: Job, out: Path, device: str, stop: Callable[[], bool], say: Callable[[str], None]
) -> OrbitModel:  # fmt: skip
    family, settings = job.family, job.family.pretrain
    model = _new_model(job, device)
    optimiser = optimiser_of(model, settings)
    folder, record = out / "work" / job.name, out / "pretrained" / f"{job.name}.json"
    processes = Processes(0, 1, torch.device(device))
    step, before = 0, 0.0
    if (found := checkpoints.latest(folder)) is not None:
        state = checkpoints.restore(found, model, [optimiser])
        step, before = state["step"], state["seconds"]
    batches = orbit_batches(model.world, settings.batch, family.tokens, job.seed, device, start=step)
    began = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step == settings.steps or step * 5 // settings.steps != (step - 100) * 5 // settings.steps:
            say(f"{job.name}: pre-training {step}/{settings.steps}, loss {loss:.4g}")

    reached = minimise(
        model, optimiser, lambda _: model.next_loss(*next(batches)), settings, family.dtype, step, stop, report
    )
    if reached > step:
        seconds = before + time.monotonic() - began
        checkpoints.save(folder, reached, model, [optimiser], {"seconds": seconds}, processes, keep=1)
    if reached < settings.steps:
        say(f"{job.name}: stopped at step {reached}; the same command goes on")
        raise OutOfTime
    if not record.exists():
        told = {
            "job": job.name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed,
            "parameters": model.parameter_count(), "steps": settings.steps,
            "sequences": settings.steps * settings.batch, "seconds": round(seconds, 1),
            **validation(model, family.tokens, family.dtype), "environment": environment(),
        }  # fmt: skip
        write_json(record, told)
        say(f"{job.name}: next step foretold to {told['rms_error']:.3g} (no motion {told['rms_error_no_motion']:.3g})")
    return model


def _arms(
    job: Job, missing: list[tuple[str, str, int]], starts: dict[str, OrbitModel], out: Path, device: str,
    stop: Callable[[], bool], say: Callable[[str], None],
) -> None:  # fmt: skip
    family = job.family
    data = label_pool(family, job.seed, device)
    test, step = test_systems(family, device)
    points = test_points(family)
    for name, start, labels in missing:
        began = time.monotonic()
        model = copy.deepcopy(starts[start])
        scale = finetune(model, data, data.log_force[:labels], family.finetune, job.seed, family.dtype, stop)
        told = predict(model, test, *scale, family.dtype)
        log_force = told.gather(1, step)[:, 0].cpu().numpy().astype(np.float64)
        kept = {"log_force": log_force.astype(np.float32), "drawn": told[:DRAWN].cpu().numpy()}
        write_file(out / "predictions" / f"{name}.safetensors", partial(save_file, kept), overwrite=True)
        record = {
            "arm": name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed, "start": start,
            "labels": labels, **exponents(points.with_force(log_force)), "r2": r_squared(log_force, points.log_force),
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        write_json(out / "arms" / f"{name}.json", record, overwrite=True)
        say(f"{name}: F ~ m1^{record['m1']:.3f} m2^{record['m2']:.3f} r^{record['r']:.3f}, R^2 {record['r2']:.4f}")


def _probe(
    job: Job, model: OrbitModel, out: Path, stop: Callable[[], bool], say: Callable[[str], None]
) -> None:  # fmt: skip
    family = job.family
    assert family.probe is not None
    result = inductive_bias(
        model, family.tokens, family.first, family.probe, family.probe_functions, job.seed, dtype=family.dtype,
        stop=stop,
    )  # fmt: skip
    about = {"job": job.name, "world": family.world, "mechanism": job.mechanism, "seed": job.seed}
    write_json(out / "probes" / f"{job.name}.json", {**about, **result}, overwrite=True)
    say(f"{job.name}: inductive bias, slope {result['slope']:.2f} (1: the oracle's), R^2 {result['model_r2']:.2f}")


# All jobs.


def run_all(
    families: tuple[Family, ...], out: Path, device: str, workers: int = 1, time_limit: float | None = None,
    keep_weights: bool = False, say: Callable[[str], None] = _print,
) -> bool:  # fmt: skip
    """Run what is missing, `workers` jobs at a time; True when every arm is there.

    After `time_limit` seconds, or on SIGINT or SIGTERM, jobs under way save what they have and end.
    """
    claim(families, out)
    jobs = jobs_of(families)
    until = None if time_limit is None else time.time() + time_limit
    with stop_signal() as signalled:

        def stop() -> bool:
            return signalled() or (until is not None and time.time() > until)

        if workers == 1:
            return all(run_job(job, out, device, stop, keep_weights, say) for job in jobs)
        context = multiprocessing.get_context("spawn")
        ending = context.Event()
        threads = max(1, torch.get_num_threads() // workers)
        with ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (ending, threads)) as pool:
            waiting = {pool.submit(_work, job, out, device, keep_weights) for job in jobs}
            done: set[Any] = set()
            try:
                while waiting:
                    finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    done |= finished
                    if stop() or any(future.exception() for future in finished):
                        ending.set()
            finally:
                ending.set()  # whatever happens here, the workers save and end
            return all([future.result() for future in done])  # noqa: C419  every failure is to be seen


_ending: Any = None
"""In a worker: set when it is to save and end."""


def _start_worker(ending: Any, threads: int) -> None:
    global _ending
    _ending = ending
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one passes it on
    torch.set_num_threads(threads)


def _work(job: Job, out: Path, device: str, keep_weights: bool) -> bool:
    return run_job(job, out, device, _ending.is_set, keep_weights)


def claim(families: tuple[Family, ...], out: Path) -> None:
    """Write down what a folder holds. Worlds, mechanisms and seeds may be added to it; nothing else may differ."""
    path = out / "settings.json"
    kept = {family.world: family for family in families_in(out)} if path.exists() else {}
    for family in families:
        before = kept.get(family.world, family)
        mechanisms, seeds = (
            tuple(dict.fromkeys((*getattr(before, name), *getattr(family, name)))) for name in ("mechanisms", "seeds")
        )
        kept[family.world] = dataclasses.replace(before, mechanisms=mechanisms, seeds=seeds)
        if dataclasses.replace(family, mechanisms=mechanisms, seeds=seeds) != kept[family.world]:
            raise ValueError(f"{out} holds a sweep with other settings; give another --out")
    settings = json.loads(json.dumps([dataclasses.asdict(family) for family in kept.values()]))
    if not path.exists() or json.loads(path.read_text()) != settings:
        write_json(path, settings, overwrite=True)


def families_in(out: Path) -> tuple[Family, ...]:
    path = Path(out) / "settings.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} holds no sweep: it has no settings.json")
    families = []
    for kept in json.loads(path.read_text()):
        for stage in ("pretrain", "finetune", "probe"):
            kept[stage] = None if kept[stage] is None else Optimisation(**kept[stage])
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in kept.items()}
        families.append(Family(**fields))
    return tuple(families)


def read_predictions(out: Path, arm: str) -> dict[str, np.ndarray]:
    return load_file(Path(out) / "predictions" / f"{arm}.safetensors")


def read_laws(
    out: Path, everything: bool = False, engine: Engine = "operon", operators: tuple[str, ...] = tuple(OPERATORS),
    draws: int = 5, size: int = 1000, workers: int = 1, say: Callable[[str], None] = _print,
) -> None:  # fmt: skip
    """Formulas for the true forces and for finished arms, into OUT/laws; those that are there are not read again."""
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


# What stands beside the arms.


def oracles(family: Family) -> list[dict[str, Any]]:
    """Ceilings: the law read from true forces, and from the nearest labelled states (k = 2, the original's oracle)."""
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
    """Of each mechanism the pre-trained arm with most labels and the first seed, where it is finished."""
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
