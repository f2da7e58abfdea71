"""`lssar ...`: thin; each command gathers its arguments, calls the library, and says where the results are."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lssar.records import command_line, write_csv, write_json

console = Console()


@dataclass
class Demo:
    """How softmax, LSSA and LSSAR rows change as the context grows 1x to 64x: a table and a picture."""

    out: Path = Path("out/demo")
    """Folder for demo.json and demo.png; an earlier demo there is replaced."""
    seed: int = 0

    def run(self) -> None:
        from lssar.demo import dilution
        from lssar.plots import plot_dilution

        with console.status("computing attention rows"):
            result = dilution(seed=self.seed)
        table = Table(
            title="One relevant key among n: largest weight, entropy H (nats), effective number of keys exp(H)"
        )
        table.add_column("n")
        for mechanism in result["mechanisms"]:
            table.add_column(mechanism, justify="right")
        for n in dict.fromkeys(row["n"] for row in result["rows"]):
            cells = [row for row in result["rows"] if row["n"] == n]
            table.add_row(str(n), *(f"{c['peak']:.3f}  H {c['entropy']:.2f}  {c['effective']:.0f} keys" for c in cells))
        console.print(table)
        console.print("cosine_softmax is the control: LSSA's scores (cosine, log n) under plain softmax.")
        files = [write_json(self.out / "demo.json", result, overwrite=True)]
        files.append(plot_dilution(result, self.out / "demo.png", overwrite=True))
        _say_where(files)


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
        _check_outputs(self.out, (".json", ".csv", ".png"), self.overwrite)
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
            )
            for size in self.head_sizes
            for dtype in dtypes
            for length in self.lengths
        ]
        columns = [f"{mode}_ms" for mode in self.modes]
        table = Table(title=f"{self.device}: milliseconds (median) and peak extra memory")
        for name in ("case", "contestant", *columns, "MiB", "ratio to first SDPA"):
            table.add_column(name)
        with _progress() as progress:
            task = progress.add_task("benchmark", total=len(cases) * len(contestants))

            def report(row: dict[str, Any]) -> None:
                progress.update(task, advance=1, description=f"{row['contestant']} L {row['length']}")

            result = run_benchmark(contestants, cases, self.modes, self.budget, report)
        result = {"command": command_line(), **result}
        for row in result["rows"]:
            table.add_row(str(_case(Case, row)), row["contestant"], *_cells(row, columns, result["rows"]))
        console.print(table)
        if self.out is not None:
            files = [write_json(self.out.with_suffix(".json"), result, self.overwrite)]
            files.append(write_csv(self.out.with_suffix(".csv"), map(_flat, result["rows"]), self.overwrite))
            if self.figure:
                files.append(plot_benchmark(result, self.out.with_suffix(".png"), self.overwrite))
            _say_where(files)
        if any("incorrect" in row or "failed" in row for row in result["rows"]):
            sys.exit(1)


@dataclass
class Specs:
    """The mechanisms by name, with the fields that make them."""

    def run(self) -> None:
        from lssar.specs import spec, specs

        for name in specs():
            console.print(repr(spec(name)), highlight=False)


def _case(kind: Any, row: dict[str, Any]) -> Any:
    return kind(**{f.name: row[f.name] for f in dataclasses.fields(kind)})


def _cells(row: dict[str, Any], columns: list[str], rows: list[dict[str, Any]]) -> list[str]:
    for obstacle in ("unavailable", "incorrect", "failed"):
        if obstacle in row:
            return [*("-" for _ in columns), "-", f"{obstacle}: {row[obstacle]}"]
    peers = ("cudnn:softmax", "sdpa:softmax", "flash:softmax")
    same = ("length", "head_size", "dtype", "batch", "heads", "key_heads", "causal")
    alike = {r["contestant"]: r for r in rows if all(r[key] == row[key] for key in same) and columns[0] in r}
    peer = next((alike[name] for name in peers if name in alike), None)
    ratios = ", ".join(f"{c.removesuffix('_ms')} {row[c] / peer[c]:.2f}x" for c in columns) if peer else "no SDPA here"
    return [*(f"{row[c]:.3g}" for c in columns), f"{row['peak_extra_mib']:.0f}", ratios]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    errors = {f"error_{name}": f"{value:.3g}" for name, value in row.get("errors", {}).items()}
    return {key: value for key, value in row.items() if key != "errors"} | errors


def _check_outputs(out: Path | None, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Before the work, not after it: is there a file in the way?"""
    for path in [out.with_suffix(suffix) for suffix in suffixes] if out is not None else []:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; give another --out, or --overwrite")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _say_where(files: list[Path]) -> None:
    console.print("written: " + ", ".join(str(path) for path in files), highlight=False)


COMMANDS: dict[str, Callable[..., Any]] = {"demo": Demo, "bench": Bench, "specs": Specs}


def main(arguments: list[str] | None = None) -> None:
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="lssar", description="Softplus attention with re-weighting.", args=arguments
    )
    try:
        command.run()
    except (ValueError, FileExistsError, FileNotFoundError, ImportError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
