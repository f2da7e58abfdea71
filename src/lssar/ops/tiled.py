"""The operator in strips of whole rows: exact for every spec, memory linear in length, with its own backward.

A strip is a block of query rows against all the keys that any of them may see. Its size follows a budget of elements,
so the working memory is O(L x rows), and on a CPU a strip stays in cache through the sweeps over it. The row arithmetic
is in `rows.py`. Nothing of the forward is kept for the backward but its inputs.

Shape letters: B batch, h key heads, g query heads per key head, R rows and K keys of a strip, N = b h of a strip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lssar.ops import compiled_strips, native
from lssar.ops import rows as row_math
from lssar.ops.containment import NonFinite, without_nonfinite
from lssar.ops.numerics import (
    WIDE_LIMIT,
    finite,
    limit_heads,
    limit_rows,
    narrow,
    per_query_head,
    saturate,
    score_factor,
    unit_and_norm,
    unit_backward,
    working_dtype,
)
from lssar.specs import AttentionSpec
from lssar.visibility import Visibility

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
    before_gain: Tensor  # (N, gR, 1): the factor without the head's gain
    threshold: Tensor | None  # (N, gR, 1), where the heads have their own
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


@dataclass(frozen=True)
class _Call:
    """The arguments of a registered operator, with the spec and its power as they are meant."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor
    stop: Tensor
    mask: Tensor | None
    gain: Tensor | None
    threshold: Tensor | None
    spec: AttentionSpec
    fixed_power: bool = True

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, gain: Tensor | None,
        threshold: Tensor | None, p: Tensor | None, literal: str,
    ) -> _Call:  # fmt: skip
        spec = _spec(literal, None if p is None else float(p))
        return cls(q, k, v, start, stop, mask, gain, threshold, spec, p is None)

    @property
    def see(self) -> Visibility:
        return Visibility(self.start, self.stop, self.mask)

    @property
    def floats(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.q, self.k, self.v, self.gain, self.threshold) if x is not None)

    def nonfinite(self) -> NonFinite:
        return NonFinite(self.q, self.k, self.v, self.see, self.gain, self.threshold)

    def without_nonfinite(self) -> _Call:
        q, k, v = (without_nonfinite(x) for x in (self.q, self.k, self.v))
        gain, threshold = (None if x is None else without_nonfinite(x) for x in (self.gain, self.threshold))
        return replace(self, q=q, k=k, v=v, gain=gain, threshold=threshold)


