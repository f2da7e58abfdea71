"""What a checkpoint costs: how long training stops, when it is on the disk, and the CPU memory that it takes meanwhile.

OMP_NUM_THREADS=1 PYTHONPATH=src python -m torch.distributed.run --standalone --nproc-per-node 2 \
    benchmarks/checkpoints.py 45m --out results/scale/checkpoints.json

The model is sharded by FSDP2 over all processes. `sharded` is what `lssar train --parallel fsdp` writes; `gathered` is
a plain file that process 0 writes, for comparison. The first save of each kind is not counted. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lssar.model import GPT
from lssar.records import environment, write_json
from lssar.training import checkpoints
from lssar.training.distributed import Processes, distribute, world
from lssar.training.optimisers import make_optimisers
from lssar.training.recipes import Recipe


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest growth of this process's memory while it is entered, sampled every 2 ms."""

    def __enter__(self) -> Peak:
        self.before, self.most, self.ended = resident(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, resident() - self.before)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def measure(begin: Callable[[int], None], end: Callable[[], None], w: Processes, saves: int) -> dict[str, float]:
    """Medians over saves of the slowest process's times, and the largest memory of any process."""
    rows = []
    for step in range(1, saves + 2):
        w.barrier()
        began = time.perf_counter()
        with Peak() as peak:
            begin(step)
            stopped = time.perf_counter() - began
            end()
        rows.append([stopped, time.perf_counter() - began, float(peak.most)])
    medians = torch.tensor([statistics.median(column) for column in zip(*rows[1:])])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    stopped, complete, memory = medians.tolist()
    return {"stopped_s": round(stopped, 3), "complete_s": round(complete, 3), "memory_mb": round(memory / 1e6, 1)}


def compare(size: str, saves: int, w: Processes) -> dict[str, Any]:
    recipe = Recipe(size=size, length=64, batch_tokens=64 * w.size, micro_batch=1, dtype="float32", compile=False)
    torch.manual_seed(0)
    model = GPT(recipe.model()).to(w.device)
    parameters = model.parameter_count()
    distribute(model, "fsdp", w)
    optimisers = make_optimisers(model, recipe)
    ids = torch.randint(recipe.vocab_size, (1, 65), device=w.device)
    model(ids[:, :-1], targets=ids[:, 1:]).backward()
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    parts = [x.to_local() for x in model.parameters()]
    own = sum(x.nbytes for x in parts) * 3  # weights and two moments of AdamW
    folders = [tempfile.mkdtemp() if w.main else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    saver = checkpoints.Saver(folder / "sharded", model, optimisers, w, keep=1)
    found = {"parameters": parameters, "processes": w.size, "part_mb": round(own / 1e6, 1), "saves": saves}
    found["sharded"] = measure(lambda step: saver.save(step, {}) and None, saver.wait, w, saves)
    found["gathered"] = measure(
        lambda step: checkpoints.save(folder / "gathered", step, model, optimisers, {}, w, 1) and None,
        lambda: None, w, saves,
    )  # fmt: skip
    if w.main:
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="name of a model size, such as 45m")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file; must not exist")
    chosen = parser.parse_args()
    with world() as w:
        found = compare(chosen.size, chosen.saves, w)
        if w.main:
            print(found)
            if chosen.out is not None:
                command = "benchmarks/checkpoints.py " + " ".join(sys.argv[1:])
                write_json(chosen.out, {"command": command, "environment": environment(), **found})


if __name__ == "__main__":
    main()
