"""`python -m tests.attack`: the long attack, with its counts written as JSON.

python -m tests.attack kills --training 56 --preparation 100      writes results/reliability/kills.json
python -m tests.attack corruption                                 writes results/reliability/corruption.json
python -m tests.attack processes --kills 40                       writes results/reliability/processes.json
python -m tests.attack sharded                                    writes results/reliability/sharded.json

`processes` kills one process of several; `sharded` damages checkpoints that were written by two processes.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from pathlib import Path
from typing import Any

from lssar.records import environment, write_json
from tests.attack.corruption import GOOD, matrix, newest_checkpoint
from tests.attack.kills import VICTIMS, kill_preparation, kill_training
from tests.attack.processes import kill_one_process


def kills(folder: Path, training: int, preparation: int, seed: int) -> dict[str, Any]:
    """Counts of killed trainings, divided between the ways to train, and of killed preparations."""
    found: dict[str, Any] = {"seed": seed, "training": [], "preparation": []}
    for number, victim in enumerate(VICTIMS):
        share = training * (number + 1) // len(VICTIMS) - training * number // len(VICTIMS)
        found["training"].append(kill_training(victim, share, folder / f"training-{number}", seed))
        print(found["training"][-1], flush=True)
    for workers, share in ((1, preparation - preparation // 5), (2, preparation // 5)):
        found["preparation"].append(kill_preparation(share, folder / f"preparation-{workers}", workers, seed))
        print(found["preparation"][-1], flush=True)
    return found


def corruption(folder: Path, sharded: bool) -> dict[str, Any]:
    """Outcomes of the whole corruption matrix, or of that of sharded checkpoints."""
    rows = []
    for row in matrix(folder, newest_checkpoint, processes=2) if sharded else matrix(folder):
        rows.append(row)
        print(row, flush=True)
    outcomes = collections.Counter(row["outcome"] for row in rows)
    return {"cases": len(rows), "outcomes": dict(outcomes), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Kill loop and corruption matrix.")
    parser.add_argument("attack", choices=["kills", "corruption", "processes", "sharded"])
    parser.add_argument("--training", type=int, default=56, help="kills of training, divided between its variants")
    parser.add_argument("--preparation", type=int, default=100, help="kills of data preparation")
    parser.add_argument("--kills", type=int, default=40, help="kills of one process of several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/reliability"), help="folder for the JSON file")
    chosen = parser.parse_args()
    about = {"command": "python -m tests.attack " + " ".join(sys.argv[1:]), "environment": environment()}
    with tempfile.TemporaryDirectory() as name:
        if chosen.attack == "kills":
            found = kills(Path(name), chosen.training, chosen.preparation, chosen.seed)
        elif chosen.attack == "processes":
            found = {"seed": chosen.seed} | kill_one_process(chosen.kills, Path(name), chosen.seed)
        else:
            found = corruption(Path(name), sharded=chosen.attack == "sharded")
    print(f"written: {write_json(chosen.out / f'{chosen.attack}.json', about | found, overwrite=True)}")
    if bad := [row for row in found.get("rows", []) if row["outcome"] not in GOOD]:
        sys.exit(f"{len(bad)} damaged files led to a traceback or passed in silence")


if __name__ == "__main__":
    main()
