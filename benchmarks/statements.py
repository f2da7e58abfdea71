"""Sentences of README and docs whose numbers come from committed results.

`benchmarks/report.py` finds each sentence by its words, whatever its line breaks, and writes the numbers into it. It
complains of a sentence that it cannot find, or that the results no longer support: change it on the page and here.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Statement:
    page: str
    text: str
    """The sentence, with {names} in place of what `values` gives."""
    values: dict[str, str]
    supported: bool = True
    """Whether the results agree with the words."""


class Table:
    """Means over seeds in a table of `lssar reproduce report`."""

    def __init__(self, experiment: str, scale: str = "h200"):
        self.rows = json.loads((ROOT / f"results/{scale}/tables/{experiment}.json").read_text())["rows"]

    def values(self, label: str, kind: str, multiples: str = "1 16 64 512") -> dict[str, float]:
        """By multiple of the training length; kind: `length`, `passkey` or `needles`."""
        (row,) = (r for r in self.rows if r["label"] == label and r["evaluation"].split("-")[0] == kind)
        cells = row["loss" if kind == "length" else "rate"]
        return {m: cells[m]["mean" if kind == "length" else "rate"] for m in multiples.split() if m in cells}

    def seeds(self, label: str) -> int:
        return min(len(row["arms"]) for row in self.rows if row["label"] == label)

    def labels(self, start: str) -> list[str]:
        return [label for label in dict.fromkeys(row["label"] for row in self.rows) if label.startswith(start)]


def percent(rate: float) -> str:
    return f"{rate:.0%}"


def at_most(difference: float) -> str:
    """Rounded up to two decimals."""
    return f"{math.ceil(difference * 100 - 1e-9) / 100:.2f}"


def mixed_statements() -> list[Statement]:
    """What README and the page of the long reader say of the experiment `mixed`, of rows with several seeds."""
    table = Table("mixed")
    uniform, lssar, cosine = "uniform softmax", "mixed, LSSAR annealed", "mixed, cosine softmax"
    ssmax, longer, uniform_longer = "mixed, SSMax", *(f"{label}, twice the tokens" for label in (cosine, uniform))
    sharp, fixed, lssa = "mixed, LSSAR annealed to 31", "mixed, LSSAR, p = 15 fixed", "mixed, LSSA"
    mixed = [lssar, "mixed, LSSA + LSSAR annealed", cosine, ssmax]
    labels = [uniform, *mixed, longer, uniform_longer, sharp, fixed, lssa]
    loss, passkeys, needles = (
        {label: table.values(label, kind) for label in labels} for kind in ("length", "passkey", "needles")
    )
    shares = {name: percent(needles[x]["512"]) for name, x in (("lssar", lssar), ("cosine", cosine), ("ssmax", ssmax))}
    behind = needles[lssar]["512"] < min(needles[cosine]["512"], needles[ssmax]["512"])
    lost = {x: max(r[x][m] for r in (passkeys, needles) for m in ("16", "64", "512")) < 0.005 for x in labels}
    found = sorted(passkeys[label]["512"] for label in mixed)
    far = [loss[label]["512"] for label in (lssar, cosine, ssmax)]
    twice = {"passkeys": percent(passkeys[longer]["512"]), "needles": percent(needles[longer]["512"])}
    twice["seeds"] = NUMBERS[min(table.seeds(longer), table.seeds(uniform_longer))]
    twice |= {"near": f"{loss[longer]['1']:.3f}", "uniform": f"{loss[uniform_longer]['1']:.3f}"}
    far_twice = {"far": f"{loss[longer]['512']:.3f}"}
    lower = loss[longer]["512"] <= loss[longer]["1"] < loss[uniform_longer]["1"]
    seeds = sorted({table.seeds(label) for label in [uniform, *mixed]})
    return [
        Statement(
            "README.md",
            """With cosine softmax in its global layers a model finds {passkeys} of the passkeys and {needles} of the
            needles in 262,144 tokens, where uniform softmax finds nothing from 16x on. Its loss is {far} there and
            {near} at 512 tokens; uniform softmax has {uniform_far} and {uniform}. (33M parameters, 118M tokens,
            {seeds} seeds;""",
            twice | far_twice | {"uniform_far": f"{loss[uniform_longer]['512']:.3f}"},
            lower and lost[uniform_longer],
        ),
        Statement(
            "README.md",
            """With half the tokens (59M) models with cosine softmax, SSMax, annealed LSSAR, or LSSA and annealed LSSAR
            there find {low} to {high} of the passkeys at 512x, at a loss within {change} nats of that at 1x ({seeds}
            seeds).""",
            {
                "change": at_most(max(abs(loss[label]["512"] - loss[label]["1"]) for label in mixed)),
                "low": percent(found[0]), "high": percent(found[-1]), "seeds": " or ".join(NUMBERS[n] for n in seeds),
            },
        ),
        Statement(
            "docs/long-reader.md",
            """With twice the tokens (118M), cosine softmax finds {passkeys} of the passkeys and {needles} of the
            needles at 512x ({seeds} seeds). Its loss is {near} at 1x, below the {uniform} of uniform softmax with as
            many tokens, and {far} at 512x.""",
            twice | far_twice,
            lower,
        ),
        Statement(
            "docs/long-reader.md",
            """the three find {fixed} of the needles at 64x. Annealed to 15 they find {lssar}, annealed to 31 they find
            {sharp} there, and {sharp_far} at 512x. Annealed to 31, LSSAR finds all passkeys at 512x, more than any
            other row with as many tokens and three seeds.""",
            {
                "fixed": percent(needles[fixed]["64"]), "lssar": percent(needles[lssar]["64"]),
                "sharp": percent(needles[sharp]["64"]), "sharp_far": percent(needles[sharp]["512"]),
            },
            passkeys[sharp]["512"] == 1 and all(passkeys[label]["512"] < 1 for label in [*mixed, fixed]),
        ),
        Statement(
            "docs/long-reader.md",
            "finds more needles at 512x than LSSAR** ({lssa}, one seed).",
            {"lssa": percent(needles[lssa]["512"])},
            needles[lssa]["512"] > max(needles[label]["512"] for label in (lssar, sharp)),
        ),
        Statement(
            "README.md",
            """At 512x it finds {lssar} of the needles, cosine softmax {cosine}, SSMax {ssmax}, at losses that differ by
            at most {spread} nats. With a power that rises to 31 it finds {passkeys} of the passkeys and {needles} of
            the needles.""",
            {
                **shares, "spread": at_most(max(far) - min(far)),
                "passkeys": percent(passkeys[sharp]["512"]), "needles": percent(needles[sharp]["512"]),
            },
            behind and needles[sharp]["512"] < needles[cosine]["512"],
        ),
        Statement(
            "docs/long-reader.md",
            """Every mixed model with three seeds, except LSSAR with p = 15 from the start, has a loss at or below
            uniform softmax at the training length. All have a lower loss with 64 times the context. Uniform softmax
            loses {lost} nats at 512x and finds nothing from 16x on.""",
            {"lost": f"{loss[uniform]['512'] - loss[uniform]['1']:.1f}"},
            lost[uniform]
            and all(loss[label]["64"] < loss[label]["1"] for label in [*mixed, sharp, fixed])
            and all(loss[label]["1"] <= loss[uniform]["1"] for label in [*mixed, sharp])
            and loss[fixed]["1"] > loss[uniform]["1"],
        ),
        Statement(
            "docs/long-reader.md",
            """It has the lowest loss at 64x and 512x, and finds {cosine} of the needles in real text at 512x (SSMax
            {ssmax}, LSSAR {lssar}).""",
            shares,
            all(loss[cosine][m] == min(loss[x][m] for x in [*mixed, sharp, fixed, lssa]) for m in ("64", "512"))
            and needles[cosine]["512"] == max(needles[x]["512"] for x in [*mixed, sharp, fixed, lssa]),
        ),
        Statement(
            "docs/long-reader.md",
            "Its loss at 512x is {below} nats below that at 1x, but it finds {lssar} of the needles there.",
            {**shares, "below": f"{loss[lssar]['1'] - loss[lssar]['512']:.2f}"},
            behind and loss[lssar]["512"] < loss[lssar]["1"],
        ),
    ]  # fmt: skip


def larger_statements() -> list[Statement]:
    """What README and the page of the long reader say of the 124M models."""
    table, benchmarks = Table("larger"), Table("larger-downstream")
    uniform, cosine, lssar = "uniform softmax", "mixed, cosine softmax", "mixed, LSSAR annealed to 31"
    loss, passkeys, needles = (
        {label: table.values(label, kind) for label in (uniform, cosine, lssar)}
        for kind in ("length", "passkey", "needles")
    )
    blimp = {row["label"]: row["accuracy"]["blimp"]["mean"] for row in benchmarks.rows}
    near = {"uniform_1": f"{loss[uniform]['1']:.3f}", "cosine_1": f"{loss[cosine]['1']:.3f}"}
    far = {"uniform_64": f"{loss[uniform]['64']:.3f}", "cosine_64": f"{loss[cosine]['64']:.3f}"}
    found = {"passkeys": percent(passkeys[cosine]["64"]), "needles": percent(needles[cosine]["64"])}
    better = all(loss[cosine][m] < loss[uniform][m] for m in ("1", "64")) and passkeys[uniform]["64"] < 0.005
    return [
        Statement(
            "README.md",
            """With 124M parameters (105M tokens at a length of 1,024, one seed) cosine softmax in the global layers has
            a loss of {cosine_1} at 1x and {cosine_64} at 64x, uniform softmax {uniform_1} and {uniform_64}; it finds
            {passkeys} of the passkeys and {needles} of the needles at 64x, uniform softmax none. On BLiMP it gets
            {blimp} right, uniform softmax {blimp_uniform}.""",
            near | far | found | {"blimp": percent(blimp[cosine]), "blimp_uniform": percent(blimp[uniform])},
            better,
        ),
        Statement(
            "docs/long-reader.md",
            "On BLiMP the mixed models get {cosine} and {lssar} right, uniform softmax {uniform}.",
            {name: percent(blimp[x]) for name, x in (("cosine", cosine), ("lssar", lssar), ("uniform", uniform))},
            max(blimp[cosine], blimp[lssar]) < blimp[uniform],
        ),
    ]


def uniform_statements() -> list[Statement]:
    """What README says of the 51M models with the same mechanism in every layer."""
    table = Table("controls")
    loss = {label: table.values(label, "length") for label in table.labels("")}
    lssar, softmax, cosine = loss["LSSAR"], loss["softmax"], loss["cosine softmax"]
    peers = [loss["ALiBi"], loss["softmax, window"]]
    return [
        Statement(
            "README.md",
            """up to 64 times the training length, where softmax rises by {rise} nats. But ALiBi and softmax with a
            sliding window are as flat at a lower loss, cosine softmax is better up to 16x, and LSSAR is {worse} nats
            worse than softmax at the training length. (51M parameters, 42M tokens, {seeds} seeds;""",
            {
                "rise": f"{softmax['64'] - softmax['1']:.1f}", "worse": f"{lssar['1'] - softmax['1']:.2f}",
                "seeds": NUMBERS[min(table.seeds(label) for label in ("LSSAR", "softmax", "cosine softmax", "ALiBi"))],
            },
            abs(lssar["64"] - lssar["1"]) < 0.02
            and all(abs(peer["64"] - peer["1"]) < 0.02 and peer["64"] < lssar["64"] for peer in peers)
            and cosine["1"] < lssar["1"] and cosine["16"] < lssar["16"],
        )
    ]  # fmt: skip


def budget_statements() -> list[Statement]:
    """What the page of the long reader says of more tokens, at the scale of two cores."""
    table = Table("budget", "laptop")
    budgets = (2, 4, 8)

    def above(label: str) -> list[float]:
        """Nats above softmax with as many tokens, at the training length."""
        at_1x = lambda label, n: table.values(f"{label}, {n}x the tokens", "length", "1")["1"]  # noqa: E731
        return [at_1x(label, n) - at_1x("softmax", n) for n in budgets]

    fixed, annealed = above("LSSAR, p = 15"), above("LSSAR annealed")
    values = {f"fixed_{n}": f"{gap:.3f}" for n, gap in zip(budgets, fixed)}
    values |= {f"annealed_{n}": f"{gap:.3f}" for n, gap in zip(budgets, annealed)}
    return [
        Statement(
            "docs/long-reader.md",
            """With 2, 4 and 8 times the tokens its loss at 1x is {fixed_2}, {fixed_4} and {fixed_8} nats above that of
            softmax with p = 15 from the start, and {annealed_2}, {annealed_4} and {annealed_8} annealed""",
            values,
            all(sorted(gaps, reverse=True) == gaps and gaps[-1] > 0.02 for gaps in (fixed, annealed)),
        )
    ]


def released_statements() -> list[Statement]:
    """What README and docs say of the released model books-6m."""
    folder = ROOT / "models/books-6m/evaluation"
    (arm,) = json.loads((folder / "retrieval.json").read_text())["arms"]
    rates = {r["task"]: r["greedy"]["rate"] for r in arm["rows"] if r["length"] == 512 * arm["train_length"]}
    tokens = json.loads((folder / "training.json").read_text())["summary"]["tokens"]
    values = {
        "all": "all" if rates["passkey"] == 1 else f"{percent(rates['passkey'])} of the",
        "needles": percent(rates["needles"]), "tokens": f"{tokens / 1e6:.0f}M",
    }  # fmt: skip
    text = "finds {all} passkeys and {needles} of the needles at 512x"
    return [
        Statement("README.md", text + ". (6.3M parameters, {tokens} tokens, one seed.)", values),
        Statement(
            "docs/long-reader.md",
            text + " (6.3M parameters, a vocabulary of 4,096, {tokens} tokens, one seed).",
            values,
        ),
    ]


def speed_statements() -> list[Statement]:
    """What README says of the speed of mixed models."""
    train, decode = (
        [row for row in json.loads((ROOT / f"benchmarks/results/h200-mixed-{what}.json").read_text())["rows"]
         if row["arm"] == "mixed, cosine softmax"]
        for what in ("train", "decode")
    )  # fmt: skip
    speeds = {f"at_{row['length']}": f"{row['tokens_per_s_ratio']:.2f}x" for row in train}
    steps = {f"batch_{row['batch']}": f"{row['step_ms_ratio']:.2f}x" for row in decode}
    cache = {"cache": f"{decode[0]['cache_mib_ratio']:.2f}x"}
    text = """With cosine softmax in its global layers a 124M model trains at {at_1024}, {at_8192} and {at_32768} the
        tokens per second of uniform softmax at 1K, 8K and 32K tokens. At 131,072 tokens its cache has {cache} the size,
        and a decode step takes {batch_1} of the time (batch 1)."""
    return [Statement("README.md", text, {**speeds, **steps, **cache})]


def cpu_statements() -> list[Statement]:
    """What docs say of windows and of a prefill on a CPU."""
    rows = json.loads((ROOT / "benchmarks/results/cpu-window.json").read_text())["rows"]
    length = rows[0]["length"]
    times = {(row["contestant"], row["window"]): row["both_ms"] for row in rows}
    names = {name for name, _ in times}
    cost, whole = {}, {}  # of a pair of row and key, against the full call: without the call with W = 1, and with it
    for w in (128, 512, 2048):
        share = (w * length - w * (w - 1) / 2) / (length * (length + 1) / 2)
        cost[w] = max((times[name, w] - times[name, 1]) / times[name, length] for name in names) / share
        whole[w] = max(times[name, w] / times[name, length] for name in names) / share
    fixed = max(times[name, 1] / times[name, 128] for name in names)
    (prefill,) = json.loads((ROOT / "benchmarks/results/cpu-prefill.json").read_text())["prefill"]
    return [
        Statement(
            "docs/cpu.md",
            "a pair of row and key takes at most {at_2048} as long at W = 2,048, {at_512} at 512 and {at_128} at 128",
            {f"at_{w}": f"{cost[w]:.2f}x" for w in cost},
        ),
        Statement(
            "docs/cpu.md",
            "it is up to {fixed} of the time at W = 128",
            {"fixed": percent(fixed)},
        ),
        Statement(
            "docs/cpu.md",
            "With the fixed part counted in, it takes up to {at_512} at 512 and {at_128} at 128.",
            {f"at_{w}": f"{whole[w]:.2f}x" for w in (128, 512)},
        ),
        Statement(
            "docs/long-reader.md",
            "takes {seconds} s for 32,768 tokens in chunks of 8,192, and {memory} MiB beside its weights",
            {"seconds": f"{prefill['seconds']:.1f}", "memory": f"{prefill['peak_mib']:.0f}"},
            prefill["length"] == 32_768 and prefill["chunk"] == 8_192,
        ),
    ]


def all_statements() -> list[Statement]:
    groups = (
        cpu_statements,
        speed_statements,
        mixed_statements,
        larger_statements,
        uniform_statements,
        budget_statements,
        released_statements,
    )
    return [statement for group in groups for statement in group()]


def filled(text: str, page: str, statements: list[Statement]) -> tuple[str, list[str]]:
    """The text of a page with the numbers of its statements, and what is wrong with them."""
    problems = []
    for statement in (s for s in statements if s.page == page):
        sentence = " ".join(statement.text.split())
        parts = re.split(r"\{(\w+)\}", sentence)
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part in parts[::2]]
        found = list(re.finditer(r"([\w.%][\w.%\s]{0,30}?)".join(words), text))
        if len(found) != 1:
            problems.append(f"{page} has {len(found)} sentences like this one of benchmarks/statements.py: {sentence}")
            continue
        if not statement.supported:
            problems.append(f"{page}: the results no longer support this sentence: {sentence}")
        for group, name in reversed(list(enumerate(parts[1::2], 1))):
            value = statement.values[name]
            if " ".join(found[0][group].split()) != value:  # else its line breaks stay
                text = text[: found[0].start(group)] + value + text[found[0].end(group) :]
    return text, problems
