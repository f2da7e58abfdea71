"""`attention`: checks its arguments, works out what each row may see, and picks an implementation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lssar.ops import fused, sdpa
from lssar.ops.numerics import times_in_range, working_dtype
from lssar.ops.reference import safe_reference_attention
from lssar.ops.tiled import tiled_attention, tiled_attention_weights
from lssar.specs import AttentionSpec, check_power, plain_number
from lssar.specs import spec as spec_of
from lssar.visibility import visibility

Implementation = Literal["auto", "reference", "tiled", "fused"]
_IMPLEMENTATIONS = ("auto", "reference", "tiled", "fused")
DECODE_TOLERANCE = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-10}
"""Share of a row's largest weight that decoding may leave unread: less than the dtype loses by rounding."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDEST = 2**32
"""Wider windows are taken for this one: they hide no more, and positions plus a window have to fit an int64."""


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: str | AttentionSpec = ..., *, causal: bool = ..., mask: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., key_lengths: Tensor | None = ...,
    key_ranges: Tensor | None = ..., head_scale: Tensor | None = ..., threshold: Tensor | None = ...,
    p: float | Tensor | None = ..., return_weights: Literal[False] = ..., impl: Implementation = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: str | AttentionSpec = ..., *, causal: bool = ..., mask: Tensor | None = ...,
    window: int | None = ..., cu_seqlens: Tensor | None = ..., key_lengths: Tensor | None = ...,
    key_ranges: Tensor | None = ..., head_scale: Tensor | None = ..., threshold: Tensor | None = ...,
    p: float | Tensor | None = ..., return_weights: Literal[True], impl: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str | AttentionSpec = "lssar",
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_ranges: Tensor | None = None,
    head_scale: Tensor | None = None,
    threshold: Tensor | None = None,
    p: float | Tensor | None = None,
    return_weights: bool = False,
    impl: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with any mechanism of `lssar.specs()`; LSSAR with p = 15 if none is named.

    Args:
        q: (B, Hq, Lq, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, Lk, D); Hq is a multiple of Hkv, and consecutive query heads share a key head.
        v: (B, Hkv, Lk, Dv).
        spec: a name, or an `AttentionSpec` such as `lssar.spec("lssar", p=3)`.
        causal: row i sees keys j <= i + Lk - Lq: with fewer queries than keys, the queries are the last ones. With
            `key_lengths` as well, they are the last ones of each batch row's own length. More queries than keys are an
            error unless `mask` or `key_ranges` says what the rows see.
        mask: bool, True where a row may see a key, broadcastable to (B, Hq, Lq, Lk).
        window: only the last `window` keys up to the row's own position (and, if not causal, as many after it).
        cu_seqlens: (documents + 1,) int32 or int64, 0 to L: batch row 0 holds documents packed one after the other,
            and each sees only itself, as if called alone.
        key_lengths: (B,) int: keys at and after this position are padding, or unused room in a cache.
        key_ranges: (B or 1, Lq, 2) int: of what else it may see, each row sees keys first <= j < end only. This
            expresses padding on either side, packs, windows and half-filled caches without memory for Lq x Lk.
        head_scale: (Hq,), the learned factor of the scores of a spec that has one (`ssmax`, or
            `spec("lssar", head_scale=1.0)`); its initial value if not given. Cosine scores are multiplied after q and k
            are normalised.
        threshold: (Hq,), the learned threshold of a spec with `learned_threshold`; its initial value if not given.
        p: the power, in place of that of a re-weighted spec. A float, or a 0-dim float tensor on the CPU, with which
            one graph of torch.compile serves all values.
        return_weights: also return the weights (B, Hq, Lq, Lk): differentiable in the reference, detached in tiled.
        impl: `reference` (dense), `tiled` (memory linear in length, any spec, any device), `fused` (kernels for a GPU,
            lssar's or PyTorch's; no re-centring, `mask` or `key_ranges`), or `auto`: fused on a GPU where it applies,
            else tiled.

    Returns:
        (B, Hq, Lq, Dv) in the dtype of q; a row that may see nothing is zero. NaN or inf in the inputs reaches only
        rows that see it, and gradients of what those rows see.
    """
    spec = spec_of(spec)
    q, k, v = (_autocast(x) for x in (q, k, v))
    window = plain_number(window)
    _check(q, k, v, causal, mask, window, cu_seqlens, key_lengths, key_ranges, return_weights, impl)
    if window is not None:
        window = min(window, WIDEST)
    spec, power = _power(spec, p)
    gain = _of_heads("head_scale", head_scale, q, spec, "head_scale")
    if gain is None and spec.head_scale not in (None, 1):
        gain = q.new_full((q.shape[1],), spec.head_scale, dtype=working_dtype(q.dtype))
    threshold = _of_heads("threshold", threshold, q, spec, "learned_threshold")

    if window is not None and causal and not return_weights and mask is cu_seqlens is key_lengths is key_ranges is None:
        k, v, window = _in_window(k, v, q.shape[2], window)

    if impl == "fused" or (impl == "auto" and q.is_cuda):
        view: dict[str, Any] = dict(causal=causal, cu_seqlens=cu_seqlens, key_lengths=key_lengths, window=window)
        o = _by_kernels(q, k, v, spec, gain, threshold, power, mask, key_ranges, return_weights, impl, **view)
        if o is not None:
            return o

    see = visibility(
        q.shape[2], k.shape[2], q.device, causal=causal, window=window, cu_seqlens=cu_seqlens, key_lengths=key_lengths,
        key_ranges=key_ranges, mask=mask,
    )  # fmt: skip
    if impl == "reference":
        if power is not None:
            spec = spec.replace(p=float(power))
        o, w = safe_reference_attention(q, k, v, see, spec, gain, threshold)
        return (o, w) if return_weights else o
    _refuse_forward_mode(impl, q, k, v, gain, threshold)
    o = tiled_attention(q, k, v, see, spec, gain=gain, threshold=threshold, p=power)
    if return_weights:
        return o, tiled_attention_weights(q, k, v, see, spec, gain=gain, threshold=threshold, p=power)
    return o


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, gain: Tensor | None, threshold: Tensor | None,
    power: Tensor | None, mask: Tensor | None, key_ranges: Tensor | None, return_weights: bool, impl: str, *,
    causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None,
) -> Tensor | None:  # fmt: skip
    """The output by PyTorch's fused kernels or ours; None where they do not apply and tiled has to do it."""
    view: dict[str, Any] = dict(causal=causal, cu_seqlens=cu_seqlens, key_lengths=key_lengths, window=window)
    masked = any(x is not None for x in (mask, window, cu_seqlens, key_lengths, key_ranges))
    if gain is not None and not spec.cosine:  # dot products take the factor through q
        q, gain = times_in_range(q, gain[:, None, None]), None
    obstacle = sdpa.why_not(q, k, spec, causal=causal, masked=masked, return_weights=return_weights)
    blocked = fused.why_not(q, k, v, spec, mask=mask, key_ranges=key_ranges, return_weights=return_weights)
    # SDPA would normalise the whole cache for a cosine, and needs a mask for lengths
    own_decode = (spec.cosine or key_lengths is not None) and fused.is_softmax_step(q, spec, cu_seqlens, window)
    if own_decode and blocked is None and not _needs_gradient(q, k, v, *_some(gain)):
        _refuse_forward_mode(impl, q, k, v)
        return fused.softmax_decode(q, k, v, spec, gain=gain, lengths=key_lengths)
    if obstacle is None:
        return sdpa.sdpa_attention(q, k, v, spec, causal, gain)
    obstacle = _why_not_fused(q, k, spec, threshold, causal, key_lengths, window) or blocked
    if obstacle is None:
        _refuse_forward_mode(impl, q, k, v)
        if fused.has_window_kernel(spec, window):
            return fused.window_attention(q, k, v, spec, p=power, gain=gain, **view)
        if not fused.is_lssa(spec):
            return fused.activation_attention(q, k, v, spec, p=power, gain=gain, **view)
        p = spec.p if power is None else power
        if fused.is_decoding(q, k, **view) and not _needs_gradient(q, k, v, *_some(gain)):
            tolerance = DECODE_TOLERANCE.get(q.dtype, 0.0)
            return fused.fused_decode(q, k, v, p=p, gain=gain, lengths=key_lengths, tolerance=tolerance)
        return fused.fused_attention(q, k, v, p=p, gain=gain, **view)
    if impl == "fused":
        raise ValueError(f"impl='fused' cannot run this call: {obstacle}")
    return None


