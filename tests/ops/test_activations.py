"""The fused kernels for activations over a divisor against float64: in Triton's interpreter, on a GPU in full."""

import math

import pytest
import torch

import lssar
from lssar.ops import fused
from lssar.ops.reference import ACTIVATIONS
from tests.helpers import ALL_SPECS, CUDA, DEVICE, assert_within_twice_eager, eager, eager_runs, qkv, with_gradients

pytest.importorskip("triton")
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SPECS = {  # a learned scale is part of q by then; LSSA has kernels of its own
    name: spec.replace(head_scale=None)
    for name, spec in ALL_SPECS.items()
    if fused.is_activation(spec) and not fused.is_lssa(spec)
}
VIEWS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 7},
    "full window": {"causal": False, "window": 7},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 20, 21, 37])},
    "padding": {"key_lengths": torch.tensor([30])},
}


def named(name):
    """`softmax^3`: re-weighted with p = 3."""
    name, _, p = name.partition("^")
    return lssar.spec(name).reweighted(float(p)) if p else lssar.spec(name)


def cancellation_floor(q, k, v, do, spec):
    """Roundings left in dq and dk of causal l1-normalised rows, where terms cancel that are far larger.

    With z = phi - tau, w = l1(z^p) and g = do.v, the gradient of a score is phi' (t_j - mean t), t = p w / z (g - w.g).
    Where one key has all the weight, g - w.g is the difference of equal numbers, and 1 / z may be large: a small score
    under relu2, or a row whose largest key is hardly above its mean.
    """
    q, k, v, do = (x.double() for x in (q, k, v, do))
    groups, factor, n = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, torch.arange(1, k.shape[2] + 1)[:, None]
    n = n.to(q.device)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if spec.cosine:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        factor = math.log(q.shape[-1]) * n.double().log()
    s = (q @ k.mT * factor).requires_grad_()
    bias = n.double().log() if spec.bias == "-log_n" else 0.0
    a = (s.exp() if spec.activation == "exp" else ACTIVATIONS[spec.activation](s - bias)).tril()
    (slope,) = torch.autograd.grad(a.sum(), s)
    a, p = a.detach(), spec.p or 1
    tau = a.abs().sum(-1, keepdim=True) / n * (n > 3) * (spec.p is not None)
    z = (a - tau).tril().clamp_min(0) if spec.p is not None else a.abs()
    w = (z / z.amax(-1, keepdim=True).clamp_min(1e-300)) ** p
    w = w / w.sum(-1, keepdim=True).clamp_min(1e-300)
    g = do.abs() @ v.abs().mT
    t = p * torch.where(w > 0, w / z, 0.0) * (g + (w * g).sum(-1, keepdim=True))
    ds = 4 * EPS[torch.float32] * slope.abs() * (t + t.sum(-1, keepdim=True) / n) * factor
    return 0.0, float((ds @ k.abs()).max()), float((ds.mT @ q.abs()).max()) * groups, 0.0


def compare(spec, dtype, L=37, D=32, B=1, Hq=4, Hkv=2, note="", **view):
    view = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in view.items()}
    inputs = tuple(x.to(DEVICE) for x in qkv(B=B, Hq=Hq, Hkv=Hkv, Lq=L, Lk=L, D=D, dtype=dtype, grad=False))
    do = torch.randn(B, Hq, L, D).to(DEVICE, dtype)
    call = lambda *x: fused.activation_attention(*x, spec, **{"causal": True, **view})  # noqa: E731
    ours = with_gradients(call, inputs, do)
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, **view), inputs, do)
    cancels = spec.divisor == "l1" and (dtype == torch.float32 or L <= 3) and not view
    floor = cancellation_floor(*inputs, do, spec) if cancels else (0.0, 0.0, 0.0, 0.0)
    if dtype == torch.float32:
        runs = eager_runs(inputs, do, spec, dtype, exact, **view)
        assert_within_twice_eager(ours, runs, exact, EPS[dtype], note, floor)
        return
    # Three times what the kernels show: 0.9 eps, and with re-weighting the power multiplies the error of a score.
    eps = torch.finfo(dtype).eps * (0.5 if dtype == torch.bfloat16 else 1)
    p = 0 if spec.p is None else spec.p
    for name, x, r, least in zip(("o", "dq", "dk", "dv"), ours, exact, floor):
        assert x.isfinite().all(), f"{note}: {name} is not finite"
        error, size = (t.double().square().mean().sqrt().item() for t in (x - r, r))
        allowed = (2.5 + p / (16 if name in ("o", "dv") else 3)) * eps * max(size, 1e-3) + least
        assert error <= allowed, f"{note}: {name} is off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_mechanism(spec):
    compare(spec, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("softmax", "full"),
        ("softmax", "window"),
        ("sigmoid_n", "pack"),
        ("sigmoid_n", "full window"),
        ("raw_l1", "padding"),
        ("exp", "window"),
        ("exp", "pack"),
        ("softmax^3", "full window"),
        ("softmax^3", "pack"),
        ("softmax^3", "padding"),
    ],
)
def test_what_rows_see(name, view):
    compare(named(name), torch.float32, **VIEWS[view])


