"""Would a ring beat the exchanges of `lssar.context`? A cost model: `python benchmarks/context_cost.py`.

Prints the time of one LSSAR layer, forward and backward, with the sequence divided over N processes. Attention takes
what was measured on one H200 (benchmarks/results/h200-bfloat16.csv, scaled with the square of the length); links have
80% of the bandwidth in the data sheets. bfloat16, one sequence, nothing recomputed.

heads, keys: `exchange_of` chooses, and says what is received; attention waits for it.
ring: keys and values go round in blocks, while attention works on the last one. A row of LSSAR needs its mean and
maximum before its weights, so the keys go round once for these, then keys and values for the output; in the backward
keys, values and their gradients go round. The model favours the ring: communication is hidden to the last byte behind
attention, all processes have equal work, and kernels lose nothing on blocks of L / N rows and keys.
"""

from __future__ import annotations

import csv
from pathlib import Path

from lssar.context import exchange_of
from lssar.model import model_config
from lssar.tables import markdown_table

RESULTS = Path(__file__).parent / "results" / "h200-bfloat16.csv"
WITHIN_NODE, BETWEEN_NODES = 0.8 * 450e9, 0.8 * 50e9
"""Bytes a second that a process receives: NVLink (one direction), and a 400 Gb/s network card for each GPU."""
NODE, BYTES = 8, 2
WAYS = ("attention", "heads", "keys", "ring")
RING = 3 + 4
"""Blocks that a process receives for every other process: K, then K and V; in the backward K, V, dK, dV."""


def measured_s(length: int, heads: int, head_size: int) -> float:
    """Forward and backward of one layer on one card, from the longest measurement."""
    with RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["contestant"] == "fused:lssar" and row["decode"] == "False"]
    row = max((row for row in rows if int(row["head_size"]) == head_size), key=lambda row: int(row["length"]))
    return float(row["both_ms"]) / 1e3 * (length / int(row["length"])) ** 2 * heads / int(row["heads"])


def layer_ms(size: int, length: int, heads: int, key_heads: int, head_size: int) -> dict[str, float]:
    """Milliseconds of a layer by attention alone, and with each way to divide it that applies."""
    link = WITHIN_NODE if size <= NODE else BETWEEN_NODES
    attention = measured_s(length, heads, head_size) / size
    block = length // size * key_heads * head_size
    chosen = exchange_of(size, length, heads, key_heads, head_size, None)
    found = {
        "attention": attention,
        chosen.kind: attention + 2 * chosen.received * BYTES / link,
        "ring": max(attention, RING * (size - 1) * block * BYTES / link),
    }
    return {name: 1e3 * seconds for name, seconds in found.items()}


def main() -> None:
    rows = []
    for name in ("1b", "124m"):
        model = model_config(name)
        shape = (model.heads, model.key_heads or model.heads, model.head_size)
        for size, length in ((4, 2**15), (4, 2**17), (16, 2**17), (32, 2**17), (32, 2**20), (64, 2**20)):
            times = layer_ms(size, length, *shape)
            ways = [f"{times[way]:,.1f}" if way in times else "" for way in WAYS]
            rows.append([name, str(size), f"{length // 1024}K", *ways])
    print(markdown_table(["model", "processes", "length", *WAYS], rows), end="")


if __name__ == "__main__":
    main()
