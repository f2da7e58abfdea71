"""The law that predicted forces obey: exponents with standard errors, and formulas by symbolic regression.

All functions take numpy arrays, one entry a system: entries are independent, so ordinary standard errors hold.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

NEWTON = {"m1": 1.0, "m2": 1.0, "r": -2.0}
"""log F = log G + log m1 + log m2 - 2 log r."""

OPERATORS = {"arithmetic": ("add", "mul", "div"), "original": ("add", "mul", "div", "sin", "cos", "exp")}
"""Operators of formulas: `original` is the set of Vafa et al. (their inv is our div)."""

Engine = Literal["operon", "pysr"]


@dataclass(frozen=True)
class Points:
    """Points from which a law is fitted: a state of each system, and the predicted (or true) force there."""

    m1: np.ndarray  # the planet, or first body
    m2: np.ndarray  # the star, or second body
    r: np.ndarray
    log_force: np.ndarray

    def with_force(self, log_force: np.ndarray) -> Points:
        return Points(self.m1, self.m2, self.r, np.asarray(log_force, dtype=np.float64))

    def features(self) -> np.ndarray:
        return np.stack([self.m1, self.m2, self.r], 1).astype(np.float64)


def exponents(points: Points) -> dict[str, Any]:
    """Least squares of log F on log m1, log m2, log r, with standard errors that allow for unequal variances (HC1).

    `error` is the largest distance of an exponent from Newton's; `power_law_r2` says how far F is a power law at all.
    """
    X = np.column_stack([np.ones(len(points.r)), np.log(points.features())])
    y = points.log_force.astype(np.float64)
    inverse = np.linalg.pinv(X.T @ X)
    c = inverse @ X.T @ y
    left = y - X @ c
    spread = inverse @ (X.T * left**2) @ X @ inverse * len(y) / max(1, len(y) - X.shape[1])
    errors = np.sqrt(np.diag(spread))
    result: dict[str, Any] = {name: float(c[i + 1]) for i, name in enumerate(NEWTON)}
    result["standard_errors"] = {name: float(errors[i + 1]) for i, name in enumerate(NEWTON)}
    result["constant"] = float(np.exp(c[0]))
    result["power_law_r2"] = r_squared(X @ c, y)
    result["error"] = max(abs(result[name] - wanted) for name, wanted in NEWTON.items())
    return result


def r_squared(predicted: np.ndarray, true: np.ndarray) -> float:
    true = np.asarray(true, dtype=np.float64)
    return float(1 - np.mean((predicted - true) ** 2) / np.var(true))


def nearest_neighbours(
    known: np.ndarray, values: np.ndarray, asked: np.ndarray, k: int = 2, rows: int = 256
) -> np.ndarray:
    """The original's oracle: mean value of the k nearest known states, each coordinate standardised."""
    mean, deviation = known.mean(0), known.std(0) + 1e-12
    a, b = (torch.from_numpy(((x - mean) / deviation).astype(np.float32)) for x in (known, asked))
    squares, of = a.square().sum(1), torch.from_numpy(np.ascontiguousarray(values))
    near = [(squares - 2 * part @ a.T).topk(min(k, len(a)), largest=False).indices for part in b.split(rows)]
    return of[torch.cat(near)].mean(1).numpy()


# Symbolic regression. Every variable is put in units of its geometric mean first: constants in the strings are then
# of order one in any units, and a power law stays one.


def symbolic_laws(
    points: Points, draws: int = 5, size: int = 1000, seed: int = 0, engine: Engine = "operon",
    operators: tuple[str, ...] = tuple(OPERATORS), max_length: int = 20,
) -> list[dict[str, Any]]:  # fmt: skip
    """A law from each of several random draws of `size` points: the string, its size, R^2 on the points not drawn.

    Formulas are fitted to F, not to log F, as in the original: the few strongest forces weigh most.
    """
    X = points.features()
    X = X / np.exp(np.log(X).mean(0))
    F = np.exp(points.log_force - points.log_force.mean())
    found = []
    for name in operators:
        for draw in range(draws):
            chosen = np.random.default_rng([seed, draw]).permutation(len(F))
            inside, outside = chosen[:size], chosen[size:]
            elsewhere = outside if len(outside) >= 50 else inside
            search = _operon if engine == "operon" else _pysr
            text, length = search(X[inside], F[inside], OPERATORS[name], draw, max_length)
            expression = parse(text)
            is_law, offset = newton_form(expression)
            r2 = r_squared(_evaluate(expression, X[elsewhere]), F[elsewhere])
            found.append(
                {"operators": name, "draw": draw, "law": shorten(expression), "found": text, "size": length, "r2": r2,
                 "newton": is_law, "offset": offset}
            )  # fmt: skip
    return found


