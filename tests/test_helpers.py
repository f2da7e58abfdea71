"""The bound that the other tests rest on must be one that wrong results do not pass."""

import pytest
import torch

import lssar
from tests.helpers import assert_within_twice_eager, eager, eager_runs, qkv, with_gradients


def test_results_beyond_the_bound_do_not_pass_and_no_more_is_computed_than_it_takes():
    spec, inputs, do = lssar.spec("lssar"), qkv(dtype=torch.float32, grad=False), torch.randn(2, 4, 19, 6)
    exact = with_gradients(lambda *x: eager(*x, spec, torch.float64), inputs, do)
    runs = eager_runs(inputs, do, spec, torch.float32, exact)
    assert_within_twice_eager(exact, runs, exact, eps=2.0**-24)
    assert len(list(runs)) == 8  # of nine
    for index, name in enumerate(("o", "dq", "dk", "dv")):
        off = [x * (1 + 1e-3 * (i == index)) for i, x in enumerate(exact)]
        with pytest.raises(AssertionError, match=f"root mean square error of {name} is"):
            assert_within_twice_eager(off, eager_runs(inputs, do, spec, torch.float32, exact), exact, eps=2.0**-24)
    one = exact[0].clone()
    one[0, 0, 0, 0] += 1e-3
    with pytest.raises(AssertionError, match="error of o is"):
        assert_within_twice_eager(
            (one, *exact[1:]), eager_runs(inputs, do, spec, torch.float32, exact), exact, eps=2.0**-24
        )
