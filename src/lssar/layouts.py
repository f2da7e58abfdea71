"""Layouts: which mechanism, window and positions each layer of a model has, as values and as text.

A layer is written `SPEC[@WINDOW][/rope|alibi|none]`, a layout as layers separated by spaces, `*TIMES` repeats one:

    lssar                            LSSAR over the whole context, rotary positions
    softmax@128                      softmax over the last 128 tokens
    lssa+lssar/none                  no positions; the first half of the heads LSSA, the second half LSSAR
    lssa:1+lssar:3                   a quarter of the heads LSSA, the others LSSAR
    softmax@128*3 lssar,p=31/none    three local layers, then a global one with another power

A model repeats its layout over its layers. In a layout the word `attention` stands for the recipe's `--attention`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from lssar.configs import check_fields
from lssar.specs import AttentionSpec, parse_spec, spec, specs

Position = Literal["rope", "alibi", "none"]
UNIFORM = "uniform"
MIXED_WINDOW, MIXED_LOCAL = 128, 3
MOST_LAYERS = 10_000
"""More than any model has; a layout of more is refused before its layers are made."""


@dataclass(frozen=True)
class HeadGroup:
    """Consecutive heads of a layer that share a mechanism: query heads and the key heads that they read."""

    spec: AttentionSpec
    heads: slice
    key_heads: slice
    learned: slice | None = None
    """Where the layer keeps the learned numbers of these heads; None: at `heads`."""


@dataclass(frozen=True, repr=False)
class LayerConfig:
    """The attention of one layer. `repr` shows it as it is written in a layout."""

    specs: tuple[AttentionSpec, ...]
    """One mechanism, or several that divide the heads between them."""
    shares: tuple[int, ...] = ()
    """Parts of the heads that each mechanism has; empty: equal parts."""
    window: int | None = None
    """How many tokens a row sees, its own included; None: all before it."""
    position: Position = "rope"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", self.shares or (1,) * len(self.specs))
        if not self.specs or len(self.shares) != len(self.specs):
            raise ValueError(f"a layer needs one share for each mechanism; got {len(self.specs)} and {self.shares}")
        if any(not isinstance(share, int) or share < 1 for share in self.shares):
            raise ValueError(f"shares of the heads must be integers >= 1; got {self.shares}")
        if self.window is not None and (not isinstance(self.window, int) or self.window < 1):
            raise ValueError(f"window must be an integer >= 1 or None; got {self.window!r}")
        if self.position not in get_args(Position):
            raise ValueError(f"position must be 'rope', 'alibi' or 'none'; got {self.position!r}")
        if self.position == "alibi":
            for s in self.specs:
                if s.cosine or s.log_n or s.activation != "exp" or s.divisor != "l1":
                    raise ValueError(f"alibi needs a dot-product softmax, which adds a bias to its scores; got {s!r}")

    @property
    def spec(self) -> AttentionSpec:
        """The mechanism of a layer that has only one."""
        if len(self.specs) > 1:
            raise ValueError(f"the layer {self} divides its heads between mechanisms; see `specs`")
        return self.specs[0]

    def groups(self, heads: int, key_heads: int) -> tuple[HeadGroup, ...]:
        """The heads of each mechanism. Query heads that share a key head must be of one group, or all groups must lie
        within one key head."""
        parts = sum(self.shares)
        if heads % parts:
            raise ValueError(f"{heads} heads do not divide into the {parts} parts of {mechanisms_text(self)!r}")
        size = heads // key_heads  # query heads of one key head
        found, first = [], 0
        for mechanism, share in zip(self.specs, self.shares):
            end = first + share * heads // parts
            if (first % size or end % size) and first // size != (end - 1) // size:
                raise ValueError(
                    f"{mechanisms_text(self)!r} gives heads {first} to {end - 1} to one mechanism, which divides a "
                    f"group of {size} query heads that share a key head; change key_heads or the shares"
                )
            found.append(HeadGroup(mechanism, slice(first, end), slice(first // size, -(-end // size))))
            first = end
        return tuple(found)

    def map(self, change: Callable[[AttentionSpec], AttentionSpec]) -> LayerConfig:
        """The layer with `change` applied to each of its mechanisms."""
        return dataclasses.replace(self, specs=tuple(map(change, self.specs)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {
            "specs": [s.to_dict() for s in self.specs], "shares": list(self.shares), "window": self.window,
            "position": self.position,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LayerConfig:
        """The inverse of `to_dict`."""
        check_fields(cls, fields)
        if "specs" not in fields:
            raise ValueError("a LayerConfig needs specs")
        mechanisms = tuple(AttentionSpec.from_dict(s) for s in fields["specs"])
        return cls(**{**fields, "specs": mechanisms, "shares": tuple(fields.get("shares", ()))})

    def __str__(self) -> str:
        window = "" if self.window is None else f"@{self.window}"
        return mechanisms_text(self) + window + ("" if self.position == "rope" else f"/{self.position}")

    def __repr__(self) -> str:
        return f"LayerConfig({str(self)!r})"


Pattern = tuple[LayerConfig, ...]


def parse_mechanisms(text: str, p: float | None = None) -> LayerConfig:
    """A layer from its mechanisms alone: `lssar,p=3`, `lssa+lssar`, `lssa:1+lssar:3`; `p` is as in `parse_spec`."""
    found, shares = [], []
    for part in text.split("+"):
        name, _, share = part.partition(":")
        if share and not share.isdecimal():
            raise ValueError(f"{text!r}: the share of {name!r} must be an integer; got {share!r}")
        found.append(parse_spec(name, p))
        shares.append(int(share or 1))
    return LayerConfig(tuple(found), tuple(shares))


_LAYER = re.compile(r"(?P<mechanisms>[^@/*]+)(@(?P<window>\d+))?(/(?P<position>\w+))?(\*(?P<times>\d+))?")
_MIXED = re.compile(r"mixed(@(?P<window>\d+))?(\*(?P<local>\d+))?")


def expand(text: str) -> str:
    """A layout without names and outer spaces: `uniform` is `attention`; `mixed[@WINDOW][*LOCAL]` is so many local
    softmax layers with that window and rotary positions, then `attention` without positions. Others stay as they are.
    """
    text = text.strip()
    if text == UNIFORM:
        return "attention"
    if found := _MIXED.fullmatch(text):
        window, local = found["window"] or MIXED_WINDOW, found["local"] or MIXED_LOCAL
        return f"softmax@{window}*{local} attention/none"
    return text


def parse_layout(text: str, attention: LayerConfig | None = None, p: float | None = None) -> Pattern:
    """The layers of a layout; `attention` gives the mechanisms that the word stands for, `p` is as in `parse_spec`."""
    pattern: list[LayerConfig] = []
    for word in expand(text).split():
        found = _LAYER.fullmatch(word)
        if found is None or found["position"] not in (None, *get_args(Position)):
            raise ValueError(
                f"layout {text!r}: {word!r} is no layer; wanted SPEC[@WINDOW][/rope|alibi|none][*TIMES], or one of the "
                f"layouts 'uniform' and 'mixed[@WINDOW][*LOCAL]'"
            )
        if found["mechanisms"] != "attention":
            layer = _mechanisms(found["mechanisms"], text, p)
        elif attention is not None:
            layer = attention
        else:
            raise ValueError(f"layout {text!r} leaves a mechanism open with the word `attention`; name one here")
        changes: dict[str, Any] = {"window": found["window"] and int(found["window"]), "position": found["position"]}
        layer = dataclasses.replace(layer, **{name: value for name, value in changes.items() if value is not None})
        times = int(found["times"] or 1)
        if times < 1:
            raise ValueError(f"layout {text!r}: {word!r} repeats a layer {times} times; wanted at least 1")
        if len(pattern) + times > MOST_LAYERS:
            raise ValueError(f"layout {text!r} has more than {MOST_LAYERS:,} layers, the most that a layout may have")
        pattern += [layer] * times
    if not pattern:
        raise ValueError("a layout needs at least one layer; got an empty text")
    return tuple(pattern)


def _mechanisms(text: str, layout: str, p: float | None) -> LayerConfig:
    try:
        return parse_mechanisms(text, p)
    except ValueError as error:
        raise ValueError(f"layout {layout!r}: {error}") from None


def names_attention(text: str) -> bool:
    """Whether the layout leaves a mechanism to `--attention`."""
    return any(re.match(r"attention(?![^@/*])", word) for word in expand(text).split())


def mechanism_name(attention: str, layout: str) -> str:
    """What a model of this layout is named after: `attention`, or the layout itself where that leaves nothing open."""
    return attention if names_attention(layout) else layout


def format_layout(pattern: Iterable[LayerConfig]) -> str:
    """The text of a pattern; `parse_layout` reads it back."""
    words = []
    for text, same in groupby(map(str, pattern)):
        times = len(list(same))
        words.append(text if times == 1 else f"{text}*{times}")
    return " ".join(words)


def shortest(layers: Sequence[LayerConfig]) -> Pattern:
    """The shortest pattern whose repetition gives these layers."""
    for size in range(1, len(layers)):
        if all(layer == layers[i % size] for i, layer in enumerate(layers)):
            return tuple(layers[:size])
    return tuple(layers)


def mechanisms_text(layer: LayerConfig) -> str:
    """The mechanisms of a layer as `parse_mechanisms` reads them."""
    equal = len(set(layer.shares)) == 1
    return "+".join(spec_text(s) + ("" if equal else f":{n}") for s, n in zip(layer.specs, layer.shares))


def spec_text(mechanism: AttentionSpec) -> str:
    """A mechanism as `parse_spec` reads it: its name and the numbers that differ from the named one's.

    `train_length` is left out, since a model sets it; a mechanism that is not in the table is only named.
    """
    if mechanism.name not in specs():
        return mechanism.name
    usual = spec(mechanism.name)
    changed = {
        name: getattr(mechanism, name)
        for name in ("p", "head_scale", "gamma", "threshold", "learned_threshold")
        if getattr(mechanism, name) != getattr(usual, name) and getattr(mechanism, name) is not None
    }
    shown = (f",{name}={str(x).lower() if isinstance(x, bool) else number_text(x)}" for name, x in changed.items())
    return mechanism.name + "".join(shown)


def number_text(x: float) -> str:
    """The number in as few digits as give it back, without the plus sign that divides the heads of a layer."""
    short = f"{x:g}"
    return (short if float(short) == x else repr(x).removesuffix(".0")).replace("+", "")
