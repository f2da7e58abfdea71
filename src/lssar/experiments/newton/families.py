"""The sweep: families of arms, scales that consist of families, and their jobs.

OUT/settings.json records the families of a folder. Worlds, mechanisms and seeds may be added later; a sweep with other
settings needs another folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lssar.experiments.newton.law import Points
from lssar.experiments.newton.orbits import WORLDS
from lssar.experiments.newton.training import Labelled, Optimisation, labelled_systems, random_stream
from lssar.records import write_json
from lssar.specs import parse_spec

MECHANISMS = ("lssar", "softmax", "lssa", "lssar,p=3", "cosine_softmax")
STARTS = ("pretrained", "fresh")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Arms that differ in mechanism, seed, start and labels, and in nothing else."""

    world: str
    size: str
    tokens: int
    """Tokens of a sequence; the first one names the time step."""
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
    "ci": (  # checks that all parts work together
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
    "h200": (  # for one H200
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


Arm = tuple[str, str, int]
"""Name, start, labels."""


@dataclass(frozen=True)
class Job:
    family: Family
    mechanism: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family.world}-{self.mechanism.replace(',', '-').replace('=', '')}-seed{self.seed}"

    def arms(self) -> Iterator[Arm]:
        """The arms with most labels first."""
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


# What a folder holds.


def claim(families: tuple[Family, ...], out: Path) -> None:
    """Record the families of a folder. Worlds, mechanisms and seeds may be added; nothing else may differ."""
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


# The systems.


def test_systems(family: Family, device: str = "cpu") -> tuple[Labelled, torch.Tensor]:
    """Test systems, the same for every arm and never labelled, and the step (N, 1) at which each force is evaluated."""
    data = labelled_systems(
        WORLDS[family.world], family.tests, family.tokens, family.first, random_stream("test", 0), device
    )
    K = len(data.at)
    step = random_stream("test", 1).integers(K // 2, K, family.tests)  # late: the orbit so far determines the state
    return data, torch.from_numpy(step).to(device)[:, None]


def label_pool(family: Family, seed: int, device: str = "cpu") -> Labelled:
    """As many systems as the largest number of labels asks for; a smaller number takes the first ones."""
    rng = random_stream("labels", seed)
    return labelled_systems(WORLDS[family.world], max(family.labels), family.tokens, family.first, rng, device)


def test_points(family: Family) -> Points:
    """States from which laws are fitted, with the true forces."""
    data, step = test_systems(family)
    m1, m2 = data.tracks.masses.numpy().T
    at = data.steps[step[:, 0]][:, None]
    force, r = (x.gather(1, at)[:, 0].numpy() for x in (data.tracks.force, data.tracks.distance))
    return Points(m1, m2, r, np.log(force))