class _Problem:
    """Inputs in the working dtype, grouped by key head, and the strips that cover them."""

    def __init__(self, call: _Call, *, wide: bool, compile: bool = False):
        q, k, v, self.spec = call.q, call.k, call.v, call.spec
        self.wide = wide
        self.half = q.element_size() < 4
        plain = call.gain is None and call.threshold is None and call.fixed_power
        self.compile = compile and plain and compiled_strips.worthwhile(q, k, call.mask)
        (B, Hq, self.Lq, self.D), (_, Hkv, self.Lk, _) = q.shape, k.shape
        self.B, self.Hkv, self.g = B, Hkv, Hq // Hkv
        dtype = torch.float64 if wide else working_dtype(q.dtype)
        self.v_scale: Tensor | None = None
        if wide:
            q, k = limit_rows(q), limit_rows(k)
            self.v, self.v_scale = limit_heads(v, Hkv)
        else:
            q, k, self.v = (x.to(dtype) for x in (q, k, v))
        if self.spec.cosine:
            q, self.q_norm = unit_and_norm(q)
            k, self.k_norm = unit_and_norm(k)
        self.q, self.k = self.grouped(q), k
        of_heads = [None if x is None else x.to(dtype).view(Hkv, self.g) for x in (call.gain, call.threshold)]
        self.gain, self.threshold = of_heads
        if wide and self.gain is not None:
            self.gain = self.gain.clamp(-WIDE_LIMIT, WIDE_LIMIT)
        self.mask = None if call.mask is None else call.mask.expand(B, Hq, self.Lq, self.Lk).unflatten(1, (Hkv, self.g))
        self.start, self.stop = (x.expand(B, self.Lq) for x in torch.broadcast_tensors(call.start, call.stop))
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
        of_heads = [None if x is None else per_row(x[heads, :, None]) for x in (self.gain, self.threshold)]
        factor = before_gain = score_factor(n, self.D, self.spec)
        if of_heads[0] is not None:
            factor = before_gain * of_heads[0]
        return _Strip(
            batch, heads, rows, keys, n, factor, before_gain, of_heads[1], hidden, bounds, shape
        )  # fmt: skip

    def query_rows(self, x: Tensor, strip: _Strip) -> Tensor:
        """(B, h, g, Lq, D) -> the strip's (N, gR, D)."""
        x = x[strip.batch, strip.heads, :, strip.rows]
        return x.reshape(-1, self.g * (strip.rows.stop - strip.rows.start), x.shape[-1])

    def key_rows(self, x: Tensor, strip: _Strip) -> Tensor:
        """(B, h, Lk, D) -> a view of the strip's (N, K, D)."""
        return x[strip.batch, strip.heads].flatten(0, 1)[:, strip.keys]

    def weigh(self, strip: _Strip, q_scaled: Tensor, training: bool) -> row_math.Rows:
        s = torch.bmm(q_scaled, self.key_rows(self.k, strip).mT, out=self.scratch("a"))
        return row_math.weigh(
            s, strip.n, self.spec, strip.hide, self.scratch, strip.factor, training, self.wide, strip.threshold
        )  # fmt: skip

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
    o = o.flatten(1, 2)
    return o if p.v_scale is None else o / per_query_head(p.v_scale, o.shape[1])


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Gradients of q, k, v, and of gain and threshold for each row (B, Hq, Lq)."""


def _backward(problem: _Problem, do: Tensor) -> Gradients:
    p = problem
    heads, do_scale = do.shape[1], None
    if p.wide:
        do, do_scale = limit_heads(do, p.Hkv)
    dq, dk, dv, d_gain, d_threshold = _backward_strips(p, p.grouped(do.to(p.k.dtype)))
    if p.spec.cosine:
        dq = unit_backward(dq, p.q.flatten(1, 2), p.q_norm)
        dk = unit_backward(dk, p.k, p.k_norm)
    if do_scale is not None and p.v_scale is not None:
        dv, dk = dv / do_scale, dk / do_scale / p.v_scale
        do_scale, v_scale = (per_query_head(x, heads) for x in (do_scale, p.v_scale))
        dq = dq / do_scale / v_scale
        d_gain, d_threshold = (
            None if x is None else x / do_scale[..., 0] / v_scale[..., 0] for x in (d_gain, d_threshold)
        )
    return dq, dk, dv, d_gain, d_threshold


def _backward_strips(problem: _Problem, do: Tensor) -> Gradients:
    p = problem
    # Contiguous even if the inputs are not: strips of keys must be views, or what is added to them is lost.
    dq, dk, dv = (x.new_zeros(x.shape) for x in (p.q, p.k, p.v))
    d_gain, d_threshold = (None if x is None else dq.new_zeros(dq.shape[:4]) for x in (p.gain, p.threshold))
    for chunk in p.chunks():
        for strip in p.strips(*chunk):
            q, k, v = p.query_rows(p.q, strip), p.key_rows(p.k, strip), p.key_rows(p.v, strip)
            do_rows = p.query_rows(do, strip)
            at, shape = (strip.batch, strip.heads, slice(None), strip.rows), strip.shape[:4]
            if p.compile:
                dq_rows, dk_keys, dv_keys = p.compiled("gradients", strip, do_rows)
                dq[at] = dq_rows.view(*shape, -1)
                p.key_rows(dk, strip).add_(dk_keys)
                p.key_rows(dv, strip).add_(dv_keys)
                continue
            rows = p.weigh(strip, q * strip.factor, training=True)
            p.key_rows(dv, strip).baddbmm_(rows.w.mT, do_rows * rows.scale)
            ds = torch.bmm(do_rows, v.mT, out=p.scratch("dw"))
            slope, threshold_rows = row_math.backpropagate(rows, ds, strip.n, p.spec, strip.hide, p.scratch)
            factor = slope * strip.factor
            dq_rows = torch.bmm(ds, k)
            if d_gain is not None:  # q.k summed over the keys; what the normalisation of q leaves out of dq
                d_gain[at] = ((q * dq_rows).sum(-1, keepdim=True) * slope * strip.before_gain).view(shape)
            if d_threshold is not None:
                assert threshold_rows is not None
                d_threshold[at] = threshold_rows.view(shape)
            dq[at] = dq_rows.mul_(factor).view(*shape, -1)
            p.key_rows(dk, strip).baddbmm_(ds.mT, q * factor)
    d_gain, d_threshold = (None if x is None else x.flatten(1, 2) for x in (d_gain, d_threshold))
    return dq.flatten(1, 2), dk, dv, d_gain, d_threshold


def _plain_range(compute: Callable[[_Problem], Any], call: _Call) -> Any:
    """`compute` for a call in the working dtype, by compiled strips where that pays; without, if the compiler fails."""
    try:
        return compute(_Problem(call, wide=False, compile=True))
    except compiled_strips.CompilerFailed:
        return compute(_Problem(call, wide=False))


@lru_cache(maxsize=256)
def _spec(literal: str, p: float | None) -> AttentionSpec:
    spec = AttentionSpec.from_literal(literal)
    return spec if p is None else spec.replace(p=p)


def _native_arguments(call: _Call) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments for the native kernel, where there is one for this call."""
    if not native.supports(call.q, call.spec, call.mask):
        return None
    shape = (call.q.shape[0], call.q.shape[2])
    q, k, v = (x.float() for x in (call.q, call.k, call.v))
    of_heads = {"gain": call.gain, "threshold": call.threshold}
    options = {name: None if x is None else x.float() for name, x in of_heads.items()}
    return (q, k, v, call.start.expand(shape), call.stop.expand(shape), call.spec), {**options, "normalize": True}


