"""Measure tile shapes on the current GPU and store the fastest where `tiles.tile_for` looks first."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lssar.ops.fused import op, tiles
from lssar.ops.fused.tiles import Tile
from lssar.records import write_json

POWER = 15.0
OPTIONS = (None, POWER, None, True, None, None, None)
"""Arguments of the operators after the tensors: no gain, p, causal, nothing else hidden."""


def candidates(kernel: str, now: Tile) -> Iterator[Tile]:
    """Tiles to measure: the one in use, and others with different sizes, warps, stages and register limits."""
    gluon = kernel.endswith("_hopper")
    seen = {now}
    yield now
    for m in (64, 128) if kernel.startswith("forward") else (32, 64, 128):
        for n in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3):
                    for registers in (None, 128, 168):
                        tile = dataclasses.replace(now, m=m, n=n, n1=0, warps=warps, stages=stages, registers=registers)
                        rows, others = (n, m) if kernel.startswith("key") else (m, n)  # of the product
                        least = 32 if kernel.startswith("forward") else 64  # backward takes tiles in quarters
                        if gluon and ((registers or 168) != 168 or rows != 16 * warps or others < least):
                            continue  # one warp group for 64 rows
                        if gluon and kernel.startswith("key") and m > 64:
                            continue  # a tile's rows must lie in one block of the dq kernel
                        if kernel.startswith("key") and m < 64 <= n:
                            continue  # Triton overwrites such tiles while products read them (test_hopper.py)
                        if m * n > 128 * 64 * (warps // 4) or tile in seen:
                            continue
                        seen.add(tile)
                        yield tile


def tune(
    head_size: int, dtype: torch.dtype, length: int = 8192, heads: int = 16, budget_s: float = 60.0,
    report: Callable[[str], None] = lambda line: None, time: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[tiles.Key, Tile]:  # fmt: skip
    """The fastest tile of each kernel among those that give the same results; kept in tiles.CHOSEN."""
    from time import monotonic

    measure = time or _time
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, do = (
        torch.randn(1, heads, length, head_size, generator=generator, device=device).to(dtype) for _ in range(4)
    )
    o, rows = op.run_forward(q, k, v, *OPTIONS)
    exact = [o, *op.run_backward(q, k, v, o, do, rows, *OPTIONS)]
    launched = record(q, k, v, do)
    # A different order of sums changes scores by a float32 rounding, and weights by p times the largest score times it.
    steepness = POWER * math.log(head_size) * math.log(length)
    allowed = 4 * torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * steepness
    found: dict[tiles.Key, Tile] = {}
    for name in launched:
        key = tiles.key_of(name, head_size, q.element_size())
        before = tiles.CHOSEN.get(key)
        best, best_ms, began = None, float("inf"), monotonic()
        for tile in candidates(name, tiles.tile_for(name, head_size, q.element_size())):
            if best is not None and monotonic() - began > budget_s:
                break
            tiles.CHOSEN[key] = tile
            try:
                o, rows = op.run_forward(q, k, v, *OPTIONS)
                got = [o, *op.run_backward(q, k, v, o, do, rows, *OPTIONS)]
                if tiles.CHOSEN[key] != tile:
                    continue  # too large for this GPU: a smaller one ran instead
                off = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(got[:4], exact[:4]))
                if not off < allowed:
                    report(f"{name} {tile}: differs by {off:.1e}, left out")
                    continue
                ms = measure(record(q, k, v, do)[name])
            except Exception as problem:  # a shape that this Triton cannot compile
                report(f"{name} {tile}: {type(problem).__name__}")
                continue
            report(f"{name} {tile}: {ms:.3f} ms")
            if ms < best_ms:
                best, best_ms = tile, ms
        if best is None:
            tiles.CHOSEN.pop(key, None)
            if before is not None:
                tiles.CHOSEN[key] = before
            continue
        tiles.CHOSEN[key] = found[key] = best
    return found


def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Run forward and backward once, and return the launch of each kernel with tiles of its own by name, so that it
    can be timed alone."""
    launch = op.launch
    launches: dict[str, Callable[[], None]] = {}

    def recording(name: str, *call: Any) -> Tile:
        def repeat() -> None:
            launch(name, *call)

        if name not in tiles.BORROWED:
            launches[name] = repeat
        return launch(name, *call)

    op.launch = recording  # type: ignore[assignment]
    try:
        o, rows = op.run_forward(q, k, v, *OPTIONS)
        op.run_backward(q, k, v, o, do, rows, *OPTIONS)
    finally:
        op.launch = launch
    return launches


def _time(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=15, rep=60, return_mode="median"))


def store(found: dict[tiles.Key, Tile], path: Path | None = None) -> Path:
    """Add tiles to the file for this GPU; those of other head sizes and dtypes stay."""
    path = path or tiles.stored_path()
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept |= {"/".join(map(str, key)): dataclasses.asdict(tile) for key, tile in found.items()}
    os.makedirs(path.parent, exist_ok=True)
    return write_json(path, kept, overwrite=True)
