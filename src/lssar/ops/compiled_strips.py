"""A strip of tiled attention as two functions for torch.compile: on a GPU its sweeps become one or two kernels.

In plain PyTorch each of many sweeps over a strip reads and writes device memory, which is what they cost.
Compiling takes seconds for each mechanism, so only calls that are large enough to be worth it come here (`worthwhile`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lssar import switches
from lssar.ops import rows as row_math
from lssar.ops.numerics import score_factor
from lssar.specs import AttentionSpec

DEVICES = ("cuda",)
LARGE = 2**27
"""Scores of a call from which on compiling is worth the wait: 16 heads of 4096 keys are twice that."""

_broken = False
"""Set when the compiler failed; calls then run without it."""

Function = Callable[..., Any]


class CompilerFailed(Exception):
    """The compiler failed; the call has to be repeated without it."""


def worthwhile(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    if _broken or mask is not None or q.device.type not in DEVICES or not switches.COMPILE:
        return False
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= LARGE


def _row_context(q: Tensor, k: Tensor, start: Tensor, stop: Tensor, spec: AttentionSpec) -> tuple[Any, ...]:
    """Visible keys, score factor, and what `rows` wants for hiding and scratch; in a graph scratch costs nothing."""
    n = (stop - start).to(q.dtype)
    keys = torch.arange(k.shape[1], device=k.device)
    hidden = (keys < start) | (keys >= stop)  # (N, R, K)

    def hide(x: Tensor, value: float) -> None:
        x.masked_fill_(hidden, value)

    def buffer(name: str) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[1], k.shape[1])

    return n, score_factor(n, q.shape[-1], spec), hide, buffer


@lru_cache(maxsize=256)
def _functions(spec: AttentionSpec) -> tuple[Function, Function]:
    """Output rows, and gradients of q, k and v, of a strip: q (N, R, D), k, v (N, K, D), start, stop (N, R, 1)."""

    def output(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        n, factor, hide, buffer = _row_context(q, k, start, stop, spec)
        s = torch.bmm(q * factor, k.mT)
        rows = row_math.weigh(s, n, spec, hide, buffer, factor, training=False, wide=False)
        return torch.bmm(rows.w, v) * rows.scale

    def gradients(
        q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, factor, hide, buffer = _row_context(q, k, start, stop, spec)
        s = torch.bmm(q * factor, k.mT)
        rows = row_math.weigh(s, n, spec, hide, buffer, factor, training=True, wide=False)
        dv = torch.bmm(rows.w.mT, do * rows.scale)
        ds = torch.bmm(do, v.mT)
        factor = row_math.backpropagate(rows, ds, n, spec, hide, buffer)[0] * factor
        return torch.bmm(ds, k) * factor, torch.bmm(ds.mT, q * factor), dv

    compiled = partial(torch.compile, fullgraph=True, dynamic=True)
    return compiled(output), compiled(gradients)


@contextlib.contextmanager
def _settings(half: bool) -> Iterator[None]:
    """One graph for strips of all shapes, all mechanisms under the limit of recompilations, and TF32 for half types.

    TF32 holds what bfloat16 and float16 hold, so that scores lose nothing by it, and rounds weights no more coarsely.
    """
    import torch._dynamo
    import torch.fx.experimental._config as symbolic_shapes

    before = None
    if half:
        try:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        except RuntimeError:  # the caller uses the newer settings, which do not mix with these
            before = None
    try:
        limits = torch._dynamo.config.patch(recompile_limit=1024, fail_on_recompile_limit_hit=True)
        no_promise = symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]  # of equal sizes
        with limits, no_promise:
            yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)


def run(kind: str, spec: AttentionSpec, half: bool, *arguments: Tensor) -> Any:
    """`output` or `gradients` of a strip; raises CompilerFailed the one time that the compiler does."""
    global _broken
    try:
        with _settings(half), torch.no_grad():
            return _functions(spec)[kind == "gradients"](*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        _broken = True
        first = str(problem).strip().split("\n")[0][:200]
        warnings.warn(f"torch.compile failed, so attention runs in slower PyTorch code ({first})", stacklevel=2)
        raise CompilerFailed from problem
