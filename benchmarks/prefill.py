"""Prefill of a long input: time and peak memory in chunks and in one pass, and the size of the cache by layout.

    PYTHONPATH=src python benchmarks/prefill.py --recipe long-6m --lengths 32768 --out out/prefill.json
    PYTHONPATH=src python benchmarks/prefill.py --recipe long-33m --lengths 65536 262144 --device cuda

Weights and tokens are random. Each measurement runs in a process of its own, so that its peak is its own; on a CPU the
peak is that of the whole process, less what it was before the prefill.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lssar.model import GPT, PREFILL_CHUNK
from lssar.records import environment, write_json
from lssar.training.recipes import Recipe, recipe

MIB = 2**20
LAYOUTS = ("mixed", "uniform")


def recipe_of(name: str, layout: str) -> Recipe:
    """The recipe as it is (`mixed`), or with its attention in every layer."""
    return recipe(name, layout="uniform") if layout == "uniform" else recipe(name)


def cache_bytes(r: Recipe, length: int, half: bool) -> int:
    """Bytes of the cache of one sequence, float32 or bfloat16; nothing is allocated."""
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model = GPT(r.model())
        cache = model.new_cache(length)
        model.hidden(torch.zeros(1, 1, dtype=torch.int64), cache)
        return cache.bytes


def measure(name: str, layout: str, length: int, chunk: int, device: str, repeats: int) -> dict[str, Any]:
    """Best time of `repeats` prefills after a short warm-up, and the peak memory above that of the weights."""
    torch.manual_seed(0)
    model = GPT(recipe_of(name, layout).model()).eval().to(device)
    half = torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    seconds = []
    with torch.no_grad(), half:
        model.prefill(ids[:, :256], model.new_cache(256))
        before = _peak(device, reset=True)
        for _ in range(repeats):
            began = time.perf_counter()
            cache = model.new_cache(length)
            model.prefill(ids, cache, chunk)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return {
        "layout": model.config.layout, "length": length, "chunk": chunk, "seconds": round(min(seconds), 3),
        "peak_mib": round((_peak(device) - before) / MIB, 1), "cache_mib": round(cache.bytes / MIB, 1),
    }  # fmt: skip


def _peak(device: str, reset: bool = False) -> int:
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(arguments: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a new process; a row that says why, if it ends early."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return {**arguments, "failed": reason[:200]}
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="long-6m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768])
    parser.add_argument("--cache-lengths", type=int, nargs="+", default=[65_536, 262_144])
    parser.add_argument("--chunk", type=int, default=PREFILL_CHUNK)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["mixed"])
    parser.add_argument("--one-pass", action="store_true", help="also without chunks")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(**json.loads(options.child))))
        return

    half = options.device == "cuda"
    caches = [
        {"layout": layout, "length": length, "mib": cache_bytes(recipe_of(options.recipe, layout), length, half) / MIB}
        for length in options.cache_lengths
        for layout in LAYOUTS
    ]
    dtype = "bfloat16" if half else "float32"
    for row in caches:
        print(f"cache, {row['length']:>7,} tokens, {row['layout']:<8} {row['mib']:10,.1f} MiB ({dtype})", flush=True)
    rows = []
    for length in options.lengths:
        for layout in options.layouts:
            for chunk in [options.chunk, *([length] if options.one_pass else [])]:
                row = in_own_process(
                    {"name": options.recipe, "layout": layout, "length": length, "chunk": chunk,
                     "device": options.device, "repeats": options.repeats}
                )  # fmt: skip
                rows.append(row)
                said = row.get("failed") or f"{row['seconds']:8.2f} s, peak {row['peak_mib']:9,.1f} MiB"
                how = "one pass" if chunk == length else f"chunks of {chunk:,}"
                print(f"prefill, {length:>7,} tokens, {layout:<8} {how:<16} {said}", flush=True)
    if options.out is not None:
        about = {"recipe": options.recipe, "device": options.device, "environment": environment()}
        write_json(options.out, {**about, "caches": caches, "prefill": rows})


if __name__ == "__main__":
    main()