def _why_not_fused(
    q: Tensor, k: Tensor, spec: AttentionSpec, threshold: Tensor | None, causal: bool, key_lengths: Tensor | None,
    window: int | None,
) -> str | None:  # fmt: skip
    """What only the other implementations know: None, or a sentence a user can act on."""
    if threshold is not None or spec.threshold != 1:
        return "the fused kernels subtract a threshold of 1; other thresholds need impl='tiled'"
    if key_lengths is not None and q.shape[2] < k.shape[2] and (window is not None or (causal and q.shape[2] > 1)):
        return "the fused kernels align queries to the keys' end, not to key_lengths; use impl='tiled'"
    return None


def _power(spec: AttentionSpec, p: Any) -> tuple[AttentionSpec, Tensor | None]:
    """The spec with power p, or the tensor that takes the place of its power."""
    if p is None:
        return spec, None
    if spec.p is None:
        raise ValueError(f"p was given, but {spec.name!r} is not re-weighted (its p is None)")
    if not isinstance(p, Tensor):
        p = plain_number(p)
        check_power(p)
        if torch.compiler.is_compiling():  # a graph makes no specs
            return spec, torch.tensor(float(p), dtype=torch.float64)
        return spec.replace(p=p), None
    if p.dim() != 0 or not p.is_floating_point() or p.device.type != "cpu" or p.requires_grad:
        raise ValueError(
            f"p must be a number, or a 0-dim float tensor on the CPU without gradient; got {_show(p)}"
            + (" that requires one" if p.requires_grad else "")
        )
    if not torch.compiler.is_compiling():
        check_power(float(p))
    return spec, p


