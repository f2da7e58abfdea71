"""A mixed 124M model against a uniform softmax model on one GPU: training steps and decode steps.

    PYTHONPATH=src:. python benchmarks/mixed_model.py train --lengths 1024 8192 32768 --out benchmarks/results/h200-mixed-train.json
    PYTHONPATH=src:. python benchmarks/mixed_model.py decode --contexts 131072 --batches 1 8 --out benchmarks/results/h200-mixed-decode.json

Both take the recipe's model (`long-124m`: three windowed softmax layers, then a global one) with cosine softmax and with
LSSAR in the global layers, and the same model with softmax and rotary positions in every layer, whose attention is
PyTorch's SDPA. Weights and tokens are random.

train: tokens a second of whole optimisation steps as `lssar train` makes them (compiled, autocast to bfloat16, the
recipe's optimiser and batch). Every arm has a process of its own; all compile at once, then they take turns of a few
steps, so that a drift of the clock hits all of them.

decode: milliseconds of one decode step as a CUDA graph, weights in bfloat16, and the bytes of the cache. The uniform
model attends through SDPA at a fixed length, which is faster than what a growing cache could do, and, for comparison,
through our kernel. Every model's time is the best of its ways.
"""  # noqa: E501

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.training_step import training_step
from torch import Tensor

from lssar.model import GPT, Cache
from lssar.nn import LayerCache, Positions
from lssar.nn.decoding import DecodeStep
from lssar.records import environment, write_json
from lssar.training.recipes import Recipe, recipe

UNIFORM = "uniform softmax"
ARMS: dict[str, dict[str, Any]] = {
    UNIFORM: {"layout": "uniform", "attention": "softmax"},
    "mixed, cosine softmax": {"attention": "cosine_softmax"},
    "mixed, LSSAR": {"attention": "lssar"},
}
WARM_UP, STEPS, ROUNDS = 2, 2, 4
"""Training steps before timing, in a turn, and turns of each arm."""
MICRO_TOKENS = 32_768
"""Of one forward and backward pass."""


class PlainSoftmax(GPT):
    """The uniform softmax model with PyTorch's SDPA called directly, without `lssar.attention`."""

    def _positions(self, *arguments: Any) -> Positions:
        return dataclasses.replace(super()._positions(*arguments), attend=plain_sdpa)


