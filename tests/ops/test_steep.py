"""What docs/derivations.md says of steep rows: the shorter forms, and what they do to weights."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from lssar.ops.fused.steep import (  # noqa: E402
    GENERAL,
    LINEAR,
    SHORT,
    TANH_SCALE,
    form_of_rows,
    general_line,
    left_and_right,
    line_of_form,
    pairs_of,
    root_and_sigmoid,
    short_key_weights,
    short_query_terms,
    short_score_gradient,
    softplus_pairs,
)
from tests.helpers import DEVICE, seeded  # noqa: E402

SLOPE = 2.0**-10
FORMS = ("short", "linear", "always linear")


@triton.jit
def forms_kernel(x_ptr, mean_ptr, root_ptr, sigma_ptr, stride, SLOPE: tl.constexpr, N: tl.constexpr):
    first = tl.arange(0, 16)[:, None] * stride + tl.program_id(0) * N
    columns = first + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + columns)
    root, sigma = root_and_sigmoid(x, SLOPE, 0.0, True, 3, True)
    tl.store(root_ptr + columns, root)
    tl.store(sigma_ptr + columns, sigma)
    left, right = left_and_right(softplus_pairs(pairs_of(x)))
    pairs = first + 2 * tl.arange(0, N // 2)[None, :]
    tl.store(mean_ptr + pairs, left)
    tl.store(mean_ptr + pairs + 1, right)


def forms(x):
    """Of a tensor [16, multiple of 256]: half-precision softplus, the short one, the sigmoid; all float64."""
    x = x.float().to(DEVICE).contiguous()
    mean, root, sigma = (torch.empty_like(x) for _ in range(3))
    forms_kernel[(x.shape[1] // 256,)](x, mean, root, sigma, x.shape[1], SLOPE=SLOPE, N=256)
    return mean.double().cpu(), root.double().cpu() / SLOPE / 2, sigma.double().cpu()


def softplus(x):
    return torch.nn.functional.softplus(x.double() * np.log(2)) / np.log(2)


def test_short_forms():
    x = torch.linspace(-70, 70, 16 * 256).view(16, 256)
    rough, short, sigma = forms(x)
    exact = softplus(x)
    assert (short - exact)[x >= 2].abs().max() < 8e-4
    assert (short - exact)[x >= 1].abs().max() < 2.1e-2
    assert (short <= exact + 1e-6)[x < 1].all()
    assert (short[x < -2] == 0).all()  # below any threshold
    assert (sigma - torch.sigmoid(x.double() * np.log(2))).abs().max() < 1e-6
    assert ((rough - exact).abs() < 3e-3 + x.abs() * 2.0**-10 + 4e-3).all()


@triton.jit
def there_and_back_kernel(line_ptr, form, N: tl.constexpr):
    at = tl.arange(0, N)
    slope, intercept = line_of_form(tl.load(line_ptr + at), tl.load(line_ptr + N + at), form)
    slope, intercept = general_line(slope, intercept, form)
    tl.store(line_ptr + at, slope)
    tl.store(line_ptr + N + at, intercept)


@pytest.mark.parametrize("form", [GENERAL, SHORT, LINEAR])
def test_general_line_is_the_inverse_of_line_of_form(form):
    line = torch.randn(2, 64, device=DEVICE)
    made = line.clone()
    there_and_back_kernel[(1,)](made, form.value, N=64)
    torch.testing.assert_close(made, line, rtol=0, atol=8 * 2.0**-24 * line.abs().max().item())


@triton.jit
def backward_kernel(x_ptr, out_ptr, slope, intercept, form, plane, P: tl.constexpr, ALWAYS_LINEAR: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 256 + tl.arange(0, 256)[None, :]
    x = tl.load(x_ptr + at)
    slope, intercept = line_of_form(slope, intercept, form)
    weight, y, th = short_key_weights(x * TANH_SCALE, slope, intercept, form, P, ALWAYS_LINEAR)
    g, g_sigma, half_sigma = short_query_terms(x, x * 0.0 + 0.75, slope, intercept, 1.0, 0.25, form, P, ALWAYS_LINEAR)
    tl.store(out_ptr + at, weight)
    tl.store(out_ptr + plane + at, y)
    tl.store(out_ptr + 2 * plane + at, short_score_gradient(y * 0.0 + 0.5, y * 0.0 + 1.0, y * 0.0, th))
    tl.store(out_ptr + 3 * plane + at, g.to(tl.float32))
    tl.store(out_ptr + 4 * plane + at, g_sigma.to(tl.float32))
    tl.store(out_ptr + 5 * plane + at, half_sigma.to(tl.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 15, 16, 21])
def test_short_forms_of_the_backward(p, form):
    """Against float64 in a row whose largest score is 40 and whose mean is 6; hidden keys and far ones have nothing."""
    x = torch.linspace(-60, 40, 16 * 256).view(16, 256)
    x[0, :3] = -1e30
    slope = 2 ** (-1 / p) / (2 * (40 - 6))
    out = torch.full((6, 16, 256), torch.nan, device=DEVICE)
    backward_kernel[(1,)](
        x.to(DEVICE), out, slope, -12 * slope, (SHORT if form == "short" else LINEAR).value, 16 * 256, P=p,
        ALWAYS_LINEAR=form == "always linear",
    )  # fmt: skip
    weight, y, sigma, g, g_sigma, half_sigma = out.double().cpu()
    a = softplus(x) if form == "short" else x.double().clamp_min(0)
    w = (2 * slope * a - 12 * slope).clamp(0, 1)
    right_sigma = torch.sigmoid(x.double() * np.log(2))
    right_y = torch.where(w > 0, w ** (p - 1), 0)
    # softplus off by 6e-4 (tanh.approx: 2^-11), then the power; values of a half type below 2^-14 lose digits
    root = 2 * slope * 6e-4
    near = p * root / w.clamp_min(root) + 2.0**-20
    assert ((weight - w * right_y).abs() <= near * w * right_y + root**p + 1e-30).all()
    away = w > 20 * root
    assert ((y - right_y).abs() <= near * right_y + 1e-30)[away].all()
    halves = near + (p + 8) * 2.0**-11
    for ours, right in ((g, 0.5 * right_y), (g_sigma, 0.5 * right_y * right_sigma)):
        assert ((ours - right).abs() <= halves * right + 2.0**-24)[away].all()
        assert (ours[w == 0] == 0).all()
    for ours in (sigma, half_sigma):
        assert (ours - right_sigma).abs().max() < 2.0**-11
        assert (ours[0, :3] == 0).all()


@triton.jit
def form_kernel(line_ptr, inside_ptr, form_ptr, rows, P: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = tl.load(inside_ptr + at) > 0
    tl.store(
        form_ptr + tl.program_id(0), form_of_rows(tl.load(line_ptr + at), tl.load(line_ptr + rows + at), inside, P)
    )


def forms_of(mean, largest, p, block, inside=None):
    """Of blocks of so many rows with these means and largest softplus, float64."""
    slope = 2 ** (-1 / p) / (2 * (largest - mean))
    line = torch.stack([slope, -2 * mean * slope]).float().to(DEVICE)
    rows = len(mean)
    form = torch.full((rows // block,), -1, dtype=torch.int32, device=DEVICE)
    inside = torch.ones(rows) if inside is None else inside
    form_kernel[(rows // block,)](line, inside.int().to(DEVICE), form, rows, P=p, N=block)
    return form.cpu()


def test_form_of_rows():
    """The row that needs the most decides, if it is there; a row with NaN takes no part."""
    linear = torch.tensor((3.0, 30.0), dtype=torch.float64).repeat(64, 1)
    assert forms_of(*linear.T, 15, 64).item() == LINEAR.value
    assert forms_of(*linear.T, 3, 64).item() == SHORT.value  # a small power leaves weight to small scores
    for row, form in (((3.0, 10.0), SHORT), ((1.0, 1.1), GENERAL), ((np.nan, 30.0), LINEAR)):
        mixed = linear.clone()
        mixed[17] = torch.tensor(row)
        assert forms_of(*mixed.T, 15, 64).item() == form.value
        assert forms_of(*mixed.T, 15, 64, torch.arange(64) != 17).item() == LINEAR.value


@pytest.mark.parametrize("deviation", [2.0, 4.0, 6.0, 10.0])
def test_the_mean_in_half_arithmetic(deviation):
    x = torch.randn(16, 2048, generator=seeded(0)) * deviation
    assert abs((forms(x)[0] - softplus(x)).mean()) < 3e-4


@pytest.mark.parametrize(
    ("n", "d", "p"),
    [
        (140, 64, 15),
        (140, 128, 15),
        (16384, 64, 3),
        (1024, 128, 15),
        (1024, 128, 63),
        (16384, 128, 3),
        (16384, 128, 15),
    ],
)
def test_weights_of_random_rows(n, d, p):
    """Cosines of random vectors: all rows are steep, and both forms together change the weights by 5e-5 at most."""
    exact, rough, short = random_scores(n, d)
    tau, largest = exact.mean(1, keepdim=True), exact.amax(1, keepdim=True)
    assert ((softplus(torch.tensor(2.0)) - tau) / (largest - tau) <= 2 ** (-24 / p)).all()
    assert (2 * (largest - tau) >= 4).all()
    right, ours = weights(exact, tau, largest, p), weights(short, rough.mean(1, keepdim=True), largest, p)
    assert (ours - right).norm() < 5e-5 * right.norm()


def random_scores(n, d):
    """Exact softplus, that of half arithmetic and the short one, [16, n], of cosines of random vectors."""
    size = 1 << (n - 1).bit_length()
    x = torch.randn(16, size, generator=seeded(1)) * (np.log(d) * np.log2(n) / d**0.5)
    rough, short, _ = forms(x)
    return softplus(x)[:, :n], rough[:, :n], short[:, :n]


def weights(a, tau, largest, p):
    w = ((a - tau).clamp_min(0) / (largest - tau)) ** p
    return w / w.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("n", "d", "p"), [(512, 64, 15), (1024, 128, 15), (1024, 128, 63), (4096, 64, 7), (16384, 128, 15)]
)
def test_linear_weights_of_random_rows(n, d, p):
    """Rows of form LINEAR: scores in place of their softplus change the weights by 2e-3 of a row's norm at most."""
    x = torch.randn(256, n, generator=seeded(1)).double() * (np.log(d) * np.log2(n) / d**0.5)
    exact = softplus(x)
    tau, largest = exact.mean(1, keepdim=True), exact.amax(1, keepdim=True)
    linear = forms_of(tau[:, 0], largest[:, 0], p, 1) == LINEAR.value
    assert linear.float().mean() > 0.9
    right, ours = weights(exact, tau, largest, p), weights(x, tau, largest, p)
    errors = ((ours - right).norm(dim=1) / right.norm(dim=1))[linear]
    assert errors.max() < 2e-3
    assert errors.square().mean() < 6e-4**2
