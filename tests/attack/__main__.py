"""`python -m tests.attack`: the long attack, with its counts written as JSON.

python -m tests.attack --kills 56 --preparation-kills 100 --out results/reliability/attack.json
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from pathlib import Path

from lssar.records import environment, write_json
from tests.attack.corruption import GOOD, matrix
from tests.attack.kills import VICTIMS, kill_preparation, kill_training


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Kill loop and corruption matrix.")
    parser.add_argument("--kills", type=int, default=56, help="of training, divided between its variants")
    parser.add_argument("--preparation-kills", type=int, default=100, help="of data preparation")
    parser.add_argument("--no-matrix", action="store_true", help="leave the corruption matrix out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/reliability/attack.json"))
    chosen = parser.parse_args()
    record: dict = {
        "command": "python -m tests.attack " + " ".join(sys.argv[1:]), "seed": chosen.seed,
        "environment": environment(), "training": [], "preparation": [], "corruption": {},
    }  # fmt: skip

    def keep() -> None:
        write_json(chosen.out, record, overwrite=True)

    with tempfile.TemporaryDirectory() as folder:
        each = -(-chosen.kills // len(VICTIMS))
        for number, victim in enumerate(VICTIMS if chosen.kills else ()):
            record["training"].append(kill_training(victim, each, Path(folder) / f"training-{number}", chosen.seed))
            print(record["training"][-1], flush=True)
            keep()
        if chosen.preparation_kills:
            parts = {
                1: chosen.preparation_kills * 4 // 5,
                2: chosen.preparation_kills - chosen.preparation_kills * 4 // 5,
            }
            for workers, kills in parts.items():
                path = Path(folder) / f"preparation-{workers}"
                record["preparation"].append(kill_preparation(kills, path, workers, chosen.seed))
                print(record["preparation"][-1], flush=True)
                keep()
        if not chosen.no_matrix:
            rows = []
            for row in matrix(Path(folder) / "matrix"):
                rows.append(row)
                print(row, flush=True)
            outcomes = collections.Counter(row["outcome"] for row in rows)
            bad = [row for row in rows if row["outcome"] not in GOOD]
            record["corruption"] = {"cases": len(rows), "outcomes": dict(outcomes), "failures": bad, "rows": rows}
            keep()
            if bad:
                sys.exit(f"{len(bad)} of {len(rows)} damaged files led to a traceback or passed in silence")
    print(f"written: {chosen.out}")


if __name__ == "__main__":
    main()