def _output(call: _Call) -> Tensor:
    """Output in the dtype of q; NaN and inf of the inputs stay within the rows that see them."""
    arguments = _native_arguments(call)
    if arguments is not None:
        o = native.forward(*arguments[0], **arguments[1])
    else:
        o = _plain_range(_forward, call)
    if finite(o):
        return saturate(o, call.q.dtype)
    if not finite(*call.floats):
        return call.nonfinite().output(_output(call.without_nonfinite()))
    # Out of the working dtype's range: computed again in float64, with scaled rows.
    return narrow(_forward(_Problem(call, wide=True)), call.q.dtype)


def _gradients(call: _Call, do: Tensor) -> list[Tensor | None]:
    """Gradients of q, k, v, gain and threshold in their dtypes."""
    arguments = _native_arguments(call)
    if arguments is not None:
        grads = native.backward(do.float(), *arguments[0], **arguments[1])
    else:
        grads = _plain_range(partial(_backward, do=do), call)
    inputs = (call.q, call.k, call.v, call.gain, call.threshold)
    if finite(*(x for x in grads if x is not None)):
        return [_as_input(grad, x, saturate) for grad, x in zip(grads, inputs)]
    if finite(do, *call.floats):
        grads = _backward(_Problem(call, wide=True), do)
        return [_as_input(grad, x, narrow) for grad, x in zip(grads, inputs)]
    return call.nonfinite().gradients(_gradients(call.without_nonfinite(), without_nonfinite(do)), do)


