"""Infinities and NaNs reach only the rows that see them; what is hidden may hold anything."""

import pytest
import torch

import lssar
from lssar.ops import fused
from tests.helpers import DEVICE, with_gradients

pytest.importorskip("triton")
KEY = 20
LENGTH = 40


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    make = lambda heads: torch.randn(1, heads, LENGTH, 16, generator=generator).to(DEVICE, dtype)  # noqa: E731
    return (make(2), make(1), make(1)), make(2)


def visible_to(rows, **view):
    """Which rows see KEY."""
    row = torch.arange(rows)
    if "window" in view:
        return (row >= KEY) & (row < KEY + view["window"])
    if "cu_seqlens" in view:
        return (row >= KEY) & (row < 30)
    return row >= KEY


CALLS = {
    "lssar": lambda *x, **view: fused.fused_attention(*x, p=15, causal=True, **view),
    "lssar p=2.5": lambda *x, **view: fused.fused_attention(*x, p=2.5, causal=True, **view),
    "lssa": lambda *x, **view: fused.fused_attention(*x, p=None, causal=True, **view),
    "softmax": lambda *x, **view: fused.activation_attention(*x, lssar.spec("softmax"), causal=True, **view),
    "sigmoid^3": lambda *x, **view: fused.activation_attention(
        *x, lssar.spec("sigmoid_n_l1").reweighted(3), causal=True, **view
    ),
}


def assert_same(got, want):
    """Equal bits; on a GPU, where a block that is computed again adds in another order, up to a few roundings."""
    allowed = 8 * torch.finfo(got.dtype).eps * want.abs().max() if got.is_cuda else 0.0
    assert ((got - want).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("name", "dtype", "which", "bad", "view"),
    [
        ("lssar", torch.bfloat16, "v", torch.inf, {}),
        ("lssar", torch.bfloat16, "k", torch.nan, {"window": 5}),
        ("lssar", torch.float32, "v", torch.nan, {"cu_seqlens": torch.tensor([0, 7, 30, LENGTH])}),
        ("lssar p=2.5", torch.float16, "v", -torch.inf, {"window": 5}),
        ("lssar", torch.float32, "q", torch.inf, {}),
        ("lssar", torch.bfloat16, "q", torch.nan, {}),
        ("lssa", torch.bfloat16, "v", torch.nan, {}),
        ("lssa", torch.float32, "k", torch.inf, {}),
        ("softmax", torch.bfloat16, "v", torch.inf, {}),
        ("softmax", torch.float32, "k", torch.nan, {"cu_seqlens": torch.tensor([0, 7, 30, LENGTH])}),
        ("softmax", torch.float32, "q", torch.nan, {}),
        ("sigmoid^3", torch.float32, "v", torch.nan, {"window": 5}),
    ],
    ids=str,
)
def test_only_rows_that_see_it(name, dtype, which, bad, view):
    view = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in view.items()}
    x, do = inputs(dtype)
    call = lambda *x: CALLS[name](*x, **view)  # noqa: E731
    clean = with_gradients(call, x, do)
    x = dict(zip("qkv", (t.clone() for t in x)))
    x[which][0, 0, KEY, 3] = bad
    o, dq, dk, dv = with_gradients(call, tuple(x.values()), do)
    seen = torch.arange(LENGTH) == KEY if which == "q" else visible_to(LENGTH, **view)
    head = o[0, :1] if which == "q" else o[0]
    assert head[:, seen].isnan().any(-1).all(), "the rows that see it say so"
    for got, want in ((o, clean[0]), (dq, clean[1])):
        assert_same(got[0, :, ~seen], want[0, :, ~seen])
        if which == "q":
            assert_same(got[0, 1], want[0, 1])
    reached = torch.zeros(LENGTH, dtype=torch.bool)  # keys that a row which sees it also sees
    for row in seen.nonzero().flatten().tolist():
        first = max(0, row - view["window"] + 1) if "window" in view else 7 if "cu_seqlens" in view else 0
        reached[first : row + 1] = True
    assert dk[0, 0, ~reached].isfinite().all() and dv[0, 0, ~reached].isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype", "bad", "view"),
    [
        ("lssar", torch.bfloat16, torch.nan, {}),
        ("lssar", torch.bfloat16, torch.inf, {"cu_seqlens": torch.tensor([0, 7, 30, LENGTH])}),
        ("lssar", torch.float32, -torch.inf, {"window": 5}),
        ("lssar p=2.5", torch.float16, torch.inf, {}),
        ("lssa", torch.bfloat16, torch.inf, {"window": 5}),
        ("lssa", torch.float32, torch.nan, {}),
        ("softmax", torch.bfloat16, torch.nan, {}),
    ],
    ids=str,
)
def test_a_gradient_of_the_output_that_is_not_finite(name, dtype, bad, view):
    """Its row has no dq, and the other gradients are those without that row, or NaN at keys that the row sees."""
    view = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in view.items()}
    x, do = inputs(dtype)
    call = lambda *x: CALLS[name](*x, **view)  # noqa: E731
    do[0, 0, KEY] = 0
    want = with_gradients(call, x, do)
    do[0, 0, KEY, 3] = bad
    got = with_gradients(call, x, do)
    assert not got[1][0, 0, KEY].isfinite().any()
    others = torch.arange(LENGTH) != KEY
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1][0, 0, others], want[1][0, 0, others]) and torch.equal(got[1][0, 1], want[1][0, 1])
    near = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}  # tiles of another shape add in another order
    kept = slice(KEY + 1, None) if name == "softmax" else slice(None)
    for a, b in zip(got[2:], want[2:]):
        torch.testing.assert_close(a[:, :, kept] / b.std(), b[:, :, kept] / b.std(), **near)


