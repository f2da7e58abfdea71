"""`lssar reproduce NAME...`: the tables and figures of the paper, and the controls; `... report` writes them up."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from lssar.commands.common import TrainingProgress, UsageError, check_positive, console, say, say_where
from lssar.experiments import EXPERIMENTS, SCALES, Arm, Scale, arms_of
from lssar.experiments.arms import ScaleName
from lssar.tables import terminal_text

ALL = "all"


@dataclass
class Reproduce:
    """Train, evaluate and tabulate the arms (training runs) of experiments; finished arms are not run again.

    Experiments: mixed, larger, larger-downstream, budget, controls, figure1, passkey, table4, figure2, stability,
    downstream, table1, table2, table3; or all.
    Stop it whenever you like: the same command resumes. `lssar reproduce report` writes docs/results.md and
    docs/results-mixed.md.
    """

    names: tyro.conf.Positional[list[str]]
    """Experiments, or all."""
    scale: ScaleName = "smoke"
    """smoke: only shows that everything runs, minutes on two cores; laptop: small models that have learned something,
    several hours on two cores for all of them; h200: 51M on books, one GPU; paper: 124M on FineWeb-10B, eight GPUs."""
    tokens: int | None = None
    """Number of training tokens of every arm, in place of the scale's."""
    seeds: int | None = None
    """Train at most this many seeds of each row now; without it, as many as the row declares."""
    data: Path | None = None
    """Folder of shards; the scale's own, if not given: data/books, data/fineweb10B."""
    bench: Path | None = None
    """Folder of benchmark files, which only `downstream` and `larger-downstream` need; data/bench, if not given."""
    time_limit: float | None = None
    """Seconds after which to save and stop; an unfinished arm continues from its checkpoint."""
    whole_arms: bool = False
    """With --time-limit: start no arm that is unlikely to finish, for machines whose disk is lost at the end."""
    workers: int = 1
    """Processes that run at the same time, each with one arm."""
    compile: bool | None = None
    """Whether to use torch.compile, if not as in the recipe; for short runs compiling may take longer than it saves."""
    out: Path | None = None
    """Folder for results/ and runs/, in place of the scale's own."""
    dry_run: bool = False
    """Print shapes, steps, tokens, parameters, memory and command of each arm, and run nothing."""

    def run(self) -> None:
        from lssar.experiments import collect
        from lssar.experiments.queue import work_through
        from lssar.experiments.runner import ArmQueue, measured, prepare_data, quietly

        scale = scale_of(self.scale, self.tokens, self.out)
        wanted = []
        for experiment in (EXPERIMENTS[name] for name in chosen(self.names)):
            missing = next(
                filter(None, (e.missing(self.bench) for row in experiment.rows for e in row.evaluations)), None
            )
            if missing and self.names != [ALL] and not self.dry_run:  # before the training, not after it
                raise FileNotFoundError(missing)
            if missing and not self.dry_run:
                say(f"without {experiment.name}: {missing}")
                continue
            if not experiment.rows_at(scale) and experiment.measure is None:
                if self.names != [ALL]:
                    raise UsageError(f"{experiment.name} has no arms at scale {self.scale}")
                continue
            wanted.append(experiment)
        check_positive(seeds=self.seeds, workers=self.workers)
        now = replace(scale, most_seeds=min(self.seeds or scale.most_seeds, scale.most_seeds))
        arms = arms_of(wanted, now, EXPERIMENTS.values())
        if self.dry_run:
            from lssar.experiments.dry_run import describe

            for arm in arms:
                say(describe(arm, scale))
            return
        command = f"lssar reproduce {' '.join(self.names)} --scale {self.scale}"
        command += f" --tokens {self.tokens}" if self.tokens else ""
        deadline = time.time() + self.time_limit if self.time_limit is not None else None
        queue = ArmQueue(
            jobs=tuple(arms), scale=scale, data=prepare_data(scale, self.data), command=command, deadline=deadline,
            whole_jobs=self.whole_arms, compile=self.compile, required=required(wanted, scale), bench=self.bench,
            watch=watch if self.workers == 1 else quietly,
        )  # fmt: skip
        done = sum(map(queue.finished, arms))
        tokens = [arm.recipe.steps * arm.recipe.batch_tokens for arm in arms] or [0]
        each = " to ".join(f"{count:,}" for count in sorted({min(tokens), max(tokens)}))
        say(f"{len(arms)} arms of {each} tokens, {done} of them finished before; results in {scale.results}")
        for experiment in wanted:
            if experiment.measure is not None:
                measured(scale.results, experiment.name, command, experiment.measure)
        failed = work_through(queue, self.workers, say)
        files: list[Path] = []
        pictures = importlib.util.find_spec("matplotlib") is not None
        if not pictures:
            say("figures need matplotlib (pip install 'lssar[plots]'); `lssar reproduce report` draws them later")
        if self.scale == "smoke":
            say("\nScale smoke only shows that everything runs: its models are too small to decide anything.")
        for experiment in wanted:
            table, written = collect.write(experiment, scale, pictures)
            files += written
            for caption, body in collect.sections(table):
                say(f"\n{table['title']}\n{caption}:\n\n{terminal_text(body, console.width)}")
        if files:
            say_where(files)
        left = [arm.key for arm in arms if not queue.finished(arm)]
        if failed:
            say(f"failed: {', '.join(failed)}")
        if left:
            say(f"{len(left)} of {len(arms)} arms are not finished; the same command resumes")
        sys.exit(1 if failed else 0)


