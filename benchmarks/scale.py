"""The dry run of `lssar train` against measurements, and its plan of docs/scale.md.

    PYTHONPATH=src:. python benchmarks/scale.py memory --out benchmarks/results/cpu-scale-memory.json
    PYTHONPATH=src:. python benchmarks/scale.py plan --out benchmarks/results/scale-plan.json
    PYTHONPATH=src:. python benchmarks/scale.py models --out benchmarks/results/h200-scale-models.json     # needs a GPU
    PYTHONPATH=src:. python benchmarks/scale.py kernels --out benchmarks/results/h200-scale-kernels.json   # needs a GPU

memory: peak memory of tiny models on a CPU, in 1, 2 and 4 processes, predicted and measured.

plan: the 1B recipe on 8 to 64 cards; and predicted speeds of the runs of which speeds are committed.

models: peak memory and speed of a few steps at 8K tokens of 124M, 355M and 1B parameters, by the training loop, on
random tokens. All compile at once, in processes of their own; then they take turns.

kernels: TFLOP/s of the matrix products of a layer and of the head, bandwidth of a copy, and times of attention at the
shapes of the plan.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
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

MODELS = {
    "124M, LSSAR": recipe("gpt2-124m-fineweb", length=8192, batch_tokens=65_536, micro_batch=4),
    "355M, mixed, cosine softmax": recipe(
        "gpt2-124m-fineweb", size="355m", layout="mixed", attention="cosine_softmax", length=8192, batch_tokens=32_768,
        micro_batch=2,
    ),
    "1B, mixed, LSSAR": recipe("long-1b-fineweb", length=8192, batch_tokens=32_768, micro_batch=2),
}  # fmt: skip
WARM_UP, STEPS = 2, 4
WIDTHS = (768, 1024, 1280, 1600, 2048)
ROWS, VOCABULARY = 16_384, 50_304
MLP_RATIO = 4
ATTENTION = {  # cases (batch, heads, key heads, length, window) of each contestant, head size 64
    "fused:lssar": [(8, 32, 8, 2048, None), (2, 32, 8, 8192, None), (4, 12, 12, 8192, None)],
    "fused:cosine_softmax": [(8, 32, 8, 2048, None), (2, 16, 16, 8192, None)],
    "fused:softmax": [(8, 32, 8, 2048, 128), (2, 16, 16, 8192, 128)],
}


def train_model(name: str, folder: str, compiled: Any, turn: Any, results: Any) -> None:
    """A process: compile, wait for the others, then take a turn."""
    r: Recipe = MODELS[name].replace(steps=WARM_UP + STEPS, warmup=1)
    try:
        with world() as w:
            began = time.monotonic()
            trainer = _Trainer(r, DataFolder(Path(folder), r.vocab_size), Path(folder), w)
            losses = [trainer.take_step()["loss"] for _ in range(WARM_UP)]
            compile_s = time.monotonic() - began
            torch.cuda.empty_cache()
            compiled.wait(timeout=400)
            with turn:
                torch.cuda.reset_peak_memory_stats()
                losses.append(trainer.take_step()["loss"])
                torch.cuda.synchronize()
                began = time.perf_counter()
                losses += [trainer.take_step()["loss"] for _ in range(STEPS - 1)]
                torch.cuda.synchronize()
                step_s = (time.perf_counter() - began) / (STEPS - 1)
                peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                torch.cuda.empty_cache()
            results.put({
                "model": name, "recipe": r.to_dict(), "parameters": trainer.model.parameter_count(),
                "peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30, "step_s": step_s,
                "tokens_per_s": r.batch_tokens / step_s, "losses": losses, "compile_s": round(compile_s, 1),
            })  # fmt: skip
    except Exception as error:
        results.put({"model": name, "failed": f"{type(error).__name__}: {error}"[:500]})
        raise


def models() -> dict[str, Any]:
    names = list(MODELS)
    context = multiprocessing.get_context("spawn")
    compiled, turn, results = context.Barrier(len(names)), context.Lock(), context.Queue()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // len(names))))
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50257, 2**20 + 1)
        write_shard(Path(folder) / "random_train_000000.bin", tokens, 50257)
        arguments = [(name, folder, compiled, turn, results) for name in names]
        processes = [context.Process(target=train_model, args=each) for each in arguments]
        for process in processes:
            process.start()
        rows = []
        for _ in names:
            rows.append(results.get(timeout=500))
            print({key: value for key, value in rows[-1].items() if key != "recipe"}, flush=True)
        for process in processes:
            process.join()
    return {"models": sorted(rows, key=lambda row: list(MODELS).index(row["model"]))}


def products() -> list[dict[str, Any]]:
    """Forward and both gradients of a linear layer, in bfloat16."""
    from triton.testing import do_bench

    rows = []
    for width in WIDTHS:
        for outer in (width, MLP_RATIO * width, VOCABULARY):
            x, w, dy = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((ROWS, width), (outer, width), (ROWS, outer))
            )
            milliseconds = do_bench(lambda x=x, w=w, dy=dy: (F.linear(x, w), dy @ w, dy.T @ x), warmup=10, rep=40)
            tflops = 6 * ROWS * width * outer / milliseconds / 1e9
            rows.append({"rows": ROWS, "inner": width, "outer": outer, "ms": milliseconds, "tflops": tflops})
            print(rows[-1], flush=True)
    return rows


def copy_gb_s() -> float:
    from triton.testing import do_bench

    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), warmup=10, rep=40) / 1e6


def kernels() -> dict[str, Any]:
    result: dict[str, Any] = {"products": products(), "memory_gb_s": copy_gb_s(), "rows": []}
    for contestant, shapes in ATTENTION.items():
        cases = [
            Case(batch, heads, keys, length, 64, "bfloat16", "cuda", True, 0, False, window)
            for batch, heads, keys, length, window in shapes
        ]
        found = run_benchmark([contestant], cases, ["forward", "both"], 0.05, lambda row: print(row, flush=True))
        result["rows"] += found["rows"]
    return result


ROOT = Path(__file__).parent.parent
TINY: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"checkpoint_layers": True}),
    (2, {"parallel": "ddp", "micro_batch": 8}),
    (2, {"parallel": "fsdp", "micro_batch": 8}),
    (4, {"parallel": "fsdp", "micro_batch": 4}),
    (4, {"parallel": "fsdp", "micro_batch": 4, "context_parallel": 2, "heads": 4}),
]
"""Processes, and changes to the recipe `tiny-cpu`."""


def memory() -> dict[str, Any]:
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
            subprocess.run([*command, str(ROOT / "tests/training/peak.py"), str(settings), folder], check=True)
            measured = [json.loads((Path(folder) / f"{rank}.json").read_text())["peak"] for rank in range(processes)]
        predicted = round(plan(r, processes, "cpu").peak_gib * 2**30)
        rows.append({"processes": processes, "changes": changes, "predicted": predicted, "measured": measured})
        print(rows[-1], flush=True)
    return {"memory": rows}


SPEEDS = ("results/books-124m/length.json", "results/books-124m/cosine_softmax.json")
LAB = re.compile(r"^(?P<recipe>[\w-]+), (?P<attention>\w+): step (?P<ms>[\d.]+) ms", re.M)


def plans() -> dict[str, Any]:
    """Plans of the 1B recipe; predicted seconds of a step on an H200 beside those of which results are committed."""
    made = []
    for card in ("h200", "h100"):
        for attention in ("lssar", "cosine_softmax"):
            schedule = "3:0.4,7:0.7,15" if attention == "lssar" else None
            r = recipe("long-1b-fineweb", attention=attention, p_schedule=schedule)
            made += [{"attention": attention, **plan(r, n, card).to_dict()} for n in (8, 16, 32, 64)]
            print(made[-1]["cost"], flush=True)
    speeds = []
    found = LAB.search((ROOT / "benchmarks/results/h200-lab.txt").read_text())
    assert found is not None
    first = recipe(found["recipe"], attention=found["attention"])
    pairs = [(first, float(found["ms"]) / 1e3, "benchmarks/results/h200-lab.txt")]
    for source in SPEEDS:
        for curve in json.loads((ROOT / source).read_text())["curves"]:
            r = Recipe.from_dict(curve["recipe"])
            pairs.append((r, r.batch_tokens / curve["training"]["tokens_per_s"], source))
    for r, measured, source in pairs:
        speeds.append({"size": r.size, "attention": r.attention, "length": r.length, "measured_s": measured,
                       "predicted_s": plan(r).step_s, "source": source})  # fmt: skip
        print(speeds[-1], flush=True)
    expected = [{"model": name, **plan(r).to_dict()} for name, r in MODELS.items()]
    return {"plans": made, "speeds": speeds, "models": expected}


def main() -> None:
    modes = {"memory": memory, "plan": plans, "models": models, "kernels": kernels}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(modes))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = modes[arguments.what]()
    command = f"python benchmarks/scale.py {' '.join(sys.argv[1:])}"
    write_json(arguments.out, {"command": command, "environment": environment(), **found}, overwrite=True)


if __name__ == "__main__":
    main()
