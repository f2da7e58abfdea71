"""The strips against the reference: values and gradients, every spec, every way to say what a row sees."""

import pytest
import torch

import lssar
from lssar.ops import tiled
from tests.helpers import (
    ALL_SPECS,
    LEARNED,
    assert_within_twice_eager,
    by_field,
    eager,
    pairwise,
    qkv,
    views,
    with_gradients,
)

VIEWS = list(views(1, 4, 19))
HALF_EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def spec_ids(specs):
    return pytest.mark.parametrize("spec", specs.values(), ids=specs)


def cut(monkeypatch, many: bool) -> None:
    """Tiny strips, so that a short test crosses many of their borders."""
    if many:
        monkeypatch.setattr(tiled, "CPU_STRIP", 64)
        monkeypatch.setattr(tiled, "MAX_ROWS", 8)


@pytest.mark.parametrize(("name", "view", "many"), by_field(ALL_SPECS | LEARNED, VIEWS, (False, True)))
def test_equals_reference_in_float64(name, view, many, monkeypatch):
    cut(monkeypatch, many)
    spec = (ALL_SPECS | LEARNED)[name]
    inputs = qkv(B=1, Lq=19, Lk=19, Dv=5)
    options = views(1, 4, 19)[view]
    do = torch.randn(1, 4, 19, 5, dtype=torch.float64)
    exact = with_gradients(lambda *x: lssar.attention(*x, spec, impl="reference", **options), inputs, do)
    ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled", **options), inputs, do)
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.abs().max()))


@pytest.mark.parametrize(
    ("name", "view", "impl"),
    by_field(ALL_SPECS | LEARNED, ["causal", "full", "mask", "pack"], ["reference", "tiled"]),
)
def test_gradcheck(name, view, impl):
    """GQA throughout: four query heads on two key heads."""
    spec = (ALL_SPECS | LEARNED)[name]
    inputs = qkv(B=1, Lq=9, Lk=9, D=4)
    options = views(1, 4, 9)[view]
    assert torch.autograd.gradcheck(
        lambda *x: lssar.attention(*x, spec, impl=impl, **options), inputs, fast_mode=True, atol=1e-6, rtol=1e-3
    )


@pytest.mark.slow
@spec_ids(ALL_SPECS)
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_gradcheck_entry_by_entry(spec, impl):
    inputs = qkv(B=1, Lq=7, Lk=7, D=3)
    assert torch.autograd.gradcheck(lambda *x: lssar.attention(*x, spec, impl=impl), inputs)


@pytest.mark.parametrize(("name", "dtype", "view"), pairwise(ALL_SPECS, HALF_EPS, ["causal", "mask"]), ids=str)
def test_error_is_bounded_by_what_eager_loses(name, dtype, view):
    B, L, spec = 2, 111, ALL_SPECS[name]
    inputs = qkv(B=B, Lq=L, Lk=L, D=32, dtype=dtype, grad=False)
    options = views(B, 4, L)[view]
    do = torch.randn(B, 4, L, 32).to(dtype)
    if spec.head_scale:  # the scale is part of the input here; the reference function takes q already scaled
        spec = spec.replace(head_scale=None)
    ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled", **options), inputs, do)
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, **options), inputs, do)
    low = with_gradients(lambda *x: eager(*x, spec, dtype, **options), inputs, do)
    assert ours[0].dtype == dtype
    assert_within_twice_eager(ours, [low], exact, HALF_EPS[dtype])


