"""`lssar bench` and `lssar tune`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lssar.commands.common import Progress, check_outputs, console, print_csv, print_json, say, say_where, show_table
from lssar.records import command_line, write_csv, write_json


@dataclass
class Bench:
    """Time and memory of attention implementations against peers; each is checked before it is timed."""

    contestants: list[str] = field(default_factory=list)
    """IMPLEMENTATION:MECHANISM, e.g. tiled:lssar sdpa:softmax; all that the device has, if none is given."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    """Queries and keys; with --decode, keys in the cache."""
    head_sizes: list[int] = field(default_factory=lambda: [64])
    """Head sizes."""
    dtypes: list[str] = field(default_factory=list)
    """float32 on a CPU and bfloat16 on a GPU, if none is given."""
    modes: list[str] = field(default_factory=lambda: ["forward", "backward", "both"])
    """What to time: forward, backward, both (forward and backward)."""
    batch: int = 1
    """Sequences in a batch."""
    heads: int = 4
    """Query heads."""
    key_heads: int | None = None
    """Key and value heads; as many as query heads, if not given."""
    tokens: int | None = None
    """Tokens in a batch: the batch size of each length is this divided by the length."""
    causal: bool = True
    """Causal attention; --no-causal for all keys."""
    windows: list[int] = field(default_factory=list)
    """Windows to measure, each on all lengths; none: the whole sequence. The peer for ratios is then flex:softmax."""
    decode: bool = False
    """Measure one query row against a cache of each length, in place of self-attention; forward only."""
    cuda_graph: bool = False
    """Time replays of a CUDA graph, without the host's work for a call; modes forward and both, GPU only."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    budget: float = 1.0
    """Seconds of timing for each result."""
    seed: int = 0
    """Seed of the inputs."""
    out: Path | None = None
    """Path without suffix for the .json, .csv and .png; nothing is written if not given."""
    overwrite: bool = False
    """Replace earlier results."""
    figure: bool = True
    """Draw the .png too."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    csv: bool = False
    """Print one line of CSV for each contestant and case instead of a table."""

    def run(self) -> None:
        from lssar.benchmark import contestant_names, run_benchmark
        from lssar.runs import pick_device

        device = str(pick_device(self.device))
        contestants = self.contestants or contestant_names()
        check_outputs(self.out, (".json", ".csv", ".png"), self.overwrite)
        cases = self._cases(device)
        modes = ["forward"] if self.decode else [m for m in self.modes if m != "backward" or not self.cuda_graph]
        with Progress("benchmark", len(cases) * len(contestants)) as bar:
            done = iter(range(1, len(cases) * len(contestants) + 1))

            def report(row: dict[str, Any]) -> None:
                bar.update(next(done), label=f"{row['contestant']}, length {row['length']:,}")

            result = run_benchmark(contestants, cases, modes, self.budget, report)
        result = {"command": command_line(), **result}
        if self.json:
            print_json(result)
        elif self.csv:
            print_csv([_flat(row) for row in result["rows"]])
        else:
            self._show(result, [f"{mode}_ms" for mode in modes], device)
        self._write(result)
        if any("incorrect" in row or "failed" in row for row in result["rows"]):
            sys.exit(1)

    def _cases(self, device: str) -> list[Any]:
        from lssar.benchmark import Case

        dtypes = self.dtypes or ["bfloat16" if device.startswith("cuda") else "float32"]
        windows: list[int | None] = [*self.windows] or [None]
        return [
            Case(
                max(1, self.tokens // length) if self.tokens else self.batch, self.heads, self.key_heads or self.heads,
                length, size, dtype, device, self.causal, self.seed, self.decode, window,
                self.cuda_graph,
            )
            for size in self.head_sizes
            for dtype in dtypes
            for window in windows
            for length in self.lengths
        ]  # fmt: skip

    def _show(self, result: dict[str, Any], columns: list[str], device: str) -> None:
        from lssar.benchmark import Case

        rows = [[str(_case(Case, r)), r["contestant"], *_cells(r, columns, result["rows"])] for r in result["rows"]]
        head = ["case", "contestant", *columns, "MiB", "ratio to first peer"]
        show_table(head, rows, f"{device}: milliseconds (median) and peak extra memory", keys=2)

    def _write(self, result: dict[str, Any]) -> None:
        from lssar.plots import plot_benchmark

        if self.out is None:
            return
        files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
        files.append(write_csv(self.out.with_suffix(".csv"), map(_flat, result["rows"]), self.overwrite))
        if self.figure:
            files.append(plot_benchmark(result, self.out.with_suffix(".png"), self.overwrite))
        say_where(files, self.json or self.csv)


@dataclass
class Tune:
    """Measure tile shapes of the fused kernels on this GPU, and keep the fastest for later processes."""

    head_sizes: list[int] = field(default_factory=lambda: [64, 128])
    """Head sizes to tune for."""
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16"])
    """Dtypes to tune for."""
    length: int = 8192
    """Length of the sequences that are timed."""
    heads: int = 16
    """Number of heads that are timed."""
    budget: float = 60.0
    """Seconds of timing for each kernel."""
    forget: bool = False
    """Remove the shapes stored for this GPU, and measure nothing."""

    def run(self) -> None:
        from lssar.ops.fused import tiles, tune

        if self.forget:
            tiles.stored_path().unlink(missing_ok=True)
            return
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU to tune for")
        path = tiles.stored_path()
        for size in self.head_sizes:
            for dtype in self.dtypes:
                with console.status(f"head size {size}, {dtype}") as status:
                    found = tune.tune(
                        size, getattr(torch, dtype), self.length, self.heads, self.budget, report=status.update
                    )
                path = tune.store(found)
                for key, tile in found.items():
                    say(f"{key[0]}, head size {size}, {dtype}: {tile}")
        say_where([path])


def _case(kind: Any, row: dict[str, Any]) -> Any:
    return kind(**{f.name: row[f.name] for f in dataclasses.fields(kind)})


def _cells(row: dict[str, Any], columns: list[str], rows: list[dict[str, Any]]) -> list[str]:
    for obstacle in ("unavailable", "incorrect", "failed"):
        if obstacle in row:
            return [*("-" for _ in columns), "-", f"{obstacle}: {row[obstacle]}"]
    peers = ("cudnn:softmax", "sdpa:softmax", "flash:softmax", "flex:softmax")
    same = ("length", "head_size", "dtype", "batch", "heads", "key_heads", "causal", "decode", "window", "cuda_graph")
    alike = {r["contestant"]: r for r in rows if all(r[key] == row[key] for key in same) and columns[0] in r}
    peer = next((alike[name] for name in peers if name in alike), None)
    ratios = ", ".join(f"{c.removesuffix('_ms')} {row[c] / peer[c]:.2f}x" for c in columns) if peer else "no peer here"
    return [*(f"{row[c]:.3g}" for c in columns), f"{row['peak_extra_mib']:.0f}", ratios]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    errors = {f"error_{name}": f"{value:.3g}" for name, value in row.get("errors", {}).items()}
    return {key: value for key, value in row.items() if key != "errors"} | errors
