"""What the Hopper kernels compute and in which order they use shared memory, without a GPU: see hopper_on_cpu.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lssar

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels themselves are tested", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from lssar.ops.fused import fused_attention, op
from tests import fuzz_fused
from tests.helpers import seeded, with_gradients
from tests.ops import hopper_on_cpu, ptx, test_steep, test_window
from tests.ops.test_fused import compare, tensors


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


@pytest.mark.parametrize(
    ("view", "D", "p", "dtype"),
    [
        ("causal", 128, 15, torch.bfloat16),
        ("pack", 64, 3, torch.bfloat16),
        ("window", 128, 7.25, torch.float16),
        pytest.param("full", 128, 63, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_dk_and_dv_without_a_pass_over_the_keys(hopper, monkeypatch, view, D, p, dtype):
    """From what the forward saves; in half types its second product takes weights of the power p - 1."""
    monkeypatch.setattr(op, "SAVE_LOWER", True)
    compare(*tensors(Hq=1, Lq=190, D=D, dtype=dtype), p=p, note=view, **VIEWS[view])


def test_values_beyond_the_range_of_sums_when_saving(hopper, monkeypatch):
    """Where the forward repeats its pass with smaller weights, what it saves is as without, times 2^125."""
    q, k, v, _ = tensors(Hq=1, Lq=100, D=128, dtype=torch.bfloat16)
    monkeypatch.setattr(op, "SAVE_LOWER", True)
    options = (None, 15.0, None, True, None, None, None)
    (o, rows, lower), large = (op.run_forward(q, k, v * size, *options, training=True) for size in (1, 2.0**125))
    near = {"rtol": 2.0**-7, "atol": 2.0**-7}  # a rounding of bfloat16
    torch.testing.assert_close(large[0] * 2.0**-125, o, **near)
    torch.testing.assert_close(large[2] * 2.0**-125, lower, **near)
    torch.testing.assert_close(large[1][..., :100], rows[..., :100], rtol=2.0**-20, atol=0)  # another order of sums


def test_float16(hopper):
    """In Gluon the forward only; its scores and weights have other polynomials."""
    compare(*tensors(Hq=1, Lq=140, D=128, dtype=torch.float16), p=15)


@pytest.mark.parametrize("length", [1, 2, 4, 65])
def test_lengths(hopper, length):
    few = length <= 4
    compare(*tensors(B=8 if few else 1, Lq=length, D=64, dtype=torch.bfloat16), p=15, few_keys=few)


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
        op._Call, "per_row",
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


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("program_barrier", "overwritten while it may be in use"),
        ("load_tile", "not asked for"),
        ("mbarrier.wait", "before it has arrived"),
        ("end_barriers", "without end_barriers"),
    ],
)
def test_a_forward_that_saves_is_faulty_without_one_step(hopper, monkeypatch, name, fault):
    monkeypatch.setattr(op, "SAVE_LOWER", True)
    monkeypatch.setattr(f"lssar.ops.fused.hopper.forward.{name}", lambda *_, **__: None)
    q, k, v, _ = tensors(Hq=1, Lq=150, D=64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=fault):
        op.run_forward(q, k, v, None, 15.0, None, True, None, None, None, training=True)


def test_inline_assembly(hopper):
    """The bounds of test_steep.py hold for the PTX too, not only for what the interpreter takes in its place."""
    test_steep.test_short_forms()
    test_steep.test_the_mean_in_half_arithmetic(4.0)
    for p in (2, 15):
        test_steep.test_short_forms_of_the_backward(p)


def test_inline_assembly_of_windowed_kernels(hopper, monkeypatch):
    for spec in ("softmax", "cosine softmax"):
        test_window.test_half_types(torch.bfloat16, spec)
    test_window.test_steep_rows(15, monkeypatch)


def test_instructions():
    x = torch.randn(64, generator=seeded(0)).numpy()
    bits = x.view("uint32")
    sign = ptx.run("{ .reg .f32 m; abs.f32 m, $1; neg.f32 m, m; ex2.approx.ftz.f32 $0, m; }", [bits])
    torch.testing.assert_close(torch.from_numpy(sign.view("float32")), torch.exp2(-torch.from_numpy(x).abs()))
    halves = ptx.run("cvt.rn.f16x2.f32 $0, $2, $1;", [bits, bits[::-1].copy()]).view("float16").reshape(-1, 2)
    assert (halves[:, 0] == x.astype("float16")).all() and (halves[:, 1] == x[::-1].astype("float16")).all()
    both = ptx.run("mov.b32 $0, {$1, $2};", [x.astype("float16").view("uint16"), halves[:, 1].copy().view("uint16")])
    assert (both.view("float16").reshape(-1, 2) == halves).all()
