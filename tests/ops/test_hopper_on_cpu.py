"""What the Hopper kernels compute and in which order they use shared memory, without a GPU: see hopper_on_cpu.py."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import lssar

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels themselves are tested", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from lssar.ops.fused import fused_attention, op, window_attention, window_op
from tests import fuzz_fused
from tests.helpers import seeded, with_gradients
from tests.ops import hopper_on_cpu, ptx, test_steep, test_window
from tests.ops.comparing import compare, tensors


@pytest.fixture
def hopper(monkeypatch):
    hopper_on_cpu.install(monkeypatch)


VIEWS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 140, 141, 190])},
    "padding": {"key_lengths": torch.tensor([1, 120])},
}


@pytest.mark.parametrize(
    ("view", "D", "p", "group", "length"),
    [
        ("causal", 64, 15, 2, 190),
        ("full", 128, 3, 1, 130),
        ("window", 128, 7.25, 1, 150),
        ("pack", 64, None, 1, 190),
        ("padding", 64, 15, 1, 190),
        pytest.param("causal", 128, 15, 4, 520, marks=pytest.mark.slow),
        pytest.param("causal", 64, 2, 1, 300, marks=pytest.mark.slow),
        pytest.param("full", 64, 63, 1, 300, marks=pytest.mark.slow),
    ],
)
def test_against_float64(hopper, view, D, p, group, length):
    inputs = tensors(B=2 if view == "padding" else 1, Hq=group, Lq=length, D=D, dtype=torch.bfloat16)
    compare(*inputs, p=p, note=view, **VIEWS[view])


def test_float16(hopper):
    """In Gluon the forward only; its scores and weights have other polynomials."""
    compare(*tensors(Hq=1, Lq=140, D=128, dtype=torch.float16), p=15)


@pytest.mark.parametrize("length", [1, 2, 4, 65])
def test_lengths(hopper, length):
    few = length <= 4
    compare(*tensors(B=8 if few else 1, Lq=length, D=64, dtype=torch.bfloat16), p=15, few_keys=few)


def test_padding_of_sequences_without_keys(hopper):
    q, k, v, do = tensors(B=2, Hq=1, Lq=64, D=64, dtype=torch.bfloat16)
    k[0, :, 0] = v[0, :, 0] = torch.inf
    call = lambda *x: fused_attention(*x, p=15, causal=True, key_lengths=torch.tensor([0, 40]))  # noqa: E731
    o, dq, dk, dv = with_gradients(call, (q, k, v), do)
    for x in (o, dq, dk, dv):
        assert (x[0] == 0).all() and x.isfinite().all()


@pytest.mark.parametrize("gain", [False, True])
def test_norms_to_the_ends_of_the_range(hopper, gain):
    """dq and dk are those of rows of other norms, times a power of two; below the normal numbers they stay finite."""
    q, k, v, do = tensors(Hq=1, Lq=64, D=64, dtype=torch.bfloat16)
    q, k = q.sign(), k.sign() * (torch.arange(64) < 8)  # so that no bit is lost
    inputs = (q, k, v, torch.tensor([0.7])) if gain else (q, k, v)
    call = lambda q, k, v, gain=None: fused_attention(q, k, v, p=15, causal=True, gain=gain)  # noqa: E731
    near = with_gradients(call, inputs, do)
    for q_exponent, k_exponent, do_exponent in ((-119, 118, 0), (110, -116, 0), (-125, -125, -8), (-60, 60, 60)):
        far = with_gradients(
            call, (q * 2.0**q_exponent, k * 2.0**k_exponent, *inputs[2:]), do * 2.0**do_exponent
        )  # fmt: skip
        for name, a, b, e in zip(("o", "dq", "dk"), near, far, (0, do_exponent - q_exponent, do_exponent - k_exponent)):
            assert (a.double() - b.double() * 2.0**-e).norm() < 0.01 * a.double().norm(), (name, q_exponent, k_exponent)
    dk = with_gradients(call, (q, k * 2.0**-130, *inputs[2:]), 0 * do)[2]
    assert (dk == 0).all()


@pytest.mark.parametrize("which", ["q", "k", "v", "dO"])
def test_not_finite(hopper, which):
    """Infinities and NaNs reach only the rows that see them, as in the fuzzer; values beyond the range of sums."""
    case = fuzz_fused.Case(
        seed=0, kind="hidden", spec="lssar", dtype="bfloat16", batch=2, key_heads=1, group=2, queries=100, keys=100,
        head_size=64 if which in "qk" else 128, p=15.0, view="causal", gain=False, strided=True,
        q_exponent=0, k_exponent=0, v_exponent=0,
    )  # fmt: skip
    seeds = (
        seed for seed in range(1000) if fuzz_fused.not_finite_place(dataclasses.replace(case, seed=seed))[1] == which
    )
    assert not fuzz_fused.run(dataclasses.replace(case, seed=next(seeds)))


@pytest.mark.parametrize("p", [None, 15, 100])
def test_repair_without_planes_of_steep_rows(hopper, monkeypatch, p):
    """Only some powers say which rows are steep; a plane that no kernel writes may hold anything."""
    q, k, v, do = tensors(Hq=1, Lq=128, D=64, dtype=torch.bfloat16)
    do[..., -1, :] = 0
    monkeypatch.setattr(
        op._Plan, "per_row",
        lambda self, planes, like: torch.ones(planes, self.B * self.Hq, self.row_stride, dtype=torch.float32),
    )  # fmt: skip
    call = lambda *x: fused_attention(*x, p=p, causal=True)  # noqa: E731
    clean = with_gradients(call, (q, k, v), do)
    do[..., -1, 0] = torch.nan
    for name, a, b in zip(("dk", "dv"), with_gradients(call, (q, k, v), do)[2:], clean[2:]):
        a, b = a[..., :-1, :].double(), b[..., :-1, :].double()
        assert (a - b).norm() <= 2e-3 * b.norm(), name


def test_gain_and_the_largest_values(hopper):
    """p = 3: with p = 15 one key has nearly all the weight of a row, and the gain's gradient is lost in rounding."""
    q, k, v, do = tensors(Hq=2, Hkv=1, Lq=130, D=64, dtype=torch.bfloat16)
    gain, spec = torch.tensor([0.5, -1.5]), lssar.spec("lssar", p=3)
    call = lambda *x: fused_attention(*x[:3], p=3, causal=True, gain=x[3])  # noqa: E731
    exact = lambda *x: fuzz_fused.exact_attention(*x, spec, {})  # noqa: E731
    want = with_gradients(exact, tuple(x.double() for x in (q, k, v, gain)), do.double())
    got = with_gradients(call, (q, k, v, gain), do)
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want):
        assert (a.double() - b).norm() < 0.01 * b.norm(), name
    # What each row adds to the gain's gradient cancels: the error was 0.1 of the norm of these terms, 0.26 at most.
    unit_q, unit_k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    of_products = lambda *x: fuzz_fused.exact_attention(*x, None, spec.replace(cosine=False), {})  # noqa: E731
    terms = with_gradients(of_products, (unit_q * gain[:, None, None], unit_k, v.double()), do.double())[1] * unit_q
    assert ((got[4] - want[4]).abs() < 0.5 * terms.sum(-1).norm(dim=-1)).all()
    large = call(q, k, v * 2.0**125, gain).double() * 2.0**-125
    assert (large - want[0]).norm() < 0.01 * want[0].norm()


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        ("forward", "program_barrier", "overwritten while it may be in use"),
        ("forward", "fence_async_shared", "without a fence after threads wrote it"),
        ("query_gradient", "program_barrier", "overwritten while it may be in use"),
        ("query_gradient", "mbarrier.wait", "before it has arrived"),
        ("query_gradient", "tile_store_wait", "overwritten while it may be in use"),
        ("key_gradient", "program_barrier", "without a barrier after other warps wrote it|overwritten"),
        ("key_gradient", "fence_async_shared", "without a fence"),
        ("memory", "fence_async_shared", "without a fence after its barrier"),
        ("forward", "end_barriers", "without end_barriers"),
        ("key_gradient", "announce_pair", "not asked for"),
        ("forward", "load_tile", "not asked for"),
        ("forward", "mbarrier.wait", "before it has arrived"),
        ("key_gradient", "async_copy.wait_group", "before it has arrived"),
    ],
)
def test_kernels_without_one_step_are_faulty(hopper, monkeypatch, where, name, fault):
    """So the checks of hopper_on_cpu would find it if a step were missing."""
    target = f"lssar.ops.fused.hopper.{where}.{name}"
    monkeypatch.setattr(target, lambda *_, **__: None)
    q, k, v, do = tensors(Hq=1, Lq=150, D=64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=fault):
        with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q, k, v), do)


