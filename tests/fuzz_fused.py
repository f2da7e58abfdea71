"""Random calls of the fused kernels against float64.

    python -m tests.fuzz_fused --cases 10000 --out fuzz-fused.json        # on a GPU: full sizes
    TRITON_INTERPRET=1 python -m tests.fuzz_fused --cases 50              # on a CPU: small sizes

Draws dtype, head size, lengths, groups, strides, power, gain, what rows see, norms of q and k, decode with and without
pages. Every case can be repeated: `--first SEED --cases 1`. Writes counts and the failures as JSON, and exits with 1 if
there are failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lssar
from lssar.ops import fused
from lssar.ops.reference import reference_attention
from lssar.visibility import visibility
from tests.fuzz_jobs import in_processes
from tests.helpers import CUDA, DEVICE, with_gradients
from tests.ops import interpreter
from tests.ops.test_window import check_not_finite

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ACTIVATIONS = ("softmax", "sigmoid_n", "sigmoid_n_l1", "l1_relu", "l1_gelu", "cosine_softmax", "softmax^3")
WINDOW_SPECS = ("softmax", "cosine softmax", "lssa", "lssar")
POWERS = (None, 1.0, 2.0, 3.0, 7.0, 15.0, 15.0, 31.0, 1.5, 7.25)


@dataclass(frozen=True)
class Case:
    seed: int
    kind: str  # lssar, activation, decode, paged, hidden, hidden window
    spec: str
    dtype: str
    batch: int
    key_heads: int
    group: int
    queries: int
    keys: int
    head_size: int
    p: float | None
    view: str
    gain: bool
    strided: bool
    q_exponent: int
    k_exponent: int
    v_exponent: int


SAME_KERNELS = 250
"""Cases on a GPU that follow each other and share what kernels are compiled for: compiling takes seconds, a case
milliseconds."""


def draw(seed: int, small: bool) -> Case:
    r = random.Random(seed)
    kernels = r if small else random.Random(-1 - seed // SAME_KERNELS)
    kinds = ("lssar", "activation", "decode", "paged", "hidden", "hidden window")
    kind = kernels.choices(kinds, (45, 15, 12, 8, 10, 10))[0]
    dtype = kernels.choices(tuple(DTYPES), (3, 2, 1))[0]
    longest = 70 if small else r.choice((64, 300, 1100))
    keys = r.choice((1, 2, 3, 4, 5, r.randint(6, longest), r.randint(6, longest), longest))
    view = kernels.choice(("causal", "full", "window", "full window", "pack", "full pack", "padding"))
    if "pack" in view or view == "padding" or r.random() < 0.7:
        queries = keys
    else:
        queries = r.randint(1, longest if "full" in view else keys)  # causal queries are the last keys
    if kind in ("decode", "paged"):
        queries, view = r.randint(1, min(4, keys)), "lengths"
    if kind in ("hidden", "hidden window"):
        queries, view = keys, "causal"
    specs = {"activation": ACTIVATIONS, "hidden window": WINDOW_SPECS}.get(kind, ("lssar",))
    far = dtype != "float16" and kind in ("lssar", "decode", "paged") and r.random() < 0.25
    spans = r.choice(((60, 60, 20), (3, 3, 104))) if far else (0, 0, 0)  # gradients are about v / |q| and v / |k|
    return Case(
        seed, kind, kernels.choice(specs), dtype,
        1 if "pack" in view else r.randint(1, 2), r.randint(1, 2), r.choice((1, 1, 2, 4)), queries, keys,
        kernels.choice((16, 20, 32) if small else (16, 40, 64, 64, 80, 128, 128, 256)),
        kernels.choice(POWERS), view, kind != "activation" and kernels.random() < 0.2,
        r.random() < 0.3, *(r.randint(-min(span, 60), span) for span in spans),
    )  # fmt: skip


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(case.seed)
    made = []
    heads = (case.key_heads * case.group, case.key_heads, case.key_heads, case.key_heads * case.group)
    lengths = (case.queries, case.keys, case.keys, case.queries)
    for head, length, exponent in zip(heads, lengths, (case.q_exponent, case.k_exponent, case.v_exponent, 0)):
        x = torch.randn(case.batch, head, length, case.head_size, generator=generator) * 2.0**exponent
        x = x.to(DEVICE, DTYPES[case.dtype])
        made.append(x.transpose(1, 2).contiguous().transpose(1, 2) if case.strided else x)
    return tuple(made)


def view_of(case: Case) -> dict[str, Any]:
    r = random.Random(case.seed + 1)
    view: dict[str, Any] = {"causal": "full" not in case.view}
    if "window" in case.view:
        view["window"] = r.randint(1, case.keys + 3)
    if "pack" in case.view:
        cuts = sorted(r.randint(0, case.keys) for _ in range(r.randint(0, 4)))
        view["cu_seqlens"] = torch.tensor([0, *cuts, case.keys], device=DEVICE)
    if case.view == "padding":
        view["key_lengths"] = torch.tensor([r.randint(0, case.keys) for _ in range(case.batch)], device=DEVICE)
    return view


def exact_attention(q, k, v, gain, spec, view):
    """The reference in the dtype of q; a gain multiplies unit queries of a spec without cosine normalisation."""
    see = visibility(q.shape[2], k.shape[2], q.device, **{"causal": True, **view}).dense(k.shape[2])
    if gain is not None:
        k = k / k.norm(dim=-1, keepdim=True)
        q = q / q.norm(dim=-1, keepdim=True) * gain.to(q.dtype)[:, None, None]
        spec = spec.replace(cosine=False)
    return reference_attention(q, k, v, see, spec)[0]


def spec_of(case: Case) -> lssar.AttentionSpec:
    if case.kind == "activation":
        name, _, p = case.spec.partition("^")
        return lssar.spec(name).reweighted(float(p)) if p else lssar.spec(name)
    return lssar.spec("lssa") if case.p is None else lssar.spec("lssar", p=case.p)


def size(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def limit(case: Case, name: str, exact: torch.Tensor, do: float, row: float) -> float:
    """Allowed root mean square error: four times that of tests/ops/comparing.py, which has the reasons."""
    eps, p = torch.finfo(DTYPES[case.dtype]).eps, spec_of(case).p or 1
    if case.dtype == "float32":
        eps *= 16  # for rows whose threshold lies close to their largest score
    if name in ("o", "dv"):
        return 4 * (1.5 + p / 16) * eps * max(size(exact), do * 0.1 if name == "dv" else 0)
    return 4 * (4 + p / 3) * eps * max(size(exact), do / row)


def compare(case: Case, got, exact, lost, sizes) -> list[str]:
    problems = []
    for name, a, b, row in zip(("o", "dq", "dk", "dv", "dgain"), got, exact, sizes):
        if name == "dgain":  # a sum over rows that cancels: only finite
            if not a.isfinite().all():
                problems.append(f"{name} is not finite")
            continue
        terms = sizes[-1] * (sizes[3] if name in ("dq", "dk") else 1.0)  # these are differences of dO.v
        error, allowed = size(a.double() - b.double()), limit(case, name, b, terms, row)
        if not a.isfinite().all():
            problems.append(f"{name} is not finite")
        elif error > allowed and not error <= 4 * lost()[name]:
            problems.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}, eager {lost()[name]:.3g}")
    return problems


def run_gradients(case: Case) -> list[str]:
    q, k, v, do = tensors(case)
    spec, view = spec_of(case), view_of(case)
    gain = torch.rand(q.shape[1], device=DEVICE) + 0.5 if case.gain else None
    inputs = (q, k, v) if gain is None else (q, k, v, gain)

    def call(q, k, v, gain=None):
        if gain is None:
            return lssar.attention(q, k, v, spec, impl="fused", **view)
        return fused.fused_attention(q, k, v, p=spec.p, gain=gain, **view)

    poison = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
    del poison  # the allocator hands this memory out again
    got = with_gradients(call, inputs, do)
    wide = tuple(x.double() for x in inputs)

    def run(inputs, spec=spec):
        exact = lambda q, k, v, gain=None: exact_attention(q, k, v, gain, spec, view)  # noqa: E731
        return with_gradients(exact, inputs, do.to(inputs[0].dtype))

    exact = run(wide)

    def lost() -> dict[str, float]:
        """Errors of plain PyTorch in the same dtype; with p < 2 also what rounding of the threshold may change, where
        the gradient jumps (p = 1) or nearly so."""
        names = ("o", "dq", "dk", "dv")
        errors = {n: size((a.double() - b).nan_to_num(torch.inf)) for n, a, b in zip(names, run(inputs), exact)}
        if spec.p is not None and spec.p < 2:
            rounding = 8 * torch.finfo(q.dtype).eps
            low, high = (run(wide, spec.replace(threshold=1 + rounding * side)) for side in (-1, 1))
            errors = {n: errors[n] + size(a - b) for n, a, b in zip(names, low, high)}
        return errors

    sizes = (1.0, size(q), size(k), size(v), 1.0, size(do))
    return compare(case, got, exact, lost, sizes)


def run_decode(case: Case) -> list[str]:
    q, k, v, _ = tensors(case)
    spec, r = spec_of(case), random.Random(case.seed + 2)
    lengths = torch.tensor([r.randint(case.queries, case.keys) for _ in range(case.batch)], device=DEVICE)
    gain = torch.rand(q.shape[1], device=DEVICE) + 0.5 if case.gain else None
    cache, table = (k, v), None
    if case.kind == "paged":
        page = 16
        pages = -(-case.keys // page)
        table = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(case.seed)).to(DEVICE)
        table = table.view(case.batch, pages).int()
        cache = tuple(_paged(x, table, page) for x in (k, v))
    o = fused.fused_decode(q, *cache, p=case.p, gain=gain, lengths=lengths, block_table=table, tolerance=0.0)
    problems = []
    for b, n in enumerate(lengths.tolist()):
        exact = exact_attention(*(x[b : b + 1].double() for x in (q, k[:, :, :n], v[:, :, :n])), gain, spec, {})
        error, allowed = size(o[b : b + 1].double() - exact), limit(case, "o", exact, 1.0, 1.0)
        if not o[b].isfinite().all() or error > 2 * allowed:
            problems.append(f"row {b} of {n} keys: error {error:.3g}, allowed {2 * allowed:.3g}")
    return problems


def _paged(x: torch.Tensor, table: torch.Tensor, page: int) -> torch.Tensor:
    cache = x.new_full((table.numel(), page, x.shape[1], x.shape[3]), torch.nan)
    for b in range(x.shape[0]):
        for i, block in enumerate(table[b].tolist()):
            rows = x[b, :, i * page : (i + 1) * page].transpose(0, 1)
            cache[block, : rows.shape[0]] = rows
    return cache


PLACES = ("q", "k", "v", "dO")


def not_finite_place(case: Case) -> tuple[int, str, float, int]:
    """Row, tensor, value and column of the number that is not finite."""
    r = random.Random(case.seed + 3)
    at, which, bad = r.randrange(case.keys), r.choice(PLACES), r.choice((torch.inf, -torch.inf, torch.nan))
    return at, which, bad, r.randrange(case.head_size)


def run_hidden(case: Case) -> list[str]:
    """An infinity or NaN in q, k, v or dO reaches no row that does not see it, and no key that such a row does not."""
    x = dict(zip(PLACES, tensors(case)))
    at, which, bad, column = not_finite_place(case)
    call = lambda *x: fused.fused_attention(*x, p=case.p, causal=True)  # noqa: E731
    clean = with_gradients(call, (x["q"], x["k"], x["v"]), x["dO"])
    x[which] = x[which].clone()
    x[which][0, 0, at, column] = bad
    got = with_gradients(call, (x["q"], x["k"], x["v"]), x["dO"])
    problems = []
    place = f"the {bad} at {at} of {which}"
    rows = torch.arange(case.keys, device=DEVICE)
    everywhere, own_row = torch.ones_like(rows, dtype=torch.bool), which in ("q", "dO")
    unseen = rows != at if own_row else rows < at
    untouched = rows > at if own_row else ~everywhere  # keys that no row which sees it also sees
    kept = (everywhere if which == "dO" else unseen, unseen, untouched, untouched)
    for name, a, b, keep in zip(("o", "dq", "dk", "dv"), got, clean, kept):
        per_head = a.shape[1] // case.key_heads
        # Rows that see the infinity do not count for whether their block is steep: others may take the shorter forms.
        near = (1e-2 if name == "o" else 4e-2) * size(b[0, :per_head])
        close = torch.isclose(a[0, :per_head].double(), b[0, :per_head].double(), rtol=1e-2, atol=near)
        if not close[:, keep].all():
            problems.append(f"{name} changes where {place} is not seen")
        if not torch.equal(a[1:], b[1:]) or not torch.equal(a[:1, per_head:], b[:1, per_head:]):
            problems.append(f"{name} of another batch row or head changes")
    lost = got[1 if which == "dO" else 0][0, : 1 if own_row else case.group][:, ~unseen]
    if lost.isfinite().all(-1).any():
        problems.append(f"a row that sees {place} is finite")
    return problems


def run_hidden_window(case: Case) -> list[str]:
    """The same in the windowed kernels, and for the gradient of the output."""
    r = random.Random(case.seed + 4)
    at, which = r.randrange(case.keys), r.choice(PLACES)
    bad = r.choice((torch.inf, -torch.inf, torch.nan))
    size = {"L": case.keys, "D": case.head_size, "window": r.randint(1, case.keys)}
    check_not_finite(case.spec, DTYPES[case.dtype], which, bad, at, **size)
    return []


def run(case: Case) -> list[str]:
    runs = {"decode": run_decode, "paged": run_decode, "hidden": run_hidden, "hidden window": run_hidden_window}
    try:
        return runs.get(case.kind, run_gradients)(case)
    except Exception as problem:
        return [f"{type(problem).__name__}: {str(problem)[:300]}"]


def print_now(line: str) -> None:
    print(line, flush=True)


def fuzz(
    first: int, cases: int, seconds: float = float("inf"), *, small: bool, report=lambda line: None
) -> dict[str, Any]:
    """Counts of cases by kind, dtype and view, and the failures."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    began = time.monotonic()
    done = 0
    for seed in range(first, first + cases):
        if time.monotonic() - began > seconds:
            break
        case = draw(seed, small)
        done += 1
        for key in (f"kind {case.kind}", f"dtype {case.dtype}", f"view {case.view}"):
            counts[key] += 1
        if problems := run(case):
            failures.append({**dataclasses.asdict(case), "problems": problems})
            report(f"seed {seed}: {case}: {'; '.join(problems)}")
        if done % 500 == 0:
            report(f"{done} cases, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    return {"first": first, "cases": done, "failures": failures, "counts": dict(sorted(counts.items()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    arguments = parser.parse_args()
    if not CUDA:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("without a GPU the kernels run in Triton's interpreter: set TRITON_INTERPRET=1")
        interpreter.improve()
    run_cases = functools.partial(fuzz, small=not CUDA, report=print_now)
    size = SAME_KERNELS if CUDA else None
    result = in_processes(run_cases, arguments.first, arguments.cases, arguments.seconds, arguments.jobs, size)
    print(f"{result['cases']} cases, {len(result['failures'])} failures")
    if arguments.out:
        from lssar.records import environment, write_json

        command = shlex.join(("python", "-m", "tests.fuzz_fused", *sys.argv[1:]))
        write_json(arguments.out, {"command": command, "environment": environment(), **result}, overwrite=True)
    else:
        print(json.dumps(result["counts"]))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