@pytest.mark.parametrize(
    ("name", "p"), [("softmax", 15), ("sigmoid_n_l1", 2.5), ("raw_l1", 1), ("l1_relu2", 2.5), ("cosine_softmax", 15)]
)
def test_reweighted(name, p):
    """Integer and other powers; signed activations; the first rows, which have no threshold."""
    compare(lssar.spec(name).reweighted(p), torch.float32, L=3 if p == 1 else 37)


@pytest.mark.parametrize("name", ["raw_l1", "l1_relu2", "l1_mish", "l1_gelu", "softmax", "softmax^3"])
def test_one_key_alone(name):
    """Its weight is one for any score: the output is its value to the bit, and no gradient reaches q and k."""
    dtype = torch.bfloat16 if CUDA else torch.float16  # the interpreter cuts bfloat16 off instead of rounding
    q, k, v = (x.to(DEVICE) for x in qkv(Lq=1, Lk=1, Hq=2, Hkv=2, D=128, dtype=dtype, grad=False))
    q = torch.where((q * k).sum(-1, keepdim=True) < 0, -q, q)  # a positive score: ReLU gives nothing for others
    o, dq, dk, _ = with_gradients(
        lambda *x: fused.activation_attention(*x, named(name), causal=True), (q, k, v), torch.ones_like(v)
    )
    assert torch.equal(o, v)
    assert not dq.any() and not dk.any()


def test_flat_rows_are_uniform():
    q, k, v = (x.to(DEVICE) for x in qkv(B=1, Lq=9, Lk=9, D=16, dtype=torch.float32, grad=False))
    k = k[:, :, :1].expand_as(k).contiguous()
    spec = lssar.spec("softmax").reweighted(15)
    call = lambda *x: fused.activation_attention(*x, spec, causal=True)  # noqa: E731
    o, dq, dk, _ = with_gradients(call, (q, k, v), torch.ones_like(q))
    mean = v.cumsum(2) / torch.arange(1, 10, device=DEVICE)[:, None]
    torch.testing.assert_close(o, mean.repeat_interleave(2, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dq[:, :, 3:], torch.zeros_like(dq[:, :, 3:]))
    assert dk.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "l1_gelu", "l1_mish", "relu_shen"])
def test_float16_and_odd_sizes(name):
    compare(lssar.spec(name), torch.float16, L=1, D=16)
    compare(lssar.spec(name), torch.float16, L=5, D=80, B=2)
    compare(lssar.spec(name), torch.float16, L=5, D=256)


def test_fewer_rows_than_keys_and_strides():
    """Queries are the last rows; q, k, v are slices of one tensor laid out (B, L, heads, D)."""
    packed = torch.randn(2, 37, 8, 32, device=DEVICE)
    q, k, v = (x.transpose(1, 2) for x in packed.split((4, 2, 2), dim=2))
    q = q[:, :, -9:]
    do = torch.randn(2, 4, 9, 32, device=DEVICE)
    for name in ("l1_sigmoid", "softmax"):
        call = lambda *x: fused.activation_attention(*x, lssar.spec(name), causal=True)  # noqa: B023, E731
        ours = with_gradients(call, (q, k, v), do)
        exact = with_gradients(lambda *x: eager(*x, name, torch.float64), (q, k, v), do)  # noqa: B023
        for a, b in zip(ours, exact):
            torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-6)


def exp_error_bound(q, k, v, do):
    """What float32 may lose of o, dq, dk, dv for weights e^s, by first-order error analysis.

    A score is a dot product of D terms, so it is off by up to (D + 2) u times the sum of their magnitudes; the
    exponential turns that, and a rounding of s or of what it was lowered by, into a relative error of the weight.
    Sums add a rounding a term, and every step bounds a sum by the sum of magnitudes.
    """
    u, D, L = EPS[torch.float32], q.shape[-1], k.shape[2]
    q, k, v, do = (x.double() for x in (q, k, v, do))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.mT / D**0.5).masked_fill(torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    magnitude = q.abs() @ k.abs().mT / D**0.5  # also bounds |s|
    lowered = s.amax(-1, keepdim=True).abs()
    off = s.exp() * u * ((D + 2) * magnitude + 2 * (magnitude + lowered) + L + 8)
    slope = (off + s.exp() * u * (D + 8)) * (do.abs() @ v.abs().mT) / D**0.5
    per_key = lambda x: x.unflatten(1, (-1, groups)).sum(2)  # noqa: E731
    return off @ v.abs(), slope @ k.abs(), per_key(slope.mT @ q.abs()), per_key(off.mT @ do.abs())


def test_exp_without_a_divisor_keeps_its_range():
    """A weight of e^40 in one row, of e^-40 in another: what scores are lowered by comes back."""
    spec = lssar.spec("exp")
    q, k, v = (x.to(DEVICE) for x in qkv(B=1, Hq=2, Lq=9, Lk=9, D=16, dtype=torch.float32, grad=False))
    for row, score in ((4, 40.0), (0, -40.0)):  # over sqrt(D) = 4
        q[:, :, row] = k[:, :, row] * (4 * score / k[:, :, row].square().sum(-1, keepdim=True))
    call = lambda *x: fused.activation_attention(*x, spec, causal=True)  # noqa: E731
    ours = with_gradients(call, (q, k, v), torch.ones_like(q))
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64), (q, k, v), torch.ones_like(q))
    assert exact[0].abs().max() > 1e15 and 0 < exact[0].abs().min() < 1e-15
    for a, b, bound in zip(ours, exact, exp_error_bound(q, k, v, torch.ones_like(q))):
        assert ((a.double() - b).abs() <= bound).all()
    nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    blind = lambda *x: fused.activation_attention(*x, lssar.spec("exp"), causal=True, key_lengths=nothing)  # noqa: E731
    assert not any(x.any() for x in with_gradients(blind, (q, k, v), torch.ones_like(q)))


