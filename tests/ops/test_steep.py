"""What docs/derivations.md says of steep rows: the shorter forms, and what they do to weights."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from lssar.ops.fused.steep import (  # noqa: E402
    TANH_SCALE,
    left_and_right,
    long_line,
    pairs_of,
    root_and_sigmoid,
    short_key_weights,
    short_line,
    short_query_terms,
    softplus_pairs,
)
from tests.helpers import seeded  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOPE = 2.0**-10


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
def there_and_back_kernel(line_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    slope, intercept = short_line(tl.load(line_ptr + at), tl.load(line_ptr + N + at))
    slope, intercept = long_line(slope, intercept)
    tl.store(line_ptr + at, slope)
    tl.store(line_ptr + N + at, intercept)


def test_long_line_is_the_inverse_of_short_line():
    line = torch.randn(2, 64, device=DEVICE)
    made = line.clone()
    there_and_back_kernel[(1,)](made, N=64)
    torch.testing.assert_close(made, line, rtol=0, atol=8 * 2.0**-24 * line.abs().max().item())


@triton.jit
def backward_kernel(x_ptr, out_ptr, slope, intercept, plane, P: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 256 + tl.arange(0, 256)[None, :]
    x = tl.load(x_ptr + at)
    slope, intercept = short_line(slope, intercept)
    weight, y, sigma = short_key_weights(x * TANH_SCALE, slope, intercept, P)
    g, g_sigma, half_sigma = short_query_terms(x, x * 0.0 + 0.75, slope, intercept, 1.0, 0.25, P)
    tl.store(out_ptr + at, weight)
    tl.store(out_ptr + plane + at, y)
    tl.store(out_ptr + 2 * plane + at, sigma)
    tl.store(out_ptr + 3 * plane + at, g.to(tl.float32))
    tl.store(out_ptr + 4 * plane + at, g_sigma.to(tl.float32))
    tl.store(out_ptr + 5 * plane + at, half_sigma.to(tl.float32))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 15, 16, 21])
def test_short_forms_of_the_backward(p):
    """Against float64 in a row whose largest score is 40 and whose mean is 6; hidden keys and far ones have nothing."""
    x = torch.linspace(-60, 40, 16 * 256).view(16, 256)
    x[0, :3] = -1e30
    slope = 2 ** (-1 / p) / (2 * (40 - 6))
    out = torch.full((6, 16, 256), torch.nan, device=DEVICE)
    backward_kernel[(1,)](x.to(DEVICE), out, slope, -12 * slope, 16 * 256, P=p)
    weight, y, sigma, g, g_sigma, half_sigma = out.double().cpu()
    w = (2 * slope * softplus(x) - 12 * slope).clamp(0, 1)
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
    size = 1 << (n - 1).bit_length()
    x = torch.randn(16, size, generator=seeded(1)) * (np.log(d) * np.log2(n) / d**0.5)
    rough, short, _ = forms(x)
    exact, rough, short = softplus(x)[:, :n], rough[:, :n], short[:, :n]
    tau, largest = exact.mean(1, keepdim=True), exact.amax(1, keepdim=True)
    assert ((softplus(torch.tensor(2.0)) - tau) / (largest - tau) <= 2 ** (-24 / p)).all()
    assert (2 * (largest - tau) >= 4).all()

    def weights(a, tau):
        w = ((a - tau).clamp_min(0) / (largest - tau)) ** p
        return w / w.sum(1, keepdim=True)

    right, ours = weights(exact, tau), weights(short, rough.mean(1, keepdim=True))
    assert (ours - right).norm() < 5e-5 * right.norm()
