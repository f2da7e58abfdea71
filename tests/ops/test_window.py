"""The windowed kernels against the float64 reference: in Triton's interpreter at small shapes, on a GPU in full."""

from __future__ import annotations

import pytest
import torch

import lssar
from tests.helpers import DEVICE, NAMES, eager, eager_runs, with_gradients

pytest.importorskip("triton")
from lssar.ops import fused
from lssar.ops.fused import tiles, window_op
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.window_gradients import STEEP_PLANE
from tests.ops.comparing import rms, tensors

SPECS = {
    "softmax": lssar.spec("softmax"),
    "cosine softmax": lssar.spec("cosine_softmax"),
    "ssmax": lssar.spec("ssmax"),
    "lssa": lssar.spec("lssa"),
    "lssar": lssar.spec("lssar"),
    "lssar p=2.5": lssar.spec("lssar", p=2.5),
}
BOUNDS = {  # relative root mean square error: a few times what is measured
    torch.float32: {"o": 3e-6, "gradient": 2e-5},
    torch.float16: {"o": 1.5e-3, "gradient": 3e-3},
    torch.bfloat16: {"o": 8e-3, "gradient": 1.2e-2},
}


def run(q, k, v, do, spec, **view):
    return with_gradients(lambda *x: fused.window_attention(*x, spec, **{"causal": True, **view}), (q, k, v), do)


def compare(q, k, v, do, spec, note="", ill_conditioned=False, least=0.0, **view):
    """Relative error in the root mean square within BOUNDS, or `least`; of gradients, against the terms of their
    differences."""
    see = {"causal": True, **view}
    poison = [torch.full_like(x, torch.nan) for x in (q, q, k, k, v, v)]
    del poison  # the allocator hands these out again: what is not written shows
    got = run(q, k, v, do, spec, **see)
    inputs = tuple(x.double() for x in (q, k, v))
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, **see), inputs, do.double())
    bounds = BOUNDS[q.dtype]
    same = list(eager_runs((q, k, v), do, spec, q.dtype, exact, **see)) if ill_conditioned else []
    for index, (name, x, r) in enumerate(zip(("o", "dq", "dk", "dv"), got, exact)):
        assert x.isfinite().all(), f"{note}: {name} is not finite"
        scale = rms(r)
        if name in ("dq", "dk"):  # rows that see one key have none, but for rounding
            scale = max(scale, 0.1 * rms(do) * rms(v) / max(rms(q if name == "dq" else k), 1e-30))
        allowed = max(bounds["o" if name == "o" else "gradient"], least) * scale
        allowed = max([allowed, *(3 * rms(run[index].double() - r) for run in same)])  # what eager loses in this dtype
        assert rms(x - r) <= allowed, f"{note}: {name} is off by {rms(x - r):.3g}, allowed {allowed:.3g}"
    return got


PACK = torch.tensor([0, 3, 40, 41, 70])
VIEWS = {
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window 3": {"window": 3},
    "window 7": {"window": 7},
    "window 32": {"window": 32},
    "longer than the keys": {"window": 100},
    "to both sides": {"window": 20, "causal": False},
    "pack": {"window": 7, "cu_seqlens": PACK},
    "full pack": {"window": 20, "cu_seqlens": PACK, "causal": False},
}


def on_device(view):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in view.items()}


@pytest.mark.parametrize(
    ("spec", "view"),
    [(spec, view) for i, view in enumerate(VIEWS) for j, spec in enumerate(SPECS) if (i + j) % 3 == 0],
)
def test_what_rows_see(spec, view):
    compare(*tensors(), SPECS[spec], f"{spec}, {view}", **on_device(VIEWS[view]))


@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_half_types(dtype, spec):
    compare(*tensors(D=64, dtype=dtype), SPECS[spec], window=20)


