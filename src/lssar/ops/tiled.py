"""The operator in strips of whole rows: exact for every spec, memory linear in length, with its own backward.

A strip is a block of query rows against all the keys that any of them may see. Its size follows a budget of elements,
so the working memory is O(L x rows), and on a CPU a strip stays in cache through the sweeps over it. The row arithmetic
is in `rows.py`. Nothing of the forward is kept for the backward but its inputs.

Shape letters: B batch, h key heads, g query heads per key head, R rows and K keys of a strip, N = b h of a strip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lssar.ops import compiled_strips, native
from lssar.ops import rows as row_math
from lssar.ops.numerics import (
    finite,
    saturate,
    score_factor,
    settle,
    tame,
    tame_rows,
    unit_and_norm,
    unit_backward,
    working_dtype,
)
from lssar.specs import AttentionSpec

CPU_STRIP = 2**19
CUDA_STRIP = 2**26
COMPILED_STRIP = 2**27
"""Elements of a strip: on a CPU four buffers of this size should stay near the cores; compiled ones need fewer."""

MAX_ROWS = 256


@dataclass
class _Strip:
    batch: slice
    heads: slice
    rows: slice
    keys: slice
    n: Tensor  # (N, gR, 1), float: visible keys of each row
    factor: Tensor  # (N, gR, 1): what q.k is multiplied by
    hidden: list[tuple[slice, Tensor]]  # column ranges with a bool tensor broadcastable to (b, h, g, R, columns)
    bounds: tuple[Tensor, Tensor]  # (N, gR, 1), int: first visible key of each row and one past the last, in the strip
    shape: tuple[int, int, int, int, int]  # b, h, g, R, K

    def hide(self, x: Tensor, value: float) -> None:
        x = x.view(self.shape)
        for columns, hidden in self.hidden:
            x[..., columns].masked_fill_(hidden, value)


class _Scratch:
    """Strip-shaped buffers that are allocated once and reused for every strip."""

    def __init__(self, like: Tensor):
        self.like = like
        self.memory: dict[str, Tensor] = {}
        self.shape: tuple[int, int, int] = (0, 0, 0)

    def __call__(self, name: str) -> Tensor:
        size = self.shape[0] * self.shape[1] * self.shape[2]
        memory = self.memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self.memory[name] = self.like.new_empty(size)
        return memory[:size].view(self.shape)


class _Problem:
    """Inputs in the working dtype, grouped by key head, and the strips that cover them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: str,
        wide: bool, compile: bool = False,
    ):  # fmt: skip
        self.spec = _spec(spec)
        self.wide = wide
        self.half = q.element_size() < 4
        self.compile = compile and compiled_strips.worthwhile(q, k, mask)
        (B, Hq, self.Lq, self.D), (_, Hkv, self.Lk, _) = q.shape, k.shape
        self.B, self.Hkv, self.g = B, Hkv, Hq // Hkv
        dtype = working_dtype(q.dtype)
        self.v_scale = 1.0
        if wide:
            q, k = tame_rows(q), tame_rows(k)
            self.v, self.v_scale = tame(v)
        else:
            q, k, self.v = (x.to(dtype) for x in (q, k, v))
        if self.spec.cosine:
            q, self.q_norm = unit_and_norm(q)
            k, self.k_norm = unit_and_norm(k)
        self.q, self.k = self.grouped(q), k
        self.mask = None if mask is None else mask.expand(B, Hq, self.Lq, self.Lk).unflatten(1, (Hkv, self.g))
        self.start, self.stop = (x.expand(B, self.Lq) for x in torch.broadcast_tensors(start, stop))
        # The host plans the strips: one copy of the bounds, once.
        self.host_start, self.host_stop = self.start.cpu(), self.stop.cpu()
        self.budget = COMPILED_STRIP if self.compile else CUDA_STRIP if q.is_cuda else CPU_STRIP
        self.scratch = _Scratch(self.k)

    def grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.Hkv, self.g))

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Batches and key heads that are worked on together: many when rows are short, one head when they are long."""
        rows = max(1, min(self.Lq, MAX_ROWS) // 2)
        together = max(1, self.budget // max(1, self.g * rows * self.Lk))
        if together >= self.Hkv:
            step = max(1, together // self.Hkv)
            for b in range(0, self.B, step):
                yield slice(b, min(b + step, self.B)), slice(0, self.Hkv)
        else:
            for b in range(self.B):
                for h in range(0, self.Hkv, together):
                    yield slice(b, b + 1), slice(h, min(h + together, self.Hkv))

    def strips(self, batch: slice, heads: slice) -> Iterator[_Strip]:
        start, stop = self.host_start[batch], self.host_stop[batch]
        together = (batch.stop - batch.start) * (heads.stop - heads.start) * self.g
        row = 0
        while row < self.Lq:
            # Rows as the budget allows, judged by what the next MAX_ROWS rows may see.
            ahead = slice(row, min(row + MAX_ROWS, self.Lq))
            reach = max(1, int(stop[:, ahead].max()) - int(start[:, ahead].min()))
            rows = slice(row, min(row + max(8, min(MAX_ROWS, self.budget // (together * reach)) // 8 * 8), self.Lq))
            row = rows.stop
            low, high = start[:, rows], stop[:, rows]
            seeing = low < high
            if seeing.any():
                keys = slice(int(low[seeing].min()), int(high[seeing].max()))
                yield self._strip(batch, heads, rows, keys, (int(low.max()), int(high.min())))

    def _strip(self, batch: slice, heads: slice, rows: slice, keys: slice, common: tuple[int, int]) -> _Strip:
        b, h, R, K = (x.stop - x.start for x in (batch, heads, rows, keys))
        start, stop = (x[batch, None, None, rows] for x in (self.start, self.stop))  # (b, 1, 1, R)
        per_row = lambda x: x.expand(b, h, self.g, R).reshape(b * h, self.g * R, 1)  # noqa: E731
        bounds = per_row(start - keys.start), per_row(stop - keys.start)
        hidden = []
        columns: list[slice]
        if self.compile:
            columns = []  # the compiled functions see to it by the bounds
        elif self.mask is not None or common[0] >= common[1]:
            columns = [keys]
        else:  # between the bounds common to all rows nothing is hidden
            columns = [slice(keys.start, common[0]), slice(common[1], keys.stop)]
        for c in columns:
            if c.start < c.stop:
                j = torch.arange(c.start, c.stop, device=start.device)
                outside = (j < start[..., None]) | (j >= stop[..., None])
                if self.mask is not None:
                    outside = outside | ~self.mask[batch, heads, :, rows, c]
                hidden.append((slice(c.start - keys.start, c.stop - keys.start), outside))
        n = stop - start if self.mask is None else K - hidden[0][1].sum(-1)
        n = per_row(n).to(self.k.dtype)
        shape = (b, h, self.g, R, K)
        self.scratch.shape = (b * h, self.g * R, K)
        return _Strip(batch, heads, rows, keys, n, score_factor(n, self.D, self.spec), hidden, bounds, shape)

    def query_rows(self, x: Tensor, strip: _Strip) -> Tensor:
        """(B, h, g, Lq, D) -> the strip's (N, gR, D)."""
        x = x[strip.batch, strip.heads, :, strip.rows]
        return x.reshape(-1, self.g * (strip.rows.stop - strip.rows.start), x.shape[-1])

    def key_rows(self, x: Tensor, strip: _Strip) -> Tensor:
        """(B, h, Lk, D) -> a view of the strip's (N, K, D)."""
        return x[strip.batch, strip.heads].flatten(0, 1)[:, strip.keys]

    def weigh(self, strip: _Strip, q_scaled: Tensor, training: bool) -> row_math.Rows:
        s = torch.bmm(q_scaled, self.key_rows(self.k, strip).mT, out=self.scratch("a"))
        return row_math.weigh(s, strip.n, self.spec, strip.hide, self.scratch, strip.factor, training, self.wide)

    def compiled(self, kind: str, strip: _Strip, *more: Tensor) -> Any:
        """`output` or `gradients` of a strip by compiled_strips."""
        parts = self.query_rows(self.q, strip), self.key_rows(self.k, strip), self.key_rows(self.v, strip)
        arguments = [x.contiguous() for x in (*parts, *strip.bounds, *more)]  # one layout, so one graph for all strips
        return compiled_strips.run(kind, self.spec, self.half, *arguments)


