"""Orbits against a numerical integrator and the laws of conservation, and what models are shown of them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from lssar.experiments.newton.orbits import (
    WORLDS,
    draw,
    eccentric_anomaly,
    from_bins,
    identifiability,
    interleaved_positions,
    shown,
    to_bins,
    two_body_tracks,
)
from lssar.experiments.newton.training import labelled_systems, orbit_batches, random_stream, true_state

WELLPOSED, ORIGINAL = WORLDS["wellposed"], WORLDS["original"]


def systems(world, count=50, seed=0, **more):
    return draw(world, count, np.random.default_rng(seed), **more)


def test_keplers_equation_holds_to_the_last_digits():
    e = torch.linspace(0, 0.99, 100, dtype=torch.float64)[:, None]
    mean = torch.linspace(-20, 20, 1001, dtype=torch.float64)
    E = eccentric_anomaly(mean, e)
    wrapped = torch.remainder(mean + math.pi, 2 * math.pi) - math.pi
    assert (E - e * E.sin() - wrapped).abs().max() < 1e-13


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_orbits_follow_from_the_forces(name):
    """Fourth-order Runge-Kutta from the first positions and velocities, small steps, against the exact tracks."""
    world = dataclasses.replace(WORLDS[name], centre=0.0)
    s = systems(world, 30, planets=1)
    steps, fine = 6, 400
    tracks = two_body_tracks(s, steps)
    masses = tracks.masses[:, :, None]
    h = (s.step / fine)[:, None, None]

    def acceleration(x):
        apart = x[:, 1:] - x[:, :1]
        pull = world.gravity * apart / apart.norm(dim=-1, keepdim=True) ** 3
        return torch.cat([pull * masses[:, 1:], -pull * masses[:, :1]], 1)

    x, v = tracks.positions[:, 0], tracks.velocities[:, 0]
    size = tracks.distance.max(1).values[:, None, None]
    for step in range(1, steps):
        for _ in range(fine):
            k1, l1 = v, acceleration(x)
            k2, l2 = v + h / 2 * l1, acceleration(x + h / 2 * k1)
            k3, l3 = v + h / 2 * l2, acceleration(x + h / 2 * k2)
            k4, l4 = v + h * l3, acceleration(x + h * k3)
            x, v = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), v + h / 6 * (l1 + 2 * l2 + 2 * l3 + l4)
        close = 1 - s.eccentricity[:, 0]  # where the integrator itself can be trusted
        good = close > 0.1
        assert good.sum() > 20
        assert ((x - tracks.positions[:, step]) / size)[good].abs().max() < 1e-6
    force = masses[:, :1] * acceleration(tracks.positions[:, -1])[:, :1]
    torch.testing.assert_close(force.norm(dim=-1)[:, 0], tracks.force[:, -1])


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_what_is_conserved(name):
    s = systems(WORLDS[name], 200, planets=1)
    tracks = two_body_tracks(s, 50)
    m = tracks.masses[:, None, :, None]
    x, v = tracks.positions - s.centre[:, None, None], tracks.velocities
    kinetic = (m * v.square()).sum((-1, -2)) / 2
    potential = -WORLDS[name].gravity * tracks.masses.prod(-1)[:, None] / tracks.distance
    spin = (m[..., 0] * (x[..., 0] * v[..., 1] - x[..., 1] * v[..., 0])).sum(-1)
    for kept in (kinetic + potential, spin):
        assert (kept / kept[:, :1] - 1).abs().max() < 1e-9
    assert (m * x).sum(2).abs().max() < 1e-12 * float((m * x.abs()).max())
    vis_viva = WORLDS[name].gravity * tracks.masses.prod(-1) / (2 * s.axis[:, 0])
    torch.testing.assert_close(-(kinetic + potential)[:, 0], vis_viva)


def test_interleaved_tokens_are_the_same_orbits():
    s = systems(ORIGINAL, planets=1)
    together = two_body_tracks(s, 5).positions.flatten(1, 2)
    torch.testing.assert_close(interleaved_positions(s, 10), together)
    torch.testing.assert_close(interleaved_positions(s, 7), together[:, :7])


def test_several_planets_take_turns_about_a_star_that_stands_still():
    s = systems(ORIGINAL, 300)
    assert set(s.planets.tolist()) == set(range(1, 11))
    tokens = interleaved_positions(s, 44)
    for planets, seen in zip(s.planets.tolist(), tokens):
        if planets > 1:
            star = seen[planets :: planets + 1]
            assert (star == star[0]).all()
    three = next(i for i, n in enumerate(s.planets.tolist()) if n == 3)
    distance = (tokens[three].unflatten(0, (11, 4)) - tokens[three].unflatten(0, (11, 4))[:, 3:]).norm(dim=-1)
    a, e = s.axis[three, :3], s.eccentricity[three, :3]
    assert (distance[:, :3] <= a * (1 + e) * (1 + 1e-9)).all()
    assert (distance[:, :3] >= a * (1 - e) * (1 - 1e-9)).all()


def test_a_seed_gives_the_same_systems_and_roles_differ():
    first, again = (draw(ORIGINAL, 20, random_stream("test", 3)) for _ in range(2))
    other = draw(ORIGINAL, 20, random_stream("labels", 3))
    assert torch.equal(shown(first, 30), shown(again, 30))
    assert not set(first.star_mass.tolist()) & set(other.star_mass.tolist())


def test_batches_can_be_taken_up_anywhere():
    whole = orbit_batches(WELLPOSED, 1500, 10, seed=1, device="cpu")  # two to a chunk
    five = [next(whole) for _ in range(5)]
    later = orbit_batches(WELLPOSED, 1500, 10, seed=1, device="cpu", start=3)
    for wanted in five[3:]:
        for a, b in zip(wanted, next(later)):
            assert torch.equal(a, b)
    assert not torch.equal(five[0][1], five[1][1])


def test_bins():
    x = torch.tensor([-1e9, -50.0, -49.99, 0.0, 49.999, 50.0, 1e9], dtype=torch.float64)
    assert to_bins(x, ORIGINAL).tolist() == [0, 0, 0, 3500, 6999, 6999, 6999]
    middle = from_bins(torch.arange(7000), ORIGINAL)
    assert torch.equal(to_bins(middle, ORIGINAL), torch.arange(7000))


def test_the_original_hides_the_mass_that_matters_most():
    """The star's swing has a median of a sixth of a bin and yet the planet's mass makes most of the variance."""
    original, wellposed = identifiability(ORIGINAL), identifiability(WELLPOSED)
    assert original["star_swing_bins_median"] == pytest.approx(1 / 6, abs=0.02)
    assert original["planet_mass_share_of_var_log_force"] == pytest.approx(0.69, abs=0.03)
    assert original["star_swing_below_one_bin"] > 0.75
    assert wellposed["star_swing_below_one_bin"] == 0
    assert wellposed["star_swing_bins_median"] > 500


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_labels_belong_to_the_planets_tokens(name):
    world = WORLDS[name]
    data = labelled_systems(world, 8, 21, 4, np.random.default_rng(0))
    positions = data.tracks.positions[:, data.steps, 0]
    said = data.shown[:, data.at]
    if world.encoding == "positions":
        torch.testing.assert_close(said[..., :2] * world.extent / 4, positions.float())
    else:
        assert torch.equal(said, to_bins(positions, world))
    state = true_state(data).double()
    r = state[..., :2].norm(dim=-1)
    torch.testing.assert_close(
        (world.gravity * state[..., 4] * state[..., 5] / r**2).log().float(), data.log_force, atol=1e-4, rtol=1e-4
    )


def test_bad_worlds_are_refused():
    with pytest.raises(ValueError, match="several planets need encoding='bins'"):
        dataclasses.replace(WELLPOSED, planets=3)
    with pytest.raises(ValueError, match="end before step 8"):
        labelled_systems(ORIGINAL, 2, 12, 8, np.random.default_rng(0))