@pytest.mark.parametrize("p", [15, 31.5, 200])
def test_steep_rows(p, monkeypatch):
    """Most blocks of rows take the shorter forms, the first ones do not; with high powers none do."""
    q, k, v, do = tensors(Hq=1, Lq=170, D=64, dtype=torch.bfloat16)
    steep = []

    def record(kernel, grid, arguments, constants):
        start_kernel(kernel, grid, arguments, constants)
        if "STEEP_ROWS" in constants:
            steep.append(arguments[6][STEEP_PLANE.value].mean().item() if constants["STEEP_ROWS"] else 0.0)

    monkeypatch.setattr(window_op, "start_kernel", record)
    compare(q, k, v, do, lssar.spec("lssar", p=p), window=150)
    assert 0.3 < steep[0] < 1 if p < 64 else steep[0] == 0


@pytest.mark.parametrize(
    ("Lq", "Lk", "D"), [(1, 1, 64), (2, 2, 40), (3, 3, 16), (4, 4, 40), (33, 70, 16), (33, 33, 40), (40, 20, 64)]
)
def test_lengths_and_head_sizes(Lq, Lk, D):
    for spec in ("softmax", "lssar") if Lq % 2 else ("cosine softmax", "lssa"):
        compare(*tensors(Hq=1, Lq=Lq, Lk=Lk, D=D), SPECS[spec], f"{Lq}, {Lk}", window=7)


@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
def test_padding_may_hold_anything(spec):
    q, k, v, do = tensors(B=2, Hq=1, Lq=50, D=16)
    view = {"window": 20, "key_lengths": torch.tensor([40, 0], device=DEVICE)}
    clean = compare(q, k, v, do, SPECS[spec], **view)
    for b, n in enumerate((40, 0)):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
    dirty = run(q, k, v, do, SPECS[spec], **view)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))
    assert not clean[0][1].any() and not clean[1][1].any() and not clean[2][1].any() and not clean[3][1].any()


def check_not_finite(spec, dtype, which, bad, at, L=40, D=16, window=7, causal=True):
    """One bad entry in q, k, v or dO: rows that see it say so, and what it may not reach is as without it."""
    x = dict(zip(("q", "k", "v", "dO"), tensors(Lq=L, D=D, dtype=dtype)))
    clean = run(*x.values(), SPECS[spec], window=window, causal=causal)
    exact = with_gradients(
        lambda *y: eager(*y, SPECS[spec], torch.float64, causal=causal, window=window),
        tuple(y.double() for y in list(x.values())[:3]), x["dO"].double(),
    )  # fmt: skip
    terms = (SPECS[spec].p or 1) * rms(x["dO"]) * rms(x["v"])  # of dq and dk, which cancel where n is small
    scales = 0.0, terms / rms(x["q"]), terms / rms(x["k"]), 0.0
    eps = torch.finfo(dtype).eps
    allowed = [  # blocks that are computed again round differently
        4 * (eps * max(scale, b.abs().max().item()) + (b - r).abs().max().item())
        for scale, b, r in zip(scales, clean, exact)
    ]
    x[which][0, 0, at, 3] = bad
    got = run(*x.values(), SPECS[spec], window=window, causal=causal)
    row, key = torch.arange(L)[:, None], torch.arange(L)
    sees = (key > row - window) & (key < row + window) & ((key <= row) | (not causal))
    rows, keys = torch.zeros(1, 2, L, dtype=torch.bool), torch.zeros(1, 1, L, dtype=torch.bool)
    if which in ("q", "dO"):
        rows[0, 0, at] = True
    else:
        rows[0] = sees[:, at]
    keys[0, 0] = sees[rows[0, 0]].any(0)
    note = f"{spec}, {dtype}, {bad} at {at} of {which}, window {window}"
    lost = got[0][rows.to(DEVICE)], got[1][rows.to(DEVICE)]
    weightless = spec == "softmax" and which == "k" and abs(bad) == torch.inf  # a score of -inf has weight 0
    if not weightless:
        assert which == "dO" or not lost[0].isfinite().all(-1).any(), f"{note}: o is finite"
        assert not lost[1].isfinite().all(-1).any(), f"{note}: dq is finite"
    of_o = torch.zeros_like(rows) if which == "dO" else rows
    for name, a, b, reached, limit in zip(("o", "dq", "dk", "dv"), got, clean, (of_o, rows, keys, keys), allowed):
        a, b = a[~reached.to(DEVICE)].double(), b[~reached.to(DEVICE)].double()
        assert a.isfinite().all(), f"{note}: {name} is not finite"
        assert ((a - b).abs() <= limit).all(), f"{note}: {name} differs by {(a - b).abs().max():.3g} > {limit:.3g}"