def _forward(problem: _Problem, weights_out: Tensor | None = None) -> Tensor:
    p = problem
    o = p.q.new_zeros(p.B, p.Hkv, p.g, p.Lq, p.v.shape[-1])
    for chunk in p.chunks():
        for strip in p.strips(*chunk):
            if p.compile:
                o_rows = p.compiled("output", strip)
            else:
                rows = p.weigh(strip, p.query_rows(p.q, strip) * strip.factor, training=False)
                o_rows = torch.bmm(rows.w, p.key_rows(p.v, strip)).mul_(rows.scale)
            o[strip.batch, strip.heads, :, strip.rows] = o_rows.view(*strip.shape[:4], -1)
            if weights_out is not None:
                w = (rows.w * rows.scale).view(strip.shape)
                weights_out[strip.batch, strip.heads, :, strip.rows, strip.keys] = saturate(w, weights_out.dtype)
    return o.flatten(1, 2) / p.v_scale if p.wide else o.flatten(1, 2)


def _backward(problem: _Problem, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = problem
    do, do_scale = tame(do) if p.wide else (do.to(p.q.dtype), 1.0)
    dq, dk, dv = _backward_strips(p, p.grouped(do))
    if p.spec.cosine:
        dq = unit_backward(dq, p.q.flatten(1, 2), p.q_norm)
        dk = unit_backward(dk, p.k, p.k_norm)
    if p.wide:
        dq, dk, dv = dq / do_scale / p.v_scale, dk / do_scale / p.v_scale, dv / do_scale
    return dq, dk, dv


def _backward_strips(problem: _Problem, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = problem
    # In the plain layout, whatever the inputs have: strips of keys must be views, or what is added to them is lost.
    dq, dk, dv = (x.new_zeros(x.shape) for x in (p.q, p.k, p.v))
    for chunk in p.chunks():
        for strip in p.strips(*chunk):
            q, k, v = p.query_rows(p.q, strip), p.key_rows(p.k, strip), p.key_rows(p.v, strip)
            do_rows = p.query_rows(do, strip)
            if p.compile:
                dq_rows, dk_keys, dv_keys = p.compiled("gradients", strip, do_rows)
                dq[strip.batch, strip.heads, :, strip.rows] = dq_rows.view(*strip.shape[:4], -1)
                p.key_rows(dk, strip).add_(dk_keys)
                p.key_rows(dv, strip).add_(dv_keys)
                continue
            rows = p.weigh(strip, q * strip.factor, training=True)
            dv_keys = p.key_rows(dv, strip)
            dv_keys.baddbmm_(rows.w.mT, do_rows * rows.scale)
            dw = torch.bmm(do_rows, v.mT, out=p.scratch("dw"))
            factor = row_math.backpropagate(rows, dw, strip.n, p.spec, strip.hide, p.scratch) * strip.factor
            dq_rows = torch.bmm(dw, k).mul_(factor)
            dq[strip.batch, strip.heads, :, strip.rows] = dq_rows.view(*strip.shape[:4], -1)
            p.key_rows(dk, strip).baddbmm_(dw.mT, q * factor)
    return dq.flatten(1, 2), dk, dv


def _plain_range(
    compute: Callable[[_Problem], Any], q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor,
    mask: Tensor | None, spec: str,
) -> Any:  # fmt: skip
    """`compute` for a call in the working dtype, by compiled strips where that pays; without, if the compiler fails."""
    try:
        return compute(_Problem(q, k, v, start, stop, mask, spec, wide=False, compile=True))
    except compiled_strips.CompilerFailed:
        return compute(_Problem(q, k, v, start, stop, mask, spec, wide=False))


@lru_cache(maxsize=256)
def _spec(literal: str) -> AttentionSpec:
    return AttentionSpec.from_literal(literal)


# The host plans the strips, so that a CUDA graph must leave these operators out.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
_Compiled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionSpec]


def _compiled(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, literal: str
) -> _Compiled | None:
    """Arguments for the compiled kernel, where there is one for this call."""
    spec, dtype = _spec(literal), working_dtype(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not native.supports(q, spec, mask):
        return None
    shape = (q.shape[0], q.shape[2])
    return q, k, v, start.expand(shape), stop.expand(shape), spec


@torch.library.custom_op("lssar::tiled_forward", mutates_args=(), tags=_TAGS)
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: str
) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        compiled = _compiled(q, k, v, start, stop, mask, spec)
        if compiled is not None:
            o = native.forward(*compiled, normalize=True)
        else:
            o = _plain_range(_forward, q, k, v, start, stop, mask, spec)
        if not finite(o):  # out of the working dtype's range: once more with room to spare
            o = _forward(_Problem(q, k, v, start, stop, mask, spec, wide=True))
            return settle(o, q.dtype, finite(q, k, v))
        return saturate(o, q.dtype)


@tiled_forward.register_fake
def _(q, k, v, start, stop, mask, spec):
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("lssar::tiled_backward", mutates_args=(), tags=_TAGS)
def tiled_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        compiled = _compiled(q, k, v, start, stop, mask, spec)
        if compiled is not None:
            grads = native.backward(do.to(compiled[0].dtype), *compiled, normalize=True)
        else:
            grads = _plain_range(partial(_backward, do=do), q, k, v, start, stop, mask, spec)
        if finite(*grads):
            dq, dk, dv = (saturate(grad, q.dtype) for grad in grads)
        else:
            grads = _backward(_Problem(q, k, v, start, stop, mask, spec, wide=True), do)
            clean = finite(do, q, k, v)
            dq, dk, dv = (settle(grad, q.dtype, clean) for grad in grads)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


@tiled_backward.register_fake
def _(do, q, k, v, start, stop, mask, spec):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, start, stop, mask, ctx.spec = inputs
    ctx.save_for_backward(q, k, v, start, stop, mask)


def _autograd(ctx, do):
    return (*tiled_backward(do, *ctx.saved_tensors, ctx.spec), None, None, None, None)


tiled_forward.register_autograd(_autograd, setup_context=_setup_context)


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError(
        "lssar.attention(impl='tiled') has no second derivative; use impl='reference', which is differentiable twice"
    )


tiled_backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("lssar::tiled_weights", mutates_args=(), tags=_TAGS)
def tiled_weights(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: str
) -> Tensor:
    """The weights (B, Hq, Lq, Lk) that `tiled_forward` uses, for looking at; no gradient."""
    out = q.new_zeros(*q.shape[:3], k.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        grouped = out.unflatten(1, (k.shape[1], -1))
        o = _forward(_Problem(q, k, v, start, stop, mask, spec, wide=False), grouped)
        if not finite(o, out):
            _forward(_Problem(q, k, v, start, stop, mask, spec, wide=True), grouped)
    return out


@tiled_weights.register_fake
def _(q, k, v, start, stop, mask, spec):
    return q.new_empty(*q.shape[:3], k.shape[2])


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Output (B, Hq, Lq, Dv); row i sees keys start <= j < stop where the mask, if any, is True."""
    return tiled_forward(q, k, v, start, stop, mask, spec.literal)


def tiled_attention_weights(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    return tiled_weights(*(x.detach() for x in (q, k, v)), start, stop, mask, spec.literal)
