"""The most bytes that PyTorch's CPU allocator holds during two training steps on random tokens.

`torchrun tests/training/peak.py RECIPE.json OUT`: every process writes OUT/RANK.json.

PyTorch's profiler does not see what gloo's threads free, and these often hold the last reference to the tensors of a
collective: its sums then only rise, by another amount in every run. So before a process waits for a collective, it lets
all processes start theirs and the threads finish with it. Where a thread was later still, its block's address is
allocated again, which shows that the block was freed.
"""

import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lssar.data.folder import DataFolder
from lssar.data.shards import write_shard
from lssar.training.distributed import world
from lssar.training.loop import _Trainer
from lssar.training.recipes import Recipe

PAUSE, LONGEST_WAIT = 0.01, 60.0


def peak_bytes(recipe: Recipe) -> dict[str, Any]:
    """Profiled from before the model is made; also the losses."""
    with tempfile.TemporaryDirectory() as folder, world(recipe.context_parallel) as w:
        tokens = np.random.default_rng(0).integers(0, recipe.vocab_size, 4 * recipe.batch_tokens + 1)
        write_shard(Path(folder) / "random_train_000000.bin", tokens, recipe.vocab_size)
        data = DataFolder(Path(folder), recipe.vocab_size)
        patient = _patient_waits(w.size) if w.size > 1 else contextlib.nullcontext()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, patient:
            trainer = _Trainer(recipe, data, Path(folder), w)
            losses = [trainer.take_step()["loss"] for _ in range(2)]
        return {"rank": w.rank, "peak": _peak(profiled.profiler.kineto_results), "losses": losses}


def _peak(results: Any) -> int:
    held: dict[int, int] = {}
    total = peak = 0
    for _, address, size in sorted(_allocations(results.experimental_event_tree())):
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
        peak = max(peak, total)
    return peak


def _allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address, and bytes, which are negative where a block is freed."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


@contextlib.contextmanager
def _patient_waits(processes: int) -> Iterator[None]:
    """Every wait for a collective begins when all processes have started it and it has had time to end."""
    store, numbers = dist.distributed_c10d._get_default_store(), itertools.count()

    def meet() -> None:
        key, began = f"wait {next(numbers)}", time.monotonic()
        store.add(key, 1)
        while store.add(key, 0) < processes:
            if time.monotonic() - began > LONGEST_WAIT:
                raise TimeoutError(f"{key}: the other processes do not wait for a collective")
            time.sleep(0.0005)
        time.sleep(PAUSE)

    class Functional(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops._c10d_functional.wait_tensor.default:
                meet()
            return func(*args, **(kwargs or {}))

    plain = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        meet()
        return plain(work, *args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        with Functional():
            yield
    finally:
        dist.Work.wait = plain  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = peak_bytes(Recipe.from_dict(json.loads(Path(sys.argv[1]).read_text())))
    (Path(sys.argv[2]) / f"{found['rank']}.json").write_text(json.dumps(found))
