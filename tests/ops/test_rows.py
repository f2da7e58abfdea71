"""Values of rows for dk and dv from what the forward saves, against those that the dq kernel finds by a pass over the
keys; and gradients made from them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from lssar.visibility import visibility
from tests.helpers import with_gradients

pytest.importorskip("triton")

from lssar.ops.fused import fused_attention, op
from lssar.ops.fused.gradients import GAIN_PLANE
from tests.ops.test_fused import CUDA, DEVICE, compare, tensors

MEAN, SCORE_FACTOR, STEEP = 4, 5, 6
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
VIEWS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": 20},
    "full window": {"causal": False, "window": 20},
    "pack": {"causal": True, "cu_seqlens": torch.tensor([0, 3, 40, 41, 70])},
    "padding": {"causal": False, "key_lengths": torch.tensor([45, 2])},
}


@pytest.fixture(autouse=True)
def saving(monkeypatch):
    monkeypatch.setattr(op, "SAVE_LOWER", True)
    if not CUDA:  # rows are steep or not by blocks, here of as many rows as those of the dq kernel
        monkeypatch.setattr(op, "ROWS_OF_VALUES", 32)


def both_ways(monkeypatch, x, do, p, gain=None, *, causal, cu_seqlens=None, key_lengths=None, window=None):
    """What the dq kernel and row_values_kernel leave for dk and dv, and o, rows and lower of the forward."""
    options = (gain, p if p is None else float(p), None, causal, cu_seqlens, key_lengths, window)
    left = []

    def kept(run):
        def keep(*arguments):
            result = run(*arguments)
            made = result[1] if isinstance(result, tuple) else result
            left.append(dataclasses.replace(made, queries=made.queries.clone(), rows=made.rows.clone()))
            return result

        return keep

    with monkeypatch.context() as patch:
        patch.setattr(op, "_query_gradient", kept(op._query_gradient))
        patch.setattr(op, "_row_values", kept(op._row_values))
        o, rows, lower = op.run_forward(*x, *options, training=True)
        op.run_backward(*x, o, do, rows, lower, *options)
    return *left, (o, rows, lower)


def lower_weights(q, k, p, gain, **view):
    """Weights of the power p - 1 in float64, with a sum of 1 in rows that see a key; and numbers of visible keys."""
    q, k = (F.normalize(x.double(), dim=-1) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen = visibility(q.shape[2], k.shape[2], q.device, **view).dense(k.shape[2])
    n = seen.sum(-1, keepdim=True).double()
    s = math.log(q.shape[-1]) * n.clamp_min(1).log() * (q @ k.mT)
    if gain is not None:
        s = s * gain.double()[:, None, None]
    a = torch.where(seen, F.softplus(s, threshold=60), 0)
    z = torch.where(seen, a - torch.where(n > 3, a.sum(-1, keepdim=True) / n, 0), 0).clamp_min(0)
    largest = z.amax(-1, keepdim=True)
    y = torch.where(seen & ((z > 0) | (largest <= 0)), (z / largest.where(largest > 0, 1)) ** (p - 1), 0)
    return y / y.sum(-1, keepdim=True).clamp_min(1e-300), n.expand(*q.shape[:3], 1)[..., 0]


def check_planes(by_keys, by_rows, saved, x, do, p, gain=None, **view):
    """Every plane but the mean of g and the gain's is the same, up to the order of the sum dO.O.

    The mean is apart by the roundings of weights and of `lower` to their dtype at most, that of g in the dq kernel if
    that is float16 (steep.short_query_terms), and some of float32.
    """
    q, k, v = x
    o, rows, lower = saved
    L, dtype = q.shape[2], q.dtype
    heads = lambda plane: plane[:, :L].unflatten(0, q.shape[:2]).double()  # noqa: E731
    same = [0, 1, 2, 5] + ([STEEP] if p is not None and op.steep_rows(dtype, p) else [])
    for plane in same:  # on a GPU the compiler may fuse other products and sums
        near = {"rtol": 1e-5 if CUDA else 0, "atol": 0}
        torch.testing.assert_close(by_rows.rows[plane][:, :L], by_keys.rows[plane][:, :L], **near)
    assert torch.equal(by_rows.queries, by_keys.queries)
    do, v = do.double(), v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    ulps = 16 * 2.0**-24
    factor = 1.0 if dtype == FLOAT32 else heads(by_keys.rows[2])
    offset = abs(factor) * ulps * (do * o.double()).abs().sum(-1)
    assert ((heads(by_rows.rows[3]) - heads(by_keys.rows[3])).abs() <= offset).all()
    assert not by_rows.rows[GAIN_PLANE.value][:, :L].any()
    if p is None:
        assert not lower.numel() and not by_rows.rows[MEAN].any()
        return
    y, n = lower_weights(q, k, p, gain, **view)
    slope, _, z, y_sum = (heads(plane) for plane in rows)
    to_score = heads(by_keys.rows[SCORE_FACTOR]) if dtype == BFLOAT16 else 1.0
    unit = 2 * p * slope / z.where(z > 0, 1) * y_sum / n.clamp_min(1) * to_score
    rounding = torch.finfo(dtype).eps / 2
    of_g = (min(p, 16) + 8) * 2.0**-11 if CUDA and dtype == BFLOAT16 else 0.0
    products = (y * (do @ v.mT).abs()).sum(-1)
    apart = (rounding + of_g + ulps) * products + (of_g + ulps) * (do * o.double()).abs().sum(-1)
    apart = apart + 2 * (rounding + ulps) * (do * lower.double()).abs().sum(-1)
    off = (heads(by_rows.rows[MEAN]) - heads(by_keys.rows[MEAN])).abs()
    assert (off <= 1.1 * unit.abs() * apart + 1e-30).all(), (off / (unit.abs() * apart + 1e-30)).max()


CASES = [
    ("causal", BFLOAT16, 15, False), ("full", FLOAT16, 15, True), ("window", FLOAT32, 15, False),
    ("pack", BFLOAT16, 3, False), ("padding", BFLOAT16, 15, True), ("full window", FLOAT32, 3, False),
    ("causal", FLOAT32, 1.5, True), ("pack", FLOAT16, 1.5, False), ("full", BFLOAT16, 1.5, False),
    ("causal", FLOAT16, 1, False), ("window", BFLOAT16, 1, True), ("padding", FLOAT32, 1, False),
    ("full", FLOAT32, 31, False), ("causal", BFLOAT16, 31, True), ("padding", FLOAT16, 31, False),
    ("pack", FLOAT32, 64, True), ("full", BFLOAT16, 64, False), ("window", FLOAT16, 64, False),
    ("full window", BFLOAT16, 100, False), ("causal", FLOAT32, 100, False), ("causal", BFLOAT16, 16, False),
    ("causal", BFLOAT16, None, True), ("window", FLOAT32, None, False),
]  # fmt: skip


@pytest.mark.parametrize(("view", "dtype", "p", "with_gain"), CASES, ids=str)
def test_planes(view, dtype, p, with_gain, monkeypatch):
    batch = 2 if view == "padding" else 1
    *x, do = tensors(B=batch, Hq=4, Hkv=2, D=64 if dtype == BFLOAT16 else 32, dtype=dtype)
    gain = torch.tensor([0.5, -1.5, 1.0, 2.0], device=DEVICE) if with_gain else None
    see = {name: y.to(DEVICE) if isinstance(y, torch.Tensor) else y for name, y in VIEWS[view].items()}
    by_keys, by_rows, saved = both_ways(monkeypatch, x, do, p, gain, **see)
    check_planes(by_keys, by_rows, saved, x, do, p, gain, **see)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_planes_of_few_keys(length, dtype, monkeypatch):
    """The first three rows have no threshold, so that their gradient has no mean."""
    *x, do = tensors(B=2, Lq=length, D=32, dtype=dtype)
    by_keys, by_rows, saved = both_ways(monkeypatch, x, do, 15, causal=True)
    check_planes(by_keys, by_rows, saved, x, do, 15, causal=True)
    assert not by_rows.rows[MEAN][:, : min(length, 3)].any()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_planes_of_flat_rows_and_needles(dtype, monkeypatch):
    q, k, v, do = tensors(Lq=40, dtype=dtype)
    cases = {
        "flat": (q, k[:, :, :1].expand_as(k).contiguous()),
        "needle": (q, torch.cat([-q[:, :1, -1:].expand(-1, -1, 39, -1), q[:, :1, -1:]], 2)),
        "zero query": (q.clone().index_fill_(2, torch.tensor([7, 30], device=DEVICE), 0), k),
    }
    for note, (a, b) in cases.items():
        by_keys, by_rows, saved = both_ways(monkeypatch, (a, b, v), do, 15, causal=True)
        check_planes(by_keys, by_rows, saved, (a, b, v), do, 15, causal=True)
        if note == "flat":
            assert not by_rows.rows[MEAN].any()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_planes_of_large_and_small_values(dtype, monkeypatch):
    """Offset and mean of g are linear in v and in dO."""
    q, k, v, do = tensors(Lq=40, dtype=dtype)
    base = both_ways(monkeypatch, (q, k, v), do, 15, causal=True)[1].rows
    for of_v, of_do in ((100, 0), (0, 100), (-60, 0), (0, -60), (100, -100), (50, 50)):
        rows = both_ways(monkeypatch, (q, k, v * 2.0**of_v), do * 2.0**of_do, 15, causal=True)[1].rows
        for plane in range(6):
            scale = 2.0 ** (of_v + of_do) if plane in (3, MEAN) else 1.0
            if dtype == FLOAT32 and plane == 3:  # float32 keeps the offset without its factor
                assert (rows[plane] == base[plane] * scale).all()
            assert torch.equal(rows[plane], base[plane] * scale), (of_v, of_do, plane)
    # Sums of values beyond the range of float32: the forward repeats its pass, with smaller weights.
    rows = both_ways(monkeypatch, (q, k, v * 2.0**125), do * 2.0**-125, 15, causal=True)[1].rows
    for plane in range(6):
        torch.testing.assert_close(rows[plane], base[plane], rtol=0, atol=2.0**-8 * base[plane].abs().max().item())


@pytest.mark.parametrize("which", ["q", "k", "v", "dO"])
@pytest.mark.parametrize(("dtype", "bad"), [(BFLOAT16, torch.inf), (FLOAT32, torch.nan)], ids=str)
def test_planes_of_rows_that_see_what_is_not_finite(which, dtype, bad, monkeypatch):
    """Zeros, and NaN in the last plane; other rows have what they would have without it."""
    q, k, v, do = tensors(Lq=40, dtype=dtype)
    clean = both_ways(monkeypatch, (q, k, v), do, 15, causal=True)[1]
    dict(zip(("q", "k", "v", "dO"), (q, k, v, do)))[which][0, 0, 20, 3] = bad
    made = both_ways(monkeypatch, (q, k, v), do, 15, causal=True)[1]
    row = torch.arange(128, device=DEVICE)
    sees = (row == 20) if which in ("q", "dO") else (row >= 20) & (row < 40)
    spoiled = sees.expand(2, -1).clone()
    spoiled[1] &= which in ("k", "v")  # which the two heads share
    for plane in range(6):  # on a GPU a block that is computed again adds in another order
        largest = clean.rows[plane].abs().max().item()
        near = {"rtol": 0, "atol": 2.0**-8 * largest if CUDA else 0}
        torch.testing.assert_close(made.rows[plane][~spoiled], clean.rows[plane][~spoiled], **near)
        assert not made.rows[plane][spoiled].any()
    assert made.rows[GAIN_PLANE.value][spoiled].isnan().all() and not made.rows[GAIN_PLANE.value][~spoiled].any()
    if dtype == BFLOAT16:
        assert torch.equal(made.queries[~spoiled[:, :40][None]], clean.queries[~spoiled[:, :40][None]])
        assert not made.queries[spoiled[:, :40][None]].any()


@pytest.mark.parametrize(
    ("view", "dtype", "p"),
    [
        ("causal", BFLOAT16, 15),
        ("full", FLOAT16, 3),
        ("window", FLOAT32, 1.5),
        ("pack", BFLOAT16, 3),
        ("causal", FLOAT32, 15),
        ("causal", BFLOAT16, None),
        ("full", BFLOAT16, 64),
    ],
    ids=str,
)
def test_gradients_against_float64(view, dtype, p):
    """dk and dv from these values; LSSA, which has no re-weighting, saves nothing."""
    see = {name: y.to(DEVICE) if isinstance(y, torch.Tensor) else y for name, y in VIEWS[view].items()}
    compare(*tensors(D=64 if dtype == BFLOAT16 else 32, dtype=dtype), p=p, note=view, **see)


@pytest.mark.parametrize("p", [3, 64])
def test_rounding_what_is_saved_costs_dk_little(p, monkeypatch):
    """In bfloat16, against a mean of g by a pass over the keys: less than what a rounding of dk itself costs, which is
    part of the difference."""
    q, k, v, do = tensors(Hq=1, Lq=100, D=64, dtype=BFLOAT16)
    call = lambda *x: fused_attention(*x, p=p, causal=True)  # noqa: E731
    by_rows = with_gradients(call, (q, k, v), do)[2].double()
    monkeypatch.setattr(op, "SAVE_LOWER", False)
    by_keys = with_gradients(call, (q, k, v), do)[2].double()
    assert (by_rows - by_keys).norm() < 4e-3 * by_keys.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("view", "D", "p"),
    [
        ("causal", 64, 15),
        ("causal", 128, 15),
        ("full window", 128, 3),
        ("padding", 64, 2.5),
        ("padding", 128, 64),
        ("full", 256, 3),
    ],
)
def test_gpu_grid(view, D, p, monkeypatch):
    """The kernels that run there at these sizes, over several tiles of keys."""
    *x, do = tensors(B=2, Hq=4, Hkv=2, Lq=700, D=D, dtype=BFLOAT16)
    see = dict(VIEWS[view])
    if view == "padding":
        see["key_lengths"] = torch.tensor([650, 2], device=DEVICE)
    by_keys, by_rows, saved = both_ways(monkeypatch, x, do, p, **see)
    check_planes(by_keys, by_rows, saved, x, do, p, **see)
    compare(*x, do, p=p, note=view, **see)


def launched(monkeypatch, run):
    """Names of the kernels with tiles that it launches."""
    names = []
    with monkeypatch.context() as patch:
        start = op.launch
        patch.setattr(op, "launch", lambda name, *call: names.append(name) or start(name, *call))
        run()
    return names


def test_only_a_training_of_lssar_saves(monkeypatch):
    q, k, v, _ = tensors(Lq=5)
    trained = q.clone().requires_grad_()
    call = lambda q, p: lambda: fused_attention(q, k, v, p=p, causal=True)  # noqa: E731
    assert launched(monkeypatch, call(trained, 15)) == ["forward_training"]
    assert launched(monkeypatch, call(trained, torch.tensor(2.5))) == ["forward_training"]
    assert launched(monkeypatch, call(trained, None)) == ["forward"]
    assert launched(monkeypatch, call(q, 15)) == ["forward"]
    with torch.no_grad():
        assert launched(monkeypatch, call(trained, 15)) == ["forward"]
    monkeypatch.setattr(op, "SAVE_LOWER", False)
    assert launched(monkeypatch, call(trained, 15)) == ["forward"]


@pytest.mark.parametrize("p", [15.0, None])
def test_operator_is_what_pytorch_expects(p):
    x = [y.requires_grad_() for y in tensors(Lq=128, D=16)[:3]]  # rows are padded to that, with anything
    torch.library.opcheck(op.forward_op, (*x, None, p, None, True, None, None, None))


def test_compiled():
    q, k, v, do = tensors(Lq=20, D=16)
    call = lambda *x: fused_attention(*x, p=15, causal=True) * 1.0  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    got, want = (with_gradients(run, (q, k, v), do) for run in (compiled, call))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)])
def test_nothing_to_see(shape):
    B, H, Lk = shape
    x = [torch.zeros(B, H, L, 16, device=DEVICE, requires_grad=True) for L in (5, Lk, Lk)]
    fused_attention(*x, p=15, causal=True).sum().backward()
    assert not any(y.grad.any() for y in x)