def test_rows_that_see_nothing_and_needles():
    q, k, v = (x.to(DEVICE) for x in qkv(B=2, Lq=8, Lk=8, D=16, dtype=torch.float32, grad=False))
    k[1, :, 3] *= 100  # scores far beyond exp's range
    lengths = torch.tensor([0, 8], device=DEVICE)
    inputs, do = (q, k, v), torch.ones_like(q)
    for spec in map(lssar.spec, ("softmax", "l1_relu", "sigmoid")):
        call = lambda *x: fused.activation_attention(*x, spec, causal=True, key_lengths=lengths)  # noqa: B023, E731
        ours = with_gradients(call, inputs, do)
        exact = with_gradients(lambda *x: eager(*x, spec, torch.float64, key_lengths=lengths), inputs, do)  # noqa: B023
        assert not any(x[0].any() for x in ours)
        runs = eager_runs(inputs, do, spec, torch.float32, exact, key_lengths=lengths)
        floor = cancellation_floor(*(x[1:] for x in (*inputs, do)), spec) if spec.divisor == "l1" else (0.0,) * 4
        assert_within_twice_eager(ours, runs, exact, EPS[torch.float32], spec.name, floor)


def test_all_mechanisms_but_recentred_ones_have_kernels(monkeypatch):
    q, k, v = (x.to(DEVICE) for x in qkv(dtype=torch.float32, D=16, grad=False))
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = {"softmax_recentred", "softmax_recentred_l1"}
    assert {name for name in lssar.specs() if not (fused.is_activation(s := lssar.spec(name)) or fused.is_lssa(s))} == (
        names
    )
    for spec in names:
        with pytest.raises(ValueError, match="activations over a divisor, not re-centred; "):
            lssar.attention(q, k, v, spec, impl="fused")
    large = [torch.zeros(1, 1, 4, 272, device=DEVICE) for _ in range(3)]
    with pytest.raises(ValueError, match="one head size, 16 to 256; got q 272"):
        lssar.attention(*large, "sigmoid", impl="fused")
    assert fused.why_not(*(x[..., :256] for x in large), lssar.spec("sigmoid")) is None
    with pytest.raises(ValueError, match="take no mask"):
        lssar.attention(q, k, v, "sigmoid", impl="fused", mask=torch.ones(19, 19, dtype=torch.bool, device=DEVICE))
    got = lssar.attention(q, k, v, "sigmoid", impl="fused")
    torch.testing.assert_close(got, lssar.attention(q, k, v, "sigmoid", impl="tiled"), rtol=1e-5, atol=1e-6)


def test_second_derivative_is_refused():
    q, k, v = (x.to(DEVICE).requires_grad_() for x in qkv(dtype=torch.float32, D=16, grad=False))
    o = fused.activation_attention(q, k, v, lssar.spec("sigmoid"), causal=True)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "D", "dtype"),
    [
        (("softmax", "raw_l1", "l1_gelu", "softmax^3")[(i + j) % 4], D, dtype)
        for i, D in enumerate((16, 64, 80, 128, 256))
        for j, dtype in enumerate(EPS)
    ],
    ids=str,
)
def test_gpu_grid(name, D, dtype):
    for L, view in ((1, {}), (129, {}), (333, {"causal": False}), (333, {"window": 100})):
        compare(named(name), dtype, L=L, D=D, B=2, note=f"{L} {view}", **view)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gpu_every_mechanism(spec):
    for L, view in ((1, {}), (129, {}), (333, {"causal": False})):
        compare(spec, torch.bfloat16, L=L, D=64, B=2, note=f"{L} {view}", **view)


@pytest.mark.gpu
def test_gpu_compiles_in_full_and_gives_the_same_bits():
    q, k, v = (x.to("cuda") for x in qkv(Lq=300, Lk=300, D=64, dtype=torch.bfloat16, grad=False))
    do = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    call = lambda *x: lssar.attention(*x, "sigmoid_n", impl="fused")  # noqa: E731
    first = with_gradients(call, (q, k, v), do)
    for f in (call, torch.compile(call, fullgraph=True)):
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(f, (q, k, v), do)))
