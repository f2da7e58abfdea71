"""AdamW as in the paper's recipe, or Muon for the matrices inside the blocks with AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch

from lssar.model import GPT
from lssar.training.recipes import Recipe

MUON_RATE_FACTOR = 33.0
"""Muon's rate over AdamW's: 0.02 where AdamW has 6e-4, as its author has them for GPT-2 sizes."""


def make_optimisers(model: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Weight decay on matrices only, as GPT-2's recipes have it. A group's rate is the schedule's x `rate_factor`."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
    embedding = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("blocks.")]
    vectors = [p for p in model.parameters() if p.dim() < 2]

    def adamw(matrices: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": recipe.weight_decay, "rate_factor": 1.0},
            {"params": vectors, "weight_decay": 0.0, "rate_factor": 1.0},
        ]
        fused = matrices[0].device.type == "cuda"
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=1e-8, fused=fused)

    if recipe.optimiser == "adamw":
        return [adamw([*inside, *embedding])]
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimiser='muon' needs torch 2.9 or newer; this is {torch.__version__}")
    groups = [{"params": inside, "rate_factor": MUON_RATE_FACTOR}]
    muon = torch.optim.Muon(groups, lr=recipe.lr * MUON_RATE_FACTOR, momentum=0.95, weight_decay=recipe.weight_decay)
    return [muon, adamw(embedding)]
