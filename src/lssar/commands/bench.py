"""`lssar bench` and `lssar tune`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lssar.commands.common import check_outputs, console, progress, say_where
from lssar.records import command_line, write_csv, write_json


@dataclass
class Bench:
    """Time and memory of attention implementations against peers; each is checked before it is timed."""

    contestants: list[str] = field(default_factory=list)
    """IMPLEMENTATION:MECHANISM, e.g. tiled:lssar sdpa:softmax; all that the device has, if none is given."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    head_sizes: list[int] = field(default_factory=lambda: [64])
    dtypes: list[str] = field(default_factory=list)
    """float32 on a CPU and bfloat16 on a GPU, if none is given."""
    modes: list[str] = field(default_factory=lambda: ["forward", "backward", "both"])
    batch: int = 1
    heads: int = 4
    key_heads: int | None = None
    """As many as heads, if not given."""
    causal: bool = True
    decode: bool = False
    """One row against a cache of each length, in place of self-attention; forward alone."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    budget: float = 1.0
    """Seconds of timing for each figure."""
    seed: int = 0
    out: Path | None = None
    """Path without suffix for the .json, .csv and .png; nothing is written if not given."""
    overwrite: bool = False
    figure: bool = True

    def run(self) -> None:
        from lssar.benchmark import Case, contestant_names, run_benchmark
        from lssar.plots import plot_benchmark

        dtypes = self.dtypes or ["bfloat16" if self.device == "cuda" else "float32"]
        contestants = self.contestants or contestant_names()
        check_outputs(self.out, (".json", ".csv", ".png"), self.overwrite)
        cases = [
            Case(
                self.batch,
                self.heads,
                self.key_heads or self.heads,
                length,
                size,
                dtype,
                self.device,
                self.causal,
                self.seed,
                self.decode,
            )
            for size in self.head_sizes
            for dtype in dtypes
            for length in self.lengths
        ]
        modes = ["forward"] if self.decode else self.modes
        columns = [f"{mode}_ms" for mode in modes]
        table = Table(title=f"{self.device}: milliseconds (median) and peak extra memory")
        for name in ("case", "contestant", *columns, "MiB", "ratio to first SDPA"):
            table.add_column(name)
        with progress() as bar:
            task = bar.add_task("benchmark", total=len(cases) * len(contestants))

            def report(row: dict[str, Any]) -> None:
                bar.update(task, advance=1, description=f"{row['contestant']} L {row['length']}")

            result = run_benchmark(contestants, cases, modes, self.budget, report)
        result = {"command": command_line(), **result}
        for row in result["rows"]:
            table.add_row(str(_case(Case, row)), row["contestant"], *_cells(row, columns, result["rows"]))
        console.print(table)
        if self.out is not None:
            files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
            files.append(write_csv(self.out.with_suffix(".csv"), map(_flat, result["rows"]), self.overwrite))
            if self.figure:
                files.append(plot_benchmark(result, self.out.with_suffix(".png"), self.overwrite))
            say_where(files)
        if any("incorrect" in row or "failed" in row for row in result["rows"]):
            sys.exit(1)


@dataclass
class Tune:
    """Measure tile shapes of the fused kernels on this GPU and keep the fastest, for every later process."""

    head_sizes: list[int] = field(default_factory=lambda: [64, 128])
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16"])
    length: int = 8192
    heads: int = 16
    budget: float = 60.0
    """Seconds for each kernel."""
    forget: bool = False
    """Remove what was kept for this card, and measure nothing."""

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
                    console.print(f"{key[0]}, head size {size}, {dtype}: {tile}", highlight=False)
        say_where([path])


def _case(kind: Any, row: dict[str, Any]) -> Any:
    return kind(**{f.name: row[f.name] for f in dataclasses.fields(kind)})


def _cells(row: dict[str, Any], columns: list[str], rows: list[dict[str, Any]]) -> list[str]:
    for obstacle in ("unavailable", "incorrect", "failed"):
        if obstacle in row:
            return [*("-" for _ in columns), "-", f"{obstacle}: {row[obstacle]}"]
    peers = ("cudnn:softmax", "sdpa:softmax", "flash:softmax")
    same = ("length", "head_size", "dtype", "batch", "heads", "key_heads", "causal", "decode")
    alike = {r["contestant"]: r for r in rows if all(r[key] == row[key] for key in same) and columns[0] in r}
    peer = next((alike[name] for name in peers if name in alike), None)
    ratios = ", ".join(f"{c.removesuffix('_ms')} {row[c] / peer[c]:.2f}x" for c in columns) if peer else "no SDPA here"
    return [*(f"{row[c]:.3g}" for c in columns), f"{row['peak_extra_mib']:.0f}", ratios]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    errors = {f"error_{name}": f"{value:.3g}" for name, value in row.get("errors", {}).items()}
    return {key: value for key, value in row.items() if key != "errors"} | errors
