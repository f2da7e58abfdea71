"""The most bytes that PyTorch's CPU allocator holds during two training steps on random tokens.

`torchrun tests/training/peak.py RECIPE.json OUT`: every process writes OUT/RANK.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from lssar.data.folder import DataFolder
from lssar.data.shards import write_shard
from lssar.training.distributed import world
from lssar.training.loop import _Trainer
from lssar.training.recipes import Recipe


def peak_bytes(recipe: Recipe) -> dict[str, Any]:
    """Profiled from before the model is made; also the losses."""
    with tempfile.TemporaryDirectory() as folder, world(recipe.context_parallel) as w:
        tokens = np.random.default_rng(0).integers(0, recipe.vocab_size, 4 * recipe.batch_tokens + 1)
        write_shard(Path(folder) / "random_train_000000.bin", tokens, recipe.vocab_size)
        data = DataFolder(Path(folder), recipe.vocab_size)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer = _Trainer(recipe, data, Path(folder), w)
            losses = [trainer.take_step()["loss"] for _ in range(2)]
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        held = np.cumsum([event.nbytes() for event in events])
        return {"rank": w.rank, "peak": int(held.max()), "losses": losses}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = peak_bytes(Recipe.from_dict(json.loads(Path(sys.argv[1]).read_text())))
    (Path(sys.argv[2]) / f"{found['rank']}.json").write_text(json.dumps(found))