def _of_heads(name: str, given: Any, q: Tensor, spec: AttentionSpec, field: str) -> Tensor | None:
    """A learned number of each query head (Hq,), if one was given. The field of the spec says whether it has one."""
    if given is None:
        return None
    if getattr(spec, field) in (None, False):
        raise ValueError(f"{name} was given, but {spec!r} has no {field}")
    if (
        not isinstance(given, Tensor)
        or not _is_plain(given)
        or given.shape != (q.shape[1],)
        or not given.is_floating_point()
    ):
        raise ValueError(
            f"{name} must be a float tensor of shape ({q.shape[1]},), one number per query head; got {_show(given)}"
        )
    if given.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, as q is; got {_show(given)}")
    return given


@torch.compiler.assume_constant_result
def _in_forward_mode() -> bool:
    """Whether forward mode is active, also while a call is traced.

    Compiled code is traced again within torch.func.jvp, but not within a `dual_level` that is entered later.
    """
    return forward_ad._current_level >= 0


def _refuse_forward_mode(impl: str, *tensors: Tensor | None) -> None:
    """Registered operators pass no forward gradient on, so that the result would be an exact zero."""
    if not _in_forward_mode():
        return
    # tangents cannot be looked at while tracing, so any call within forward mode is refused
    traced = torch.compiler.is_compiling()
    if traced or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"lssar.attention(impl={impl!r}) has no forward-mode derivative (torch.func.jvp, jacfwd); use "
            "impl='reference', which has"
        )


def _in_window(k: Tensor, v: Tensor, queries: int, window: int) -> tuple[Tensor, Tensor, int | None]:
    """Keys that the last `queries` rows can see through a causal window, and the window if it still hides any."""
    first = k.shape[2] - queries - window + 1
    if first > 0:
        k, v = k[:, :, first:], v[:, :, first:]
    return k, v, window if window < k.shape[2] else None