@pytest.mark.parametrize("which", ["q", "k", "v", "dO"])
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssa", "lssar"])
def test_values_that_are_not_finite_stay_in_the_rows_that_see_them(spec, which):
    bad = (torch.nan, torch.inf, -torch.inf)[list(SPECS).index(spec) % 3]
    check_not_finite(spec, torch.float32, which, bad, 33)
    check_not_finite(spec, torch.float16, which, torch.inf, 31, causal=False, window=2)


def test_groups_and_strides():
    """Heads shared by groups; q, k, v as slices of one tensor laid out (B, L, heads, D), and no copy of the layout."""
    packed = torch.randn(2, 37, 8, 16, device=DEVICE)
    q, k, v = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:6].transpose(1, 2), packed[:, :, 6:].transpose(1, 2)
    do = torch.randn(2, 37, 4, 16, device=DEVICE).transpose(1, 2)
    for spec in ("cosine softmax", "lssar"):
        o = compare(q, k, v, do, SPECS[spec], window=20)[0]
        assert o.shape == q.shape
    assert fused.window_attention(q, k, v, SPECS["softmax"], causal=True, window=9).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssa", "lssar"])
def test_adversarial_rows(spec):
    q, k, v, do = tensors(Hq=1, Lq=40)
    cosine = SPECS[spec].cosine
    cases = {
        "equal keys": (q, k[:, :, :1].expand_as(k).contiguous()),
        "anti-aligned": (q, -q[:, :1, -1:].expand_as(k) + 0.01 * k),
        "needle": (q, torch.cat([-q[:, :1, -1:].expand(-1, -1, 39, -1), q[:, :1, -1:]], 2)),
        "tiny and huge": (q * 1e-18, k * 1e18) if cosine else (q * 1e-18, k * 3e17),
        "zero query": (q.clone().index_fill_(2, torch.tensor([7, 30], device=DEVICE), 0), k),
    }
    for note, (a, b) in cases.items():
        if note == "zero query" and spec in ("cosine softmax", "lssa"):  # zero by convention, not by autograd
            dq = run(a, b, v, do, SPECS[spec], window=20)[1]
            assert not dq[:, :, [7, 30]].any() and dq.isfinite().all()
        else:
            near = note == "anti-aligned"  # in LSSAR keys near the mean: 0.7% of dv at most in ten seeds
            compare(a, b, v, do, SPECS[spec], note, near, least=0.03 * (near and spec == "lssar"), window=20)


@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
def test_norms_to_the_ends_of_the_range(spec, dtype):
    """The output is finite and right: with cosine it does not depend on norms, else the largest score takes all."""
    q, k, v, do = tensors(Hq=1, Lq=20, dtype=dtype)
    for up, down in ((2.0**100, 2.0**100), (2.0**100, 2.0**-100), (2.0**-100, 2.0**100)):
        if SPECS[spec].cosine:
            expected = run(q, k, v, do, SPECS[spec], window=7)[0]
        else:
            inputs = (x.double() for x in (q * up, k * down, v))
            expected = eager(*inputs, SPECS[spec], torch.float64, causal=True, window=7).to(dtype)
        got = run(q * up, k * down, v, do, SPECS[spec], window=7)
        assert all(x.isfinite().all() for x in got)
        assert rms(got[0] - expected) <= 2 * BOUNDS[dtype]["o"] * rms(expected), (up, down)


