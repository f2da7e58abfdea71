"""A single row against a cache takes the decode kernel, where nothing asks for a gradient."""

import pytest
import torch

import lssar
from lssar.ops.fused import fused_decode


@pytest.mark.parametrize("name", ["lssa", "lssar"])
def test_a_single_row_without_gradient_is_decoded(name, monkeypatch):
    q, k, v = (torch.randn(2, heads, n, 32) for heads, n in ((4, 1), (2, 40), (2, 40)))
    expected = lssar.attention(q, k, v, name, impl="reference")
    called = []
    monkeypatch.setattr("lssar.ops.fused.fused_decode", lambda *a, **b: called.append(1) or fused_decode(*a, **b))
    with torch.no_grad():
        for window in (None, 40):
            found = lssar.attention(q, k, v, name, impl="fused", window=window)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert len(called) == 2
    q.requires_grad_()
    lssar.attention(q, k, v, name, impl="fused").sum().backward()
    assert len(called) == 2
    assert q.grad is not None
