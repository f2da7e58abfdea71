"""An attention mechanism as a value, and the table of every mechanism of the paper and its controls.

Nothing outside this file knows a mechanism by name: the implementations read the fields of an `AttentionSpec`.
With S the scores, M' the visible entries and n_i the number of keys that row i may see, a row is made in four steps:

    score       s_ij = scale * [log n_i] * [g_h] * q_i.k_j      (q, k L2-normalised first when `cosine`; g_h learned)
    activation  a_ij = phi(s_ij + b_i) on visible entries, 0 elsewhere
    normalise   A_i  = a_i / divisor_i, then optionally re-centred, negated
    re-weight   A_i  = l1(ReLU(n_i A_i - o_i)^p), o_i = `threshold` (1 in the paper), but 0 where n_i <= 3

`docs/mechanism.md` maps each equation and table of the paper to its line here.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy

from lssar.configs import check_fields

Scale = Literal["rsqrt_d", "log_d"]
Activation = Literal["identity", "exp", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"]
Bias = Literal["none", "-log_L", "-log_n"]
Divisor = Literal["none", "l1", "L", "n", "sqrt_n"]
Recentre = Literal["none", "mean", "mean_l1"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """How one attention row is computed. Immutable, hashable, comparable; make variants with `replace`."""

    name: str
    cosine: bool = False
    """L2-normalise q and k per head, so that only directions matter."""
    scale: Scale = "rsqrt_d"
    """`rsqrt_d`: 1 / sqrt(d). `log_d`: the natural log of d, as LSSA has it."""
    log_n: bool = False
    """Multiply the scores of row i by log n_i."""
    head_scale: float | None = None
    """Initial value of a learned factor of the scores, one per query head (SSMax, or a gain); None: no such factor."""
    activation: Activation = "exp"
    bias: Bias = "none"
    """Added to the scores: `-log_L` is a constant from `train_length`, `-log_n` follows the row."""
    divisor: Divisor = "l1"
    """`l1`: the row's absolute sum. `L`: `train_length`. `n`: n_i. `sqrt_n`: gamma * sqrt(n_i / 2). `none`: 1."""
    gamma: float = 1.0
    """The constant of the `sqrt_n` divisor (Shen 2023); the paper does not give its value."""
    train_length: int = 1024
    """The L of the formulas that name one. A constant, so that a row never depends on what comes after it."""
    recentre: Recentre = "none"
    """Subtract the row's mean over its visible entries (rows with n_i <= 3 stay), then optionally l1 again."""
    negate: bool = False
    """Use the negative of the weights (the inverse softmax of Table 1)."""
    p: float | None = None
    """Power of the re-weighting, >= 1; None: no re-weighting."""
    threshold: float = 1.0
    """What the re-weighting subtracts, in means of the row. Above 1, a row may end up with no weight at all."""
    learned_threshold: bool = False
    """Whether the threshold is learned, one per query head, starting from `threshold`."""

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string; got {self.name!r}")
        for field in ("cosine", "log_n", "negate", "learned_threshold"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False; got {getattr(self, field)!r}")
        for field in ("gamma", "train_length", "head_scale", "p", "threshold"):
            object.__setattr__(self, field, plain_number(getattr(self, field)))
        if not is_number(self.gamma) or not self.gamma > 0:
            raise ValueError(f"gamma must be a finite number > 0; got {self.gamma!r}")
        if not isinstance(self.train_length, int) or isinstance(self.train_length, bool) or self.train_length < 1:
            raise ValueError(f"train_length must be an integer >= 1; got {self.train_length!r}")
        if self.head_scale is not None and not is_number(self.head_scale):
            raise ValueError(f"head_scale must be a finite number or None; got {self.head_scale!r}")
        if not is_number(self.threshold) or not self.threshold >= 0:
            raise ValueError(f"threshold must be a finite number >= 0; got {self.threshold!r}")
        if self.p is None:
            if self.threshold != 1 or self.learned_threshold:
                raise ValueError(f"a threshold is part of the re-weighting, and {self.name!r} has none (its p is None)")
        else:
            check_power(self.p)
            if self.divisor != "l1" or self.recentre != "none" or self.negate:
                raise ValueError(
                    "re-weighting needs a normalised mechanism (divisor='l1', not re-centred, not negated); "
                    f"{self.name!r} has divisor={self.divisor!r}, recentre={self.recentre!r}, negate={self.negate}"
                )
        # Made here and not on demand, so that torch.compile sees one constant.
        object.__setattr__(self, "_literal", repr(dataclasses.asdict(self)))

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed; an unknown field is a ValueError."""
        if not changes:  # also what torch.compile sees of a plain name
            return self
        check_fields(AttentionSpec, changes)
        return dataclasses.replace(self, **changes)

    def reweighted(self, p: float) -> AttentionSpec:
        """This mechanism followed by the paper's re-weighting (Eq. 5) with power p."""
        return self.replace(p=p)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionSpec:
        """The inverse of `to_dict`; fields left out take their defaults."""
        check_fields(cls, fields)
        if "name" not in fields:
            raise ValueError("an AttentionSpec needs a name")
        return cls(**fields)

    @property
    def literal(self) -> str:
        """`to_dict` as a Python literal, the form in which registered operators take a spec."""
        return self._literal  # type: ignore[attr-defined]

    @classmethod
    def from_literal(cls, text: str) -> AttentionSpec:
        return cls.from_dict(ast.literal_eval(text))

    def __repr__(self) -> str:
        shown = [repr(self.name)]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"AttentionSpec({', '.join(shown)})"

    @property
    def learns(self) -> bool:
        """Whether a layer keeps learned numbers for the mechanism, one or two per query head."""
        return self.head_scale is not None or self.learned_threshold

    @property
    def signed(self) -> bool:
        """Whether the activation can be negative, so that |a| and a differ."""
        return self.activation in ("identity", "gelu", "mish")


_CHOICES: dict[str, tuple[str, ...]] = {
    "scale": get_args(Scale),
    "activation": get_args(Activation),
    "bias": get_args(Bias),
    "divisor": get_args(Divisor),
    "recentre": get_args(Recentre),
}


LARGEST_NUMBER = 3.4e38
"""What float32 holds: the implementations compute with these numbers in float32."""

LARGEST_POWER = 2**24
"""Beyond, the powers of two neighbouring float32 numbers differ by more than a factor e: weights would be rounding."""


def plain_number(value: Any) -> Any:
    """A number of numpy's as Python's own; anything else unchanged."""
    if isinstance(value, numpy.generic) and not isinstance(value, numpy.bool_):
        return value.item()
    return value


def is_number(value: Any) -> bool:
    """Whether it is an int or float that is finite in float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def check_power(p: Any) -> None:
    """ValueError unless p is a power that re-weighting takes."""
    if not is_number(p) or not 1 <= p <= LARGEST_POWER:
        shown = "an integer too large for a float" if isinstance(p, int) and p > LARGEST_NUMBER else repr(p)
        raise ValueError(f"p must be a finite number >= 1 (at most {LARGEST_POWER}), or None for none; got {shown}")


def _table(*specs: AttentionSpec) -> dict[str, AttentionSpec]:
    return {spec.name: spec for spec in specs}


_LSSA = AttentionSpec(name="lssa", cosine=True, scale="log_d", log_n=True, activation="softplus")

# fmt: off
_SPECS: dict[str, AttentionSpec] = _table(
    # Table 1: does softmax need to be positive, or to sum to one?
    AttentionSpec(name="softmax"),
    AttentionSpec(name="softmax_inverse", negate=True),
    AttentionSpec(name="softmax_recentred", recentre="mean"),
    AttentionSpec(name="softmax_recentred_l1", recentre="mean_l1"),
    # Table 2, scenarios I to III (IV is softmax): without and with exp, without and with l1
    AttentionSpec(name="raw", activation="identity", divisor="none"),
    AttentionSpec(name="exp", divisor="none"),
    AttentionSpec(name="raw_l1", activation="identity"),
    # Table 3, Eq. 3: l1 of another activation
    AttentionSpec(name="l1_relu", activation="relu"),  # also Li 2022 in Table 4
    AttentionSpec(name="l1_relu2", activation="relu2"),
    AttentionSpec(name="l1_relu6", activation="relu6"),
    AttentionSpec(name="l1_gelu", activation="gelu"),
    AttentionSpec(name="l1_sigmoid", activation="sigmoid"),
    AttentionSpec(name="l1_softplus", activation="softplus"),
    AttentionSpec(name="l1_mish", activation="mish"),
    # Table 4: Ramapuram 2024 as published, with the bias changed, and with l1; Wortsman 2023; Shen 2023
    AttentionSpec(name="sigmoid", activation="sigmoid", bias="-log_L", divisor="none"),
    AttentionSpec(name="sigmoid_n", activation="sigmoid", bias="-log_n", divisor="none"),
    AttentionSpec(name="sigmoid_n_l1", activation="sigmoid", bias="-log_n"),
    AttentionSpec(name="relu_wortsman", activation="relu", divisor="L"),
    AttentionSpec(name="relu_shen", activation="relu", divisor="sqrt_n"),
    # Eq. 4 and Eq. 5
    _LSSA,
    _LSSA.replace(name="lssar", p=15),
    # Controls that the paper lacks: LSSA's scores under softmax; SSMax, whose s starts at 1 / mean(log n), n <= 1024
    AttentionSpec(name="cosine_softmax", cosine=True, scale="log_d", log_n=True),
    AttentionSpec(name="ssmax", log_n=True, head_scale=0.168),
)
# fmt: on


def specs() -> tuple[str, ...]:
    """The names that `spec` knows."""
    return tuple(_SPECS)


def spec(base: str | AttentionSpec, /, **changes: Any) -> AttentionSpec:
    """The named mechanism, with fields changed if asked: `spec("lssar", p=3)`."""
    if isinstance(base, AttentionSpec):
        return base.replace(**changes)
    if not isinstance(base, str) or base not in _SPECS:
        raise ValueError(f"unknown attention spec {base!r}; known: {', '.join(_SPECS)}")
    return _SPECS[base].replace(**changes)


def parse_spec(text: str, p: float | None = None) -> AttentionSpec:
    """A mechanism as it is written on a command line: `lssar`, or with fields changed, `lssar,p=3`.

    `p` is the power of a re-weighted mechanism whose text has none; if not given, that of the table.
    """
    name, *changes = text.split(",")
    fields: dict[str, Any] = {}
    for change in changes:
        field, _, value = change.partition("=")
        if value in ("true", "false"):
            fields[field] = value == "true"
            continue
        try:
            fields[field] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: expected NAME or NAME,FIELD=NUMBER (or true, false), e.g. lssar,p=3") from None
    if p is not None and "p" not in fields and spec(name).p is not None:
        fields["p"] = p
    return spec(name, **fields)
