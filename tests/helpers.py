"""Shared by the tests: inputs, variants of visibility, the error bound, processes of their own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import lssar
from lssar.ops.reference import reference_attention
from lssar.specs import AttentionSpec
from lssar.testing import one_rounding_away, with_gradients
from lssar.visibility import visibility

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
"""Where the kernels of a GPU run: without one, in Triton's interpreter."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Short names of dtypes in the names of tests."""
TEST_SEED = int(os.environ.get("LSSAR_TEST_SEED", "0"))


def shifted_seed(seed: int) -> int:
    """The seed of a test's random numbers; LSSAR_TEST_SEED gives every test others."""
    return seed + 1_000_003 * TEST_SEED


def seeded(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(shifted_seed(seed))


def pairwise(*choices: Iterable) -> list[tuple]:
    """Few combinations of the choices, in which every pair of values from two different lists occurs."""
    lists = [list(options) for options in choices]
    missing = {
        (a, x, b, y)
        for (a, one), (b, other) in itertools.combinations(enumerate(lists), 2)
        for x in range(len(one))
        for y in range(len(other))
    }
    rows = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for place, options in enumerate(lists):
            if place not in row:
                gain = lambda value: sum(_pair(p, row[p], place, value) in missing for p in row)  # noqa: B023, E731
                row[place] = max(range(len(options)), key=lambda value: (gain(value), -value))
        missing -= {_pair(p, row[p], r, row[r]) for p, r in itertools.combinations(row, 2)}
        rows.append(tuple(options[row[place]] for place, options in enumerate(lists)))
    return rows


def _pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)


def field_kinds(spec: AttentionSpec) -> list[tuple[str, object]]:
    """Fields of a spec with their values; of numbers only what the implementations distinguish."""
    power = "none" if spec.p is None else "one" if spec.p == 1 else "integer" if spec.p == int(spec.p) else "fraction"
    numbers = {"p": power, "head_scale": spec.head_scale is not None, "threshold": spec.threshold != 1}
    return [(key, numbers.get(key, value)) for key, value in spec.to_dict().items() if key != "name"]


def by_field(specs: dict[str, AttentionSpec], views: Iterable[str], *others: Iterable) -> list[tuple]:
    """Few combinations of a spec's name, a view and the others, in which these pairs occur:

    every kind of value of every field of the specs with every view and every value of the others, each view with every
    value of the others, and every spec with and without a bool mask and with every value of the others. Implementations
    read the fields of a spec, so a fault that needs one kind of value and one view is found.
    """
    fields = {name: field_kinds(spec) for name, spec in specs.items()}

    def pairs(case: tuple) -> set[tuple]:
        name, view, *rest = case
        places = list(enumerate([view, *rest]))
        found = {(field, place) for field, place in itertools.product([name, *fields[name]], places[1:])}
        found |= {(field, view) for field in fields[name]} | {(name, "mask" in view)}
        return found | {(view, place) for place in places[1:]}

    waiting = {case: pairs(case) for case in itertools.product(specs, views, *others)}
    missing, rows = set().union(*waiting.values()), []
    while missing:
        rows.append(max(waiting, key=lambda case: len(waiting[case] & missing)))
        missing -= waiting.pop(rows[-1])
    return rows


REWEIGHTED = {
    "softmax p=3": lssar.spec("softmax").reweighted(3),
    "sigmoid_n_l1 p=15": lssar.spec("sigmoid_n_l1").reweighted(15),
    "lssar p=1": lssar.spec("lssar", p=1),
    "lssar p=2.5": lssar.spec("lssar", p=2.5),
    "l1_gelu p=3": lssar.spec("l1_gelu").reweighted(3),
    "raw_l1 p=2": lssar.spec("raw_l1").reweighted(2),
    "wortsman n": lssar.spec("relu_wortsman", divisor="n"),
}
ALL_SPECS = {**{name: lssar.spec(name) for name in lssar.specs()}, **REWEIGHTED}
LEARNED = {  # with numbers of their own for each head, at other than their usual values
    "lssar gain": lssar.spec("lssar", p=3, head_scale=-0.7),
    "cosine_softmax gain": lssar.spec("cosine_softmax", head_scale=2.0),
    "lssar threshold": lssar.spec("lssar", p=2.5, threshold=0.4),
    "softmax p=3 threshold": lssar.spec("softmax", p=3, threshold=1.3),
}


def qkv(B=2, Hq=4, Hkv=2, Lq=19, Lk=19, D=6, Dv=None, dtype=torch.float64, grad=True) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(B, Hq, Lq, D, dtype=torch.float64)
    k = torch.randn(B, Hkv, Lk, D, dtype=torch.float64)
    v = torch.randn(B, Hkv, Lk, Dv or D, dtype=torch.float64)
    q, k, v = (x.to(dtype).requires_grad_(grad) for x in (q, k, v))
    return q, k, v