def _operon(
    X: np.ndarray, F: np.ndarray, operators: tuple[str, ...], seed: int, max_length: int
) -> tuple[str, int]:  # fmt: skip
    """Of the best formulas of every length, the one that PySR's score picks: the steepest fall of the log error."""
    try:
        from pyoperon.sklearn import SymbolicRegressor
    except ImportError as error:
        raise ImportError("symbolic regression needs pyoperon: pip install 'lssar[newton]'") from error
    regressor = SymbolicRegressor(
        allowed_symbols=",".join((*operators, "constant", "variable")), max_length=max_length, generations=40,
        population_size=300, optimizer_iterations=5, objectives=["r2", "length"], n_threads=1, random_state=seed,
    )  # fmt: skip
    regressor.fit(X, F)
    front = sorted(regressor.pareto_front_, key=lambda row: row["tree"].Length)
    best, steepest = front[0]["tree"], -np.inf
    for shorter, longer in itertools.pairwise(front):
        errors = [max(float(row["mean_squared_error"]), 1e-12) for row in (shorter, longer)]
        fall = np.log(errors[0] / errors[1]) / max(1, longer["tree"].Length - shorter["tree"].Length)
        if fall > steepest:
            best, steepest = longer["tree"], fall
    return regressor.get_model_string(best, precision=6, names=list(NEWTON)), int(best.Length)


def _pysr(
    X: np.ndarray, F: np.ndarray, operators: tuple[str, ...], seed: int, max_length: int
) -> tuple[str, int]:  # fmt: skip
    """The original's engine and settings; downloads a Julia where there is none."""
    try:
        from pysr import PySRRegressor
    except ImportError as error:
        raise ImportError("engine='pysr' needs PySR and a Julia runtime: pip install pysr") from error
    regressor = PySRRegressor(
        niterations=100, binary_operators=["+", "*"], unary_operators=[*operators[3:], "inv(x) = 1/x"],
        extra_sympy_mappings={"inv": lambda x: 1 / x}, maxsize=max_length, random_state=seed, parallelism="serial",
        elementwise_loss="loss(prediction, target) = max(1e-8, abs(prediction - target)) - 1e-8", deterministic=True,
        model_selection="score", progress=False, verbosity=0,
    )  # fmt: skip
    regressor.fit(X, F, variable_names=list(NEWTON))
    best = regressor.get_best()
    return str(best["sympy_format"]), int(best["complexity"])


def parse(text: str) -> Any:
    import sympy

    return sympy.sympify(text, locals=_symbols())


def _symbols() -> dict[str, Any]:
    import sympy

    return {name: sympy.Symbol(name, positive=True) for name in NEWTON}


def newton_form(expression: Any) -> tuple[bool, float]:
    """Whether it is c m1 m2 / r^2 + d with c > 0, algebraically; and d, where the geometric mean of F is 1.

    Operon fits a factor and an additive constant to every formula. The constant says how far the strongest forces are
    missed; whether it is small is for the reader to see.
    """
    import sympy

    s = _symbols()
    offset, rest = sympy.expand(expression).as_coeff_Add()
    ratio = sympy.simplify(rest * s["r"] ** 2 / (s["m1"] * s["m2"]))
    return bool(ratio.is_number and ratio.is_real and ratio > 0), float(offset)


def shorten(expression: Any, digits: int = 3) -> str:
    """The formula with constants collected and rounded to a few digits."""
    import sympy

    return str(sympy.N(sympy.factor_terms(sympy.simplify(expression)), digits))


def _evaluate(expression: Any, X: np.ndarray) -> np.ndarray:
    import sympy

    with np.errstate(all="ignore"):
        value = sympy.lambdify(list(_symbols().values()), expression, "numpy")(*X.T)
        return np.nan_to_num(np.broadcast_to(np.asarray(value, dtype=np.float64), len(X)), posinf=1e30, neginf=-1e30)
