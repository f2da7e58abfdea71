"""The dry run of `lssar train` against measurements, and the plan of docs/scale.md.

    PYTHONPATH=src:. python benchmarks/scale.py memory --out benchmarks/results/cpu-scale-memory.json
    PYTHONPATH=src:. python benchmarks/scale.py plan --out benchmarks/results/scale-plan.json
    PYTHONPATH=src:. python benchmarks/scale.py models --times --out benchmarks/results/h200-scale-models.json    # GPU
    PYTHONPATH=src:. python benchmarks/scale.py kernels --times --out benchmarks/results/h200-scale-kernels.json  # GPU

memory: peak memory of tiny models on a CPU, in 1, 2 and 4 processes, predicted and measured.

plan: the 1B recipe on 8 to 64 cards, and the dry run of what was measured on an H200.

models: peak memory of training steps at 8K tokens of 124M, 355M and 1B parameters, by the training loop, on random
tokens. Every model has a process of its own, and all compile at once. Memory is that of each process alone, so the GPU
may be in use by others. With --times the models then take turns and their steps are timed: that needs an idle GPU.

kernels: checks attention at the shapes of the plan, which compiles the kernels. With --times, which needs an idle GPU,
also times it, the matrix products of a layer and of the head, and a copy in memory.

--tiny runs `models` and `kernels` in seconds on any device, as a rehearsal. The file is written anew after each
measurement, so that nothing is lost when one fails or time runs out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lssar.benchmark import Case, run_benchmark
from lssar.data.folder import DataFolder
from lssar.data.shards import write_shard
from lssar.records import environment, write_json
from lssar.training.distributed import world
from lssar.training.loop import _Trainer
from lssar.training.plan import plan
from lssar.training.recipes import Recipe, recipe

Save = Callable[[dict[str, Any]], None]
MODELS = {
    "124M, LSSAR": recipe("gpt2-124m-fineweb", length=8192, batch_tokens=65_536, micro_batch=4),
    "355M, mixed, cosine softmax": recipe(
        "gpt2-124m-fineweb", size="355m", layout="mixed", attention="cosine_softmax", length=8192, batch_tokens=32_768,
        micro_batch=2,
    ),
    "1B, mixed, LSSAR": recipe("long-1b-fineweb", length=8192, batch_tokens=32_768, micro_batch=2),
}  # fmt: skip
TINY_MODELS = {
    name: r.replace(size="0.8m", heads=2, key_heads=2, length=64, batch_tokens=256, micro_batch=2, compile=False)
    for name, r in MODELS.items()
}
WARM_UP, MEASURED, TIMED = 2, 2, 3
"""Steps: the first compiles, the second has all optimiser state."""
KEPT_SIZES = 24
"""Sizes of blocks that are listed."""


def train_model(name: str, r: Recipe, folder: str, go: Any, results: Any) -> None:
    """A process: reports (model, memory), then (model, time of a step) each time that it receives True from `go`."""
    r = r.replace(steps=100, warmup=1)
    try:
        with world() as w:
            began = time.monotonic()
            trainer = _Trainer(r, DataFolder(Path(folder), r.vocab_size), Path(folder), w)
            losses = [trainer.take_step()["loss"] for _ in range(WARM_UP)]
            found = {"recipe": r.to_dict(), "parameters": trainer.model.parameter_count()}
            found["compile_s"] = round(time.monotonic() - began, 1)
            if w.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            losses += [trainer.take_step()["loss"] for _ in range(MEASURED)]
            found["losses"] = [loss if math.isfinite(loss) else None for loss in losses]
            if w.device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            results.put((name, found))
            if w.device.type == "cuda":
                results.put((name, {"micro_step": micro_step(trainer)}))
            while go.recv():
                results.put((name, timed_steps(trainer)))
    except BaseException as error:
        results.put((name, {"failed": f"{type(error).__name__}: {error}"[:500]}))
        raise


def micro_step(trainer: _Trainer) -> dict[str, Any]:
    """GiB before, during and after a forward and a backward, and the blocks that are allocated at the peak."""

    def held() -> float:
        return torch.cuda.memory_allocated() / 2**30

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 2**30

    found: dict[str, Any] = {"before": held()}
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)
    try:
        live = {
            block["address"]: block["requested_size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        torch.cuda.reset_peak_memory_stats()
        loss = trainer.loss(next(trainer.batches))
        found |= {"forward_peak": peak(), "kept": held()}
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        found |= {"backward_peak": peak(), "after": held()}
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        found["blocks"] = blocks_at_peak(live, events)
    except Exception as error:  # only explains the peak, which has been measured
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    for optimiser in trainer.optimisers:
        optimiser.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return found


def blocks_at_peak(live: dict[int, int], events: list[dict[str, Any]]) -> list[list[float]]:
    """MiB and number of blocks of each size when most is allocated: `live` by address, then events of the allocator."""
    live, total = dict(live), sum(live.values())
    most, fullest = total, dict(live)
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            total += event["size"]
            if total > most:
                most, fullest = total, dict(live)
        elif event["action"] == "free_completed":
            total -= live.pop(event["addr"], 0)
    by_size = sorted(Counter(fullest.values()).items(), key=lambda pair: -pair[0] * pair[1])
    return [[round(size / 2**20, 3), count] for size, count in by_size[:KEPT_SIZES]]


def timed_steps(trainer: _Trainer) -> dict[str, float]:
    """Seconds of a step and tokens a second; the clocks of the GPU rise in a step before."""
    trainer.take_step()
    began = time.perf_counter()
    for _ in range(TIMED):
        trainer.take_step()  # the loss that it returns has been computed
    seconds = (time.perf_counter() - began) / TIMED
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"step_s": seconds, "tokens_per_s": trainer.recipe.batch_tokens / seconds}


def models(arguments: argparse.Namespace, save: Save) -> None:
    recipes = TINY_MODELS if arguments.tiny else MODELS
    ends = time.monotonic() + arguments.limit
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // len(recipes))))
    rows: dict[str, dict[str, Any]] = {name: {"model": name} for name in recipes}
    processes, pipes = {}, {}

    def wait_for(names: list[str], key: str) -> None:
        """Until each of the models has a result called `key`, or has failed, or time is up."""
        while waiting := [name for name in names if not {key, "failed"} & rows[name].keys()]:
            try:
                name, found = results.get(timeout=1)
            except queue.Empty:
                for name in waiting:
                    if processes[name].exitcode is not None:
                        rows[name]["failed"] = f"the process ended with code {processes[name].exitcode}"
                    elif time.monotonic() > ends:
                        rows[name]["failed"] = f"not measured within {arguments.limit:g} s"
                continue
            rows[name] |= found
            print(name, {key: value for key, value in found.items() if key != "recipe"}, flush=True)
            save({"models": list(rows.values())})

    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50257, 2**20 + 1)
        write_shard(Path(folder) / "random_train_000000.bin", tokens, 50257)
        for name, r in recipes.items():
            pipes[name], there = context.Pipe()
            processes[name] = context.Process(target=train_model, args=(name, r, folder, there, results))
            processes[name].start()
        wait_for(list(recipes), "micro_step" if torch.cuda.is_available() else "losses")
        for name in recipes if arguments.times else ():
            if "failed" not in rows[name]:
                pipes[name].send(True)
                wait_for([name], "step_s")
        for name, process in processes.items():
            if process.is_alive() and "failed" not in rows[name]:
                pipes[name].send(False)
            elif process.is_alive():
                process.terminate()
            process.join(20)
    save({"models": list(rows.values())})


WIDTHS = (768, 1024, 1280, 1600, 2048)
ROWS, VOCABULARY = 16_384, 50_304
MLP_RATIO = 4
ATTENTION = {  # cases (batch, heads, key heads, length, window) of each contestant, head size 64
    "fused:lssar": [(8, 32, 8, 2048, None), (2, 32, 8, 8192, None), (4, 12, 12, 8192, None)],
    "fused:cosine_softmax": [(8, 32, 8, 2048, None), (2, 16, 16, 8192, None)],
    "fused:softmax": [(8, 32, 8, 2048, 128), (2, 16, 16, 8192, 128)],
}
TINY_ATTENTION = {f"tiled:{name}": [(1, 4, 2, 64, None)] for name in ("lssar", "cosine_softmax")}


def milliseconds(f: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return float(do_bench(f, warmup=10, rep=40, return_mode="median"))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def products(rows: int, widths: tuple[int, ...], vocabulary: int, device: str) -> list[dict[str, Any]]:
    """Forward and both gradients of a linear layer, in bfloat16."""
    found = []
    for width in widths:
        for outer in (width, MLP_RATIO * width, vocabulary):
            x, w, dy = (
                torch.randn(shape, device=device, dtype=torch.bfloat16)
                for shape in ((rows, width), (outer, width), (rows, outer))
            )
            ms = milliseconds(lambda x=x, w=w, dy=dy: (F.linear(x, w), dy @ w, dy.T @ x))  # type: ignore[misc]
            tflops = 6 * rows * width * outer / ms / 1e9
            found.append({"rows": rows, "inner": width, "outer": outer, "ms": ms, "tflops": tflops})
            print(found[-1], flush=True)
    return found


def copy_gb_s(numbers: int, device: str) -> float:
    x = torch.empty(numbers, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / milliseconds(lambda: y.copy_(x)) / 1e6


def kernels(arguments: argparse.Namespace, save: Save) -> None:
    tiny, device = arguments.tiny, "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"rows": []}
    if arguments.times:
        result["products"] = products(64, (32,), 96, device) if tiny else products(ROWS, WIDTHS, VOCABULARY, device)
        result["memory_gb_s"] = copy_gb_s(2**16 if tiny else 2**28, device)
        save(result)

    def keep(row: dict[str, Any]) -> None:
        row = {key: value for key, value in row.items() if arguments.times or not key.endswith("_ms")}
        print(row, flush=True)
        result["rows"].append(row)
        save(result)

    for contestant, shapes in (TINY_ATTENTION if tiny else ATTENTION).items():
        cases = [
            Case(batch, heads, keys, length, 64, "bfloat16", device, window=window, cuda_graph=device == "cuda")
            for batch, heads, keys, length, window in shapes
        ]
        run_benchmark([contestant], cases, ["forward", "both"], 0.05 if arguments.times else 0.0, keep)


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TINY: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"checkpoint_layers": True}),
    (2, {"parallel": "ddp", "micro_batch": 8}),
    (2, {"parallel": "fsdp", "micro_batch": 8}),
    (4, {"parallel": "fsdp", "micro_batch": 4}),
    (2, {"parallel": "fsdp", "micro_batch": 4, "dtype": "bfloat16"}),
    (4, {"parallel": "fsdp", "micro_batch": 4, "context_parallel": 2, "heads": 4}),
    (4, {"parallel": "fsdp", "micro_batch": 8, "context_parallel": 4, "heads": 4, "layout": "mixed@32"}),
    (2, {"parallel": "fsdp", "micro_batch": 8, "context_parallel": 2}),
]
"""Processes, and changes to the recipe `tiny-cpu`."""


def memory(arguments: argparse.Namespace, save: Save) -> None:
    """Predicted bytes, and measured ones of each process."""
    rows = []
    for processes, changes in TINY:
        r = recipe("tiny-cpu", steps=2, warmup=1, data="random", **changes)
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder) / "recipe.json"
            settings.write_text(json.dumps(r.to_dict()))
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(processes),
                "--standalone",
            ]
            without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            script = str(ROOT / "tests/training/peak.py")
            subprocess.run([*command, script, str(settings), folder], check=True, env=without_gpu)
            measured = [json.loads((Path(folder) / f"{rank}.json").read_text())["peak"] for rank in range(processes)]
        predicted = round(plan(r, processes, "cpu").peak_gib * 2**30)
        rows.append({"processes": processes, "changes": changes, "predicted": predicted, "measured": measured})
        print(rows[-1], flush=True)
    save({"memory": rows})


LAB = re.compile(r"^(?P<recipe>[\w-]+), (?P<attention>\w+): step (?P<ms>[\d.]+) ms", re.M)


def plans(arguments: argparse.Namespace, save: Save) -> None:
    """Plans of the 1B recipe, and of the runs whose step was timed on an H200."""
    made = []
    for card in ("h200", "h100"):
        for attention in ("lssar", "cosine_softmax"):
            schedule = "3:0.4,7:0.7,15" if attention == "lssar" else None
            r = recipe("long-1b-fineweb", attention=attention, p_schedule=schedule)
            made += [{"attention": attention, **plan(r, n, card).to_dict()} for n in (8, 16, 32, 64)]
            print(made[-1]["cost"], flush=True)
    found = LAB.search((RESULTS / "h200-lab.txt").read_text())
    assert found is not None
    first = recipe(found["recipe"], attention=found["attention"])
    speeds = [
        {
            "size": first.size, "attention": first.attention, "length": first.length,
            "predicted_s": plan(first).step_s, "measured_s": float(found["ms"]) / 1e3,
            "source": "benchmarks/results/h200-lab.txt",
        }
    ]  # fmt: skip
    print(speeds, flush=True)
    expected = [{"model": name, **plan(r).to_dict()} for name, r in MODELS.items()]
    save({"plans": made, "speeds": speeds, "models": expected})


def main(words: list[str] | None = None) -> None:
    modes = {"memory": memory, "plan": plans, "models": models, "kernels": kernels}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(modes))
    parser.add_argument("--out", type=Path, required=True, help="JSON file, which is overwritten")
    parser.add_argument("--times", action="store_true", help="also measure times; nothing else may use the GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--limit", type=float, default=300, help="models: seconds in all")
    arguments = parser.parse_args(words)
    if arguments.what in ("models", "kernels") and not (arguments.tiny or torch.cuda.is_available()):
        parser.error(f"{arguments.what} needs a GPU; --tiny runs it on any device")
    about = {
        "command": f"python benchmarks/scale.py {' '.join(sys.argv[1:] if words is None else words)}",
        "environment": environment(),
    }
    modes[arguments.what](arguments, lambda found: write_json(arguments.out, about | found, overwrite=True))


if __name__ == "__main__":
    main()