def views(B: int, Hq: int, L: int) -> dict[str, dict]:
    """Ways to say what a row may see, for self-attention of length L (the pack needs B = 1)."""
    mask = torch.rand(B, Hq, L, L, generator=seeded(1)) > 0.4
    mask[..., 2, :] = False  # a row that sees nothing
    ranges = torch.stack([torch.arange(L) // 3, torch.arange(L) // 2 + 1], -1).repeat(B, 1, 1)
    ranges[-1, 1] = torch.tensor([2, 1])  # nothing again
    cases = {
        "causal": {},
        "full": {"causal": False},
        "mask": {"causal": False, "mask": mask},
        "causal, key mask": {"mask": mask[:, :1, :1]},
        "window": {"window": 5},
        "full, window": {"window": 3, "causal": False},
        "padding": {"key_lengths": torch.arange(B) * (L // 2) + min(L, 2)},
        "ranges": {"causal": False, "key_ranges": ranges.int()},
        "causal, ranges": {"key_ranges": ranges[:1] * 2},
    }
    if B == 1:
        cases["pack"] = {"cu_seqlens": torch.tensor([0, 1, 1, 4, L // 2, L])}
    return cases


def eager(q: Tensor, k: Tensor, v: Tensor, spec, dtype: torch.dtype, **view) -> Tensor:
    """The reference's arithmetic in one dtype throughout: what a user's own PyTorch code would lose."""
    see = visibility(q.shape[2], k.shape[2], q.device, **{"causal": True, **view})
    return reference_attention(q.to(dtype), k.to(dtype), v.to(dtype), see.dense(k.shape[2]), lssar.spec(spec))[0]


def outside_the_interpreter(module: str, *words: str, cache: Path) -> dict:
    """What `python -m MODULE WORDS...` prints as JSON in its last line, by Triton's compiler.

    A process of its own, because whether kernels are interpreted is decided when Triton is imported.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def eager_runs(
    inputs: tuple[Tensor, ...], do: Tensor, spec, dtype: torch.dtype, exact, **view
) -> Iterator[tuple[Tensor, ...]]:
    """What eager computation gives, computed as it is asked for.

    In float32 it is a handful of roundings off, and how many is luck that differs from one CPU to the next: there also
    what it loses at inputs that are one rounding away, eight times, added to `exact`.
    """
    run = lambda inputs, dtype: with_gradients(lambda *x: eager(*x, spec, dtype, **view), inputs, do)  # noqa: E731
    yield run(inputs, dtype)
    generator = seeded(0, do.device)  # its own: what a test draws next does not depend on luck
    for _ in range(8 if dtype == inputs[0].dtype == torch.float32 else 0):
        moved = tuple(one_rounding_away(x, generator) for x in inputs)
        pairs = zip(run(moved, dtype), run(moved, torch.float64), exact)
        yield tuple(low.double() - high.double() + r.double() for low, high, r in pairs)


def assert_within_twice_eager(
    got, runs: Iterable[tuple], exact, eps: float, note: str = "", floor=(0.0, 0.0, 0.0, 0.0)
) -> None:
    """Error against float64, in the root mean square, at most twice what eager computation loses and a few roundings.

    The largest single error is a matter of luck from one run to the next, so it may be up to eight times eager's.
    `runs`: one or more eager results, the worst of which counts; no more of them are computed than it takes.
    `floor`: error that is allowed in any case, for o, dq, dk, dv.
    """
    done: list[tuple] = []
    more = iter(runs)
    for index, name in enumerate(("o", "dq", "dk", "dv")):
        x, r = got[index], exact[index]
        assert x.isfinite().all(), f"{note}: {name} is not finite"
        always = 4 * eps * float(r.abs().max()) + floor[index]
        for measure, times in (("root mean square", 2), ("largest", 8)):
            error = _size(x.double() - r, measure)
            lost = lambda run: _size((run[index].double() - r).nan_to_num(torch.inf), measure)  # noqa: B023, E731
            assert any(error <= times * lost(run) + always for run in _kept_and_more(done, more)), (
                f"{note}: {measure} error of {name} is {error:.3g}, eager's {max(map(lost, done)):.3g}"
            )


def _kept_and_more(done: list, more: Iterator) -> Iterator:
    """What was computed before, then what is computed now, which is kept."""
    yield from list(done)
    for run in more:
        done.append(run)
        yield run


def _size(x: Tensor, measure: str) -> float:
    return float(x.abs().max()) if measure == "largest" else float(x.square().mean().sqrt())
