"""A fuzzer of `lssar.attention` on the CPU: random calls, forward and backward, against the reference in float64.

    python -m tests.fuzz_attention --cases 100000 --seed 0 --out results/reliability/fuzz-attention.json

A case draws shapes, dtypes, layouts in memory, what rows see, the mechanism, sizes from the smallest to the largest
number of the dtype, and now and then NaN or inf. Every implementation that runs on a CPU must

- raise nothing,
- give finite outputs and gradients for finite inputs,
- agree with float64 as closely as its dtype allows, where sizes are moderate,
- keep NaN and inf within the rows that see them.

Case i of a seed does not depend on the number of cases; `--only I` runs one of them.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lssar
from lssar.ops import native
from lssar.records import environment, write_json
from lssar.specs import AttentionSpec
from lssar.testing import EPS, assert_close_to_reference, with_gradients
from lssar.visibility import visibility
from tests.fuzz_jobs import in_processes

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
SIZES = ("moderate", "moderate", "moderate", "tiny", "huge", "mixed", "zero", "largest")
IMPLEMENTATIONS = ("tiled", "strips", "reference")
"""`tiled` with the native kernels where there are any, `strips` without."""


class Draw:
    """Random choices of one case."""

    def __init__(self, seed: int, index: int):
        self.generator = torch.Generator().manual_seed(seed * 1_000_000_007 + index)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def chance(self, p: float) -> bool:
        return float(torch.rand(1, generator=self.generator)) < p

    def of(self, options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


@dataclass
class Call:
    spec: AttentionSpec
    tensors: dict[str, Tensor]  # q, k, v, and gain, threshold where the spec learns them
    do: Tensor
    options: dict[str, Any]
    size: str
    bad: bool  # whether anything is not finite
    kinds: list[str] = field(default_factory=list)

    def attend(self, impl: str, *given: Tensor) -> Tensor:
        named = dict(zip(self.tensors, given))
        learned = {"head_scale": named.get("gain"), "threshold": named.get("threshold")}
        return lssar.attention(
            named["q"], named["k"], named["v"], self.spec, **learned, impl="tiled" if impl == "strips" else impl,
            **self.options,
        )  # fmt: skip

    def run(self, impl: str, tensors: dict[str, Tensor] | None = None, do: Tensor | None = None) -> tuple[Tensor, ...]:
        """Output and gradients."""
        library = native._library
        if impl == "strips":
            native._library = None
        try:
            given = tuple((tensors or self.tensors).values())
            return with_gradients(lambda *x: self.attend(impl, *x), given, self.do if do is None else do)
        finally:
            native._library = library


def draw_spec(draw: Draw) -> AttentionSpec:
    spec = lssar.spec(draw.of((*lssar.specs(), "lssar", "lssar", "lssa", "cosine_softmax")))
    normalised = spec.divisor == "l1" and spec.recentre == "none" and not spec.negate
    if spec.p is not None or (normalised and draw.chance(0.3)):
        spec = spec.replace(p=draw.of((1, 1.5, 2, 3, 7, 15, 15, 31, 64)))
        if draw.chance(0.2):
            spec = spec.replace(threshold=draw.of((0.0, 0.5, 1.0, 1.5)), learned_threshold=draw.chance(0.5))
    if draw.chance(0.15):
        spec = spec.replace(head_scale=draw.of((1.0, -0.5, 3.0)))
    return spec


def draw_view(draw: Draw, B: int, H: int, Lq: int, Lk: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": draw.chance(0.7) and Lq <= Lk}
    kind = draw.of(("plain", "plain", "window", "mask", "key_lengths", "key_ranges", "cu_seqlens", "both"))
    if kind in ("window", "both"):
        options["window"] = draw.integer(1, max(1, Lk + 2))
    if kind in ("mask", "both"):
        shape = [draw.of((1, n)) for n in (B, H, Lq, Lk)][draw.integer(0, 2) :]
        options["mask"] = torch.rand(shape, generator=draw.generator) < draw.of((0.2, 0.6, 0.9))
    if kind == "key_lengths":
        options["key_lengths"] = torch.tensor([draw.integer(0, Lk) for _ in range(B)])
    if kind == "key_ranges":
        options["key_ranges"] = torch.randint(-1, Lk + 2, (B, Lq, 2), generator=draw.generator)
    if kind == "cu_seqlens" and B == 1 and Lq == Lk:
        cuts = sorted(draw.integer(0, Lk) for _ in range(draw.integer(0, 3)))
        options["cu_seqlens"] = torch.tensor([0, *cuts, Lk], dtype=draw.of((torch.int32, torch.int64)))
    return options


def draw_tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, size: str) -> Tensor:
    """Values of the size asked for, in a layout of its own."""
    x = draw.normal(*shape)
    info = torch.finfo(dtype)
    match size:
        case "tiny":
            x = x * info.tiny * 8
        case "huge":
            x = x * info.max**0.75
        case "mixed":
            x = x * 10.0 ** (draw.normal(*shape[:3], 1) * (1.5 if dtype == torch.float16 else 12)).clamp(-30, 30)
        case "zero":
            x = x * (torch.rand(*shape[:3], 1, generator=draw.generator) < 0.5)
        case "largest":
            x = x.sign() * info.max
    x = x.clamp(-info.max, info.max).to(dtype)
    match draw.of(("plain", "transposed", "padded", "expanded")):
        case "transposed":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        case "padded":
            wide = torch.zeros(*shape[:3], shape[3] + 3, dtype=dtype)
            wide[..., 1:-2] = x
            x = wide[..., 1:-2]
        case "expanded" if shape[0] > 1:
            x = x[:1].expand(shape)
    return x


def draw_call(draw: Draw) -> Call:
    B, Hkv, groups = draw.integer(1, 2), draw.integer(1, 2), draw.integer(1, 3)
    H, D, Dv = Hkv * groups, draw.of((1, 2, 3, 5, 8, 16, 17)), draw.of((1, 3, 8, 16))
    Lk = draw.of((1, 2, 3, 4, 5, draw.integer(0, 40), draw.integer(0, 40)))
    Lq = Lk if draw.chance(0.6) else draw.integer(0, 20)
    dtype, spec = draw.of(DTYPES), draw_spec(draw)
    sizes = [draw.of(SIZES)] * 3 if draw.chance(0.5) else [draw.of(SIZES) for _ in range(3)]
    shapes = ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv))
    tensors = {n: draw_tensor(draw, shape, dtype, size) for n, shape, size in zip("qkv", shapes, sizes)}
    of_heads = torch.float64 if dtype == torch.float64 else torch.float32
    if spec.head_scale is not None and draw.chance(0.7):
        tensors["gain"] = draw.normal(H).to(of_heads)
    if spec.learned_threshold and draw.chance(0.7):
        tensors["threshold"] = draw.normal(H).abs().to(of_heads)
    sizes.append(draw.of(("moderate", "moderate", "zero", "mixed")))
    do = draw_tensor(draw, (B, H, Lq, Dv), dtype, sizes[-1])
    bad = draw.chance(0.12)
    if bad:
        for _ in range(draw.integer(1, 2)):
            name = draw.of(("q", "k", "v", "do"))
            x = (do if name == "do" else tensors[name]).clone()
            if x.numel():
                x[tuple(draw.integer(0, n - 1) for n in x.shape)] = draw.of((torch.inf, -torch.inf, torch.nan))
            tensors, do = (tensors, x) if name == "do" else (tensors | {name: x}, do)
    size = "moderate" if set(sizes) <= {"moderate", "zero"} else "extreme"
    call = Call(spec, tensors, do, draw_view(draw, B, H, Lq, Lk), size, bad)
    view = [name for name in call.options if name != "causal"] or ["plain"]
    call.kinds = [str(dtype).removeprefix("torch."), size, *view, *(["not finite"] if bad else [])]
    return call


def reached(call: Call) -> tuple[Tensor, ...]:
    """Where NaN may stand in o, dq, dk, dv: rows that see an entry that is not finite, and what they see."""
    q, k, v = (call.tensors[name] for name in "qkv")
    H, Hkv, Lk = q.shape[1], k.shape[1], k.shape[2]
    see = visibility(q.shape[2], Lk, q.device, **call.options).dense(Lk).expand(q.shape[0], H, q.shape[2], Lk)
    per_row = lambda x: ~x.isfinite().all(-1)  # noqa: E731
    bad_keys = (per_row(k) | per_row(v)).repeat_interleave(H // Hkv, 1)
    rows = per_row(q) | (see & bad_keys[:, :, None]).any(-1)
    wide = rows | per_row(call.do)
    keys = (see & wide[..., None]).any(2).unflatten(1, (Hkv, -1)).any(2)
    return rows, wide, keys, keys


def check(call: Call, impl: str) -> None:
    """AssertionError, or what the call raised."""
    got = call.run(impl)
    if call.bad:
        return check_containment(call, impl, got)
    for name, x in zip(("o", "dq", "dk", "dv", "d_gain", "d_threshold"), got):
        assert x.isfinite().all(), f"{name} is not finite"
    dtype = call.tensors["q"].dtype
    if call.size != "moderate" or impl == "reference" or not all(x.numel() for x in got):
        return None
    exact = call.run("reference", {n: x.double() for n, x in call.tensors.items()}, call.do.double())
    steep = 64 * (call.spec.p or 1) * EPS[torch.float64 if dtype == torch.float64 else torch.float32]
    quick = all(
        float((x.double() - y).abs().max()) <= (4 * EPS[dtype] + steep) * float(y.abs().max())
        for x, y in zip(got, exact)
    )
    if not quick and set(call.tensors) == set("qkv") and call.spec.head_scale is None:
        q, k, v = (call.tensors[name] for name in "qkv")
        assert_close_to_reference(got, q, k, v, call.spec, do=call.do, **call.options)
    return None


def check_containment(call: Call, impl: str, got: tuple[Tensor, ...]) -> None:
    zeroed = {name: x.nan_to_num(0.0, 0.0, 0.0) for name, x in call.tensors.items()}
    clean = call.run(impl, zeroed, call.do.nan_to_num(0.0, 0.0, 0.0))
    for name, x, y, gone in zip(("o", "dq", "dk", "dv"), got, clean, reached(call)):
        assert x[~gone].isfinite().all(), f"{name} is not finite where nothing of the kind is seen"
        if call.size != "moderate":
            continue
        allowed = 1e-3 if x.dtype in (torch.float16, torch.bfloat16) else 1e-4 if x.dtype == torch.float32 else 1e-9
        limit = allowed * max(1.0, float(y.abs().max()) if y.numel() else 1.0)
        assert ((x[~gone] - y[~gone]).abs() <= limit).all(), f"{name} changed where nothing of the kind is seen"


def fuzz(
    first: int, cases: int, seconds: float = float("inf"), *, seed: int = 0, progress: bool = False
) -> dict[str, Any]:
    """Counts of what was run, and every failure."""
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    start, done = time.perf_counter(), 0
    for index in range(first, first + cases):
        call = draw_call(Draw(seed, index))
        for impl in IMPLEMENTATIONS:
            counts["calls"] += 1
            try:
                check(call, impl)
            except Exception as problem:
                text = f"{type(problem).__name__}: {problem}" if str(problem) else traceback.format_exc(limit=-1)
                failures.append({"case": index, "impl": impl, "kinds": call.kinds, "problem": text[:500]})
                if progress:
                    print(f"case {index}, {impl}, {call.spec}: {text[:300]}", file=sys.stderr, flush=True)
        counts.update(call.kinds)
        counts[call.spec.name] += 1
        done += 1
        if progress and done % 2000 == 0:
            print(f"{done} cases, {len(failures)} failures", file=sys.stderr, flush=True)
        if time.perf_counter() - start > seconds:
            break
    about = {"seed": seed, "first": first, "cases": done, "native": native.isa()}
    return about | {"counts": dict(counts), "failures": failures}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz lssar.attention on the CPU.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone and print it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write counts as JSON; an existing file is replaced")
    asked = parser.parse_args(words)
    if asked.only is not None:
        asked.cases, asked.first = 1, asked.only
        call = draw_call(Draw(asked.seed, asked.only))
        shapes = {name: tuple(x.shape) for name, x in call.tensors.items()}
        print(call.spec, shapes, call.kinds, call.options, sep="\n")
    run = functools.partial(fuzz, seed=asked.seed, progress=True)
    result = in_processes(run, asked.first, asked.cases, 60 * asked.minutes, asked.jobs)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, result | {"environment": environment()}, overwrite=True)
    print(f"{result['cases']} cases, {result['counts']['calls']} calls, {len(result['failures'])} failures")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
