"""The strips by torch.compile: on a GPU every mechanism, without one the same code through the compiler for the CPU."""

import shutil
import threading
import warnings

import pytest
import torch
import torch._inductor.config

import lssar
from lssar import switches
from lssar.ops import compiled_strips, native, tiled
from tests.helpers import ALL_SPECS, DEVICE, assert_within_twice_eager, eager, qkv, views, with_gradients

if not torch.cuda.is_available() and not shutil.which("g++"):
    pytest.skip("torch.compile wants a C++ compiler on a CPU", allow_module_level=True)

IN_CI = {  # the two with the most sweeps
    "softmax, p = 3": lssar.spec("softmax").reweighted(3),
    "softmax_recentred_l1": lssar.spec("softmax_recentred_l1"),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Every call through the compiler, in strips so small that a short test crosses many of their borders."""
    monkeypatch.setattr(compiled_strips, "DEVICES", (DEVICE,))
    monkeypatch.setattr(compiled_strips, "LARGE", 0)
    monkeypatch.setattr(compiled_strips, "_broken", False)
    monkeypatch.setattr(native, "supports", lambda *_: False)
    monkeypatch.setattr(tiled, "COMPILED_STRIP", 2**12)
    monkeypatch.setattr(tiled, "MAX_ROWS", 16)
    # Scalar code on a CPU: what Inductor makes for AVX2 (PyTorch 2.13) gives wrong sums, and this tests our graph only.
    scalar = torch._inductor.config.patch({"cpp.simdlen": 1})
    with scalar, warnings.catch_warnings():
        warnings.simplefilter("error")  # if the compiler fails, calls continue without it, with a warning
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="TensorFloat32")  # the compiler's advice, once a process
        yield


def kinds_of_calls(monkeypatch):
    """Names of the compiled functions that are called from here on."""
    called = []
    run = compiled_strips.run
    monkeypatch.setattr(compiled_strips, "run", lambda kind, *rest: called.append(kind) or run(kind, *rest))
    return called


@pytest.mark.parametrize("spec", IN_CI.values(), ids=IN_CI)
def test_equals_reference_in_float64(spec, monkeypatch):
    called = kinds_of_calls(monkeypatch)
    for length in (19, 70):
        inputs = qkv(B=1, Lq=length, Lk=length, Dv=5)
        do = torch.randn(1, 4, length, 5, dtype=torch.float64)
        for name, options in views(1, 4, length).items():
            exact = with_gradients(lambda *x: lssar.attention(*x, spec, impl="reference", **options), inputs, do)  # noqa: B023
            ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled", **options), inputs, do)  # noqa: B023
            for a, b in zip(ours, exact):
                atol = 1e-10 * float(b.abs().max())
                torch.testing.assert_close(a, b, rtol=1e-10, atol=atol, msg=lambda m: f"{name}, {length}: {m}")  # noqa: B023
    assert {"output", "gradients"} == set(called)


@pytest.mark.skipif(
    DEVICE == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="scalar code cannot be asked for in another thread, and Inductor's for AVX2 gives wrong sums",
)
def test_within_a_compiled_model_and_a_thread_of_its_own(monkeypatch):
    """What a training step on a GPU does: the operator stands in a compiled graph, and its backward runs elsewhere."""
    called = kinds_of_calls(monkeypatch)
    q, k, v = qkv(dtype=torch.float32)
    do = torch.randn(2, 4, 19, 6)
    plain = with_gradients(lambda *x: lssar.attention(*x, "sigmoid_n", impl="reference"), (q, k, v), do)
    outer = torch.compile(lambda *x: lssar.attention(*x, "sigmoid_n", impl="tiled") * 2, fullgraph=True)
    got = []
    thread = threading.Thread(target=lambda: got.extend(with_gradients(lambda *x: outer(*x) / 2, (q, k, v), do)))
    thread.start()
    thread.join()
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert {"output", "gradients"} == set(called)


def test_runs_without_a_compiler(monkeypatch):
    def broken(spec):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(compiled_strips, "_functions", broken)
    q, k, v = qkv()
    with pytest.warns(UserWarning, match=r"failed, so attention runs in slower PyTorch code \(no compiler here\)"):
        o = lssar.attention(q, k, v, "sigmoid_n", impl="tiled")
    torch.testing.assert_close(o, lssar.attention(q, k, v, "sigmoid_n", impl="reference"))
    lssar.attention(q, k, v, "sigmoid_n", impl="tiled").sum().backward()  # and does not ask again


def test_only_where_it_pays(monkeypatch):
    called = kinds_of_calls(monkeypatch)
    q, k, v = qkv(grad=False)
    monkeypatch.setattr(compiled_strips, "LARGE", q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] + 1)
    lssar.attention(q, k, v, "sigmoid_n", impl="tiled")
    monkeypatch.setattr(compiled_strips, "LARGE", 0)
    monkeypatch.setattr(switches, "COMPILE", False)
    lssar.attention(q, k, v, "sigmoid_n", impl="tiled")
    monkeypatch.setattr(switches, "COMPILE", True)
    lssar.attention(q, k, v, "sigmoid_n", impl="tiled", mask=torch.ones(19, 19, dtype=torch.bool))
    assert not called
    lssar.attention(q, k, v, "sigmoid_n", impl="tiled", return_weights=True)
    assert set(called) == {"output"}  # the weights themselves are for looking at, and come without


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ALL_SPECS.values(), ids=ALL_SPECS)
def test_gpu_error_is_bounded_by_what_eager_loses(spec, monkeypatch):
    monkeypatch.setattr(tiled, "COMPILED_STRIP", 2**18)
    monkeypatch.setattr(tiled, "MAX_ROWS", 256)
    if spec.head_scale:
        spec = spec.replace(head_scale=None)
    for dtype, eps in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.float32, 2.0**-24)):
        inputs = tuple(x.to("cuda") for x in qkv(Lq=333, Lk=333, D=64, dtype=dtype, grad=False))
        do = torch.randn(2, 4, 333, 64).to("cuda", dtype)
        ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled"), inputs, do)
        exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, causal=True), inputs, do)
        low = with_gradients(lambda *x: eager(*x, spec, dtype, causal=True), inputs, do)  # noqa: B023
        assert_within_twice_eager(ours, [low], exact, eps, str(dtype))
