"""Planets on exact Kepler orbits, vectorised, from a seed, the same on any device.

Shape letters: N systems, P planets, T steps in time, L tokens. A system's planets feel their star and not each other.
The elements of the orbits are drawn with numpy, so that a seed gives the same systems everywhere; where the bodies are
at a time is worked out by torch in float64 on the device asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

WEEK, HALF_YEAR = 7 * 0.0027, 180 * 0.0027
"""In years; the original's two steps."""


@dataclass(frozen=True, kw_only=True)
class OrbitWorld:
    """A distribution over systems, and how they are shown to a model."""

    name: str
    encoding: Literal["positions", "bins"]
    """`positions`: a token a step with both bodies' coordinates, as numbers (two bodies only). `bins`: a token a body
    and step, planets first and the star last, x and y each in one of `bins` bins."""
    masses: Literal["similar", "exoplanets", "heavy"]
    """`similar`: both log-uniform 0.3..3. `exoplanets`: fits to the NASA archive, 1e-9..1e-3 and 0.1..5 solar masses.
    `heavy`: the same stars with companions of 0.05 to 1 times their mass."""
    gravity: float
    axis: tuple[float, float]
    """Range of the semi-major axis: log-uniform for `similar` masses, else uniform."""
    eccentricity: Literal["uniform", "beta"]
    """`uniform`: 0..0.5. `beta`: Beta(0.867, 3.03), of observed planets (Kipping 2013)."""
    intervals: tuple[float, ...]
    """Time from step to step, one of these in each system; the first token says which."""
    planets: int = 1
    """Pre-training systems have 1 to this many; systems with forces always have one."""
    centre: float = 0.0
    """Deviation of the centre of mass from the origin."""
    extent: float = 5.0
    """Bins cover -extent..extent; numbers are given in units of a quarter of it."""
    bins: int = 7000

    def __post_init__(self) -> None:
        if self.encoding == "positions" and self.planets > 1:
            raise ValueError("encoding='positions' shows two bodies in a token; several planets need encoding='bins'")


ORIGINAL = OrbitWorld(
    name="original", encoding="bins", masses="exoplanets", gravity=4 * math.pi**2, axis=(0.3, 32.0),
    eccentricity="beta", intervals=(WEEK, HALF_YEAR), planets=10, centre=1.0, extent=50.0,
)  # fmt: skip

WORLDS: dict[str, OrbitWorld] = {
    # Both masses can be worked out from what is shown: their ratio from the orbits' sizes, their sum from the period.
    "wellposed": OrbitWorld(
        name="wellposed", encoding="positions", masses="similar", gravity=1.0, axis=(0.7, 3.0), eccentricity="uniform",
        intervals=(0.25,),
    ),
    # The same, through the original's tokens: is it the bins?
    "wellposed-bins": OrbitWorld(
        name="wellposed-bins", encoding="bins", masses="similar", gravity=1.0, axis=(0.7, 3.0), eccentricity="uniform",
        intervals=(0.25,),
    ),
    # Vafa et al. 2025, whose protocol the paper follows.
    "original": ORIGINAL,
    # The original with companions so heavy that the star's motion can be seen: is it the masses?
    "heavy": replace(ORIGINAL, name="heavy", masses="heavy"),
}  # fmt: skip

# Fits by scipy.stats to the 4,956 planets of the NASA Exoplanet Archive that Vafa et al. use (planets below the 90th
# percentile; shape, location, scale in solar masses).
PLANET_GAMMA = (0.3202, 6.01e-8, 1.1056e-3)
STAR_LOGNORMAL = (0.20045, -0.67936, 1.62715)


@dataclass(frozen=True)
class Systems:
    """Orbital elements of N systems, float64. Slots of planets that a system does not have hold copies of its first."""

    world: OrbitWorld
    planets: Tensor  # (N,) how many
    planet_mass: Tensor  # (N, P)
    star_mass: Tensor  # (N,)
    axis: Tensor  # (N, P)
    eccentricity: Tensor  # (N, P)
    tilt: Tensor  # (N, P), direction of the nearest point, in the plane
    phase: Tensor  # (N, P), mean anomaly at time 0
    centre: Tensor  # (N, 2)
    interval: Tensor  # (N,) index into world.intervals

    def __len__(self) -> int:
        return len(self.star_mass)

    @property
    def step(self) -> Tensor:
        """(N,), the time between two steps."""
        return torch.tensor(self.world.intervals, dtype=torch.float64, device=self.interval.device)[self.interval]


