"""Newton's law: how laws are fitted to predictions."""

import sys

import numpy as np
import pytest

from lssar.experiments.newton import law
from lssar.experiments.newton.law import Points, exponents, nearest_neighbours, newton_form, parse, symbolic_laws


def some_points(count=2000, noise=0.0, powers=(1.0, 1.0, -2.0), seed=0):
    rng = np.random.default_rng(seed)
    m1, m2, r = np.exp(rng.uniform(-1, 1, (3, count)))
    log_force = np.log(7.0) + powers[0] * np.log(m1) + powers[1] * np.log(m2) + powers[2] * np.log(r)
    return Points(m1, m2, r, log_force + noise * rng.standard_normal(count))


def test_exponents_of_a_known_law():
    fit = exponents(some_points())
    assert [fit[name] for name in ("m1", "m2", "r")] == pytest.approx([1, 1, -2])
    assert fit["constant"] == pytest.approx(7)
    assert fit["error"] < 1e-9
    assert fit["power_law_r2"] == pytest.approx(1)
    wrong = exponents(some_points(powers=(1.0, 0.0, -2.0)))  # the law that the paper reports, F ~ m1 / r^2
    assert wrong["error"] == pytest.approx(1)


def test_standard_errors_cover_the_truth():
    fits = [exponents(some_points(400, noise=0.3, seed=seed)) for seed in range(200)]
    for name, true in (("m1", 1), ("r", -2)):
        away = np.array([(fit[name] - true) / fit["standard_errors"][name] for fit in fits])
        assert 0.9 < np.mean(np.abs(away) < 1.96) < 0.99


def test_nearest_neighbours():
    rng = np.random.default_rng(0)
    known, values = rng.standard_normal((500, 3)) * [1, 100, 0.01], rng.standard_normal(500)
    assert nearest_neighbours(known, values, known, k=1) == pytest.approx(values)
    two = nearest_neighbours(known, values, known[:7], k=2)
    scaled = (known - known.mean(0)) / known.std(0)
    for i in range(7):
        near = np.argsort(((scaled - scaled[i]) ** 2).sum(1))[:2]
        assert two[i] == pytest.approx(values[near].mean())


@pytest.mark.parametrize(
    ("text", "newton"),
    [
        ("m1*m2/r**2", True),
        ("((0.9154 * m2) / (0.8422 * r)) / ((1.3293 * r) / (1.2164 * m1))", True),
        ("(0.0076 + (0.9986 * (((-0.5 * m1) / (0.93 * r)) * ((-0.8 * m2) / (1.2 * r)))))", True),
        ("m1/(r*r/m2)", True),
        ("m1/r**2", False),
        ("m1*m2/(r*(r + 0.001))", False),
        ("-1.0*m1*m2/r**2", False),
        ("m1*m2/r**2 + 0.1*m1", False),
        ("sin(m1*m2/r**2)", False),
        ("2.5", False),
    ],
)  # fmt: skip
def test_is_it_newtons_law(text, newton):
    pytest.importorskip("sympy")
    assert newton_form(parse(text))[0] == newton


def test_symbolic_regression_finds_a_clean_law_in_any_units():
    pytest.importorskip("pyoperon")
    points = some_points(600, noise=0.01)
    found = symbolic_laws(Points(1e-5 * points.m1, points.m2, 30 * points.r, points.log_force - 12), draws=1, size=400)[
        0
    ]
    assert found["newton"], found
    assert found["r2"] > 0.99
    assert abs(found["offset"]) < 0.05
    assert {"law", "found", "size", "draw", "operators"} <= set(found)


def test_pysr_is_asked_as_in_the_original(monkeypatch):
    """PySR downloads a Julia runtime, so a stand-in takes its place: what it is given, what is made of its answer."""
    pytest.importorskip("sympy")
    asked = {}

    class Stub:
        def __init__(self, **settings):
            asked.update(settings)

        def fit(self, X, F, variable_names):
            asked["names"] = variable_names

        def get_best(self):
            return {"sympy_format": "1.0*m1*m2/r**2", "complexity": 9}

    module = type(sys)("pysr")
    module.PySRRegressor = Stub
    monkeypatch.setitem(sys.modules, "pysr", module)
    found = symbolic_laws(some_points(200), draws=2, size=100, engine="pysr")
    assert [(row["operators"], row["newton"]) for row in found] == [("arithmetic", True)] * 2 + [("original", True)] * 2
    assert asked["unary_operators"] == ["sin", "cos", "exp", "inv(x) = 1/x"]
    assert (asked["maxsize"], asked["binary_operators"], asked["names"]) == (20, ["+", "*"], ["m1", "m2", "r"])
    monkeypatch.setitem(sys.modules, "pysr", None)
    with pytest.raises(ImportError, match="needs PySR and a Julia"):
        symbolic_laws(some_points(200), draws=1, size=100, engine="pysr")


def test_without_the_extra_there_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyoperon.sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'lssar\[newton\]'"):
        law.symbolic_laws(some_points(100), draws=1, size=50)