def _some(x: Tensor | None) -> tuple[Tensor, ...]:
    return () if x is None else (x,)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _autocast(x: Tensor) -> Tensor:
    """Under autocast, what SDPA does: float32 and half inputs go to the autocast dtype."""
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES[:3]:
        return x
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _show(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    if not _is_plain(x):
        return f"a nested or sparse tensor ({x.layout})"
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def _is_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _check(
    q: Any, k: Any, v: Any, causal: Any, mask: Any, window: Any, cu_seqlens: Any, key_lengths: Any, key_ranges: Any,
    return_weights: Any, impl: Any,
) -> None:  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not _is_plain(x) or x.dim() != 4:
            raise ValueError(f"{name} must be a tensor (batch, heads, length, head size); got {_show(x)}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64; got {_show(x)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v must have one batch size; got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(f"q and k must have one head size, at least 1; got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must have the same heads and length; got {tuple(k.shape)} and {tuple(v.shape)}")
    if min(q.shape[1], k.shape[1]) == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"query heads must be a multiple of key heads, at least one of each; got {q.shape[1]} and {k.shape[1]}"
        )
    if v.shape[3] == 0:
        raise ValueError(f"v must have a head size of at least 1; got {_show(v)}")
    for name, x in (("causal", causal), ("return_weights", return_weights)):
        if not isinstance(x, bool):
            raise ValueError(f"{name} must be True or False; got {_show(x)}")
    if causal and q.shape[2] > k.shape[2] and mask is None and key_ranges is None:
        raise ValueError(
            f"causal=True with {q.shape[2]} queries and {k.shape[2]} keys: the queries are taken for the last rows, so "
            f"that the first {q.shape[2] - k.shape[2]} of them would see nothing. For cross-attention give "
            "causal=False; otherwise say what each row sees with mask or key_ranges"
        )
    if impl not in _IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _IMPLEMENTATIONS))}; got {impl!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer >= 1 or None; got {window!r}")
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.device)
    if key_lengths is not None:
        if cu_seqlens is not None:
            raise ValueError("key_lengths and cu_seqlens cannot be combined: a packed batch has no padding")
        _check_integers("key_lengths", key_lengths)
        if key_lengths.shape != (q.shape[0],):
            raise ValueError(
                f"key_lengths must have shape ({q.shape[0]},), one per batch row; got {_show(key_lengths)}"
            )
        if not torch.compiler.is_compiling() and key_lengths.device.type == "cpu":
            low, high = (int(key_lengths.min()), int(key_lengths.max())) if q.shape[0] else (0, 0)
            if low < 0 or high > k.shape[2]:
                raise ValueError(f"key_lengths must lie in 0..{k.shape[2]}; got {low}..{high}")
    if key_ranges is not None:
        shapes = [(b, q.shape[2], 2) for b in (q.shape[0], 1)]
        integers = isinstance(key_ranges, Tensor) and key_ranges.dtype in (torch.int32, torch.int64)
        if not integers or not _is_plain(key_ranges):
            raise ValueError(f"key_ranges must be an int32 or int64 tensor; got {_show(key_ranges)}")
        if tuple(key_ranges.shape) not in shapes:
            raise ValueError(
                f"key_ranges must have shape {shapes[0]}, first and end of each row; got {_show(key_ranges)}"
            )
    if cu_seqlens is not None:
        _check_pack(cu_seqlens, q, k)


def _check_mask(mask: Any, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not _is_plain(mask):
        raise ValueError(f"mask must be a bool tensor, True where a row may see a key; got {_show(mask)}")
    if mask.device != device:
        raise ValueError(f"mask must be on {device}, as q is; got {_show(mask)}")
    if mask.dim() > 4 or any(m not in (1, s) for m, s in zip(reversed(mask.shape), reversed(shape))):
        raise ValueError(f"mask must broadcast to (B, Hq, Lq, Lk) = {shape}; got shape {tuple(mask.shape)}")


def _check_integers(name: str, x: Any) -> None:
    integers = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)
    if not integers or not _is_plain(x) or x.dim() != 1:
        raise ValueError(f"{name} must be a 1-D int32 or int64 tensor; got {_show(x)}")


def _check_pack(cu_seqlens: Any, q: Tensor, k: Tensor) -> None:
    _check_integers("cu_seqlens", cu_seqlens)
    if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"cu_seqlens needs one packed batch row, (1, H, total, D), with as many queries as keys; got q "
            f"{tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens needs at least two entries, 0 and the total length; got {_show(cu_seqlens)}")
    if not torch.compiler.is_compiling() and cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != q.shape[2] or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to the total length {q.shape[2]}; got {bounds}")
