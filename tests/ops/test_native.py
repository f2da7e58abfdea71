"""The strips in C: as exact as eager float32, on every instruction set, and with poisoned memory."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

import lssar
from lssar.ops import native, tiled
from lssar.visibility import visibility
from tests.helpers import assert_within_twice_eager, eager, eager_runs, qkv, with_gradients

REQUIRED = os.environ.get("LSSAR_REQUIRE_NATIVE") == "1"
EPS = 2.0**-24
SPECS = {
    "lssa": lssar.spec("lssa"),
    **{f"lssar p={p}": lssar.spec("lssar", p=p) for p in (1, 1.5, 2, 3, 15, 64)},
    "softmax": lssar.spec("softmax"),
    "cosine_softmax": lssar.spec("cosine_softmax"),
    "softmax p=3": lssar.spec("softmax").reweighted(3),
    "l1_softplus": lssar.spec("l1_softplus"),
}
LENGTHS = (1, 2, 3, 4, 5, 63, 111, 257)
HEAD_SIZES = (1, 3, 16, 33, 64, 80, 128)
VIEWS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 40},
    "full, window": {"window": 40, "causal": False},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 90, 90, 257])},
    "padding": {"key_lengths": torch.tensor([111])},
    "nothing to see": {"key_lengths": torch.tensor([0])},
}
ISAS = [isa for isa in ("avx512", "avx2", "baseline") if native._library and native._library.lssar_isa(isa.encode())]


def test_is_built_where_it_must_be():
    """CI has a compiler, so there a missing build is a broken one."""
    if not REQUIRED and native.isa() is None:
        pytest.skip("not built (no compiler, or LSSAR_NATIVE=0); LSSAR_REQUIRE_NATIVE=1 makes this a failure")
    assert native.isa() is not None


needs_native = pytest.mark.skipif(native.isa() is None, reason="the compiled strips are not built, or LSSAR_NATIVE=0")
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture
def strips(monkeypatch):
    """Call to continue with the PyTorch strips."""
    return lambda: monkeypatch.setattr(native, "_library", None)


@pytest.fixture(autouse=True)
def threads():
    """One thread unless a test asks for more: these are many small calls, often beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attend(spec, **view):
    return lambda *x: lssar.attention(*x, spec, impl="tiled", **view)


def check(inputs, spec, note="", **view):
    assert native.supports(inputs[0], spec, None)
    check_tiled(inputs, spec, note, **view)


def check_tiled(inputs, spec, note="", **view):
    do = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3])
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, **view), inputs, do)
    floor = tuple(16 * (spec.p or 1) * EPS * float(r.abs().max()) * (r.numel() < 1000) for r in exact)
    got = with_gradients(attend(spec, **view), inputs, do)
    runs = eager_runs(inputs, do, spec, torch.float32, exact, **view)
    assert_within_twice_eager(got, runs, exact, EPS, note, floor)


def float32(**shape):
    return qkv(dtype=torch.float32, grad=False, **shape)


@needs_native
@each_spec
def test_lengths(spec):
    for L in LENGTHS:
        for causal in (True, False):
            check(float32(B=2, Hq=2, Hkv=2, Lq=L, Lk=L, D=16), spec, f"L={L} causal={causal}", causal=causal)


@needs_native
@each_spec
def test_head_sizes(spec):
    for D in HEAD_SIZES:
        check(float32(B=1, Hq=2, Hkv=1, Lq=111, Lk=111, D=D, Dv=20 if D == 33 else D), spec, f"D={D}")


@needs_native
@each_spec
def test_what_rows_see(spec):
    for name, view in VIEWS.items():
        check(float32(B=1, Hq=4, Hkv=2, Lq=257, Lk=257, D=16, Dv=24), spec, name, **view)
    for Lq, Lk in ((50, 111), (111, 50), (1, 300), (3, 700)):
        inputs = float32(B=2, Hq=4, Hkv=2, Lq=Lq, Lk=Lk, D=16, Dv=24)
        check(inputs, spec, f"{Lq} queries, {Lk} keys", causal=Lq < Lk)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["lssa", "lssar p=1.5", "lssar p=15", "softmax", "softmax p=3"])
