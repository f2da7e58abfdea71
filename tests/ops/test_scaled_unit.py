"""The kernel that normalises q and k for softmax of cosines, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

import lssar
from lssar.ops import fused, sdpa
from lssar.ops.numerics import unit
from tests.helpers import DEVICE, with_gradients

pytest.importorskip("triton")


def expected(x, scale, log_n, first_n, step):
    n = first_n + step * torch.arange(x.shape[2], device=x.device, dtype=torch.float64)
    factor = scale * (n.clamp_min(1).log() if log_n else torch.ones_like(n))
    return unit(x) * factor[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 3, 37, 64), (4.0, True, 1, 1)), ((1, 2, 1, 40), (2.0, True, 9, 0)), ((1, 1, 130, 16), (1.0, False, 1, 0))],
)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_unit_vectors_and_gradients(shape, options, dtype, size):
    if dtype == torch.float16 and size != 1.0:
        size = 1e4 if size > 1 else 1e-4
    generator = torch.Generator().manual_seed(0)
    B, H, L, D = shape
    x, grad = (torch.randn(B, L, H, D, generator=generator).transpose(1, 2) for _ in range(2))  # as projections are
    x, grad = (x * size).to(dtype).to(DEVICE), grad.to(dtype).to(DEVICE)
    x[:, :, 0, :] = 0
    got = with_gradients(lambda x: fused.scaled_unit(x, *options), (x,), grad)
    exact = with_gradients(lambda x: expected(x, *options), (x.double(),), grad.double())
    eps = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    largest = torch.finfo(dtype).max
    for name, a, r in zip(("unit", "gradient"), got, exact):
        r = r.clamp(-largest, largest)  # gradients of tiny vectors saturate
        error = (a.double() - r).norm() / r.norm().clamp_min(1e-300)
        assert a.isfinite().all() and error <= eps, f"{name}: {error:.2g}"
        assert not a[:, :, 0].any(), f"{name}: a zero vector stays zero, with no gradient"


@pytest.mark.parametrize(("causal", "queries"), [(True, 20), (True, 5), (False, 20)])
def test_sdpa_uses_it(causal, queries, monkeypatch):
    monkeypatch.setattr(sdpa, "fused_unit", lambda q, k: True)
    generator = torch.Generator().manual_seed(0)
    spec = lssar.spec("cosine_softmax", head_scale=1.0)
    gain = torch.tensor([0.5, 2.0], device=DEVICE)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to(DEVICE) for n in (queries, 20, 20))
    do = torch.randn(q.shape, generator=generator).to(DEVICE)
    found = with_gradients(lambda *x: sdpa.sdpa_attention(*x, spec, causal, gain), (q, k, v), do)
    exact = with_gradients(
        lambda *x: lssar.attention(*x, spec, causal=causal, head_scale=gain.double(), impl="reference"),
        tuple(x.double() for x in (q, k, v)), do.double(),
    )  # fmt: skip
    for a, r in zip(found, exact):
        torch.testing.assert_close(a.double(), r, atol=1e-5, rtol=1e-4)


def test_operator_is_well_formed():
    from lssar.ops.fused.scaled_unit_op import unit_op

    x = torch.randn(1, 2, 5, 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(unit_op, (x, 2.0, True, 1, 1))


def test_names_of_modules_hide_no_functions():
    """A submodule becomes an attribute of its package when it is imported, in place of a function of that name."""
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(fused.__path__)}
    taken = {name for name in modules if callable(vars(fused).get(name))}
    assert not taken