@pytest.mark.parametrize(
    ("length", "name", "many"), pairwise([1, 2, 3, 4, 5, 63, 111, 257], ["lssar", "lssa", "softmax"], (False, True))
)
def test_odd_lengths(length, name, many, monkeypatch):
    cut(monkeypatch, many)
    inputs = qkv(B=2, Lq=length, Lk=length)
    do = torch.randn(2, 4, length, 6, dtype=torch.float64)
    exact = with_gradients(lambda *x: lssar.attention(*x, name, impl="reference"), inputs, do)
    ours = with_gradients(lambda *x: lssar.attention(*x, name, impl="tiled"), inputs, do)
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (3, 9), (9, 3), (5, 0), (0, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_of_different_length(queries, keys, causal):
    inputs = qkv(Lq=queries, Lk=keys)
    if causal and queries > keys:
        with pytest.raises(ValueError, match="For cross-attention give causal=False"):
            lssar.attention(*inputs)
        return
    do = torch.randn(2, 4, queries, 6, dtype=torch.float64)
    exact = with_gradients(lambda *x: lssar.attention(*x, causal=causal, impl="reference"), inputs, do)
    ours = with_gradients(lambda *x: lssar.attention(*x, causal=causal, impl="tiled"), inputs, do)
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@spec_ids(ALL_SPECS)
def test_returned_weights(spec):
    q, k, v = qkv()
    o, w = lssar.attention(q, k, v, spec, impl="tiled", return_weights=True)
    reference = lssar.attention(q, k, v, spec, impl="reference", return_weights=True)[1]
    torch.testing.assert_close(w, reference.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(w @ v.repeat_interleave(2, 1), o, rtol=1e-10, atol=1e-10)
    assert not w.requires_grad


def test_a_row_that_sees_nothing_is_zero_and_passes_no_gradient():
    mask = torch.ones(19, 19, dtype=torch.bool)
    mask[4] = False
    for impl in ("reference", "tiled"):
        for name in lssar.specs():
            q, k, v = qkv()
            o = lssar.attention(q, k, v, name, mask=mask, impl=impl)
            assert (o[:, :, 4] == 0).all()
            (dq,) = torch.autograd.grad(o[:, :, 4].sum(), q)
            assert (dq == 0).all(), (impl, name)


def test_operator_is_registered_properly():
    q, k, v = qkv(Lq=5, Lk=5)
    bounds = torch.zeros(1, 5, dtype=torch.int64), torch.arange(1, 6)[None]
    torch.library.opcheck(tiled.tiled_forward, (q, k, v, *bounds, None, None, None, None, lssar.spec("lssar").literal))


@pytest.mark.parametrize(
    ("name", "dtype", "masked", "many"),
    pairwise(["lssar", "softmax", "cosine_softmax"], [torch.float32, torch.float64], (False, True), (False, True)),
)
def test_strided_inputs(name, dtype, masked, many, monkeypatch):
    """(B, L, H, D) transposed, as a model's projections give it: values, and what reaches each input's gradient."""
    cut(monkeypatch, many)
    inputs = tuple(torch.randn(3, 7, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.rand(7, 7) > 0.3 if masked else None  # with a mask the native kernel is not used
    do = torch.randn(3, 4, 7, 6, dtype=torch.float64)

    def run(impl):
        return lambda *x: lssar.attention(*(y.transpose(1, 2) for y in x), name, mask=mask, impl=impl)

    exact = with_gradients(run("reference"), inputs, do)
    got = with_gradients(run("tiled"), tuple(x.to(dtype) for x in inputs), do)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    for a, b in zip(got, exact):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


def test_operator_is_registered_properly_for_strided_inputs():
    q, k, v = (torch.randn(2, 5, 4, 6).transpose(1, 2).requires_grad_() for _ in range(3))
    bounds = torch.zeros(1, 5, dtype=torch.int64), torch.arange(1, 6)[None]
    torch.library.opcheck(tiled.tiled_forward, (q, k, v, *bounds, None, None, None, None, lssar.spec("lssar").literal))


def test_memory_is_linear_in_length():
    """Scratch follows the strip budget, not the length squared."""
    q, k, v = qkv(B=1, Hq=1, Hkv=1, Lq=4096, Lk=4096, D=4, dtype=torch.float32, grad=False)
    start, stop = torch.zeros(1, 4096, dtype=torch.int64), torch.arange(1, 4097)[None]
    call = tiled._Call(q, k, v, start, stop, None, None, None, lssar.spec("lssar"))
    problem = tiled._Problem(call, wide=False)
    tiled._forward(problem)
    tiled._backward(problem, torch.ones_like(q))
    assert sum(x.numel() for x in problem.scratch.memory.values()) <= 6 * tiled.CPU_STRIP < 4096**2 / 4


@pytest.mark.gpu
@spec_ids(ALL_SPECS)
@pytest.mark.parametrize("view", VIEWS)
def test_on_a_gpu(spec, view):
    """The same strips on CUDA: float64 against the reference on the CPU."""
    inputs = qkv(B=1, Lq=67, Lk=67, Dv=5)
    options = views(1, 4, 67)[view]
    do = torch.randn(1, 4, 67, 5, dtype=torch.float64)
    exact = with_gradients(lambda *x: lssar.attention(*x, spec, impl="reference", **options), inputs, do)
    there = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    moved = tuple(x.detach().cuda() for x in inputs)
    ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled", **there), moved, do.cuda())
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-10, atol=1e-10 * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_EPS, ids=str)
@pytest.mark.parametrize("name", lssar.specs())
def test_what_auto_picks_on_a_gpu_is_right(name, dtype):
    spec = lssar.spec(name, head_scale=None)
    inputs = tuple(x.cuda() for x in qkv(B=2, Lq=111, Lk=111, D=32, dtype=dtype, grad=False))
    do = torch.randn(2, 4, 111, 32, device="cuda").to(dtype)
    ours = with_gradients(lambda *x: lssar.attention(*x, spec), inputs, do)
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64), inputs, do)
    low = with_gradients(lambda *x: eager(*x, spec, dtype), inputs, do)
    assert_within_twice_eager(ours, [low], exact, HALF_EPS[dtype])
