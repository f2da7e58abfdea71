"""What docs/derivations.md says of steep rows: the shorter forms, and what they do to weights."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from lssar.ops.fused.steep import (  # noqa: E402
    left_and_right,
    pairs_of,
    root_and_sigmoid,
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
