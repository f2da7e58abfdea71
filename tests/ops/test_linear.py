"""Linear layers of a few rows with what is around them in one kernel, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from lssar.layouts import parse_layout
from lssar.model import GPT, model_config
from lssar.nn import fused_linear
from lssar.nn.decoding import DecodeStep
from lssar.nn.norms import LayerNorm, RMSNorm
from lssar.ops import fused
from tests.helpers import pairwise, seeded

pytest.importorskip("triton")

no_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU runs these on it")
DEVICES = [pytest.param("cpu", marks=no_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
"""Relative error in the root mean square; measured are 1.6e-7, 3.3e-4 and 2.7e-3 in the interpreter."""
NORMS = ("none", "layer", "layer without bias", "rms")
ACTIVATIONS = ("none", "gelu", "swiglu")


def tensors(rows, K, N, dtype, device, norm="none", activation="none", bias=True, residual=True, size=1.0):
    """Arguments of `small_linear` in the given dtype."""
    generator, gated = seeded(0), 2 if activation == "swiglu" else 1
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    given = {"x": draw(rows, K) * size, "weight": draw(gated * N, K) / K**0.5}
    given["bias"] = draw(gated * N) if bias else None
    given["residual"] = draw(rows, N) if residual else None
    given["norm_weight"] = None if norm == "none" else draw(K)
    given["norm_bias"] = draw(K) if norm == "layer" else None
    return {name: t if t is None else t.to(dtype).to(device) for name, t in given.items()}


def modules(given, norm):
    """The arguments as `fused_linear` takes them: x, a layer, its norm and the residual."""
    N, K = given["weight"].shape
    linear = nn.Linear(K, N, bias=given["bias"] is not None)
    before = {"none": None, "rms": RMSNorm(K, eps=1e-5)}.get(norm, LayerNorm(K, bias=norm == "layer"))
    values = {"weight": given["weight"], "bias": given["bias"]}
    linear.load_state_dict({name: t for name, t in values.items() if t is not None}, assign=True)
    if before is not None:
        values = {"weight": given["norm_weight"], "bias": given["norm_bias"]}
        before.load_state_dict({name: t for name, t in values.items() if t is not None}, assign=True)
    return given["x"], linear, before, given["residual"]


def by_pytorch(given, norm, activation):
    x, linear, before, residual = modules(given, norm)
    named = None if activation == "none" else activation
    with torch.no_grad():
        return fused_linear(x, linear, norm=before, activation=named, residual=residual)


def check(given, norm="none", activation="none", **plan):
    from lssar.ops.fused.linear import linear

    with pytest.MonkeyPatch.context() as patch:  # what is not written shows
        patch.setattr(Tensor, "new_empty", lambda x, *shape, **options: x.new_zeros(*shape, **options) / 0)
        found = linear(**given, norm=norm.split()[0], eps=1e-5, activation=activation, ahead=True, **plan)
    exact = by_pytorch({name: t if t is None else t.double() for name, t in given.items()}, norm, activation)
    error = (found.double() - exact).norm() / exact.norm()
    assert error <= BOUNDS[given["x"].dtype], f"{error:.2g}"
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "norm", "activation", "rows", "K", "N", "bias", "residual"),
    pairwise(BOUNDS, NORMS, ACTIVATIONS, (1, 2, 7, 16), (63, 111, 256), (65, 64, 1), (True, False), (True, False)),
    ids=str,
)
def test_against_float64(dtype, norm, activation, rows, K, N, bias, residual, device):
    check(tensors(rows, K, N, dtype, device, norm, activation, bias, residual), norm, activation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_several_chunks_of_columns(rows, norm, activation, device):
    """Statistics are of all of them, and the last chunk is not full."""
    given = tensors(rows, 111, 37, torch.float32, device, norm, activation)
    given["x"] += 5  # means of the chunks are not near zero
    check(given, norm, activation, block_k=32, block_n=16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e12])
def test_large_and_small_inputs(rows, norm, size, device):
    given = tensors(rows, 65, 33, torch.bfloat16, device, norm, "none", bias=False, residual=False, size=size)
    found = check(given, norm) if norm != "layer without bias" or size > 1e-30 else None  # all that is left is eps
    assert found is None or found.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_squares_beyond_the_range_are_as_in_pytorch(device):
    """The variance is infinite, so that rows become zero."""
    for norm in ("layer", "rms"):
        given = tensors(2, 65, 33, torch.bfloat16, device, norm, size=1e30)
        found = fused.small_linear(**given, norm=norm)
        torch.testing.assert_close(found, by_pytorch(given, norm, "none"), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activations_far_from_zero(activation, device):
    gate = torch.tensor([[-1e20, -1e4, -200.0, -30.0, 0.0, 30.0, 200.0, 1e4, 1e20]], device=device)
    weight = torch.cat([torch.eye(9), torch.eye(9)] if activation == "swiglu" else [torch.eye(9)]).to(device)
    found = fused.small_linear(gate, weight, activation=activation)
    expected = F.silu(gate) * gate if activation == "swiglu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_rows_of_zeros(device):
    given = tensors(3, 20, 12, torch.float32, device, "layer", residual=False)
    assert fused.small_linear(given["x"][:0], given["weight"]).shape == (0, 12)
    given["x"].zero_()
    found = fused.small_linear(**given, norm="layer")
    torch.testing.assert_close(found, by_pytorch(given, "layer", "none"))
    assert not fused.small_linear(given["x"], given["weight"]).any()


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_and_shapes_of_inputs(device):
    """Leading dimensions stay, and inputs need not be contiguous."""
    given = tensors(4, 24, 10, torch.float32, device)
    expected = fused.small_linear(**given).view(2, 2, 10)
    x = given["x"].view(2, 2, 24).transpose(0, 1).contiguous().transpose(0, 1)
    weight = given["weight"].T.contiguous().T
    found = fused.small_linear(x, weight, given["bias"], residual=given["residual"].view(2, 2, 10))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_there_is_no_gradient(device):
    x, weight = torch.randn(1, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match="no gradient"):
        fused.small_linear(x, weight).sum().backward()


@pytest.fixture
def launched(monkeypatch):
    """Arguments of each launch; in the interpreter, decode steps take the kernel as they do on a GPU."""
    calls, kernel = [], fused.small_linear
    few = lambda x: 0 < x.numel() <= fused.FEW_ROWS * x.shape[-1]  # noqa: E731
    if not torch.cuda.is_available():
        monkeypatch.setattr(fused, "has_small_linear", few)

    def run(*arguments, **options):
        calls.append((arguments, options))
        return kernel(*arguments, **options)

    monkeypatch.setattr(fused, "small_linear", run)
    return calls


def test_other_calls_take_the_modules(launched):
    """With a hook, a forward of its own, a class or a dtype that is not known, with autocast, with a gradient, with a
    residual that broadcasts, and outside decode steps."""
    x, linear, norm, residual = modules(tensors(2, 8, 8, torch.float32, "cpu", "layer"), "layer")
    if torch.cuda.is_available():
        x, linear, norm, residual = x.cuda(), linear.cuda(), norm.cuda(), residual.cuda()
    usual = {"norm": norm, "residual": residual, "step": True}
    run = lambda layer, **more: fused_linear(x, layer, **{**usual, **more})  # noqa: E731
    other = type("Other", (nn.Linear,), {})(8, 8).to(x.device)
    with torch.no_grad():
        expected = run(linear, step=False)
        run(other)
        fused_linear(x.expand(20, 2, 8), linear, step=True)
        fused_linear(x.double(), nn.Linear(8, 8).double().to(x.device), norm=LayerNorm(8).to(x), step=True)
        with torch.autocast(x.device.type, torch.bfloat16):
            run(linear)
        run(linear, residual=residual[:1])
        run(linear, residual=residual[:, :1])
        run(linear, norm=type("PlusOne", (RMSNorm,), {})(8).to(x.device))
        shifted = LayerNorm(8).to(x.device)
        register_parametrization(shifted, "weight", nn.Identity())
        run(linear, norm=shifted)
        replaced = LayerNorm(8).to(x.device)
        replaced.forward = lambda x: x
        run(linear, norm=replaced)
        assert not launched
        for hook in (linear.register_forward_hook, register_module_forward_hook):
            handle = hook(lambda *_: launched.append("hook"))
            run(linear)
            handle.remove()
    run(linear)
    assert set(launched) == {"hook"}
    launched.clear()
    with torch.no_grad():
        torch.testing.assert_close(run(linear), expected)
    assert len(launched) == 1


def test_wrong_arguments_are_refused():
    given = tensors(3, 8, 6, torch.float32, "cpu", "layer")
    wrong = {
        "at most 16 rows": {"x": torch.zeros(17, 8), "residual": None},
        "weight must be": {"weight": torch.zeros(6, 7)},
        "bias must be": {"bias": torch.zeros(5)},
        "residual must be": {"residual": torch.zeros(1, 6)},
        "norm_weight must be": {"norm_weight": torch.zeros(1)},
        "do not go together": {"norm_weight": None},
        "unknown norm 'batch'": {"norm": "batch"},
        "or activation 'relu'": {"activation": "relu"},
        "N even": {"activation": "swiglu", "weight": torch.zeros(5, 8)},
        "the dtype and the device of x": {"weight": given["weight"].double()},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            fused.small_linear(**{**given, "norm": "layer", **changes})
    with pytest.raises(ValueError, match="activation must be"):
        fused_linear(given["x"], nn.Linear(8, 6), activation="relu")


@pytest.mark.parametrize("of", ["attention", "attention.project"])
def test_hooks_of_attention_see_in_a_step_what_they_see_elsewhere(of):
    config = model_config("tiny", vocab_size=61, layers=2, pattern=parse_layout("softmax@3 lssar"))
    model = GPT(config).eval()
    ids = torch.randint(61, (2, 7), generator=seeded(0))
    seen = []
    model.blocks[1].get_submodule(of).register_forward_hook(lambda m, given, out: seen.append((given[0], out)))
    with torch.no_grad():
        full = model(ids)
        (given, out), cache = seen.pop(), model.new_cache(7)
        model.next_logits(ids[:, :6], cache)
        seen.clear()
        last = DecodeStep(lambda x: model.next_logits(x, cache), cache.layers, graph=False)(ids[:, 6:])
    torch.testing.assert_close(last, full[:, -1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(seen[0][0], given[:, -1:], atol=1e-5, rtol=1e-4)
    if of == "attention":
        torch.testing.assert_close(seen[0][1], out[:, -1:], atol=1e-5, rtol=1e-4)


SHAPES = {
    "gpt-2": {},
    "gpt-2 without biases": {"bias": False},
    "llama": {"bias": False, "norm": "rms", "mlp": "swiglu", "key_heads": 2},
    "tpa": {"projection": "tpa"},
}


BATCHES = [*((shape, 1) for shape in SHAPES), ("gpt-2", 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "batch"), BATCHES)
def test_a_decode_step_by_the_kernel(shape, batch, launched, device):
    """Logits of steps are those of a full forward, and each block has four launches for its linear layers."""
    config = model_config("tiny", vocab_size=61, layers=2, pattern=parse_layout("softmax@3 lssar"), **SHAPES[shape])
    model = GPT(config).to(device).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(61, (batch, 7), device=device)
    full = model(ids)
    cache = model.new_cache(7)
    model.next_logits(ids[:, :4], cache)
    assert not launched
    step = DecodeStep(lambda x: model.next_logits(x, cache), cache.layers)
    for i in range(4, 7):
        torch.testing.assert_close(step(ids[:, i : i + 1]), full[:, i], atol=1e-4, rtol=1e-4)
    steps = 3  # of which a GPU makes two to warm up and one to capture
    assert len(launched) == steps * (4 * config.layers + 1)
    assert all(options["ahead"] for _, options in launched)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_larger_step_with_and_without_the_kernel(dtype, batch, monkeypatch):
    """Replayed from a graph, in which kernels overlap."""
    config = model_config("124m", vocab_size=997, layers=4, pattern=parse_layout("softmax@64*3 cosine_softmax/none"))
    torch.manual_seed(0)
    model = GPT(config).cuda().eval().to(dtype)
    ids = torch.randint(997, (batch, 300), device="cuda")
    results = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(fused, "has_small_linear", lambda x: False)
        cache = model.new_cache(300)
        with torch.no_grad():
            model.next_logits(ids[:, :200], cache)
        step = DecodeStep(lambda x, cache=cache: model.next_logits(x, cache), cache.layers)
        results.append(torch.stack([step(ids[:, i : i + 1]).clone() for i in range(200, 300)]))
    found, expected = (x.double() for x in results)
    assert (found - expected).norm() / expected.norm() < (3e-2 if dtype == torch.bfloat16 else 1e-4)


def test_plans_fill_a_gpu(monkeypatch):
    """Two programs a multiprocessor where the layer has that many rows; tiles within their bounds."""
    from lssar.ops.fused import linear

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(linear, "can_overlap", lambda _: True)
    x = SimpleNamespace(is_cuda=True, device="cuda", element_size=lambda: 2)
    blocks = {}
    for K, N in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50304), (8192, 2048)):
        x.shape = (1, K)
        how = linear.plan_for(x, N, False, True)
        assert how.ahead and N / how.block_n >= 264
        assert how.block_n * how.block_k * 2 <= linear.TILE_BYTES
        blocks[K, N] = how.block_n
    assert list(blocks.values()) == [8, 2, 8, 2, 16, 4]
