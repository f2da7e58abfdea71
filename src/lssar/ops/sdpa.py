"""Softmax kinds through PyTorch's own fused kernels: exp under l1 is softmax, for any scale of the scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lssar.ops import fused
from lssar.ops.numerics import in_range, scale_factor, score_factor, times_in_range, unit
from lssar.specs import AttentionSpec

MOST_MASKED = 2**24
"""Entries of a dense mask that a call may make."""


def why_not(
    q: Tensor, k: Tensor, spec: AttentionSpec, *, causal: bool, masked: bool, return_weights: bool
) -> str | None:
    """None if SDPA can run this call, else why not."""
    if spec.activation != "exp" or spec.divisor != "l1" or spec.p is not None or spec.recentre != "none" or spec.negate:
        return f"PyTorch's fused kernels compute softmax, and {spec.name!r} is not a softmax of scaled scores"
    if q.dtype == torch.float64:
        return "PyTorch's fused kernels have no float64"
    if masked:
        return "PyTorch's fused kernels take no masks, windows, packs or padding here"
    if return_weights:
        return "it does not form the weights"
    if causal and q.shape[2] > k.shape[2]:
        return "with more queries than keys the first rows see nothing, which SDPA cannot do"
    if causal and 1 < q.shape[2] < k.shape[2] and q.shape[2] * k.shape[2] > MOST_MASKED:
        return "SDPA's own causal mask wants as many queries as keys, and these are too many for a dense one"
    if min(*q.shape, *k.shape) == 0:
        return "there is nothing to compute"
    return None


def fused_unit(q: Tensor, k: Tensor) -> bool:
    """Whether a kernel of ours normalises q and k; the transforms of torch.func go through PyTorch's operations."""
    usable = fused.HAS_TRITON and q.is_cuda and q.shape[-1] <= fused.HEAD_SIZES[1]
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return usable and not transformed and q.stride(-1) == k.stride(-1) == 1


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, causal: bool, gain: Tensor | None = None
) -> Tensor:
    """`gain` (Hq,): a factor of the scores, given with cosine scores only."""
    queries, keys = q.shape[2], k.shape[2]
    causal = causal and queries > 1  # a single query is the last one: it sees all
    mask = None
    if causal and queries < keys:  # a few rows against a cache: SDPA's own mask is aligned at the other end
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    scale = scale_factor(q.shape[-1], spec)
    if spec.cosine and fused_unit(q, k):
        first_n, step = (keys - queries + 1, 1) if causal else (keys, 0)
        q, k = fused.scaled_unit(q, scale, spec.log_n, first_n, step), fused.scaled_unit(k, 1.0, False, 1, 0)
        scale = 1.0
    else:
        bring = unit if spec.cosine else in_range
        q, k = bring(q), bring(k)
        if spec.log_n:  # a factor that differs from row to row goes into q
            n = torch.full((queries,), float(keys), device=q.device)
            if causal:
                n = torch.arange(keys - queries + 1, keys + 1, device=q.device).float()
            q, scale = times_in_range(q, score_factor(n, q.shape[-1], spec)[:, None]), 1.0
    if gain is not None:
        q = (q * gain[:, None, None]).to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
