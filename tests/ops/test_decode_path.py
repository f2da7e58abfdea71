"""A few rows against a cache take the decode kernel, where nothing asks for a gradient."""

import pytest
import torch

import lssar
from lssar.ops.fused import fused_decode
from lssar.testing import assert_close_to_reference


@pytest.mark.parametrize("name", ["lssa", "lssar"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_few_rows_without_gradient_are_decoded(rows, name, monkeypatch):
    q, k, v = (torch.randn(2, heads, n, 32) for heads, n in ((4, rows), (2, 40), (2, 40)))
    called = []
    monkeypatch.setattr("lssar.ops.fused.fused_decode", lambda *a, **b: called.append(1) or fused_decode(*a, **b))
    with torch.no_grad():
        for window in (None, 40 + rows):
            found = lssar.attention(q, k, v, name, impl="fused", window=window)
            assert_close_to_reference(found, q, k, v, name)
    assert len(called) == 2
    q.requires_grad_()
    lssar.attention(q, k, v, name, impl="fused").sum().backward()
    assert len(called) == 2
    assert q.grad is not None


def test_a_half_filled_cache_is_decoded_too(monkeypatch):
    """Lengths of a static cache; a row that sees nothing gives zeros, and what lies beyond is not read."""
    q, k, v = (torch.randn(3, heads, n, 32) for heads, n in ((4, 1), (2, 40), (2, 40)))
    lengths = torch.tensor([40, 7, 0])
    poisoned = k.clone(), v.clone()
    for x in poisoned:
        x[1, :, 7:] = torch.nan
    called = []
    monkeypatch.setattr("lssar.ops.fused.fused_decode", lambda *a, **b: called.append(1) or fused_decode(*a, **b))
    with torch.no_grad():
        found = lssar.attention(q, *poisoned, causal=False, key_lengths=lengths, impl="fused")
    assert_close_to_reference(found, q, k, v, causal=False, key_lengths=lengths)
    assert called


def test_a_pack_may_end_in_empty_documents():
    """How the Hugging Face integration says where documents start without asking how many there are."""
    q, k, v = (torch.randn(1, heads, 40, 32) for heads in (4, 2, 2))
    plain, longer = torch.tensor([0, 5, 33, 40]), torch.tensor([0, 5, 33] + [40] * 38)
    assert_close_to_reference(lssar.attention(q, k, v, cu_seqlens=longer, impl="fused"), q, k, v, cu_seqlens=plain)
