"""The inductive-bias probe of Vafa et al. 2025: to which functions does a pre-trained model extend a few labels?

A random linear function of the true state is shown on a few tokens of a few systems; the model is fine-tuned on them
and asked elsewhere, and so is an oracle, linear regression on the true state. Over many functions, two states that the
oracle tells apart by a distance d should be told apart by about d: a model with the state inside lies on the diagonal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lssar.experiments.newton.model import OrbitModel
from lssar.experiments.newton.steps import EAGER, Execution
from lssar.experiments.newton.training import (
    Optimisation,
    finetune,
    labelled_systems,
    predict,
    random_stream,
    true_state,
)


def inductive_bias(
    model: OrbitModel, tokens: int, first: int, settings: Optimisation, functions: int, seed: int = 0,
    examples: int = 100, labels_each: int = 2, asked: int = 300, bins: int = 20, how: Execution = EAGER,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Mean distances of model and oracle over pairs of held-out states, in bins; and R^2 on the functions themselves.

    The original asks for the same sequences again; here the systems asked about are new ones.
    """
    device = next(model.parameters()).device
    rng = random_stream("probe", seed)
    known = labelled_systems(model.world, examples, tokens, first, rng, device)
    new = labelled_systems(model.world, asked, tokens, first, rng, device)
    K = len(known.at)
    step = torch.from_numpy(rng.integers(K // 2, K, asked)).to(device)
    states, elsewhere = _five(true_state(known)), _five(true_state(new))[torch.arange(asked, device=device), step]
    mean, deviation = states.mean((0, 1)), states.std((0, 1))
    states, elsewhere = (states - mean) / deviation, (elsewhere - mean) / deviation

    distances: dict[str, list[np.ndarray]] = {"model": [], "oracle": []}
    r2: dict[str, list[float]] = {"model": [], "oracle": []}
    for function in range(functions):
        direction = torch.from_numpy(rng.standard_normal(states.shape[-1])).to(states)
        direction = direction / direction.norm()
        chosen = torch.zeros(examples, K, dtype=torch.bool, device=device)
        chosen.scatter_(1, torch.from_numpy(np.argsort(rng.random((examples, K)))[:, :labels_each]).to(device), True)
        adapted = copy.deepcopy(model)
        scale = finetune(adapted, known, states @ direction, settings, seed * 1000 + function, how, stop, chosen)
        said = predict(adapted, new, *scale, how)[torch.arange(asked, device=device), step].cpu().double()
        oracle = _linear(states[chosen], (states @ direction)[chosen], elsewhere)
        true = (elsewhere @ direction).cpu().double()
        for name, values in (("model", said), ("oracle", oracle)):
            distances[name].append(torch.pdist(values[:, None]).numpy())
            r2[name].append(float(1 - (values - true).square().mean() / true.var()))
    result = _calibration(np.mean(distances["oracle"], 0), np.mean(distances["model"], 0), bins)
    result |= {f"{name}_r2": float(np.mean(values)) for name, values in r2.items()}
    return result | {"functions": functions}


def _five(state: torch.Tensor) -> torch.Tensor:
    """Relative position and velocity and the ratio of masses, as the original has them."""
    return torch.cat([state[..., :4], state[..., 4:5] / state[..., 5:6]], -1)


def _linear(x: torch.Tensor, y: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    x, y, asked = x.double().cpu(), y.double().cpu(), asked.double().cpu()
    one = x.new_ones(len(x), 1)
    c = torch.linalg.lstsq(torch.cat([x, one], 1), y[:, None]).solution
    return (torch.cat([asked, one[:1].expand(len(asked), 1)], 1) @ c)[:, 0]


def _calibration(oracle: np.ndarray, model: np.ndarray, bins: int) -> dict[str, Any]:
    """Mean model distance in bins of oracle distance. `error` is the mean distance from the diagonal over the mean
    oracle distance; `slope` that of a straight line through the pairs."""
    edges = np.linspace(oracle.min(), oracle.max(), bins + 1)
    which = np.clip(np.digitize(oracle, edges) - 1, 0, bins - 1)
    filled = [b for b in range(bins) if (which == b).sum() >= 10]
    points = [[float(oracle[which == b].mean()), float(model[which == b].mean())] for b in filled]
    error = float(np.mean([abs(x - y) for x, y in points]) / oracle.mean())
    slope = float(np.polyfit(oracle, model, 1)[0])
    return {"points": points, "error": error, "slope": slope, "correlation": float(np.corrcoef(oracle, model)[0, 1])}
