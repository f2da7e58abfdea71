"""NaN and inf in the inputs stay within the rows that see them, forward and backward."""

import itertools

import pytest
import torch

import lssar
from lssar.visibility import visibility
from tests.helpers import pairwise, seeded, views, with_gradients

B, HQ, HKV, L, D = 1, 4, 2, 13, 4
SPECS = ["lssar", "softmax", "lssa", "sigmoid", "raw_l1", "softmax_recentred_l1", "exp"]
IMPLS = {
    "reference": ("reference", torch.float64),
    "strips": ("tiled", torch.float64),
    "native": ("tiled", torch.float32),
}


def inputs(dtype, heads=(HQ, HKV, HKV, HQ)):
    generator = seeded(0)
    return [torch.randn(B + 1, h, L, D, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def reached(visible, bad):
    """Rows (B, H, Lq) that are bad themselves or see a bad key, and keys (B, Hkv, Lk) that such a row sees.

    `bad`: bool (B, heads, L) for each of q, k, v, do.
    """
    groups = HQ // HKV
    keys = (bad["k"] | bad["v"]).repeat_interleave(groups, 1)
    rows = bad["q"] | (visible & keys[:, :, None]).any(-1)
    wide = rows | bad["do"]
    return rows, wide, (visible & wide[..., None]).any(2).unflatten(1, (HKV, groups)).any(2)


CASES = pairwise(IMPLS, ["q", "k", "v", "do"], [torch.inf, -torch.inf, torch.nan], SPECS, list(views(2, HQ, L)))


@pytest.mark.parametrize(("impl", "where", "value", "name", "view"), CASES, ids=str)
def test_only_rows_that_see_it_are_lost(impl, where, value, name, view):
    how, dtype = IMPLS[impl]
    options = views(B + 1, HQ, L)[view]
    given = dict(zip(("q", "k", "v", "do"), inputs(dtype)))
    call = lambda q, k, v: lssar.attention(q, k, v, name, impl=how, **options)  # noqa: E731
    clean = with_gradients(call, (given["q"], given["k"], given["v"]), given["do"])
    bad = {key: torch.zeros(x.shape[:3], dtype=torch.bool) for key, x in given.items()}
    for place in ((1, 0, 6), (1, -1, 9)):
        given[where][(*place, 2)] = value
        bad[where][place] = True
    got = with_gradients(call, (given["q"], given["k"], given["v"]), given["do"])
    see = visibility(L, L, torch.device("cpu"), **{"causal": True, **options})
    rows, wide, keys = reached(see.dense(L).expand(B + 1, HQ, L, L), bad)
    lost = (rows, wide, keys, keys)
    for found, expected, affected in zip(got, clean, lost):
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found[~affected], expected[~affected], rtol=tolerance, atol=tolerance)
    assert bool(rows.any()) == (not bool(got[0].isfinite().all())) or name in ("softmax", "exp", "sigmoid")


@pytest.mark.parametrize("impl", IMPLS)
def test_the_other_batch_rows_and_heads_keep_their_bits(impl):
    how, dtype = IMPLS[impl]
    q, k, v, do = inputs(dtype)
    for name in ("lssar", "softmax"):
        call = lambda *x: lssar.attention(*x, name, impl=how)  # noqa: B023, E731
        clean = with_gradients(call, (q, k, v), do)
        bad = v.clone()
        bad[1, 0, 3, 0] = torch.inf
        for found, expected in zip(with_gradients(call, (q, k, bad), do), clean):
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1, found.shape[1] // 2 :], expected[1, found.shape[1] // 2 :])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_that_is_not_finite_beside_a_hidden_value(impl):
    """Keys in front of the window are cut off, and the inputs that are left are finite."""
    how, dtype = IMPLS[impl]
    q, k, v, do = (x[:, :, -2:] if i in (0, 3) else x for i, x in enumerate(inputs(dtype)))
    v[1, 0, 1, 2] = torch.inf
    do[1, 0, 0, 2] = torch.nan
    _, dq, dk, dv = with_gradients(lambda *x: lssar.attention(*x, impl=how, window=3), (q, k, v), do)
    assert dq[1, 0, 0].isnan().all() and dq[1, 0, 1].isfinite().all() and dq[1, 1:].isfinite().all()
    for x in (dk, dv):
        assert x[1, 0, -4:-1].isnan().any(-1).all() and x[1, 0, -1].isfinite().all()
        assert x[0].isfinite().all() and x[1, 1].isfinite().all() and x[1, 0, :-4].isfinite().all()


def test_gradients_of_the_weights_that_are_not_finite():
    q, k, v, do = (x.requires_grad_() for x in inputs(torch.float64))
    o, w = lssar.attention(q, k, v, impl="reference", return_weights=True)
    dw = torch.zeros_like(w)
    dw[1, 0, 5, 2] = torch.inf
    for grads in ((w,), (dw,)), ((o, w), (do.detach(), dw)):
        dq, dk, _ = torch.autograd.grad(grads[0], (q, k, v), grads[1], retain_graph=True, allow_unused=True)
        assert dq[1, 0, 5].isnan().all() and dk[1, 0, :6].isnan().all()
        assert dq[1, 0, 6:].isfinite().all() and dk[1, 0, 6:].isfinite().all() and dk[:, 1].isfinite().all()
    clean = torch.autograd.grad(o, (q, k, v), do.detach())  # nothing is kept from the calls before
    assert all(x.isfinite().all() for x in clean)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_column_of_a_value(impl):
    how, dtype = IMPLS[impl]
    q, k, v, _ = inputs(dtype)
    v[1, 0, 3, 2] = torch.nan
    o = lssar.attention(q, k, v, impl=how)
    assert not o[1, :2, 3:, 2].isfinite().any()
    assert o[1, :2, :, [0, 1, 3]].isfinite().all() and o[1, :2, :3].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_what_nobody_sees_reaches_nothing(impl):
    """NaN in all of the padding, in the gaps of a mask and in front of a window."""
    how, dtype = IMPLS[impl]
    hidden = torch.tensor([True] * 4 + [False] * 9)
    for options in (
        {"causal": False, "mask": ~hidden},
        {"causal": False, "key_ranges": torch.tensor([4, L]).expand(1, L, 2)},
        {"window": 3},
        {"key_lengths": torch.tensor([L - 4, L - 4])},
    ):
        q, k, v, do = inputs(dtype)
        if "window" in options:
            q, do = q[:, :, -7:], do[:, :, -7:]
        where = hidden.flip(0) if "key_lengths" in options else hidden
        call = lambda *x: lssar.attention(*x, impl=how, **options)  # noqa: B023, E731
        clean = with_gradients(call, (q, k, v), do)
        k[:, :, where] = torch.nan
        v[:, :, where] = torch.inf
        for found, expected in zip(with_gradients(call, (q, k, v), do), clean):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_returned_weights_contain_an_inf(impl):
    how, dtype = IMPLS[impl]
    q, k, v, _ = inputs(dtype)
    k[1, 1, 5] = torch.inf
    w = lssar.attention(q, k, v, impl=how, return_weights=True)[1]
    assert w[0].isfinite().all() and w[1, :2].isfinite().all() and w[1, 2:, :5].isfinite().all()
    for row, column in itertools.product((5, 12), (0, 5)):
        assert w[1, 2:, row, column].isnan().all()
    assert (w[..., torch.ones(L, L, dtype=torch.bool).triu(1)] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_learned_number_that_is_lost(impl):
    """It has a part in every row of its head, and in no other."""
    how, dtype = IMPLS[impl]
    q, k, v, do = inputs(dtype)
    gain = torch.tensor([1.0, torch.nan, 1.0, 2.0], dtype=dtype)
    call = lambda q, k, v, g: lssar.attention(q, k, v, lssar.spec("lssar", head_scale=1.0), head_scale=g, impl=how)  # noqa: E731
    o, dq, dk, dv, dg = with_gradients(call, (q, k, v, gain), do)
    for x in (o, dq):
        assert x[:, 1].isnan().all() and x[:, [0, 2, 3]].isfinite().all()
    for x in (dk, dv):
        assert x[:, 0].isnan().all() and x[:, 1].isfinite().all()
    assert dg.isnan().tolist() == [False, True, False, False]