def plain_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: Any, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recipe_of(name: str, arm: str, length: int) -> Recipe:
    tokens = recipe(name).batch_tokens
    return recipe(name, **ARMS[arm], length=length, micro_batch=max(1, min(MICRO_TOKENS, tokens) // length))


def step_of(r: Recipe) -> Callable[[], float]:
    """A function that makes one optimisation step of an arm."""
    torch.manual_seed(0)
    model = (PlainSoftmax if r.layout == "uniform" else GPT)(r.model()).cuda()
    return training_step(model, r, model.config.layer_configs[-1].specs[-1].p)


def train_arm(name: str, arm: str, length: int, places: Any, pipe: Any) -> None:
    """A process: compile, say so, then a turn of steps for each word of the parent; seconds of each turn."""
    try:
        r = recipe_of(name, arm, length)
        with places:
            step = step_of(r)
            for _ in range(WARM_UP):
                step()
            torch.cuda.empty_cache()
        pipe.send({"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)})
        while pipe.recv():
            step()  # memory comes back, clocks rise
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            seconds = (time.perf_counter() - began) / STEPS
            torch.cuda.empty_cache()
            pipe.send({"seconds": seconds})
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        raise


def train(name: str, lengths: list[int], at_once: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    places = context.Semaphore(at_once)
    rows, pipes, processes = [], [], []
    for length in lengths:
        for arm in ARMS:
            here, there = context.Pipe()
            process = context.Process(target=train_arm, args=(name, arm, length, places, there))
            process.start()
            r = recipe_of(name, arm, length)
            rows.append({"arm": arm, "length": length, "batch_tokens": r.batch_tokens, "micro_batch": r.micro_batch})
            pipes.append(here)
            processes.append(process)
    began = time.monotonic()
    for row, pipe in zip(rows, pipes):
        row |= pipe.recv()
        print(f"[{time.monotonic() - began:.0f} s] ready: {row}", flush=True)
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(ROUNDS):
        for row, pipe, times in zip(rows, pipes, seconds):
            if "failed" not in row:
                pipe.send(True)
                row |= pipe.recv()
                times.append(row.pop("seconds", float("nan")))
    for row, pipe, times in zip(rows, pipes, seconds):
        if times:
            row["step_ms"] = round(1e3 * statistics.median(times), 2)
            row["tokens_per_s"] = round(row["batch_tokens"] / statistics.median(times))
            pipe.send(False)
    _add_ratios(rows, "tokens_per_s", ("length",))
    for process in processes:
        process.join(20)
    return rows


def fill(model: GPT, batch: int, context: int) -> Cache:
    """A cache of `context` random tokens with room for a few more, without a prefill."""
    cache = model.new_cache(context + 8)
    model.prefill(torch.zeros((batch, 1), dtype=torch.int64, device="cuda"), cache)
    for layer in cache.layers:
        layer.length = context
        for kept in layer.tensors:
            kept.normal_()
    return cache


def fixed_length_sdpa(length: int) -> Callable[..., Tensor]:
    """Softmax of one row over the first `length` keys of a cache by PyTorch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Any, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length])

    return attend


def next_logits(model: GPT, cache: Cache, attend: Callable[..., Tensor] | None, ids: Tensor) -> Tensor:
    if attend is None:
        return model.next_logits(ids, cache)
    at = cache.layers[0].at
    assert at is not None
    layers: list[LayerCache] = cache.layers
    return model.logits(model.through(model.embed(ids), model.positions(at, attend=attend), layers))[:, -1]


@torch.no_grad()
def decode_arm(name: str, arm: str, batch: int, context: int, compiled: bool) -> dict[str, Any]:
    from triton.testing import do_bench

    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = GPT(recipe_of(name, arm, 1024).model()).cuda().eval().to(torch.bfloat16)
    cache = fill(model, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device="cuda")
    row: dict[str, Any] = {"arm": arm, "batch": batch, "context": context, "cache_mib": round(cache.bytes / 2**20, 1)}
    function = partial(next_logits, model, cache)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"ours": partial(function, None)}
    if arm == UNIFORM:
        ways["sdpa"] = partial(function, fixed_length_sdpa(context + 1))
    if compiled:  # PyTorch's compiler fuses what is between products and attention
        ways |= {f"{way}_compiled": torch.compile(step, dynamic=False) for way, step in ways.items()}
    for way, next_step in ways.items():
        step = DecodeStep(next_step, cache.layers)
        step(ids)
        assert step.graph is not None and step.output is not None and step.output.isfinite().all()
        for layer in cache.layers:
            layer.length = context
        row[f"{way}_ms"] = round(do_bench(step.graph.replay, warmup=20, rep=100, return_mode="median"), 4)
    row["step_ms"] = min(row[f"{way}_ms"] for way in ways)
    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def decode(name: str, contexts: list[int], batches: list[int], compiled: bool) -> list[dict[str, Any]]:
    rows = []
    for context in contexts:
        for batch in batches:
            for arm in ARMS:
                rows.append(decode_arm(name, arm, batch, context, compiled))
                print(rows[-1], flush=True)
    _add_ratios(rows, "step_ms", ("batch", "context"))
    _add_ratios(rows, "cache_mib", ("batch", "context"))
    return rows


def _add_ratios(rows: list[dict[str, Any]], number: str, same: tuple[str, ...]) -> None:
    for row in rows:
        of = next(x for x in rows if x["arm"] == UNIFORM and all(x[key] == row[key] for key in same))
        if number in row and number in of:
            row[f"{number}_ratio"] = round(row[number] / of[number], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "decode"])
    parser.add_argument("--recipe", default="long-124m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--at-once", type=int, default=6, help="arms that compile at once; each needs about 20 GiB")
    parser.add_argument("--contexts", type=int, nargs="+", default=[131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--compiled", action="store_true", help="decode: also with torch.compile around the step")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    if options.what == "train":
        rows = train(options.recipe, options.lengths, options.at_once)
    else:
        rows = decode(options.recipe, options.contexts, options.batches, options.compiled)
    command = ["python", "benchmarks/mixed_model.py", *sys.argv[1:]]
    record = {"environment": environment(), "command": " ".join(command), "recipe": options.recipe, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, record)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