def draw(
    world: OrbitWorld, count: int, rng: np.random.Generator, planets: int | None = None,
    device: torch.device | str = "cpu",
) -> Systems:  # fmt: skip
    """`count` systems of a world; `planets` of them in each, or as many as the world's pre-training has."""
    most = planets or world.planets
    number = np.full(count, planets) if planets else rng.integers(1, world.planets + 1, count)
    shape = (count, most)
    if world.masses == "similar":
        star, light = _log_uniform(rng, 0.3, 3.0, (count,)), _log_uniform(rng, 0.3, 3.0, shape)
    else:
        sigma, place, scale = STAR_LOGNORMAL
        star = np.clip(place + scale * rng.lognormal(0.0, sigma, count), 0.1, 5.0)
        if world.masses == "exoplanets":
            alpha, place, scale = PLANET_GAMMA
            light = np.clip(place + rng.gamma(alpha, scale, shape), 1e-9, 1e-3)
        else:
            light = star[:, None] * _log_uniform(rng, 0.05, 1.0, shape)
    a = _log_uniform(rng, *world.axis, shape) if world.masses == "similar" else rng.uniform(*world.axis, shape)
    e = rng.uniform(0.0, 0.5, shape) if world.eccentricity == "uniform" else rng.beta(0.867, 3.03, shape)
    tilt, phase = rng.uniform(0.0, 2 * math.pi, (2, *shape))
    centre = world.centre * rng.standard_normal((count, 2))
    interval = rng.integers(0, len(world.intervals), count)
    absent = np.arange(most) >= number[:, None]
    for element in (light, a, e, tilt, phase):
        element[absent] = np.broadcast_to(element[:, :1], shape)[absent]

    def put(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Systems(
        world, put(number), put(light), put(star), put(a), put(e), put(tilt), put(phase), put(centre), put(interval)
    )


def _log_uniform(rng: np.random.Generator, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(rng.uniform(math.log(low), math.log(high), shape))


def eccentric_anomaly(mean: Tensor, eccentricity: Tensor, iterations: int = 6) -> Tensor:
    """E with E - e sin E = M, 0 <= e < 1: Danby's start, then steps of fourth order; float64 to the last few bits."""
    mean = torch.remainder(mean + math.pi, 2 * math.pi) - math.pi
    E = mean + 0.85 * eccentricity * torch.sign(mean)
    for _ in range(iterations):
        es, ec = eccentricity * E.sin(), eccentricity * E.cos()
        f, f1 = E - es - mean, 1 - ec
        d1 = -f / f1
        d2 = -f / (f1 + d1 * es / 2)
        E = E - f / (f1 + d2 * es / 2 + d2**2 * ec / 6)
    return E


def relative_motion(systems: Systems, planet: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Position and velocity (N, L, 2) of planets (N, L) as seen from their star, at times (N, L)."""
    a, e, tilt, phase, light = (
        x.gather(1, planet)
        for x in (systems.axis, systems.eccentricity, systems.tilt, systems.phase, systems.planet_mass)
    )
    motion = torch.sqrt(systems.world.gravity * (light + systems.star_mass[:, None]) / a**3)
    E = eccentric_anomaly(phase + motion * time, e)
    minor = torch.sqrt(1 - e**2)
    along, across = a * (E.cos() - e), a * minor * E.sin()
    rate = motion / (1 - e * E.cos())
    v_along, v_across = -a * E.sin() * rate, a * minor * E.cos() * rate
    return _turn(along, across, tilt), _turn(v_along, v_across, tilt)


def _turn(x: Tensor, y: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x - sin * y, sin * x + cos * y], -1)


@dataclass(frozen=True)
class Tracks:
    """Two bodies over time: planet first, star second."""

    positions: Tensor  # (N, T, 2 bodies, 2)
    velocities: Tensor  # (N, T, 2 bodies, 2), of the bodies about their centre of mass
    distance: Tensor  # (N, T)
    force: Tensor  # (N, T), magnitude
    masses: Tensor  # (N, 2)


def two_body_tracks(systems: Systems, steps: int) -> Tracks:
    """Where both bodies of each system are at `steps` times, and the force between them; the first planet counts."""
    time = torch.arange(steps, device=systems.axis.device) * systems.step[:, None]
    first = torch.zeros_like(time, dtype=torch.long)
    x, v = relative_motion(systems, first, time)
    masses = torch.stack([systems.planet_mass[:, 0], systems.star_mass], -1)
    share = (masses.flip(-1) / masses.sum(-1, keepdim=True)) * torch.tensor([1.0, -1.0], device=masses.device)
    share = share[:, None, :, None]  # planet at + m_star / M, star at - m_planet / M of their distance
    distance = x.norm(dim=-1)
    force = systems.world.gravity * masses.prod(-1)[:, None] / distance**2
    positions = systems.centre[:, None, None] + share * x[:, :, None]
    return Tracks(positions, share * v[:, :, None], distance, force, masses)


def interleaved_positions(systems: Systems, tokens: int) -> Tensor:
    """(N, tokens, 2): planets in turn and then the star, step after step.

    With one planet both bodies move about the centre of mass. With several the star stands still, as in the original.
    """
    device = systems.axis.device
    bodies = systems.planets[:, None] + 1
    at = torch.arange(tokens, device=device)[None]
    step, body = at // bodies, at % bodies
    star = body == systems.planets[:, None]
    planet = torch.where(star, 0, body)
    x, _ = relative_motion(systems, planet, step * systems.step[:, None])
    single = systems.planets[:, None] == 1
    light = systems.planet_mass[:, :1]
    total = light + systems.star_mass[:, None]
    start, _ = relative_motion(systems, planet[:, :1] * 0, torch.zeros_like(systems.phase[:, :1]))
    still = systems.centre[:, None] - (light / total)[..., None] * start  # (N, 1, 2)
    alone = torch.where(star, -light / total, systems.star_mass[:, None] / total)[..., None] * x
    among = torch.where(star[..., None], 0.0, x)
    return torch.where(single[..., None], systems.centre[:, None] + alone, still + among)


def to_bins(positions: Tensor, world: OrbitWorld) -> Tensor:
    """Bin of each coordinate; what lies outside goes into the first or last."""
    width = 2 * world.extent / world.bins
    return ((positions + world.extent) / width).floor().long().clamp(0, world.bins - 1)


def from_bins(bins: Tensor, world: OrbitWorld) -> Tensor:
    """Middle of each bin."""
    return (bins + 0.5) * (2 * world.extent / world.bins) - world.extent


def shown(systems: Systems, tokens: int) -> Tensor:
    """What a model reads: (N, tokens, 4) float32 numbers or (N, tokens, 2) bins."""
    if systems.world.encoding == "positions":
        return (two_body_tracks(systems, tokens).positions.flatten(2) / (systems.world.extent / 4)).float()
    return to_bins(interleaved_positions(systems, tokens), systems.world)


@lru_cache(maxsize=16)
def typical_step(world: OrbitWorld) -> float:
    """Root mean square of a coordinate's change in one step, in the units of `shown`."""
    systems = draw(world, 4096, np.random.default_rng(0), planets=1)
    positions = two_body_tracks(systems, 16).positions / (world.extent / 4)
    return float((positions[:, 1:] - positions[:, :-1]).square().mean().sqrt())


def identifiability(world: OrbitWorld, count: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Whether the planet's mass can be observed: the star's motion in bins, the share of var(log F) due to the mass."""
    systems = draw(world, count, np.random.default_rng(seed), planets=1)
    tracks = two_body_tracks(systems, 1)
    swing = 2 * systems.axis[:, 0] * tracks.masses[:, 0] / tracks.masses.sum(-1)  # from end to end
    log_force, log_light = tracks.force[:, 0].log(), tracks.masses[:, 0].log()
    width = 2 * world.extent / world.bins
    return {
        "star_swing_bins_median": float(swing.median() / width),
        "star_swing_below_one_bin": float((swing < width).double().mean()),
        "planet_mass_share_of_var_log_force": float(log_light.var() / log_force.var()),
        "force_ratio_99_to_1": float((log_force.quantile(0.99) - log_force.quantile(0.01)).exp()),
    }
