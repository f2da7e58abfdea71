"""Fused kernels: LSSA and LSSAR (forward, backward, decode), activations over a divisor (forward, backward), and the
linear layers of a decode step with what is between them.

Importing this needs neither a GPU nor Triton. The kernels are imported on first use, so that TRITON_INTERPRET=1 may
still be set after `import lssar`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal

import torch
from torch import Tensor

from lssar.ops.numerics import in_range, unit

__all__ = [
    "activation_attention", "append_token", "fused_attention", "fused_decode", "scaled_unit", "small_linear",
    "softmax_decode", "why_not", "window_attention",
]  # fmt: skip

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZES = (16, 256)
LONGEST = 2**30
# Asked once: torch.compile cannot trace find_spec.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_lssa(spec: Any) -> bool:
    """Whether it is LSSA or LSSAR, with a learned gain or without, which have kernels of their own."""
    return (
        spec.cosine
        and spec.log_n
        and (spec.scale, spec.activation, spec.divisor, spec.bias, spec.recentre)
        == ("log_d", "softplus", "l1", "none", "none")
        and not spec.negate
    )


def is_softmax(spec: Any) -> bool:
    """Whether weights are a softmax of scaled products or cosines."""
    return (spec.activation, spec.divisor, spec.recentre, spec.p) == ("exp", "l1", "none", None) and not spec.negate


def is_activation(spec: Any) -> bool:
    """Whether weights are phi(s) over a divisor, re-weighted or not: see activation_forward.py."""
    return spec.recentre == "none"


def why_not(
    q: Tensor, k: Tensor, v: Tensor, spec: Any, *, mask: Tensor | None = None, key_ranges: Tensor | None = None,
    return_weights: bool = False,
) -> str | None:  # fmt: skip
    """None if the fused kernels can run this call, else a sentence a user can act on."""
    if not (is_lssa(spec) or is_activation(spec)):
        return f"the fused kernels compute activations over a divisor, not re-centred; {spec.name!r} needs impl='tiled'"
    if key_ranges is not None:
        return "the fused kernels take no ranges of keys; give padding as key_lengths, packs as cu_seqlens"
    if mask is not None:
        return "the fused kernels take no mask; give padding as key_lengths, packs as cu_seqlens, or use impl='tiled'"
    if return_weights:
        return "the fused kernels never hold the weights; return_weights=True needs impl='reference' or impl='tiled'"
    if not HAS_TRITON:
        return "the fused kernels need Triton, which is not installed"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the fused kernels run on a GPU; the inputs are on {q.device} (for tests: TRITON_INTERPRET=1)"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return f"the fused kernels take bfloat16, float16 or float32, one for all; got {q.dtype}, {k.dtype}, {v.dtype}"
    d, (least, most) = q.shape[-1], HEAD_SIZES
    if not least <= d <= most or v.shape[-1] != d:
        return f"the fused kernels take one head size, {least} to {most}; got q {d}, v {v.shape[-1]}"
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "the fused kernels need a contiguous last dimension; call .contiguous() on the input that has none"
    if max(q.shape[2], k.shape[2]) > LONGEST:
        return f"the fused kernels take lengths up to {LONGEST}; got {q.shape[2]} and {k.shape[2]}"
    return None


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, p: float | Tensor | None, gain: Tensor | None = None, causal: bool,
    cu_seqlens: Tensor | None = None, key_lengths: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """LSSA (p None) or LSSAR (p >= 1), differentiable. q (B, Hq, Lq, D), k, v (B, Hkv, Lk, D), last stride 1.

    p: a number, or a float tensor of no dimensions on the CPU: torch.compile makes a number a constant of the graph and
    a tensor an input, which can change without compiling again.
    gain: (Hq,), multiplies the scores of each query head; differentiable. For half types log d log2 n times
    the gain is limited to 2048.
    Masks as `lssar.attention` documents them. The result has the layout of q in memory.
    """
    from lssar.ops.fused.op import forward_op

    return forward_op(q, k, v, _checked_gain(gain, q), *_power(p), causal, cu_seqlens, key_lengths, window)[0]


def activation_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Any, *, p: float | Tensor | None = None, gain: Tensor | None = None,
    causal: bool, cu_seqlens: Tensor | None = None, key_lengths: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """A mechanism for which `is_activation` holds, differentiable.

    p: replaces the power of the spec; gain: multiplies the scores of each query head; both as in fused_attention.
    """
    from lssar.ops.fused.activation_op import forward_op

    dtype = q.dtype  # CUDA's autocast divides in float32
    bring = unit if spec.cosine else in_range
    q, k = bring(q), bring(k).to(dtype)
    gain = _checked_gain(gain, q)
    if gain is not None:
        q = q * gain[:, None, None]
    return forward_op(q.to(dtype), k, v, spec.literal, *_power(p), causal, cu_seqlens, key_lengths, window)[0]


def _power(p: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    """p as the arguments p and p_tensor of an operator."""
    if not isinstance(p, Tensor):
        return p, None
    if p.dim() != 0 or p.device.type != "cpu" or not p.is_floating_point() or p.requires_grad:
        raise ValueError(
            f"p must be a number or a float tensor of no dimensions on the CPU, without gradient; got {p.dtype} "
            f"{tuple(p.shape)} on {p.device}, requires_grad={p.requires_grad}"
        )
    return None, p


def _checked_gain(gain: Tensor | None, q: Tensor) -> Tensor | None:
    if gain is not None and (gain.shape != (q.shape[1],) or gain.device != q.device):
        raise ValueError(
            f"gain must have shape ({q.shape[1]},), one value a query head, on {q.device}; got {tuple(gain.shape)} on "
            f"{gain.device}"
        )
    return gain


SHORT_WINDOW = 512
"""Longest window for which LSSA and LSSAR use the windowed kernels; over more keys the general ones are faster."""


def has_window_kernel(spec: Any, window: int | None) -> bool:
    """Whether the windowed kernels compute this: softmax of scaled scores; LSSA and LSSAR if the window is short."""
    if window is None:
        return False
    return is_softmax(spec) or (is_lssa(spec) and window <= SHORT_WINDOW)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Any, *, causal: bool, cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None, window: int | None = None, p: float | Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A mechanism for which `has_window_kernel` holds, differentiable.

    p: replaces the power of the spec, as in fused_attention.
    gain: (Hq,), multiplies the scores of each query head; differentiable; for cosine scores only.
    """
    from lssar.ops.fused.window_op import forward_op

    options: dict[str, Any] = dict(causal=causal, window=window, p=p)
    outputs = []
    if q.shape[0] > LARGEST_BATCH:
        options["gain"] = gain
        for first in range(0, q.shape[0], LARGEST_BATCH):
            part = slice(first, first + LARGEST_BATCH)
            lengths = None if key_lengths is None else key_lengths[part]
            outputs.append(window_attention(q[part], k[part], v[part], spec, key_lengths=lengths, **options))
        return torch.cat(outputs)
    if q.shape[1] > LARGEST_BATCH:
        options |= dict(cu_seqlens=cu_seqlens, key_lengths=key_lengths)
        group = q.shape[1] // k.shape[1]
        step = max(LARGEST_BATCH // group, 1)
        for first in range(0, k.shape[1], step):
            keys, queries = slice(first, first + step), slice(first * group, (first + step) * group)
            some = None if gain is None else gain[queries]
            outputs.append(window_attention(q[:, queries], k[:, keys], v[:, keys], spec, gain=some, **options))
        return torch.cat(outputs, 1)
    number, power = _power(p)
    if number is not None:
        spec = spec.replace(p=number)
    return forward_op(q, k, v, _checked_gain(gain, q), power, spec.literal, causal, cu_seqlens, key_lengths, window)[0]


LARGEST_BATCH = 65535
"""The size of a grid's second and third axis."""


FEW_ROWS = 16
"""Query rows, times heads that share a key head, that make a call one of decoding: the tensor cores' smallest tile."""


def is_decoding(
    q: Tensor, k: Tensor, *, causal: bool, cu_seqlens: Tensor | None, key_lengths: Tensor | None, window: int | None
) -> bool:
    """Whether fused_decode gives what fused_attention would, and sooner: a few rows, split over the keys."""
    rows = q.shape[2]
    few = 0 < rows <= k.shape[2] and rows * (q.shape[1] // k.shape[1]) <= FEW_ROWS
    whole = cu_seqlens is None and window is None
    return few and whole and (rows == 1 or (causal and key_lengths is None))


def has_decode(spec: Any, head_size: int) -> bool:
    """Whether fused_decode or softmax_decode computes this mechanism, for dtypes of at most 32 bits."""
    known = is_softmax(spec) or (is_lssa(spec) and spec.threshold == 1 and not spec.learned_threshold)
    return known and HAS_TRITON and HEAD_SIZES[0] <= head_size <= HEAD_SIZES[1]


def is_softmax_step(q: Tensor, spec: Any, cu_seqlens: Tensor | None, window: int | None) -> bool:
    """Whether softmax_decode applies: one row that sees all keys up to its length."""
    few = q.shape[2] == 1 and q.shape[0] * q.shape[1] > 0
    return few and is_softmax(spec) and cu_seqlens is None and window is None


def fused_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, p: float | Tensor | None, gain: Tensor | None = None,
    lengths: Tensor | None = None, block_table: Tensor | None = None, tolerance: float = 2.0**-10,
    unit_keys: bool = False,
) -> Tensor:  # fmt: skip
    """The last Lq rows of a causal LSSA or LSSAR against a cache; for a few rows, as in token-by-token generation.

    p, gain: as in fused_attention.
    q (B, Hq, Lq, D). Cache: (B, Hkv, L, D), or pages (num_blocks, block_size, Hkv, D) with block_table (B, max_blocks).
    lengths (B,), int: keys in each row of the batch, the Lq queries' own included; None: the whole cache.
    tolerance: values of keys whose weights together are below this share of the row's sum of weights may be left
    unread, and the others weighted as if they were all (0: exact).
    unit_keys: the cache holds k / |k| already, which saves computing their norms.
    No gradient, no host synchronisation: fit for CUDA graphs.
    """
    from lssar.ops.fused.decode_op import decode_op

    return decode_op(
        q, k_cache, v_cache, _checked_gain(gain, q), *_power(p), lengths, block_table, tolerance, unit_keys
    )


def softmax_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: Any, *, gain: Tensor | None = None,
    lengths: Tensor | None = None, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query row of each head against a cache, for a mechanism for which `is_softmax` holds.

    q (B, Hq, 1, D); cache, lengths and block_table as in fused_decode. The order of the keys does not matter, so that a
    cache may be a ring; lengths beyond its capacity mean that all of it is used.
    gain: (Hq,), multiplies cosine scores. No gradient, no host synchronisation: fit for CUDA graphs.
    """
    from lssar.ops.fused.decode_softmax import decode_op

    return decode_op(q, k_cache, v_cache, _checked_gain(gain, q), spec.literal, lengths, block_table)


def append_token(
    q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor] | None, k_cache: Tensor, v_cache: Tensor, at: Tensor
) -> Tensor:
    """Write k and v (B, Hkv, 1, D) of token `at` to slot `at` modulo T of the caches (B, Hkv, T, D); return q.

    angles: cos and sin (..., D / 2) by which q and k are rotated first, as `lssar.nn.positions.rotate` does; None: they
    are not. at: (1,) int64 on the device, so that a CUDA graph serves all positions. D is even.
    """
    from lssar.ops.fused.decode_softmax import append_op

    cos, sin = (None, None) if angles is None else angles
    return append_op(q, k, v, cos, sin, k_cache, v_cache, at)


def scaled_unit(x: Tensor, scale: float, log_n: bool, first_n: int, step: int) -> Tensor:
    """x / |x| of rows of x (B, H, L, D) times scale, with log_n times log n too; differentiable.

    Row i sees n = first_n + step * i keys. D is at most 256, the last stride 1.
    """
    from lssar.ops.fused.scaled_unit_op import unit_op

    if x.shape[0] > LARGEST_BATCH:
        return torch.cat([unit_op(part, scale, log_n, first_n, step) for part in x.split(LARGEST_BATCH)])
    return unit_op(x, scale, log_n, first_n, step)


def has_small_linear(x: Tensor) -> bool:
    """Whether small_linear takes x (..., K) as input: a few rows on a GPU."""
    return HAS_TRITON and x.is_cuda and x.dtype in DTYPES and 0 < x.numel() <= FEW_ROWS * x.shape[-1]


def small_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None,
    norm: Literal["none", "layer", "rms"] = "none", norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None, eps: float = 1e-5, activation: Literal["none", "gelu", "swiglu"] = "none",
    ahead: bool = False,
) -> Tensor:  # fmt: skip
    """activation(norm(x) W^T + bias) + residual in one launch, for up to FEW_ROWS rows of x (..., K).

    W (N, K); with activation "swiglu" (2 N, K), of which the first N rows are the gate's; "gelu" is that by tanh.
    norm_weight (K,) goes with a norm, norm_bias with a layer norm that has one. All tensors have one dtype. The
    normalised x is rounded to it, as by a norm of its own; what follows the product stays in float32 until the end.
    ahead: the weights may be read before kernels that were launched earlier have ended, because none of them that may
    still run writes weights. No gradient, no host synchronisation: fit for CUDA graphs.
    """
    from lssar.ops.fused.linear import check, linear_op

    check(x, weight, bias, residual, norm, norm_weight, norm_bias, activation)
    return linear_op(x, weight, bias, residual, norm_weight, norm_bias, norm, eps, activation, ahead)
