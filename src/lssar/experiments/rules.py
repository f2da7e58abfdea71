"""Building blocks of the rules of claims: verdicts, and access to the tables of the experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "holds in part", "does not hold", "not tested"]


class Missing(Exception):
    """A result that the rule needs does not exist yet."""


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    evidence: str


class Tables:
    """Losses and rates by experiment, label and multiple; the loss of a diverged arm is infinite."""

    def __init__(self, tables: dict[str, dict[str, Any]]):
        self.tables = tables

    def line(self, experiment: str, label: str, evaluation: str | None = None) -> dict[str, Any]:
        for row in self.tables.get(experiment, {}).get("rows", []):
            if row["label"] == label and (row["main"] if evaluation is None else row["evaluation"] == evaluation):
                return row
        raise Missing(f"{experiment}: {label}")

    def loss(self, experiment: str, label: str, multiple: int = 1, evaluation: str | None = None) -> float:
        point = self.line(experiment, label, evaluation)["loss"].get(str(multiple))
        if point is None:
            raise Missing(f"{experiment}: {label} at {multiple}x")
        return math.inf if point["mean"] is None else point["mean"]

    def rate(self, label: str, multiple: str) -> dict[str, Any]:
        """The rate of the newest training; its interval covers those of earlier trainings too."""
        line = self.line("passkey", label)
        found = [run["rate"].get(multiple) for run in (line, *line["earlier"])]
        if found[0] is None:
            raise Missing(f"passkey: {label} at {multiple}x")
        there = [rate for rate in found if rate]
        return found[0] | {"low": min(r["low"] for r in there), "high": max(r["high"] for r in there)}

    def deviation(self, experiment: str, label: str, multiple: int) -> float:
        return self.line(experiment, label)["loss"][str(multiple)].get("deviation") or 0.0


def grade(good: int, of: int) -> Verdict:
    return "holds" if good == of else "holds in part" if good else "does not hold"


BENCHMARKS = ("arc_easy", "hellaswag", "piqa", "sciq", "blimp")
ABOVE_CHANCE = (
    "of ARC-E, HellaSwag, PIQA, SciQ and BLiMP, those on which either is two standard errors above chance: LSSAR is "
    "more than one standard error above softmax in each; in part: in some"
)


def more_accurate(t: Tables, experiment: str, ours: str, theirs: str) -> Finding:
    """Whether ours is better than theirs by the rule ABOVE_CHANCE."""
    accuracy = [t.line(experiment, label)["accuracy"] for label in (ours, theirs)]
    learned = [
        task
        for task in BENCHMARKS
        if max(a[task]["mean"] - a[task]["chance"] - 2 * a[task]["stderr"] for a in accuracy) > 0
    ]
    if not learned:
        raise Missing(f"{experiment}: a model that is above chance in one of {', '.join(BENCHMARKS)}")
    good = sum(a["mean"] > b["mean"] + b["stderr"] for a, b in ([x[task] for x in accuracy] for task in learned))
    parts = [
        f"{task}: {ours} {accuracy[0][task]['mean']:.3f}, {theirs} {accuracy[1][task]['mean']:.3f}" for task in learned
    ]
    return Finding(grade(good, len(learned)), "; ".join(parts))


def show(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "diverged"


@dataclass(frozen=True)
class Claim:
    name: str
    text: str
    source: str
    rule: str
    experiments: tuple[str, ...]
    decide: Callable[[Tables], Finding]
    page: str = "results"
    """Page of the documentation that shows the claim, as of an experiment."""