def _as_input(grad: Tensor | None, x: Tensor | None, cast: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor | None:
    """The gradient in the dtype and shape of its input: that of a learned number of a head is summed over its rows."""
    if grad is None or x is None:
        return None
    if x.dim() == 1:
        grad = grad.double().sum((0, 2))
    return cast(grad, x.dtype)


# The host plans the strips, so that a CUDA graph must leave these operators out.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@torch.library.custom_op("lssar::tiled_forward", mutates_args=(), tags=_TAGS)
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, gain: Tensor | None,
    threshold: Tensor | None, p: Tensor | None, spec: str,
) -> Tensor:  # fmt: skip
    """`p`, a 0-dim tensor on the CPU, takes the place of the spec's power: a graph then serves all powers."""
    with torch.autocast(q.device.type, enabled=False):
        return _output(_Call.of(q, k, v, start, stop, mask, gain, threshold, p, spec))


@tiled_forward.register_fake
def _(q, k, v, start, stop, mask, gain, threshold, p, spec):
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("lssar::tiled_backward", mutates_args=(), tags=_TAGS)
def tiled_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, gain: Tensor | None,
    threshold: Tensor | None, p: Tensor | None, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, gain and threshold; of no elements for what is not there."""
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, *of_heads = _gradients(_Call.of(q, k, v, start, stop, mask, gain, threshold, p, spec), do)
        assert dq is not None and dk is not None and dv is not None
        d_gain, d_threshold = (q.new_empty(0) if x is None else x for x in of_heads)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_gain, d_threshold


@tiled_backward.register_fake
def _(do, q, k, v, start, stop, mask, gain, threshold, p, spec):
    of_heads = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (gain, threshold))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *of_heads


def _setup_context(ctx, inputs, output):
    *tensors, ctx.spec = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, do):
    saved = ctx.saved_tensors  # checkpointing lets them be read once
    gain, threshold = saved[6:8]
    dq, dk, dv, d_gain, d_threshold = tiled_backward(do, *saved, ctx.spec)
    of_heads = None if gain is None else d_gain, None if threshold is None else d_threshold
    return dq, dk, dv, None, None, None, *of_heads, None, None


tiled_forward.register_autograd(_autograd, setup_context=_setup_context)


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError(
        "lssar.attention(impl='tiled') has no second derivative; use impl='reference', which is differentiable twice"
    )


tiled_backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("lssar::tiled_weights", mutates_args=(), tags=_TAGS)
def tiled_weights(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, mask: Tensor | None, gain: Tensor | None,
    threshold: Tensor | None, p: Tensor | None, spec: str,
) -> Tensor:  # fmt: skip
    """The weights (B, Hq, Lq, Lk) that `tiled_forward` uses, for looking at; no gradient."""
    with torch.autocast(q.device.type, enabled=False):
        return _weights(_Call.of(q, k, v, start, stop, mask, gain, threshold, p, spec))


def _weights(call: _Call) -> Tensor:
    q, k = call.q, call.k
    if not finite(*call.floats):
        return call.nonfinite().weights(_weights(call.without_nonfinite()))
    out = q.new_zeros(*q.shape[:3], k.shape[2])
    grouped = out.unflatten(1, (k.shape[1], -1))
    o = _forward(_Problem(call, wide=False), grouped)
    if not finite(o, out):
        _forward(_Problem(call, wide=True), grouped)
    return out


@tiled_weights.register_fake
def _(q, k, v, start, stop, mask, gain, threshold, p, spec):
    return q.new_empty(*q.shape[:3], k.shape[2])


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, see: Visibility, spec: AttentionSpec, *, gain: Tensor | None = None,
    threshold: Tensor | None = None, p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Output (B, Hq, Lq, Dv). `gain` and `threshold` are (Hq,); `p` replaces the spec's power."""
    return tiled_forward(q, k, v, see.start, see.stop, see.mask, gain, threshold, p, spec.literal)


def tiled_attention_weights(
    q: Tensor, k: Tensor, v: Tensor, see: Visibility, spec: AttentionSpec, *, gain: Tensor | None = None,
    threshold: Tensor | None = None, p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tensors = (None if x is None else x.detach() for x in (gain, threshold, p))
    q, k, v = (x.detach() for x in (q, k, v))
    return tiled_weights(q, k, v, see.start, see.stop, see.mask, *tensors, spec.literal)
