"""The reference against the paper's formulas written out a row at a time, in plain Python floats."""

import math

import pytest
import torch

import lssar
from lssar.ops.reference import reference_attention
from tests.helpers import ALL_SPECS, LEARNED, by_field, qkv, views

PHI = {
    "identity": lambda s: s,
    "exp": math.exp,
    "relu": lambda s: max(s, 0.0),
    "relu2": lambda s: max(s, 0.0) ** 2,
    "relu6": lambda s: min(max(s, 0.0), 6.0),
    "gelu": lambda s: 0.5 * s * (1 + math.erf(s / math.sqrt(2))),
    "sigmoid": lambda s: 1 / (1 + math.exp(-s)),
    "softplus": lambda s: math.log(1 + math.exp(s)),
    "mish": lambda s: s * math.tanh(math.log(1 + math.exp(s))),
}


def plain_l1(row):
    total = sum(abs(a) for a in row)
    return [a / total if total else 0.0 for a in row]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y))


def plain_row(q, keys, spec):
    """Weights of one row over the keys it sees (Eq. 3, 4, 5 of the paper; textbook re-weighting)."""
    n, d = len(keys), len(q)
    s = [dot(q, k) for k in keys]
    if spec.cosine:
        s = [x / math.sqrt(dot(q, q) * dot(k, k)) for x, k in zip(s, keys)]
    s = [x * (math.log(d) if spec.scale == "log_d" else d**-0.5) * (math.log(n) if spec.log_n else 1) for x in s]
    s = [x * (1 if spec.head_scale is None else spec.head_scale) for x in s]
    s = [x - {"none": 0, "-log_L": math.log(spec.train_length), "-log_n": math.log(n)}[spec.bias] for x in s]
    row = [PHI[spec.activation](x) for x in s]
    if spec.divisor == "l1":
        row = plain_l1(row)
    else:
        by = {"none": 1, "L": spec.train_length, "n": n, "sqrt_n": spec.gamma * math.sqrt(n / 2)}[spec.divisor]
        row = [a / by for a in row]
    if spec.recentre != "none" and n > 3:
        mean = sum(row) / n
        row = [a - mean for a in row]
    if spec.recentre == "mean_l1":
        row = plain_l1(row)
    if spec.negate:
        row = [-a for a in row]
    if spec.p is not None:
        row = plain_l1([max(n * a - (spec.threshold if n > 3 else 0), 0.0) ** spec.p for a in row])
    return row


@pytest.mark.parametrize(
    ("name", "view"), by_field(ALL_SPECS | LEARNED, ["causal", "full", "mask", "window", "padding", "ranges"])
)
def test_rows_equal_the_formulas(name, view):
    B, H, L, spec = 2, 2, 9, (ALL_SPECS | LEARNED)[name]
    q, k, v = qkv(B=B, Hq=H, Hkv=1, Lq=L, Lk=L, D=4, grad=False)
    options = views(B, H, L)[view]
    o, w = lssar.attention(q, k, v, spec, impl="reference", return_weights=True, **options)
    allowed = options.get("mask", torch.ones(1, 1, L, L, dtype=torch.bool)).expand(B, H, L, L)
    for b in range(B):
        for h in range(H):
            for i in range(L):
                seen = [
                    j
                    for j in range(L)
                    if allowed[b, h, i, j]
                    and (j <= i or options.get("causal") is False)
                    and i - j < options.get("window", L)
                    and j < (options["key_lengths"][b] if "key_lengths" in options else L)
                    and ("key_ranges" not in options or j in range(*options["key_ranges"][b, i].tolist()))
                ]
                row = plain_row(q[b, h, i].tolist(), [k[b, 0, j].tolist() for j in seen], spec)
                expected = torch.zeros(L, dtype=torch.float64)
                expected[seen] = torch.tensor(row, dtype=torch.float64)
                torch.testing.assert_close(w[b, h, i], expected, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(o[b, h, i], expected @ v[b, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["l1_softplus", "l1_sigmoid", "raw_l1", "softmax", "l1_gelu"])
def test_gradient_where_scores_are_exactly_zero(name):
    """A zero key: autograd's usual derivatives of relu and abs at 0 would make a softplus without slope."""
    q, k, v = qkv(B=1, Lq=6, Lk=6, D=4, grad=False)
    k[:, :, 2] = 0
    k.requires_grad_()
    f = lambda k: lssar.attention(q, k, v, name, impl="reference")  # noqa: E731
    assert torch.autograd.gradcheck(f, k, fast_mode=True)
    do = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    (exact,) = torch.autograd.grad(f(k), k, do[..., :4])
    (tiled,) = torch.autograd.grad(lssar.attention(q, k, v, name, impl="tiled"), k, do[..., :4])
    torch.testing.assert_close(tiled, exact)


def test_the_reference_runs_in_any_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q, k, v = qkv(dtype=dtype, Hkv=4, grad=False)
        o, w = reference_attention(q, k, v, torch.ones(1, 1, 19, 19, dtype=torch.bool).tril(), lssar.spec("lssar"))
        assert o.dtype == w.dtype == dtype


def test_textbook_form_overflows_where_ours_does_not():
    """One needle among 1024 keys: (n A - 1)^15 leaves float32; the stable form gives the needle all the weight."""
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1
    k = -q.expand(1, 1, 1024, 64).clone()
    k[0, 0, 7] = q[0, 0, 0]
    w = lssar.attention(q, k, k, "lssa", impl="reference", return_weights=True)[1]
    assert torch.isinf((1024 * w - 1) ** 15).any()
    w = lssar.attention(q, k, k, "lssar", impl="reference", return_weights=True)[1]
    assert w[0, 0, 0, 7] == 1
    assert w.sum() == 1