@dataclass
class Report:
    """Write docs/results.md and docs/results-mixed.md, their tables and figures from finished arms; train nothing."""

    scale: ScaleName = "h200"
    """Scale whose results are written up."""
    tokens: int | None = None
    """Another number of training tokens, as in `lssar reproduce`."""
    out: Path | None = None
    """Folder that holds results/, if not the scale's own."""
    page: Path | None = None
    """Page to write; docs/results.md for `h200`, docs/results-SCALE.md for others, if not given."""
    check: bool = False
    """Write nothing, and fail if the page does not match the results."""

    def run(self) -> None:
        from lssar.experiments import report

        scale = scale_of(self.scale, self.tokens, self.out)
        if not any(scale.results.glob("*.json")):
            raise FileNotFoundError(
                f"no results in {str(scale.results)!r}: run this in a checkout of the repository, or name the --out "
                "FOLDER of an earlier `lssar reproduce NAME...`"
            )
        page = self.page or report.usual_page(scale)
        if self.check:
            stale = report.stale(scale, page)
            if stale:
                raise ValueError(f"these do not match the results, run `lssar reproduce report`: {', '.join(stale)}")
            say(f"{page} matches the results")
            return
        say_where(report.write(scale, page))


def chosen(names: list[str]) -> list[str]:
    if names == [ALL]:
        return list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise UsageError(f"unknown experiment {', '.join(map(repr, unknown))}; known: {', '.join(EXPERIMENTS)}, {ALL}")
    if not names:
        raise UsageError(f"`lssar reproduce` needs names of experiments: {', '.join(EXPERIMENTS)}, or {ALL}")
    return list(dict.fromkeys(names))


def scale_of(name: str, tokens: int | None, out: Path | None) -> Scale:
    scale = SCALES[name]
    if out is not None:
        scale = replace(scale, results=out / "results", runs=out / "runs")
    return scale if tokens is None else scale.with_tokens(tokens)


def required(wanted: list[Any], scale: Scale) -> dict[str, tuple[str, ...]]:
    return {arm.key: tuple(e.key for e in arm.evaluations) for arm in arms_of(wanted, scale)}


@contextlib.contextmanager
def watch(arm: Arm) -> Iterator[Any]:
    """A live line of progress on a terminal."""
    with TrainingProgress(arm.name, arm.recipe.steps) as line:
        yield line.report