@pytest.mark.parametrize("spec", ["cosine softmax", "lssa", "lssar"])
def test_gain(spec):
    """As multiplying the scores of each head, gradient included."""
    q, k, v, do = tensors(Hq=3, Lq=40, D=16)
    gain = torch.tensor([0.5, 1.7, -1.2], device=DEVICE)
    call = lambda *x: fused.window_attention(*x[:3], SPECS[spec], causal=True, window=9, gain=x[3])  # noqa: E731
    got = with_gradients(call, (q, k, v, gain), do)
    learned = SPECS[spec].replace(head_scale=1.0)

    def dense(q, k, v, gain):
        return lssar.attention(q, k, v, learned, window=9, head_scale=gain, impl="reference")

    exact = with_gradients(dense, tuple(x.double() for x in (q, k, v, gain)), do.double())
    for name, x, r in zip(("o", "dq", "dk", "dv", "dgain"), got, exact):
        bound = 5e-4 if name == "dgain" else 2e-5  # a sum over rows of both signs
        assert rms(x - r) <= bound * rms(r), name


def test_gains_that_are_not_contiguous():
    q, k, v, do = tensors(Hq=3, Lq=20, D=16)
    for gain in (torch.tensor([0.5, 9.0, 1.7, 9.0, -1.2, 9.0], device=DEVICE)[::2], q.new_tensor([1.7]).expand(3)):
        call = lambda *x: fused.window_attention(*x, SPECS["lssar"], causal=True, window=9, gain=gain)  # noqa: B023, E731
        got = with_gradients(call, (q, k, v), do)
        gain = gain.contiguous()
        assert all(torch.equal(a, b) for a, b in zip(got, with_gradients(call, (q, k, v), do)))


def test_a_power_that_changes():
    """A 0-dim tensor in the place of the spec's p, whole or not."""
    q, k, v, do = tensors(Lq=40)
    for p in (1.0, 3.0, 7.5):
        call = lambda *x: fused.window_attention(  # noqa: E731
            *x,
            SPECS["lssar"],
            causal=True,
            window=9,
            p=torch.tensor(p),  # noqa: B023
        )
        expected = run(q, k, v, do, lssar.spec("lssar", p=p), window=9)
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(call, (q, k, v), do), expected))


@pytest.mark.parametrize("spec", ["softmax", "lssar"])
def test_attention_dispatches_here(spec, monkeypatch):
    q, k, v, _ = tensors(Lq=40)
    called = []
    monkeypatch.setattr(fused, "window_attention", lambda *a, **b: called.append(b["window"]))
    lssar.attention(q, k, v, spec, window=9, impl="fused")
    assert called == [9]


@pytest.mark.parametrize("spec", ["cosine softmax", "lssar"])
def test_operators_are_what_pytorch_expects(spec):
    from lssar.ops.fused.window_op import forward_op

    q, k, v, _ = (x.requires_grad_() for x in tensors(Lq=20, D=16))
    power = torch.tensor(3.0) if spec == "lssar" else None
    torch.library.opcheck(forward_op, (q, k, v, None, power, SPECS[spec].literal, True, None, None, 9))


def test_second_derivative_is_refused():
    q, k, v, _ = tensors(Lq=5)
    q.requires_grad_()
    o = fused.window_attention(q, k, v, SPECS["softmax"], causal=True, window=3)
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("spec", ["softmax", "lssar"])
def test_tiles_of_64_keys(spec, monkeypatch):
    """dk and dv are summed the other way round with fewer keys, which is what the interpreter has elsewhere."""
    monkeypatch.setattr(tiles, "INTERPRETED", tiles.Tile(32, 64, 1, 1))
    compare(*tensors(Lq=70, D=16), SPECS[spec], window=20)


def test_batches_beyond_the_grid(monkeypatch):
    q, k, v, _ = tensors(B=3, Lq=10, D=16)
    lengths = torch.tensor([10, 4, 0], device=DEVICE)
    view = {"causal": True, "window": 5, "key_lengths": lengths}
    expected = fused.window_attention(q, k, v, SPECS["softmax"], **view)
    monkeypatch.setattr(fused, "LARGEST_BATCH", 2)
    assert torch.equal(fused.window_attention(q, k, v, SPECS["softmax"], **view), expected)


