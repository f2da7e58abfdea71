import math

import pytest
import torch

import lssar
from lssar.nn import LayerCache, add_alibi, alibi_slopes, ntk_base, rotary_angles, rotate


def test_rotation_keeps_norms_and_depends_on_distance_only():
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        angles = [rotary_angles(torch.tensor([at]), 16, 10_000.0) for at in (i, j)]
        return float((rotate(q, angles[0]) * rotate(k, angles[1])).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    rotated = rotate(q, rotary_angles(torch.tensor([9]), 16, 10_000.0))
    torch.testing.assert_close(rotated.norm(), q.norm(), rtol=1e-6, atol=0)


def test_ntk_stretches_the_slowest_wave_by_the_factor():
    """base * s^(d / (d - 2)): the lowest frequency, base^-(d-2)/d, falls by s; the highest stays 1."""
    d, base, s = 64, 10_000.0, 8.0
    slow = lambda b: b ** (-(d - 2) / d)  # noqa: E731
    assert slow(base) / slow(ntk_base(base, s, d)) == pytest.approx(s)
    assert ntk_base(base, 0.5, d) == base


def test_alibi_slopes():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert len(alibi_slopes(12)) == 12
    assert len(set(alibi_slopes(12).tolist())) == 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_alibi_adds_its_bias(dtype):
    """Against the bias written out densely, at positions that bfloat16 cannot hold in one number."""
    heads, length, d = 4, 600, 16
    q, k, v = (torch.randn(1, heads, length, d).to(dtype) for _ in range(3))
    slopes = alibi_slopes(heads)
    o = lssar.attention(*add_alibi(q, k, slopes), v, "softmax")
    i = torch.arange(length)
    bias = slopes[:, None, None].double() * (i[None, :] - i[:, None])
    s = q.double() @ k.double().mT / math.sqrt(d) + bias
    exact = s.masked_fill(i[None, :] > i[:, None], -torch.inf).softmax(-1) @ v.double()
    tolerance = 1e-6 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(o.double(), exact, atol=tolerance, rtol=tolerance)


def test_cache_keeps_order_and_refuses_to_overflow():
    cache = LayerCache(room=5)
    x = torch.arange(10.0).view(1, 1, 5, 2)
    (seen,) = cache.append(x[:, :, :3])
    assert seen.shape[2] == 3
    (seen,) = cache.append(x[:, :, 3:])
    assert torch.equal(seen, x)
    with pytest.raises(ValueError, match=r"room for 5 tokens; 5 \+ 1 do not fit"):
        cache.append(x[:, :, :1])
