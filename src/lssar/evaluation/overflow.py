"""Where the textbook form of re-weighting leaves the range of a dtype, and where the stable form does.

Textbook, Eq. 5 as written: A = l1(phi(s)), r = ReLU(n A - 1)^p, r / sum r. With n A up to n, r grows to n^p and its sum
with it; or every r underflows and the sum is 0. Stable: the row is divided by its spread first (docs/derivations.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lssar.model import GPT
from lssar.nn import Attention, narrower
from lssar.ops.numerics import FIRST_ROWS, eps_of, flat_tolerance, score_factor
from lssar.ops.reference import ACTIVATIONS, l1, reweight, scores
from lssar.specs import AttentionSpec, spec

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def textbook_rows(s: Tensor, p: float, mechanism: AttentionSpec) -> Tensor:
    """Weights (R, n) of rows of scores that see all n keys, every step in the dtype of s."""
    n = s.shape[-1]
    weights = s.softmax(-1) if mechanism.activation == "exp" else l1(ACTIVATIONS[mechanism.activation](s))
    raised = torch.relu(n * weights - (mechanism.threshold if n > FIRST_ROWS else 0)) ** p
    return raised / raised.sum(-1, keepdim=True)


def stable_rows(s: Tensor, p: float, mechanism: AttentionSpec, head_size: int) -> Tensor:
    """The same weights by the stable form that the implementations use."""
    n = torch.full((s.shape[0], 1), s.shape[-1], dtype=torch.float32, device=s.device)
    largest = s.amax(-1, keepdim=True)
    a = (s - largest).exp() if mechanism.activation == "exp" else ACTIVATIONS[mechanism.activation](s)
    bound = score_factor(n, head_size, mechanism) if mechanism.cosine else largest.float().abs()
    tolerance = flat_tolerance(a.amax(-1, keepdim=True), bound, mechanism, eps_of(s.dtype))
    visible = torch.ones_like(s, dtype=torch.bool)
    # Sums in float32, as all implementations have it.
    return reweight(a.float(), visible, n, p, mechanism.threshold, tolerance).to(s.dtype)


def lost_rows(w: Tensor) -> int:
    """Rows that are not finite, or hold no weight."""
    return int((~w.isfinite().all(-1) | (w.float().sum(-1) < 0.5)).sum())


def overflow_counts(s: Tensor, p: float, mechanism: AttentionSpec, head_size: int) -> dict[str, Any]:
    """How many of the rows of scores (R, n) each form loses in each dtype."""
    counts: dict[str, Any] = {"rows": s.shape[0], "textbook": {}, "stable": {}}
    for name, dtype in DTYPES.items():
        rounded = s.to(dtype)
        counts["textbook"][name] = lost_rows(textbook_rows(rounded, p, mechanism))
        counts["stable"][name] = lost_rows(stable_rows(rounded, p, mechanism, head_size))
    return counts


def synthetic_overflow(
    powers: tuple[float, ...], lengths: tuple[int, ...] = (1024, 16_384), rows: int = 64, head_size: int = 64,
    seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows over random keys, as at a model's initialisation, and over keys of which one points where the query does."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        q = torch.randn(1, 1, rows, head_size, generator=generator)
        k = torch.randn(1, 1, length, head_size, generator=generator)
        for kind in ("random", "one match"):
            keys = k.expand(1, rows, length, head_size).clone()
            if kind == "one match":
                keys[:, :, length // 2] = 2 * q[0]
            n = torch.tensor(float(length))
            for name in ("softmax", "lssa"):
                factor = score_factor(n, head_size, spec(name))
                s = scores(q.transpose(1, 2), keys, factor, n, spec(name))[0, :, 0]
                for p in powers:
                    about = {"attention": name, "p": p, "length": length, "keys": kind}
                    found.append(about | overflow_counts(s, p, spec(name), head_size))
    return found


@torch.no_grad()
def model_overflow(model: GPT, ids: Tensor) -> dict[str, Any]:
    """Counts over all layers, heads and pieces, for the row of the last token of each piece (B, L)."""
    total: dict[str, Any] = {"length": ids.shape[1], "rows": 0, "textbook": dict.fromkeys(DTYPES, 0)}
    total["stable"] = dict(total["textbook"])

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        for mechanism, s in _last_rows(module, inputs):
            assert mechanism.p is not None
            counts = overflow_counts(s, mechanism.p, mechanism, module.project.config.head_size)
            total["rows"] += counts["rows"]
            for form in ("textbook", "stable"):
                for name in DTYPES:
                    total[form][name] += counts[form][name]

    if not any(mechanism.p for block in model.layers() for mechanism in block.attention.specs):
        raise ValueError(f"the model ({model.config.layout}) has no re-weighting that could overflow")
    hooks = [block.attention.register_forward_pre_hook(look) for block in model.layers()]
    try:
        for piece in ids.split(1):
            model.hidden(piece)
    finally:
        for hook in hooks:
            hook.remove()
    return total


def _last_rows(module: Attention, inputs: tuple[Any, ...]) -> list[tuple[AttentionSpec, Tensor]]:
    """Each re-weighted mechanism of a layer with the scores (B H, n) of its heads in the last row, float32."""
    x, positions = inputs[:2]
    q, k, v = module.qkv(x, positions)
    first = max(0, k.shape[2] - (narrower(module.window, positions.window) or k.shape[2]))
    found = []

    def keep(
        q: Tensor, k: Tensor, v: Tensor, mechanism: AttentionSpec, head_scale: Tensor | None = None, **others: Any
    ) -> Tensor:
        if mechanism.p is not None:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            n = torch.tensor(float(k.shape[2]), device=q.device)
            factor = score_factor(n, q.shape[-1], mechanism)
            if head_scale is not None:
                factor = factor * head_scale.float()[:, None, None]
            found.append((mechanism, scores(q.float(), k.float(), factor, n, mechanism).flatten(0, 2)))
        return q

    module.attend(q[:, :, -1:], k[:, :, first:], v[:, :, first:], function=keep)
    return found