def test_decode_of_several_rows():
    """The last key is hidden from all rows but the last."""
    (q, k, v), _ = inputs(torch.float32)
    largest = float(v.abs().max())
    clean = fused.fused_decode(q[:, :, -3:], k, v, p=15, tolerance=0.0)
    v[0, 0, -1, 2] = torch.inf
    o = fused.fused_decode(q[:, :, -3:], k, v, p=15, tolerance=0.0)
    assert torch.equal(o[:, :, :2], clean[:, :, :2]) and o[:, :, 2].isnan().any(-1).all()
    k[0, 0, -2, 5] = torch.nan
    o = fused.fused_decode(q[:, :, -3:], k, v, p=15, tolerance=0.0)
    assert o[:, :, 1:].isnan().any(-1).all()
    # Other keys matter to the rows together, so that sums of weights (one in all) times v have another order.
    torch.testing.assert_close(o[:, :, :1], clean[:, :, :1], rtol=0, atol=2 * LENGTH * 2.0**-24 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [None, 15])
def test_decode_of_a_query_or_key_that_is_not_finite(p, dtype):
    """Half types keep cosines as integers, which hold no NaN."""
    (q, k, v), _ = inputs(dtype)
    q = q[:, :, -2:].clone()
    clean = fused.fused_decode(q, k, v, p=p, tolerance=0.0)
    for bad in (torch.nan, torch.inf):
        wrong = k.clone()
        wrong[0, 0, -1, 5] = bad
        o = fused.fused_decode(q, wrong, v, p=p, tolerance=0.0)
        assert o[:, :, 1].isnan().all() and o[:, :, 0].isfinite().all()
        wrong = q.clone()
        wrong[0, 1, 0, 5] = bad
        o = fused.fused_decode(wrong, k, v, p=p, tolerance=0.0)
        assert o[0, 1, 0].isnan().all()
        # Other keys matter to the rows together, so that sums have another order.
        torch.testing.assert_close(o[:, 0], clean[:, 0])
        torch.testing.assert_close(o[:, 1, 1], clean[:, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_values_and_keys(dtype):
    """Sums of values beyond float32's range, and keys of the largest norms, forward and backward."""
    (q, k, v), do = inputs(dtype)
    call = lambda *x: fused.fused_attention(*x, p=15, causal=True)  # noqa: E731
    base = with_gradients(call, (q, k, v), do)
    large = call(q, k, v * 2.0**125)
    torch.testing.assert_close(large.double() * 2.0**-125, base[0].double(), rtol=0.02, atol=0.02)
    scale = 2.0**122 if dtype == torch.bfloat16 else 2.0**120
    got = with_gradients(call, (q, k * scale, v), do)
    for a, b, factor in zip(got, base, (1, 1, scale, 1)):
        torch.testing.assert_close(a.double() * factor, b.double(), rtol=0.03, atol=0.03 * b.abs().max().item())


def test_gradients_do_not_depend_on_hidden_values():
    """To the bit: gradients of queries in half types are scaled by the largest value that their own row sees."""
    (q, k, v), do = inputs(torch.bfloat16)
    call = lambda *x: fused.fused_attention(*x, p=15, causal=True)  # noqa: E731
    clean = with_gradients(call, (q, k, v), do)
    v[0, 0, KEY:] *= 2.0**100
    got = with_gradients(call, (q, k, v), do)
    for a, b in zip(got[:2], clean[:2]):
        assert torch.equal(a[0, :, :KEY], b[0, :, :KEY])
