"""Properties that hold for any input (hypothesis), in both implementations that run anywhere."""

from itertools import pairwise

import pytest
import torch

import lssar
from tests.helpers import ALL_SPECS, seeded

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

POSITIVE_L1 = ["softmax", "l1_sigmoid", "l1_softplus", "sigmoid_n_l1", "lssa", "lssar", "cosine_softmax", "ssmax",
               "softmax p=3", "sigmoid_n_l1 p=15", "lssar p=1", "lssar p=2.5"]  # fmt: skip
both = pytest.mark.parametrize("impl", ["reference", "tiled"])
any_spec = st.sampled_from(sorted(ALL_SPECS)).map(ALL_SPECS.get)
runs = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def inputs(draw, batch=1, low=1):
    length = draw(st.integers(low, 24))
    d = draw(st.integers(1, 9))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    generator = seeded(draw(st.integers(0, 2**31)))
    size = 10.0 ** draw(st.integers(-2, 1))
    q = torch.randn(batch, heads * groups, length, d, generator=generator, dtype=torch.float64) * size
    k, v = (torch.randn(batch, heads, length, d, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k, v, generator


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * max(1.0, float(b.abs().max()) if b.numel() else 1.0))


@both
@runs
@given(inputs(), st.sampled_from(POSITIVE_L1), st.booleans())
def test_normalised_rows_sum_to_one(impl, data, name, causal):
    q, k, v, _ = data
    w = lssar.attention(q, k, v, ALL_SPECS[name], causal=causal, impl=impl, return_weights=True)[1]
    assert (w >= 0).all()
    close(w.sum(-1), torch.ones_like(w[..., 0]))


@both
@runs
@given(inputs(), st.floats(-6, 6), st.floats(-6, 6), st.sampled_from(["lssa", "lssar", "cosine_softmax"]))
def test_cosine_scores_do_not_feel_norms(impl, data, x, y, name):
    q, k, v, _ = data
    o = lssar.attention(q, k, v, name, impl=impl)
    close(lssar.attention(q * 10**x, k * 10**y, v, name, impl=impl), o)


@both
@runs
@given(inputs(), any_spec)
def test_permuted_keys_permute_weights(impl, data, spec):
    q, k, v, generator = data
    order = torch.randperm(k.shape[2], generator=generator)
    o, w = lssar.attention(q, k, v, spec, causal=False, impl=impl, return_weights=True)
    o2, w2 = lssar.attention(q, k[:, :, order], v[:, :, order], spec, causal=False, impl=impl, return_weights=True)
    close(w2, w[..., order])
    close(o2, o)


@both
@runs
@given(inputs(), any_spec, st.lists(st.integers(0, 24), max_size=4), st.booleans())
def test_a_pack_equals_separate_calls(impl, data, spec, cuts, causal):
    q, k, v, _ = data
    length = q.shape[2]
    bounds = [0, *sorted(min(c, length) for c in cuts), length]
    packed = lssar.attention(q, k, v, spec, cu_seqlens=torch.tensor(bounds), causal=causal, impl=impl)
    parts = [
        lssar.attention(*(x[:, :, a:b] for x in (q, k, v)), spec, causal=causal, impl=impl) for a, b in pairwise(bounds)
    ]
    close(packed, torch.cat(parts, 2))


@both
@runs
@given(inputs(), any_spec, st.integers(1, 4))
def test_a_cache_step_equals_the_last_rows_of_the_full_call(impl, data, spec, rows):
    q, k, v, _ = data
    close(
        lssar.attention(q[:, :, -rows:], k, v, spec, impl=impl), lssar.attention(q, k, v, spec, impl=impl)[:, :, -rows:]
    )


@both
@runs
@given(inputs(batch=2), any_spec, st.integers(1, 3))
def test_a_masked_key_changes_nothing(impl, data, spec, extra):
    q, k, v, generator = data
    more = [torch.cat([x, 1e6 * torch.randn(*x.shape[:2], extra, x.shape[3], generator=generator)], 2) for x in (k, v)]
    seen = torch.arange(k.shape[2] + extra) < k.shape[2]
    o = lssar.attention(q, k, v, spec, causal=False, impl=impl)
    close(lssar.attention(q, *more, spec, causal=False, mask=seen, impl=impl), o)
    lengths = torch.full((2,), k.shape[2])
    close(lssar.attention(q, *more, spec, causal=False, key_lengths=lengths, impl=impl), o)


@runs
@given(inputs(batch=2), any_spec, st.integers(1, 30), st.booleans())
def test_a_window_is_a_mask(data, spec, window, causal):
    q, k, v, _ = data
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    close(
        lssar.attention(q, k, v, spec, window=window, causal=causal),
        lssar.attention(q, k, v, spec, mask=distance.abs() < window, causal=causal),
    )
