"""Newton's law: the model, fine-tuning it, and the probe of what it has learnt."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

import lssar
from lssar.experiments.newton.model import OrbitModel, orbit_model_config
from lssar.experiments.newton.orbits import WORLDS, draw, shown
from lssar.experiments.newton.probe import _calibration, inductive_bias
from lssar.experiments.newton.training import Optimisation, finetune, labelled_systems, predict, random_stream

FEW_BINS = dataclasses.replace(WORLDS["wellposed-bins"], bins=50)


def tiny(world, attention="lssar", tokens=14):
    return OrbitModel(orbit_model_config("ci", lssar.spec(attention), world, tokens), world)


@pytest.mark.parametrize("world", [WORLDS["wellposed"], FEW_BINS], ids=["numbers", "bins"])
@pytest.mark.parametrize("attention", ["softmax", "lssa", "lssar", "cosine_softmax", "ssmax"])
def test_predictions_depend_only_on_the_past(world, attention):
    model = tiny(world, attention).eval()
    systems = draw(world, 3, np.random.default_rng(0), planets=1)
    tokens = shown(systems, 13)
    later = tokens.clone()
    later[:, 9:] = shown(draw(world, 3, np.random.default_rng(1), planets=1), 13)[:, 9:]
    at = torch.arange(13)
    for tell in (model.next_shown, lambda i, s: model.force(i, s, at)):
        one, other = tell(systems.interval, tokens), tell(systems.interval, later)
        torch.testing.assert_close(one[:, :9], other[:, :9])
    assert not torch.equal(model.force(systems.interval, tokens, at), model.force(systems.interval, later, at))
    model.next_loss(systems.interval, tokens).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("force_head"))


def test_a_new_model_knows_nothing():
    batch = shown(draw(FEW_BINS, 64, np.random.default_rng(0), planets=1), 13)
    loss = tiny(FEW_BINS).next_loss(torch.zeros(64, dtype=torch.long), batch)
    assert float(loss.detach()) == pytest.approx(math.log(50), rel=0.02)


@pytest.mark.parametrize(
    ("size", "world", "millions"), [("60k", "wellposed", 0.057), ("10m", "wellposed", 10.6), ("109m", "original", 108)]
)
def test_sizes(size, world, millions):
    with torch.device("meta"):
        model = OrbitModel(orbit_model_config(size, lssar.spec("lssar"), WORLDS[world], 64), WORLDS[world])
    assert model.parameter_count() / 1e6 == pytest.approx(millions, rel=0.02)


def test_finetuning_learns_its_labels_and_leaves_others_alone():
    data = labelled_systems(WORLDS["wellposed"], 20, 14, 6, random_stream("labels", 0))
    model = tiny(WORLDS["wellposed"])
    settings = Optimisation(steps=80, batch=8, lr=5e-3, warmup=5)
    scale = finetune(model, data, data.log_force[:8], settings, seed=0)
    told = predict(model, data, *scale)
    error = (told - data.log_force).square().mean(1)
    assert error[:8].mean() < 0.2 * data.log_force.var()
    assert scale == (pytest.approx(float(data.log_force[:8].mean())), pytest.approx(float(data.log_force[:8].std())))

    hidden = dataclasses.replace(data, log_force=data.log_force.clone().index_fill_(0, torch.arange(8, 20), 1e9))
    again = tiny(WORLDS["wellposed"])
    again.load_state_dict(_initial(again))
    other = tiny(WORLDS["wellposed"])
    other.load_state_dict(_initial(again))
    for net, labels in ((again, data), (other, hidden)):  # labels of systems that are not given change nothing
        finetune(net, labels, labels.log_force[:8], dataclasses.replace(settings, steps=3), seed=0)
    for a, b in zip(again.parameters(), other.parameters()):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="21 labelled systems asked for; there are 20"):
        finetune(model, data, torch.zeros(21, len(data.at)), settings, seed=0)


def _initial(model):
    return copy.deepcopy(model.state_dict())


def test_the_diagonal_is_an_oracle():
    rng = np.random.default_rng(0)
    oracle = rng.random(5000)
    same, blind = _calibration(oracle, oracle, 20), _calibration(oracle, rng.random(5000), 20)
    assert same["error"] == pytest.approx(0)
    assert (same["slope"], same["correlation"]) == (pytest.approx(1), pytest.approx(1))
    assert abs(blind["slope"]) < 0.1
    assert blind["error"] > 0.3


def test_probe():
    settings = Optimisation(steps=3, batch=16, lr=1e-3)
    model = tiny(WORLDS["wellposed"])
    before = _initial(model)
    result = inductive_bias(model, 14, 6, settings, functions=2, examples=40, asked=30)
    assert result["oracle_r2"] == pytest.approx(1, abs=1e-6)  # a linear function of the state, with the state given
    assert result["model_r2"] < 0.9
    assert result["points"]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
