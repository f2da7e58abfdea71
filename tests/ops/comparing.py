"""Inputs for the fused kernels, and their results against the formula in float64."""

from __future__ import annotations

import torch

import lssar
from lssar.ops.fused import fused_attention
from lssar.visibility import visibility
from tests.helpers import DEVICE, eager, eager_runs, seeded, with_gradients


def spec_of(p):
    return lssar.spec("lssa") if p is None else lssar.spec("lssar", p=p)


def tensors(B=1, Hq=2, Hkv=1, Lq=70, Lk=None, D=32, dtype=torch.float32, seed=0):
    generator = seeded(seed)
    shapes = (B, Hq, Lq, D), (B, Hkv, Lk or Lq, D), (B, Hkv, Lk or Lq, D), (B, Hq, Lq, D)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


def rms(x):
    return x.double().square().mean().sqrt().item()


def allowed_error(name, p, dtype, exact, do, same):
    """Root mean square error that a kernel may have; same: results of the formula evaluated in the inputs' dtype, if
    any: always for float32, and for half types where rows see so few keys that some are all near their mean.

    For half types it is three to four times what the kernels show (0.8 eps for o and dv, 4 eps for dq and dk at
    p = 15): weights are rounded to the dtype, and the power multiplies the relative error of a score. dO.v - dO.O
    cancels where one key has nearly all the weight, so errors of dq and dk are also measured against dO.
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float32:
        lost = max(rms((run - exact).nan_to_num(torch.inf)) for run in same)
        return 4 * lost + 8 * eps * max(rms(exact), rms(do))
    if dtype == torch.bfloat16:
        eps /= 2
    p = p or 1
    eager_loses = 3 * max([rms((run - exact).nan_to_num(0.0)) for run in same], default=0.0)
    if name in ("o", "dv"):
        return max((1.5 + p / 16) * eps * rms(exact), eager_loses)
    return max((4 + p / 3) * eps * max(rms(exact), rms(do)), eager_loses)


def compare(q, k, v, do, p, causal=True, note="", few_keys=False, **view):
    """Fused against the formula in float64: see allowed_error. few_keys: all rows see at most four.

    In half types other rows of few keys have no gradient: where their scores are nearly equal, its error would be that
    of the whole tensor.
    """
    see = {"causal": causal, **view}
    if q.dtype != torch.float32 and not few_keys:
        seen = visibility(q.shape[2], k.shape[2], q.device, **see).dense(k.shape[2]).sum(-1, keepdim=True)
        do = torch.where(seen > 8, do, 0)
    got = with_gradients(lambda *x: fused_attention(*x, p=p, causal=causal, **view), (q, k, v), do)
    inputs = tuple(x.double() for x in (q, k, v))
    exact = with_gradients(lambda *x: eager(*x, spec_of(p), torch.float64, **see), inputs, do.double())
    beside_eager = few_keys or q.dtype == torch.float32
    same = list(eager_runs((q, k, v), do, spec_of(p), q.dtype, exact, **see)) if beside_eager else []
    for index, (name, x, r) in enumerate(zip(("o", "dq", "dk", "dv"), got, exact)):
        assert x.isfinite().all(), f"{note}: {name} is not finite"
        allowed = allowed_error(name, p, q.dtype, r, do, [run[index] for run in same])
        assert rms(x - r) <= allowed, f"{note}: {name} is off by {rms(x - r):.3g}, allowed {allowed:.3g}"
    return got