def test_keys_that_replace_others_without_a_barrier_are_found(hopper, monkeypatch):
    """The first three barriers of a program, after which copies and queries are there, stay."""
    barrier, calls = hopper_on_cpu.barrier, itertools.count()
    monkeypatch.setattr(
        "lssar.ops.fused.hopper.forward.program_barrier", lambda: barrier() if next(calls) < 3 else None
    )
    q, k, v, _ = tensors(Hq=1, Lq=150, D=64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="overwritten while it may be in use"):
        fused_attention(q, k, v, p=15, causal=True)


def test_inline_assembly(hopper):
    """The bounds of test_steep.py hold for the PTX too, not only for what the interpreter takes in its place."""
    test_steep.test_short_forms()
    test_steep.test_the_mean_in_half_arithmetic(4.0)
    for p, form in itertools.product((2, 15), test_steep.FORMS):
        test_steep.test_short_forms_of_the_backward(p, form)


def test_inline_assembly_of_windowed_kernels(hopper, monkeypatch):
    for spec in ("softmax", "cosine softmax"):
        test_window.test_half_types(torch.bfloat16, spec)
    test_window.test_steep_rows(15, monkeypatch)


@pytest.fixture
def window_in_gluon(hopper, monkeypatch):
    """The number of launches of Gluon kernels of windows."""
    launched = []
    start = window_op.start_kernel

    def record(kernel, *arguments):
        name = kernel.fn.__name__
        launched.append(name.startswith("window_") and not name.endswith("repair_kernel"))
        start(kernel, *arguments)

    monkeypatch.setattr(window_op, "start_kernel", record)
    return lambda: sum(launched)


