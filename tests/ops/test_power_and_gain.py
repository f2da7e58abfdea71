"""The power as an argument, and a learned gain per query head, in the fused kernels."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import lssar
from lssar.ops import fused
from tests.helpers import DEVICE, with_gradients

pytest.importorskip("triton")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
"""Relative error in the root mean square, about four times what is measured."""


def dense(q, k, v, gain, p, softmax=False):
    """Causal LSSA, LSSAR or cosine softmax in float64 by the formula, differentiable."""
    q, k, v, gain = (x.double() for x in (q, k, v, gain))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    L, d = q.shape[-2:]
    n = torch.arange(1, L + 1, device=q.device)[:, None].double()
    s = gain[:, None, None] * math.log(d) * n.log() * (q @ k.mT)
    seen = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
    if softmax:
        return torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ v
    a = torch.where(seen, F.softplus(s, threshold=60), 0)
    if p is not None:
        z = torch.where(seen, a - torch.where(n > 3, a.sum(-1, keepdim=True) / n, 0), 0).clamp_min(0)
        a = (z / z.amax(-1, keepdim=True).detach()) ** p
    return a / a.sum(-1, keepdim=True) @ v


def inputs(dtype, L=40, D=32, B=2, Hq=4, Hkv=2):
    generator = torch.Generator().manual_seed(0)
    make = lambda heads: torch.randn(B, heads, L, D, generator=generator).to(DEVICE, dtype)  # noqa: E731
    gain = torch.tensor([0.5, -1.5, 1.0, 2.0], device=DEVICE)[:Hq]
    return (make(Hq), make(Hkv), make(Hkv), gain), make(Hq)


def check(got, exact, dtype, note=""):
    for name, a, b in zip(("o", "dq", "dk", "dv", "dgain"), got, exact):
        assert a.isfinite().all(), f"{note}: {name}"
        error = ((a.double() - b.double()).norm() / b.double().norm()).item()
        allowed = TOLERANCE[dtype] * (10 if name == "dgain" else 1)  # a sum over rows that cancels
        assert error < allowed, f"{note}: {name} is off by {error:.2g}"


@pytest.mark.parametrize(
    ("dtype", "p"), [(torch.float32, 15), (torch.float32, None), (torch.float32, 2.5), (torch.float16, 7)], ids=str
)
def test_gain(dtype, p):
    x, do = inputs(dtype)
    got = with_gradients(lambda q, k, v, gain: fused.fused_attention(q, k, v, p=p, gain=gain, causal=True), x, do)
    check(got, with_gradients(lambda *x: dense(*x, p), x, do.double()), dtype)


def test_gain_of_cosine_softmax():
    x, do = inputs(torch.float32)
    spec = lssar.spec("cosine_softmax")
    got = with_gradients(lambda q, k, v, gain: fused.activation_attention(q, k, v, spec, gain=gain, causal=True), x, do)
    check(got, with_gradients(lambda *x: dense(*x, None, softmax=True), x, do.double()), torch.float32)


@pytest.mark.parametrize("p", [None, 3, torch.tensor(2.5)], ids=str)
def test_gain_of_decode(p):
    (q, k, v, gain), _ = inputs(torch.float32)
    o = fused.fused_decode(q[:, :, -2:], k, v, p=p, gain=gain, tolerance=0.0)
    check([o], [dense(q, k, v, gain, p if p is None else float(p))[:, :, -2:]], torch.float32)


def test_a_gain_of_any_size_gives_finite_results():
    """Float16 scores are limited, so that unit vectors times a large gain do not overflow."""
    for value in (0.0, 1e-30, 500.0, 1e30):
        (q, k, v, gain), do = inputs(torch.bfloat16, L=20, D=16)
        x = q, k, v, torch.full_like(gain, value)
        got = with_gradients(lambda q, k, v, gain: fused.fused_attention(q, k, v, p=15, gain=gain, causal=True), x, do)
        assert all(t.isfinite().all() for t in got), value


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 3e4), (torch.bfloat16, 1e38), (torch.float32, 1e38)], ids=str
)
def test_a_factor_that_leaves_the_range_of_q_gives_finite_results(dtype, largest, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    q = q / q.abs().amax() * largest
    q, k, v = (x.to(DEVICE, dtype).requires_grad_() for x in (q, k / largest, v))
    gain = torch.tensor([8.0, 1.0], device=DEVICE, requires_grad=True)
    o = lssar.attention(q, k, v, "ssmax", head_scale=gain, window=window, impl="fused")
    assert o.isfinite().all()
    if window is not None:  # without one the backward is that of PyTorch's SDPA, where dk may exceed float16
        o.float().square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v, gain))


def test_wrong_powers_and_gains_are_refused():
    (q, k, v, gain), _ = inputs(torch.float32, L=4)
    call = lambda **options: fused.fused_attention(q, k, v, **{"p": 15, "causal": True, **options})  # noqa: E731
    for p in (torch.tensor([3.0]), torch.tensor(3), torch.tensor(3.0, requires_grad=True)):
        with pytest.raises(ValueError, match="float tensor of no dimensions on the CPU"):
            call(p=p)
    for p in (0.5, math.inf, math.nan, torch.tensor(0.0)):
        with pytest.raises(ValueError, match="finite number >= 1"):
            call(p=p)
    with pytest.raises(ValueError, match=r"shape \(4,\), one value a query head"):
        call(gain=gain[:2])


@pytest.mark.parametrize("kind", ["lssar", "softmax", "decode"])
def test_the_power_can_change_without_a_new_graph(kind):
    """A tensor is an input of the compiled graph: integers and other powers, forward and backward."""
    from torch._dynamo.testing import CompileCounterWithBackend

    (q, k, v, _), do = inputs(torch.float32, L=8, D=16, B=1)
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, p):
        if kind == "lssar":
            return fused.fused_attention(q, k, v, p=p, causal=True) * 1.0
        if kind == "decode":
            return fused.fused_decode(q[:, :, -1:], k, v, p=p) * 1.0
        return fused.activation_attention(q, k, v, lssar.spec("softmax"), p=p, causal=True) * 1.0

    torch.compiler.reset()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    power = torch.tensor(3.0)
    seen = []
    for value in (3.0, 7.0, 7.25, 15.0):
        power.fill_(value)
        if kind == "decode":
            got, want = (compiled(q, k, v, power),), (call(q, k, v, value),)
        else:
            got = with_gradients(lambda *x: compiled(*x, power), (q, k, v), do)
            want = with_gradients(lambda *x: call(*x, value), (q, k, v), do)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        seen.append(got[0])
    assert counter.frame_count == 1
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_one_kernel_for_all_powers_that_are_not_integers():
    from lssar.ops.fused.op import power_arguments

    assert power_arguments(None) == (1, 0.0)
    assert power_arguments(15.0) == (15, 0.0)
    assert power_arguments(2.5) == (0, 2.5) and power_arguments(7.25) == (0, 7.25)
    assert power_arguments(4096.0) == (0, 4096.0)
