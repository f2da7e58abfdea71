"""The helpers that other tests rest on: the error bound, and the choice of combinations."""

import itertools
from pathlib import Path

import pytest
import torch

import lssar
from tests.helpers import (
    ALL_SPECS,
    LEARNED,
    assert_within_twice_eager,
    by_field,
    eager,
    eager_runs,
    field_kinds,
    qkv,
    views,
    with_gradients,
)

ROOT = Path(__file__).parent.parent


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


def test_combinations_by_field_miss_no_pair():
    specs, seen, many = ALL_SPECS | LEARNED, list(views(1, 4, 19)), (False, True)
    rows = by_field(specs, seen, many)
    assert len(rows) < len(specs) * len(seen) * len(many) / 3
    assert {(view, cut) for _, view, cut in rows} == set(itertools.product(seen, many))
    assert {(name, "mask" in view) for name, view, _ in rows} == set(itertools.product(specs, many))
    kinds = {name: field_kinds(spec) for name, spec in specs.items()}
    for kind, view in itertools.product({kind for found in kinds.values() for kind in found}, seen):
        assert any(kind in kinds[name] and at == view for name, at, _ in rows), (kind, view)


def test_no_numeric_test_is_missing_under_other_instruction_sets(tmp_path, capsys):
    from tests import portable

    listed = {*portable.KERNELS, *portable.MODELS}
    compiling = {f"tests/ops/test_{name}.py" for name in ("hopper", "launch", "tune")}
    assert {f"tests/ops/{path.name}" for path in (ROOT / "tests/ops").glob("test_*.py")} <= listed | compiling
    assert all((ROOT / path).exists() for path in listed)
    assert (
        portable.main(["--settings", "no-native", "--workers", "0", "--out", str(tmp_path), "--", "tests/nowhere.py"])
        == 1
    )
    assert "1 of 1 settings failed" in capsys.readouterr().out
