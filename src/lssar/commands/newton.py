"""`lssar newton`: the sweep; `read-law`: formulas from its predictions; `publish` and `report`: its results in docs."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from lssar.commands.common import say, say_where, show_table
from lssar.records import command_line, environment, write_json

if TYPE_CHECKING:
    from lssar.experiments.newton.families import Family


@dataclass
class Newton:
    """Newton's law from orbits: do models that predict motion find the force behind it, and with which attention?"""

    scale: Literal["ci", "smoke", "h200", "109m"] = "smoke"
    """`ci`: a test that all parts run. `smoke`: minutes on two cores. `h200`: 10M parameters, every arm, on a GPU.
    `109m`: the paper's model size."""
    out: Path | None = None
    """Folder of the sweep; out/newton-SCALE, if not given. Arms finished there are not run again."""
    mechanisms: list[str] = field(default_factory=list)
    """Mechanisms, e.g. lssar softmax lssar,p=3; those of the scale, if none is given."""
    seeds: list[int] = field(default_factory=list)
    """Seeds; those of the scale, if none is given."""
    labels: list[int] = field(default_factory=list)
    """Numbers of labelled systems; those of the scale, if none is given."""
    pretrain_steps: int | None = None
    """Steps of pre-training; the scale's, if not given."""
    finetune_steps: int | None = None
    """Steps of fine-tuning; the scale's, if not given."""
    workers: int | None = None
    """Jobs at a time; one for each core on a CPU, 4 on a GPU, if not given."""
    time_limit: float | None = None
    """Seconds after which to save and stop; the same command resumes. Jobs that would take longer are not started."""
    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one, if not given."""
    compile: bool = True
    """On a GPU: compile the blocks of the models with torch.compile, in longer training runs."""
    graphs: bool = True
    """On a GPU: run each training step as one CUDA graph."""
    keep_weights: bool = False
    """Keep the pre-trained weights in OUT/work."""
    laws: bool = True
    """Fit formulas too, where pyoperon is installed; `lssar newton read-law` can do it later, on another machine."""
    summary: bool = True
    """Collect and plot the results at the end; `lssar newton publish` can do it later, on another machine."""

    def _changed(self, family: Family) -> Family:
        """A family of the scale with what the flags ask for."""
        changes: dict[str, Any] = {
            name: tuple(getattr(self, name)) for name in ("mechanisms", "seeds", "labels") if getattr(self, name)
        }
        for stage in ("pretrain", "finetune"):
            if (steps := getattr(self, f"{stage}_steps")) is not None:
                changes[stage] = dataclasses.replace(getattr(family, stage), steps=steps)
        return dataclasses.replace(family, **changes)

    def run(self) -> None:
        from lssar.experiments.newton.families import SCALES, claim, jobs_of
        from lssar.experiments.newton.steps import Execution
        from lssar.experiments.newton.sweep import run_all
        from lssar.runs import pick_device

        families = tuple(self._changed(family) for family in SCALES[self.scale])
        out = self.out or Path("out") / f"newton-{self.scale}"
        jobs = jobs_of(families)
        device = str(pick_device(self.device))
        cuda = device.startswith("cuda")
        workers = self.workers or min(len(jobs), 4 if cuda else os.cpu_count() or 1)
        arms = sum(len(list(job.arms())) for job in jobs)
        say(f"{arms} arms in {len(jobs)} jobs, {workers} at a time, into {out}")
        claim(families, out)
        if not all((out / "arms" / f"{arm}.json").exists() for job in jobs for arm, _, _ in job.arms()):
            session = {"command": command_line(), "environment": environment()}
            write_json(out / "run.json", {**session, "earlier": _sessions(out)}, overwrite=True)
        how = Execution(compile=cuda and self.compile, graph=cuda and self.graphs)
        done = run_all(families, out, device, workers, self.time_limit, self.keep_weights, how=how)
        if not done:
            say("not all arms are finished; the same command resumes")
        elif self.laws and _have("pyoperon", "sympy"):
            ReadLaw(out, draws=3, workers=workers).read()
        if self.summary:
            finish(out)


@dataclass
class ReadLaw:
    """Formulas by symbolic regression from the stored predictions of a sweep; needs no GPU and no weights."""

    folder: tyro.conf.Positional[Path]
    """Folder of the sweep."""
    engine: Literal["operon", "pysr"] = "operon"
    """Symbolic regression by pyoperon or PySR."""
    arms: Literal["best", "all"] = "best"
    """`best`: of each mechanism the pre-trained arm with most labels, first seed; `all`: every finished arm."""
    operators: list[Literal["arithmetic", "original"]] = field(default_factory=lambda: ["arithmetic", "original"])
    """Operators of the formulas: + * / alone, or sin, cos and exp too, as in the original."""
    draws: int = 5
    """Samples of points from which a formula is fitted."""
    size: int = 1000
    """Points in a draw."""
    workers: int = 1
    """Processes."""

    def run(self) -> None:
        self.read()
        finish(self.folder)

    def read(self) -> None:
        from lssar.experiments.newton.results import read_laws

        everything = self.arms == "all"
        read_laws(self.folder, everything, self.engine, tuple(self.operators), self.draws, self.size, self.workers)


@dataclass
class Publish:
    """Copy the results of a sweep, as one JSON file, and its figures to where the docs find them."""

    folder: tyro.conf.Positional[Path]
    """Folder of the sweep."""
    to: tyro.conf.Positional[Path]
    """Path without suffix, e.g. results/newton/h200: makes h200.json, h200-errors.png, ..."""
    overwrite: bool = False
    """Replace earlier files."""

    def run(self) -> None:
        say_where(write(self.folder, self.to, self.overwrite)[1])


@dataclass
class Report:
    """Fill the tables of a document from the committed results; with --check only say whether that changes it."""

    page: tyro.conf.Positional[Path] = Path("docs/newton.md")
    """Markdown file whose tables are filled."""
    check: bool = False
    """Write nothing, and fail if the page does not match the results."""

    def run(self) -> None:
        from lssar.experiments.newton.report import filled
        from lssar.records import write_file

        if not self.page.exists():
            raise FileNotFoundError(f"{self.page} does not exist")
        text = filled(self.page)
        if text == self.page.read_text():
            say(f"{self.page} is up to date")
        elif self.check:
            raise ValueError(f"{self.page} does not match the results; run `lssar newton report`")
        else:
            say_where([write_file(self.page, lambda p: p.write_text(text), overwrite=True)])


def _sessions(out: Path) -> list[dict[str, Any]]:
    """Commands and machines that worked on a sweep, in order; a finished arm keeps its record of an earlier session."""
    path = out / "run.json"
    if not path.exists():
        return []
    last = json.loads(path.read_text())
    return [*last.pop("earlier", []), last]


def _have(*modules: str) -> bool:
    import importlib.util

    return all(importlib.util.find_spec(module) is not None for module in modules)


def write(out: Path, to: Path, overwrite: bool) -> tuple[dict[str, Any], list[Path]]:
    """Gather what is there of a sweep into TO.json and draw it into TO-*.png."""
    from lssar import plots
    from lssar.experiments.newton.results import collect

    sessions = _sessions(out)
    about = {**sessions[-1], "earlier": sessions[:-1]} if sessions else {}
    result = {**about, **collect(out)}
    files = [write_json(to.with_name(f"{to.name}.json"), result, overwrite)]
    if result["arms"] and _have("matplotlib"):
        figures = {"errors": plots.plot_law_errors, "forces": plots.plot_forces, "orbits": plots.plot_orbits}
        if result["probes"]:
            figures["probe"] = plots.plot_inductive_bias
        files += [draw(result, to.with_name(f"{to.name}-{name}.png"), overwrite) for name, draw in figures.items()]
    return result, files


def finish(out: Path) -> None:
    """Write the results into the folder of the sweep, and print them."""
    from lssar.experiments.newton.report import law_counts

    result, files = write(out, out / "newton", overwrite=True)
    if result["arms"]:
        show_exponents(result)
    for (name, counts), row in zip(law_counts(result), result["laws"]):
        say(f"{name}: m1 m2 / r^2 in {counts}")
        for text in dict.fromkeys(law["law"] for law in row["laws"]):
            say(f"    F = {text}")
    say_where(files)


def show_exponents(result: dict[str, Any]) -> None:
    rows = []
    arms = [row | {"model": f"{row['mechanism']}, {row['start']}"} for row in result["arms"]]
    arms += [row | {"model": f"oracle: {row['oracle']}"} for row in result["oracles"]]
    for row in arms:
        exponents = " ".join(f"{row[e]:.3f}" for e in ("m1", "m2", "r"))
        deviation = max(row["standard_errors"].values())
        about = [row["world"], row["model"], str(row.get("labels", "")), str(row.get("seed", ""))]
        rows.append([*about, exponents, f"{deviation:.3f}", f"{row['error']:.3f}", f"{row['r2']:.4f}"])
    head = ["world", "model", "labels", "seed", "a b c", "s.e.", "error", "R2"]
    title = "F ~ m1^a m2^b r^c on systems never labelled (Newton: 1 1 -2), standard errors, largest error"
    show_table(head, rows, title, keys=2)