def test_every_instruction_set(isa, name, monkeypatch):
    monkeypatch.setattr(native, "_asked_isa", isa.encode())
    assert native.isa() == isa
    for Lq, D in ((257, 33), (700, 64), (2, 20)):
        check(float32(B=1, Hq=2, Hkv=1, Lq=Lq, Lk=700, D=D, Dv=80), SPECS[name], f"D={D}")


@each_spec
def test_the_pytorch_strips_are_as_exact(spec, strips):
    inputs = float32(B=2, Hq=4, Hkv=2, Lq=150, Lk=400, D=32)
    strips()
    assert not native.supports(inputs[0], spec, None)
    check_tiled(inputs, spec)


def rows_of(kind: str, n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight queries and n keys that make rows of an awkward kind."""
    q = torch.randn(8, d)
    k = torch.randn(n, d)
    match kind:
        case "needle":
            k = -q[0] + 0.1 * k
            k[n // 2] = q[0]
        case "equal":
            k = k[:1].expand(n, d)
        case "anti-aligned":
            away = torch.randn(d)
            q, k = 0.1 * q - away, 0.5 * k + away
        case "tiny":
            q, k = q * 1e-30, k * 1e-35
        case "huge":
            q, k = q * 1e30, k * 1e37
    return q[None, None], k[None, None]


@needs_native
@pytest.mark.parametrize("kind", ["needle", "equal", "anti-aligned", "tiny", "huge"])
@pytest.mark.parametrize("p", [1, 15, 64])
def test_awkward_rows(kind, p):
    """Against the float64 reference, with the error in units of what p makes of one rounding of a score."""
    spec = lssar.spec("lssar", p=p)
    for n in (4, 1000, 5000):
        q, k = rows_of(kind, n, 64)
        v, do = torch.randn(1, 1, n, 64), torch.randn(1, 1, 8, 64)
        exact = eager(q, k, v, spec, torch.float64, causal=False)
        got = with_gradients(attend(spec, causal=False), (q, k, v), do)
        for name, x in zip(("o", "dq", "dk", "dv"), got):
            assert x.isfinite().all(), f"{name} of {kind}, n={n}"
        torch.testing.assert_close(got[0].double(), exact, rtol=0, atol=2e-4 * p * float(exact.abs().max()))


@needs_native
def test_far_below_zero():
    """Softplus keeps its relative accuracy where it is tiny, so that such a row still has weights."""
    spec = lssar.spec("l1_softplus")
    q, k = torch.linspace(-0.9, -1.1, 64)[None, None, :, None], torch.linspace(45, 95, 500)[None, None, :, None]
    check((q, k, torch.randn(1, 1, 500, 8)), spec, causal=False)


@needs_native
@each_spec
def test_nan_stays_visible(spec):
    """A NaN comes out as NaN where it is seen, and a row of q concerns no other row."""
    q, k, v = float32(B=1, Hq=1, Hkv=1, Lq=300, Lk=300, D=16)
    see = visibility(300, 300, q.device, causal=True)
    run = lambda *x: native.forward(*x, see.start, see.stop, spec, normalize=True)  # noqa: E731
    q_bad, k_bad, v_bad = q.clone(), k.clone(), v.clone()
    q_bad[0, 0, 100, 3], k_bad[0, 0, 250, 3], v_bad[0, 0, 250, 3] = torch.nan, torch.nan, torch.nan
    bad = run(q_bad, k, v).isnan().any(-1)[0, 0]
    assert bad[100] and bad.sum() == 1
    assert run(q, k_bad, v).isnan().any(-1)[0, 0, 250:].all()
    assert run(q, k, v_bad).isnan().any(-1)[0, 0, 250:].all()
    dq, dk, *_ = native.backward(v, q, k_bad, v, see.start, see.stop, spec, normalize=True)
    assert dq[0, 0, 250:].isnan().any(-1).all() and dk[0, 0, 250].isnan().any()


@needs_native
def test_any_layout_in_memory():
    inputs = float32(B=2, Hq=4, Hkv=2, Lq=70, Lk=70, D=16)
    do = torch.randn(2, 4, 70, 16)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
    expanded = do[..., :1].expand_as(do)
    straight = with_gradients(attend("lssar"), inputs, expanded.contiguous())
    for x, y in zip(with_gradients(attend("lssar"), strided, expanded), straight):
        assert torch.equal(x, y)


@needs_native
@each_spec
def test_nothing_depends_on_what_memory_held(spec):
    """Outputs start as NaN, and working space as large numbers (glibc)."""
    inputs = float32(B=1, Hq=4, Hkv=2, Lq=111, Lk=257, D=20, Dv=33)
    do = torch.randn(1, 4, 111, 33)
    clean = with_gradients(attend(spec, window=60), inputs, do)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        if mallopt:
            mallopt(-6, 0x80)  # M_PERTURB: fills new memory with 0x7f
        dirty = with_gradients(attend(spec, window=60), inputs, do)
    finally:
        torch.use_deterministic_algorithms(False)
        if mallopt:
            mallopt(-6, 0)
    for x, y in zip(dirty, clean):
        assert torch.equal(x, y)


@needs_native
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("torch_threads", [True, False], ids=["threads of PyTorch", "own threads"])
def test_same_bits_every_time(count, torch_threads, threads, monkeypatch):
    """Also where one head is shared out among threads, so that its gradients are sums of parts."""
    if not torch_threads:
        monkeypatch.setattr(native, "_parallel", None)
    inputs = float32(B=1, Hq=1, Hkv=1, Lq=900, Lk=900, D=16)
    do = torch.randn(1, 1, 900, 16)
    threads(count)
    first = with_gradients(attend("lssar"), inputs, do)
    for _ in range(3):
        for x, y in zip(with_gradients(attend("lssar"), inputs, do), first):
            assert torch.equal(x, y)
    check(inputs, lssar.spec("lssar"))


@needs_native
def test_calls_from_several_threads():
    inputs = float32(B=1, Hq=2, Hkv=2, Lq=200, Lk=200, D=16)
    expected = attend("lssar")(*inputs)
    results: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: results.append(attend("lssar")(*inputs))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4 and all(torch.equal(x, expected) for x in results)


@needs_native
def test_half_types_go_through_float32():
    inputs = float32(B=1, Hq=2, Hkv=2, Lq=64, Lk=64, D=16)
    half = tuple(x.bfloat16() for x in inputs)
    expected = attend("lssar")(*(x.float() for x in half)).bfloat16()
    assert torch.equal(attend("lssar")(*half), expected)


def test_what_is_left_to_pytorch():
    """Everything that the kernel does not cover says so."""
    q = torch.randn(1, 1, 4, 4)
    assert not native.supports(q.double(), lssar.spec("lssar"), None)
    assert not native.supports(q, lssar.spec("lssar"), torch.ones(1, 1, 4, 4, dtype=torch.bool))
    for name in ("l1_relu", "sigmoid", "softmax_recentred", "softmax_inverse", "exp"):
        assert not native.supports(q, lssar.spec(name), None)


@needs_native
def test_no_memory_is_an_error(monkeypatch):
    class Full:
        lssar_isa = native._library.lssar_isa  # type: ignore[union-attr]

        def lssar_run(self, *_):
            return native._OUT_OF_MEMORY

    monkeypatch.setattr(native, "_library", Full())
    with pytest.raises(MemoryError):
        see = visibility(4, 4, torch.device("cpu"), causal=False)
        tiled.tiled_attention(*(torch.randn(1, 1, 4, 4) for _ in range(3)), see, lssar.spec("lssar"))


def test_can_be_turned_off():
    code = "from lssar.ops import native; assert native.isa() is None"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "LSSAR_NATIVE": "0"}, check=True)