@pytest.mark.parametrize(
    ("spec", "D", "group", "view"),
    [
        ("softmax", 64, 2, {"window": 100}),
        ("cosine softmax", 128, 1, {"window": 70}),
        ("lssa", 64, 1, {"window": 1}),
        ("lssar", 128, 2, {"window": 128}),
        ("lssar", 64, 1, {"window": 40, "causal": False}),
        ("lssar p=2.5", 64, 2, {"window": 100, "cu_seqlens": torch.tensor([0, 3, 140, 141, 192])}),
        ("cosine softmax", 64, 3, {"window": 300, "cu_seqlens": torch.tensor([0, 64, 65, 192]), "causal": False}),
    ],
)
def test_windows(window_in_gluon, spec, D, group, view):
    inputs = test_window.tensors(B=2 - ("cu_seqlens" in view), Hq=group, Lq=192, D=D, dtype=torch.bfloat16)
    test_window.compare(*inputs, test_window.SPECS[spec], **view)
    assert window_in_gluon() == (3 if view["window"] <= 129 and view.get("causal", True) else 2)


@pytest.mark.parametrize("length", [1, 3, 65, 190])
def test_forward_of_windows(window_in_gluon, monkeypatch, length):
    """Rows that end within a tile, and a gain, with which softmax is shifted by its maximum.

    In bfloat16 rows of few keys have no gradient: where their scores are nearly equal, its error in LSSAR would be that
    of the whole tensor.
    """
    q, k, v, do = test_window.tensors(Lq=length, D=64, dtype=torch.bfloat16)
    do[:, :, :8] = 0
    for spec in ("softmax", "cosine softmax", "lssar"):
        test_window.compare(q, k, v, do, test_window.SPECS[spec], window=129)
    launches = window_in_gluon()
    gain, view = torch.tensor([0.5, 1.7]), {"causal": True, "window": 100}
    for name in ("cosine softmax", "lssar"):
        spec = test_window.SPECS[name]
        call = lambda *x: window_attention(*x[:3], spec, gain=x[3], **view)  # noqa: B023, E731
        exact = lambda *x: fuzz_fused.exact_attention(*x, spec, view)  # noqa: B023, E731
        want = with_gradients(exact, tuple(x.double() for x in (q, k, v, gain)), do.double())
        got = with_gradients(call, (q, k, v, gain), do)
        terms = 0.1 * (q.shape[2] * do.double().square().sum() / q.shape[3]).sqrt()  # of gradients, which cancel
        for part, a, b in zip(("o", "dq", "dk", "dv"), got, want):
            allowed = 0.012 * max(b.norm(), 0 if part in ("o", "dv") else terms)
            assert (a - b).norm() <= allowed, f"{name}, {part}"
        with monkeypatch.context() as triton:  # a sum that cancels: no farther off than twice that of these kernels
            triton.setattr(op, "hopper_kernels", lambda *_: None)
            dgain = with_gradients(call, (q, k, v, gain), do)[4]
        off, of_triton = ((x - want[4]).norm() for x in (got[4], dgain))
        assert off <= 2 * of_triton + 0.01 * want[4].norm(), name
    assert launches == 6 and window_in_gluon() == 10


