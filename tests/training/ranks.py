"""Work of several processes for the tests: `python -m tests.training.ranks JOBS.json` forks them from one process.

A job names one of the functions below, a number of processes and arguments. Rank 0 writes what the function returns as
JSON. One process imports torch and the library for all jobs, which takes longer than most of the jobs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lssar.data.batches import IGNORE
from lssar.model import GPT, model_config
from lssar.training import Recipe, train
from lssar.training.distributed import distribute, world
from tests.attack.children import fork_ranks, kill, wait

ROOT = Path(__file__).parent.parent.parent


def run_jobs(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of the jobs by their names; a job {"do", "size", ...} that failed has the output of its processes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.training.ranks", str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = {}
    for name in jobs:
        path = folder / f"{name}.json"
        results[name] = json.loads(path.read_text()) if path.exists() else (folder / f"{name}.log").read_text()
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        arguments = {key: value for key, value in job.items() if key not in ("do", "size")}

        def act(name: str = name, function: str = job["do"], arguments: dict[str, Any] = arguments) -> None:
            result = FUNCTIONS[function](**arguments)
            if int(os.environ.get("RANK", 0)) == 0:
                (folder / f"{name}.json").write_text(json.dumps(result))

        pids = fork_ranks(act, folder / f"{name}.log", job["size"])
        ends = wait(pids, 240)
        if ends is None:
            kill(pids)
        if ends is None or any(ends):
            (folder / f"{name}.json").unlink(missing_ok=True)


def training(recipe: dict[str, Any], run: str, stop_after: float | None = None) -> dict[str, Any]:
    """The last row of metrics of a run, or of a part of one."""
    return train(Recipe.from_dict(recipe), Path(run), stop_after=stop_after)


def gradients(
    config: dict[str, Any], context: int = 1, parallel: str = "ddp", pack: Sequence[int] | None = None,
    compile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Loss and gradients of every parameter for one fixed batch of whole sequences, in float64."""
    torch.manual_seed(0)
    model = GPT(model_config("tiny", vocab_size=61, **config)).double()
    with torch.no_grad():
        for name, x in model.named_parameters():  # numbers of heads that differ, so that no mix-up goes unseen
            if x.dim() == 1:
                x += 0.3 * torch.rand_like(x) * (0.2 if "threshold" in name else 1)
    B, L = (1, pack[-1]) if pack is not None else (4, 24)
    tokens = torch.randint(61, (B, L + 1))
    ids, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :7] = IGNORE  # one shard has fewer targets than the others, or none
    with world(context) as w:
        module: Any = distribute(model, parallel, w)  # type: ignore[arg-type]
        if compile:
            model.compile(backend="aot_eager")
        part = slice(w.data_rank * B // w.data_size, (w.data_rank + 1) * B // w.data_size)
        bounds = None if pack is None else torch.tensor(pack, dtype=torch.int32)
        loss = module(ids[part], targets=targets[part], cu_seqlens=bounds)
        loss.backward()
        found = {name: x.grad for name, x in model.named_parameters()}
        full = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
        return {"loss": float(w.mean(loss.detach())), **{name: g.flatten().tolist() for name, g in full.items()}}


def two_steps(config: dict[str, Any], length: int, megabytes: int, context: int = 1) -> float:
    """Loss in the second step on one sequence, where the process may use so much memory more than it does before."""
    limit = _data_bytes() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model = GPT(model_config("tiny", **config))
    ids = torch.randint(config["vocab_size"], (1, length + 1))
    with world(context) as w:
        module: Any = distribute(model, "ddp", w)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            loss = module(ids[:, :-1], targets=ids[:, 1:])
            loss.backward()
            optimiser.step()
        return float(w.mean(loss.detach()))


def _data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


FUNCTIONS: dict[str, Callable[..., Any]] = {"training": training, "gradients": gradients, "two_steps": two_steps}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
