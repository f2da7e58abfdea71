"""Claims about mixed layouts and their rules.

Every comparison is one of means over seeds: a difference counts if it exceeds twice its standard error. Rows with one
seed get the deviation that the rows with several seeds have on average (pooled variance).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from typing import Any

from lssar.experiments.larger import BUDGETS, LARGE, RAISED, SOFTMAX, budget_label
from lssar.experiments.larger import FIXED as FIXED_EVERYWHERE
from lssar.experiments.rules import ABOVE_CHANCE, Claim, Finding, Missing, Tables, Verdict, grade, more_accurate

UNIFORM = "uniform softmax"
LSSAR, DIVIDED = "mixed, LSSAR annealed", "mixed, LSSA + LSSAR annealed"
COSINE, SSMAX = "mixed, cosine softmax", "mixed, SSMax"
FIXED = "mixed, LSSAR, p = 15 fixed"
MIXED = (DIVIDED, LSSAR, COSINE, SSMAX)
"""The mixed rows with three seeds and one budget."""
TWICE, UNIFORM_TWICE = "mixed, cosine softmax, twice the tokens", "uniform softmax, twice the tokens"
NEAR = 0.02
"""Nats that count as the same loss."""
PASSKEY, NEEDLES = 0.95, 0.9
"""Rates that count as found."""

Values = list[float]


class Mixed:
    """Losses and rates of the experiment `mixed`, by seed."""

    def __init__(self, t: Tables) -> None:
        self.t = t
        self.rows = list(t.tables.get("mixed", {}).get("rows", []))
        mains = [row for row in self.rows if row["main"]]
        if not mains:
            raise Missing("mixed")
        multiples = [int(multiple) for multiple in mains[0]["loss"]]
        self.far = [multiple for multiple in multiples if multiple in (64, 512)] or [max(multiples)]
        """The multiples that decide: 64 and 512 where the scale has them."""

    def loss(self, label: str, multiple: int) -> Values:
        point = self.t.line("mixed", label)["loss"].get(str(multiple))
        if point is None:
            raise Missing(f"mixed: {label} at {multiple}x")
        return [math.inf if value is None else value for value in point["by_seed"]]

    def rate(self, task: str, label: str, multiple: int) -> Values:
        for row in self.rows:
            if row["label"] == label and row["evaluation"].startswith(task) and str(multiple) in row["rate"]:
                return row["rate"][str(multiple)]["by_seed"]
        raise Missing(f"mixed: {task}, {label} at {multiple}x")

    def noise(self, curve: str, multiple: int, task: str = "") -> float:
        """Pooled deviation over seeds of the rows that have several."""
        found = []
        for row in self.rows:
            if (row["main"] if curve == "loss" else row["evaluation"].startswith(task)) and row.get(curve):
                values = row[curve].get(str(multiple), {}).get("by_seed", [])
                if len(values) > 1 and None not in values:
                    found.append(statistics.variance(values))
        return math.sqrt(statistics.fmean(found)) if found else 0.0

    def compare(self, ours: Values, theirs: Values, noise: float) -> int:
        """1 if ours is higher by more than twice the standard error of the difference, -1 if lower, else 0."""
        if math.inf in ours or math.inf in theirs:
            return (math.inf in ours) - (math.inf in theirs)
        difference = statistics.fmean(ours) - statistics.fmean(theirs)
        error = math.sqrt(sum((_deviation(values) or noise) ** 2 / len(values) for values in (ours, theirs)))
        return 0 if abs(difference) <= 2 * error else 1 if difference > 0 else -1

    def lower_loss(self, ours: str, theirs: str, multiple: int) -> int:
        return -self.compare(self.loss(ours, multiple), self.loss(theirs, multiple), self.noise("loss", multiple))

    def found_more(self, task: str, ours: str, theirs: str, multiple: int) -> int:
        noise = self.noise("rate", multiple, task)
        return self.compare(self.rate(task, ours, multiple), self.rate(task, theirs, multiple), noise)


def _deviation(values: Values) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean(values: Values, digits: int = 3) -> str:
    return "diverged" if math.inf in values else f"{statistics.fmean(values):.{digits}f}"


def lower_at_1x(t: Tables) -> Finding:
    m = Mixed(t)
    good = sum(m.lower_loss(label, UNIFORM, 1) > 0 for label in MIXED)
    parts = [f"{label} {_mean(m.loss(label, 1))}" for label in (UNIFORM, *MIXED)]
    return Finding(grade(good, len(MIXED)), "at 1x: " + "; ".join(parts))


def not_above_1x(t: Tables) -> Finding:
    m = Mixed(t)
    good, parts = 0, []
    for label in MIXED:
        first = m.loss(label, 1)
        changes = {far: [b - a for a, b in zip(first, m.loss(label, far))] for far in m.far}
        good += all(statistics.fmean(values) <= 0 for values in changes.values())
        parts.append(f"{label} " + ", ".join(f"{statistics.fmean(v):+.3f} at {far}x" for far, v in changes.items()))
    return Finding(grade(good, len(MIXED)), "change from 1x: " + "; ".join(parts))


def found_far_back(t: Tables) -> Finding:
    m = Mixed(t)
    verdict: Verdict = "does not hold"
    parts = []
    for label in [*MIXED, *(row["label"] for row in m.rows if row["main"] and row["label"] == TWICE)]:
        rates = {(task, far): m.rate(task, label, far) for task in ("passkey", "needles") for far in m.far}
        least = {"passkey": PASSKEY, "needles": NEEDLES}
        if all(min(values) >= least[task] for (task, _), values in rates.items()):
            verdict = "holds"
        elif verdict != "holds" and all(statistics.fmean(v) >= least[task] for (task, _), v in rates.items()):
            verdict = "holds in part"
        parts.append(f"{label}: " + ", ".join(f"{task} {_mean(v, 2)} at {far}x" for (task, far), v in rates.items()))
    return Finding(verdict, "; ".join(parts))


def one_recipe_does_all(t: Tables) -> Finding:
    """m1, m2 and m3 of one row, against uniform softmax with as many tokens."""
    m = Mixed(t)
    first = m.loss(TWICE, 1)
    good = [m.lower_loss(TWICE, UNIFORM_TWICE, 1) > 0]
    parts = [f"loss at 1x {_mean(first)}, uniform softmax {_mean(m.loss(UNIFORM_TWICE, 1))}"]
    for far in m.far:
        change = [b - a for a, b in zip(first, m.loss(TWICE, far))]
        good.append(statistics.fmean(change) <= 0)
        parts.append(f"{statistics.fmean(change):+.3f} at {far}x")
        for task, least in (("passkey", PASSKEY), ("needles", NEEDLES)):
            rates = m.rate(task, TWICE, far)
            good.append(min(rates) >= least)
            parts.append(f"{task} {_mean(rates, 2)} at {far}x")
    return Finding(grade(sum(good), len(good)), "; ".join(parts))


def annealing_helps(t: Tables) -> Finding:
    m = Mixed(t)
    outcomes = [m.lower_loss(LSSAR, FIXED, 1)]
    parts = [f"loss at 1x {_mean(m.loss(LSSAR, 1))} against {_mean(m.loss(FIXED, 1))}"]
    for far in m.far:
        outcomes.append(m.found_more("needles", LSSAR, FIXED, far))
        rates = [_mean(m.rate("needles", label, far), 2) for label in (LSSAR, FIXED)]
        parts.append(f"needles at {far}x {rates[0]} against {rates[1]}")
    verdict = grade(sum(outcome > 0 for outcome in outcomes), len(outcomes))
    return Finding(verdict, "annealed against fixed: " + "; ".join(parts))


def ahead_in_global_layers(t: Tables) -> Finding:
    m = Mixed(t)
    words = {1: "ahead", 0: "level", -1: "behind"}
    clean = some = False
    parts: list[str] = []
    for ours in (DIVIDED, LSSAR):
        outcomes: dict[str, list[int]] = {}
        for theirs in (COSINE, SSMAX):
            outcomes[theirs] = [m.lower_loss(ours, theirs, far) for far in (1, *m.far)]
            outcomes[theirs] += [m.found_more("needles", ours, theirs, far) for far in m.far]
            at = [f"loss {far}x" for far in (1, *m.far)] + [f"needles {far}x" for far in m.far]
            told = ", ".join(f"{place} {words[o]}" for place, o in zip(at, outcomes[theirs]))
            parts.append(f"{ours.removeprefix('mixed, ')} against {theirs.removeprefix('mixed, ')}: {told}")
        every = [o for found in outcomes.values() for o in found]
        some = some or max(every) > 0
        clean = clean or (min(every) >= 0 and all(max(found) > 0 for found in outcomes.values()))
    losses = "; ".join(
        f"{label.removeprefix('mixed, ')} " + ", ".join(f"{_mean(m.loss(label, far))} at {far}x" for far in (1, *m.far))
        for label in MIXED
    )
    verdict: Verdict = "holds" if clean else "holds in part" if some else "does not hold"
    return Finding(verdict, f"{'; '.join(parts)}. Loss: {losses}")


def reaches_softmax(t: Tables) -> Finding:
    """At the largest budget of which both softmax and LSSAR are trained."""
    losses: dict[int, dict[str, float]] = {}
    for budget in BUDGETS:
        for label in (SOFTMAX, FIXED_EVERYWHERE, RAISED):
            with contextlib.suppress(Missing):
                line = t.line("budget", budget_label(label, budget))
                losses.setdefault(budget, {})[label] = line["loss"]["1"]["mean"]
    decided = [budget for budget, by_label in losses.items() if len(by_label) == 3 and budget > 1]
    if not decided:
        raise Missing("budget: softmax, LSSAR and LSSAR annealed on more tokens")
    gaps = {b: {x: losses[b][x] - losses[b][SOFTMAX] for x in (FIXED_EVERYWHERE, RAISED)} for b in decided}
    last = gaps[max(decided)]
    near = [gap <= NEAR for gap in last.values()]
    verdict: Verdict = "holds" if all(near) else "holds in part" if any(near) else "does not hold"
    parts = [
        f"{b}x the tokens " + ", ".join(f"{x} {gap:+.3f}" for x, gap in found.items()) for b, found in gaps.items()
    ]
    return Finding(verdict, "loss at 1x above softmax's: " + "; ".join(parts))


def as_good_when_larger(t: Tables) -> Finding:
    """m1 to m3 for the models of 124M, as far as these are evaluated."""
    uniform, *mixed = (label for label, *_ in LARGE)
    reference = t.loss("larger", uniform)
    outcomes, parts = [], [f"{uniform} {reference:.3f} at 1x"]
    for label in mixed:
        near, far = t.loss("larger", label), t.loss("larger", label, 64)
        rates = {task: _rate_when_larger(t, label, task) for task in ("passkey", "needles")}
        outcomes.append([near < reference, far <= near, rates["passkey"] >= PASSKEY, rates["needles"] >= NEEDLES])
        found = ", ".join(f"{task} {rate:.2f}" for task, rate in rates.items())
        parts.append(f"{label} {near:.3f} at 1x, {far:.3f} at 64x, {found} at 64x")
    every = [outcome for row in outcomes for outcome in row]
    verdict: Verdict = "holds" if any(map(all, outcomes)) else "holds in part" if any(every) else "does not hold"
    return Finding(verdict, "; ".join(parts))


def _rate_when_larger(t: Tables, label: str, task: str) -> float:
    for row in t.tables.get("larger", {}).get("rows", []):
        if row["label"] == label and row["evaluation"].startswith(task) and "64" in row["rate"]:
            return row["rate"]["64"]["rate"]
    raise Missing(f"larger: {task}, {label} at 64x")


def _claim(name: str, text: str, rule: str, decide: Any) -> Claim:
    return Claim(name, text, "not in the paper", rule, ("mixed",), decide, page="results-mixed")


SIGNIFICANT = "a difference counts if it exceeds twice its standard error over seeds"

MIXED_CLAIMS: tuple[Claim, ...] = (
    _claim(
        "m1", "Mixed layouts have a lower loss than uniform softmax at the training length",
        f"each mixed row with three seeds is lower at 1x; in part: some; {SIGNIFICANT}", lower_at_1x,
    ),
    _claim(
        "m2", "The loss of mixed layouts does not rise with length",
        "for each mixed row with three seeds the loss at 64x and at 512x (or at the farthest multiple of a smaller "
        "scale) is not above that at 1x on the same text, in the mean over seeds; in part: for some rows",
        not_above_1x,
    ),
    _claim(
        "m3", "A mixed model finds passkeys and needles in real text at 64 and 512 times its training length",
        f"one mixed row with three seeds answers at least {PASSKEY:.0%} of the passkeys and {NEEDLES:.0%} of the "
        "needles at both multiples in every seed; in part: in the mean over seeds", found_far_back,
    ),
    _claim(
        "m4", "Raising p during training is better than p = 15 from the start",
        "LSSAR annealed has a lower loss at 1x and answers more needles at 64x and 512x than LSSAR with p = 15 fixed; "
        f"in part: some of it; {SIGNIFICANT}", annealing_helps,
    ),
    _claim(
        "m5", "In global layers LSSAR, or heads divided between LSSA and LSSAR, is ahead of cosine softmax and SSMax",
        "one of the two is ahead of each control in loss (1x, 64x, 512x) or needles (64x, 512x), and behind it in "
        f"none; in part: ahead somewhere; {SIGNIFICANT}", ahead_in_global_layers,
    ),
    Claim(
        "m6", "With more tokens LSSAR in every layer reaches softmax's loss at the training length", "not in the paper",
        f"at the largest budget, LSSAR with p = 15 and LSSAR annealed are at most {NEAR} nats above softmax at 1x; in "
        "part: one of them", ("budget",), reaches_softmax, page="results-mixed",
    ),
    Claim(
        "m7", "What mixed layouts gain in a small model, they gain at 124M", "not in the paper",
        f"one mixed row has a lower loss at 1x than uniform softmax, a loss at 64x not above 1x, and at least "
        f"{PASSKEY:.0%} of the passkeys and {NEEDLES:.0%} of the needles at 64x; in part: some of it; one seed",
        ("larger",), as_good_when_larger, page="results-mixed",
    ),
    Claim(
        "m8", "At 124M LSSAR in the global layers is better than uniform softmax in zero-shot benchmarks",
        "paper, later versions, for LSSAR in all layers",
        f"{ABOVE_CHANCE}; one seed", ("larger-downstream",),
        lambda t: more_accurate(t, "larger-downstream", LARGE[2][0], LARGE[0][0]), page="results-mixed",
    ),
    _claim(
        "m9", "One recipe, cosine softmax in the global layers with twice the tokens, meets m1, m2 and m3",
        "the rules of m1 to m3 for this row in every seed of m3, against uniform softmax with as many tokens; in part: "
        "some of them; stated after the runs, from rules that were stated before", one_recipe_does_all,
    ),
)  # fmt: skip
