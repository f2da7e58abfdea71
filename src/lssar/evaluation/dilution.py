"""What happens to an attention row, on synthetic keys, when the context grows 64 times."""

from __future__ import annotations

import math
from typing import Any

import torch

from lssar.attention import attention
from lssar.records import environment

MECHANISMS = ("softmax", "cosine_softmax", "lssa", "lssar")


def row_statistics(w: torch.Tensor, relevant: int) -> dict[str, float]:
    """Mean over rows (queries, n) of the largest weight, entropy, effective number of keys and weight of one key."""
    entropy = -(w * w.clamp_min(1e-300).log()).sum(-1)
    return {
        "peak": float(w.max(-1).values.mean()),
        "relevant": float(w[:, relevant].mean()),
        "entropy": float(entropy.mean()),
        "effective": float(entropy.exp().mean()),
    }


def dilution(
    base: int = 256, multiples: int = 64, queries: int = 64, head_size: int = 64, cosine: float = 0.6, seed: int = 0
) -> dict[str, Any]:
    """Rows over n keys, n = base to base * multiples: one key at the given cosine to the query, the others random.

    Entries have unit variance, so a random key scores about N(0, 1) under softmax, as at a model's initialisation.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows: list[dict[str, Any]] = []
    q = normal(queries, 1, 1, head_size)
    direction = q / q.norm(dim=-1, keepdim=True)
    side = normal(queries, 1, 1, head_size)
    side = side - (side * direction).sum(-1, keepdim=True) * direction
    side = side / side.norm(dim=-1, keepdim=True)
    target = math.sqrt(head_size) * (cosine * direction + math.sqrt(1 - cosine**2) * side)
    keys = normal(queries, 1, base * multiples, head_size)
    keys[:, :, :1] = target
    for exponent in range(int(math.log2(multiples)) + 1):
        n = base * 2**exponent
        k = keys[:, :, :n]
        for mechanism in MECHANISMS:
            w = attention(q, k, k, mechanism, return_weights=True)[1][:, 0, 0]
            rows.append({"mechanism": mechanism, "n": n, "multiple": 2**exponent, **row_statistics(w, relevant=0)})
    settings = {"base": base, "queries": queries, "head_size": head_size, "cosine": cosine, "seed": seed}
    return {"mechanisms": list(MECHANISMS), "settings": settings, "rows": rows, "environment": environment()}