def test_heads_beyond_the_grid(monkeypatch):
    q, k, v, _ = tensors(Hq=6, Hkv=3, Lq=10, D=16)
    gain = torch.arange(6.0, device=DEVICE) - 2
    launched = []

    def record(kernel, grid, *given):
        launched.append(grid)
        start_kernel(kernel, grid, *given)

    views = {"key_lengths": [7]}, {"cu_seqlens": [0, 3, 10]}
    views = [{name: torch.tensor(x, device=DEVICE) for name, x in view.items()} for view in views]
    call = lambda view: fused.window_attention(q, k, v, SPECS["lssar"], causal=True, window=5, gain=gain, **view)  # noqa: E731
    expected = [call(view) for view in views]
    monkeypatch.setattr(fused, "LARGEST_BATCH", 4)
    monkeypatch.setattr(window_op, "start_kernel", record)
    assert all(torch.equal(call(view), o) for view, o in zip(views, expected))
    assert launched and all(heads <= 4 for _, heads, _ in launched)


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)])
def test_nothing_to_see(shape):
    B, H, Lk = shape
    q, k, v = (torch.zeros(B, H, L, 16, device=DEVICE) for L in (5, Lk, Lk))
    for spec in ("softmax", "lssar"):
        assert not fused.window_attention(q, k, v, SPECS[spec], causal=True, window=3).any()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssa", "lssar"])
@pytest.mark.parametrize("D", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES.get)
def test_gpu_grid(dtype, D, spec):
    for L, window in ((63, 7), (333, 128), (1111, 300)):
        compare(*tensors(B=2, Hq=4, Hkv=2, Lq=L, D=D, dtype=dtype), SPECS[spec], f"{L}, {window}", window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssa", "lssar"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES.get)
def test_gpu_values_that_are_not_finite(dtype, D, spec):
    for which in ("q", "k", "v", "dO"):
        for bad, at in ((torch.nan, 150), (torch.inf, 191), (-torch.inf, 0)):
            check_not_finite(spec, dtype, which, bad, at, L=333, D=D, window=128)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssa", "lssar", "lssar p=2.5"])
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_gluon(D, spec):
    """Also many times over, as a tile that is read too early shows in few blocks, and not always."""
    views = [{"window": 128}, {"window": 500}]
    if spec == "lssar":
        views.append({"window": 50, "cu_seqlens": torch.tensor([0, 3, 140, 141, 640], device=DEVICE)})
    for view in views:
        inputs = tensors(B=2 - ("cu_seqlens" in view), Hq=4, Hkv=2, Lq=640, D=D, dtype=torch.bfloat16)
        compare(*inputs, SPECS[spec], f"{view}", **view)
    inputs = tensors(B=4, Hq=12, Hkv=6, Lq=2048, D=D, dtype=torch.bfloat16)
    first = run(*inputs, SPECS[spec], window=128)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(run(*inputs, SPECS[spec], window=128), first))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_gluon_of_values_that_are_not_finite(D, spec):
    for which in ("q", "k", "v", "dO"):
        for bad, at in ((torch.nan, 150), (-torch.inf, 0)):
            check_not_finite(spec, torch.bfloat16, which, bad, at, L=320, D=D, window=128)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_same_bits_every_run(D, spec):
    inputs = tensors(B=2, Hq=4, Hkv=2, Lq=777, D=D, dtype=torch.bfloat16)
    runs = [run(*inputs, SPECS[spec], window=128) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(other, runs[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["cosine_softmax", "lssar"])
def test_gpu_compile_and_cuda_graph(spec):
    q, k, v, do = tensors(B=1, Hq=4, Hkv=4, Lq=256, D=64, dtype=torch.bfloat16)
    call = lambda *x: lssar.attention(*x, spec, window=100)  # noqa: E731
    want = with_gradients(call, (q, k, v), do)
    got = with_gradients(torch.compile(call, fullgraph=True), (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, k, v)
    graph.replay()
    assert torch.equal(o, want[0])
