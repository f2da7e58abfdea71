"""`lssar.testing`: our own implementation passes, and a wrong kernel is caught."""

import pytest
import torch

import lssar
from lssar.testing import assert_close_to_reference, cases, check_attention

FEATURES = ("causal", "window", "key_lengths", "cu_seqlens", "mask")


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("lssar", torch.float32), ("lssar", torch.bfloat16), ("softmax", torch.float16), ("l1_gelu", torch.float64)],
    ids=str,
)
def test_tiled_passes(spec, dtype):
    done = check_attention(
        lambda *x, **options: lssar.attention(*x, spec, impl="tiled", **options), spec, dtype=dtype, features=FEATURES
    )
    assert {"length 1", "needle", "uniform rows", "pack", "mask"} <= set(done)


def mine(q, k, v, *, p=15.0, log_n=True, first=3, offset=0, eps=0.0, dtype=None):
    """LSSAR in plain PyTorch, with places to go wrong."""
    q, k, v = (x.to(dtype or x.dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    L, d = q.shape[2], q.shape[3]
    n = torch.arange(1, L + 1, device=q.device).to(q.dtype)[:, None] + offset
    unit = lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # noqa: E731
    s = unit(q) @ unit(k).mT * torch.log(torch.tensor(float(d))) * (n.clamp_min(1).log() if log_n else 1)
    a = torch.nn.functional.softplus(s).tril(offset)
    a = a / (a.sum(-1, keepdim=True) + eps)
    a = torch.relu(n * a - (n > first).to(q.dtype)) ** p
    return (a / a.sum(-1, keepdim=True).clamp_min(1e-30)) @ v


WRONG = {
    "p is 14": dict(p=14.0),
    "no log n": dict(log_n=False),
    "a threshold in row 3": dict(first=2),
    "a threshold from row 6 on": dict(first=5),
    "sees one key too many": dict(offset=1),
    "an epsilon in the divisor": dict(eps=1e-3),
    "half precision inside": dict(dtype=torch.float16),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_caught(wrong):
    with pytest.raises(AssertionError, match=r"(length|needle|uniform rows|opposite|norms|zero)"):
        check_attention(lambda *x: mine(*x, **wrong).to(x[0].dtype), gradients=False)


def test_a_wrong_gradient_is_caught():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return lssar.attention(q, k, v)

        @staticmethod
        def backward(ctx, do):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                dq, dk, dv = torch.autograd.grad(lssar.attention(*leaves), leaves, do)
            return dq, 1.001 * dk, dv

    with pytest.raises(AssertionError, match=r"length \d+: .* error of dk"):
        check_attention(Wrong.apply)
    check_attention(Wrong.apply, gradients=False)


def test_one_result_against_the_reference():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    o = lssar.attention(q, k, v, "lssa", window=4)
    assert_close_to_reference(o, q, k, v, "lssa", window=4)
    assert_close_to_reference(lssar.attention(q, k, v, "ssmax"), q, k, v, "ssmax")  # with its initial head_scale
    with pytest.raises(AssertionError, match=r"here: .* error of o"):
        assert_close_to_reference(o + torch.eye(20, 16) * 1e-3, q, k, v, "lssa", window=4, note="here")
    with pytest.raises(AssertionError, match="o is not finite"):
        assert_close_to_reference(o * torch.nan, q, k, v, "lssa")
    with pytest.raises(AssertionError, match=r"o is \(1, 2, 20, 16\) torch.float64, not"):
        assert_close_to_reference(o.double(), q, k, v, "lssa")
    with pytest.raises(ValueError, match="give the output, or"):
        assert_close_to_reference((o, q), q, k, v)
    with pytest.raises(ValueError, match="unknown feature 'paged'"):
        next(cases(features=["paged"]))


def test_same_cases_for_a_seed():
    first, second, other = ([c.q for c in cases(seed=s)] for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[-1], other[-1])