@pytest.mark.parametrize(("Lq", "Lk"), [(64, 190), (128, 40)])
def test_windows_of_other_keys(window_in_gluon, Lq, Lk):
    """Blocks of keys that end within a tile, and such as no row sees."""
    inputs = test_window.tensors(Lq=Lq, Lk=Lk, D=64, dtype=torch.bfloat16)
    for spec in ("softmax", "lssar"):
        test_window.compare(*inputs, test_window.SPECS[spec], f"{Lq}, {Lk}", window=20)
    assert window_in_gluon() == 4  # no forward: tiles of these rows and keys do not begin at the same place


@pytest.mark.parametrize("which", ["q", "k", "v", "dO"])
@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
def test_windows_of_values_that_are_not_finite(window_in_gluon, spec, which):
    bad = (torch.nan, torch.inf, -torch.inf)[list(test_window.SPECS).index(spec) % 3]
    test_window.check_not_finite(spec, torch.bfloat16, which, bad, 70, L=192, D=64, window=50)
    assert window_in_gluon() == 6


@pytest.mark.parametrize("spec", ["softmax", "cosine softmax", "lssar"])
def test_windows_of_norms_to_the_ends_of_the_range(window_in_gluon, monkeypatch, spec):
    tensors = test_window.tensors
    monkeypatch.setattr(test_window, "tensors", lambda **given: tensors(**{**given, "Lq": 64, "D": 64}))
    test_window.test_norms_to_the_ends_of_the_range(spec, torch.bfloat16)
    assert window_in_gluon() > 2


@pytest.mark.parametrize("D", [64, 128])
def test_windows_of_small_queries_against_their_keys(window_in_gluon, D):
    """All scores are far below zero, so slopes are large, and so is 1 / |q|: dq scales as it does."""
    q, k, v, do = test_window.tensors(Hq=1, Lq=64, D=D, dtype=torch.bfloat16)
    q, k = q[:, :, -1:] + 0.01 * q, 0.01 * k - q[:, :1, -1:]
    large = test_window.run(q, k, v, do, test_window.SPECS["lssar"], window=50)[1]
    small = test_window.run(q * 2.0**-90, k, v, do * 2.0**-90, test_window.SPECS["lssar"], window=50)[1]
    assert (small - large).norm() <= 1e-3 * large.norm()
    assert window_in_gluon() == 6


def test_ptx_instructions_on_numpy():
    x = torch.randn(64, generator=seeded(0)).numpy()
    bits = x.view("uint32")
    sign = ptx.run("{ .reg .f32 m; abs.f32 m, $1; neg.f32 m, m; ex2.approx.ftz.f32 $0, m; }", [bits])
    torch.testing.assert_close(torch.from_numpy(sign.view("float32")), torch.exp2(-torch.from_numpy(x).abs()))
    halves = ptx.run("cvt.rn.f16x2.f32 $0, $2, $1;", [bits, bits[::-1].copy()]).view("float16").reshape(-1, 2)
    assert (halves[:, 0] == x.astype("float16")).all() and (halves[:, 1] == x[::-1].astype("float16")).all()
    both = ptx.run("mov.b32 $0, {$1, $2};", [x.astype("float16").view("uint16"), halves[:, 1].copy().view("uint16")])
    assert (both.view("float16").reshape(-1, 2) == halves).all()
