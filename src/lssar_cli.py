"""The `lssar` command: finds the subcommand, parses its flags and reports its errors.

This module is outside the `lssar` package because `import lssar` imports torch, which takes seconds. From here
`lssar --help` and `lssar eval --help` answer at once, and OpenMP's settings are made before torch reads them.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Command:
    """A subcommand: a dataclass whose fields are its flags, with a `run` method. Imported only when it is used."""

    place: str
    """MODULE:CLASS"""
    summary: str
    resumes: bool = False
    """After an interruption the same command line continues where it stopped."""
    arguments: str = ""
    """What follows the group's name, for the default command of a group."""


@dataclass(frozen=True)
class Group:
    """Subcommands under one word. `default` runs where the next word is none of them."""

    summary: str
    commands: dict[str, Command]
    default: Command | None = None


COMMANDS: dict[str, dict[str, Command | Group]] = {
    "Start here": {
        "demo": Command("lssar.commands.demo:Demo", "Two released models look for a key far back in a long text"),
        "demo-train": Command(
            "lssar.commands.demo_train:DemoTrain", "Train small models, evaluate them at 16 times the length", True
        ),
        "rows": Command("lssar.commands.rows:RowsDemo", "How attention rows change as the number of keys grows"),
        "doctor": Command("lssar.commands.doctor:Doctor", "Versions, devices, kernels and extras of this installation"),
        "specs": Command("lssar.commands.specs:Specs", "List the attention mechanisms"),
    },
    "Data and training": {
        "data": Group(
            "Prepare, inspect and decode token shards",
            {
                "prepare": Command("lssar.commands.data:Prepare", "Text or datasets to token shards", True),
                "show": Command("lssar.commands.data:Show", "Check shards and print their contents in brief"),
                "decode": Command("lssar.commands.data:Decode", "Shards back to text"),
            },
        ),
        "train": Command("lssar.commands.train:Train", "Train a model from a recipe, or resume a run", True),
    },
    "Evaluation": {
        "eval": Group(
            "Evaluate runs",
            {
                "length": Command("lssar.commands.eval_length:Length", "Loss by context length and by position"),
                "retrieval": Command(
                    "lssar.commands.eval_retrieval:Retrieval", "Passkey, needles, recall and copy, by length", True
                ),
                "downstream": Command(
                    "lssar.commands.eval_downstream:Downstream", "Zero-shot benchmarks (HellaSwag, PIQA, ...)", True
                ),
            },
        ),
        "diagnose": Command("lssar.commands.diagnose:Diagnose", "Entropy, effective keys and sinks of each head"),
        "generate": Command("lssar.commands.generate:Generate", "Continue a prompt"),
        "report": Command("lssar.commands.report:Report", "HTML page with the results of runs"),
        "explore": Command("lssar.commands.explore:Explore", "HTML page to explore the attention of a run"),
        "plot": Command("lssar.commands.plot:Plot", "Draw the JSON results of several evaluations in one figure"),
        "export": Command("lssar.commands.export:Export", "Write a run as a Hugging Face model"),
    },
    "Experiments": {
        "reproduce": Group(
            "The paper's tables and figures, and controls",
            {
                "report": Command("lssar.commands.reproduce:Report", "Write docs/results.md from finished results"),
            },
            default=Command("lssar.commands.reproduce:Reproduce", "Run experiments by name", True, "NAME..."),
        ),
        "newton": Group(
            "Newton's law from orbits: does a model of motion find the force?",
            {
                "read-law": Command("lssar.commands.newton:ReadLaw", "Formulas by symbolic regression from a sweep"),
                "publish": Command("lssar.commands.newton:Publish", "Copy the results of a sweep for the docs"),
                "report": Command("lssar.commands.newton:Report", "Fill the tables of docs/newton.md from the results"),
            },
            default=Command("lssar.commands.newton:Newton", "Run the sweep", True, "[flags]"),
        ),
    },
    "Speed": {
        "bench": Command("lssar.commands.bench:Bench", "Time and memory of attention implementations"),
        "tune": Command("lssar.commands.bench:Tune", "Measure tile shapes of the fused kernels on this GPU"),
    },
}  # fmt: skip

USER_ERRORS = (ValueError, OSError, ImportError)
"""Errors whose message tells the user what to change; anything else is a bug and keeps its traceback."""

HELP = ("-h", "--help", "help")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command: Command | None = None
    try:
        words, command, rest = find(arguments)
        set_openmp_defaults()
        parse(command, words, rest).run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `| head` perhaps, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        fail("interrupted" + ("; the same command resumes" if command and command.resumes else ""), 130, "")
    except USER_ERRORS as error:
        fail(str(error) or type(error).__name__, getattr(error, "exit_code", 1))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        fail(f"{str(error).split('. ')[0]}; try a smaller batch or length", 1)


def parse(command: Command, words: list[str], arguments: list[str]) -> Any:
    """The command with its flags set. A class with a `parse` method of its own interprets its first words itself."""
    import tyro

    kind = load(command)
    if hasattr(kind, "parse"):
        return kind.parse(arguments)
    from lssar.commands.common import explain_flags

    explain_flags(kind)
    # Comments of the source are for its readers, not for --help.
    return tyro.cli(kind, prog=" ".join(words), args=arguments, config=(tyro.conf.HelptextFromCommentsOff,))


def find(arguments: list[str]) -> tuple[list[str], Command, list[str]]:
    """Words of the command, the command, and the arguments that are left. Prints help or a usage error and exits."""
    known = {name: entry for section in COMMANDS.values() for name, entry in section.items()}
    if not arguments or arguments[0] in HELP:
        show(usage())
        sys.exit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version"):
        show(f"lssar {version()}")
        sys.exit(0)
    name, *rest = arguments
    entry = known.get(name)
    if entry is None:
        fail(f"unknown command {name!r}; `lssar --help` lists them", 2)
    if isinstance(entry, Command):
        return ["lssar", name], entry, rest
    if rest and rest[0] in entry.commands:
        return ["lssar", name, rest[0]], entry.commands[rest[0]], rest[1:]
    if (rest and rest[0] in HELP) or (not rest and entry.default is None):
        show(group_usage(name, entry))
        if entry.default is None:
            sys.exit(0 if rest else 2)
        return ["lssar", name], entry.default, ["--help"]
    if entry.default is None:
        fail(f"unknown command {f'{name} {rest[0]}'!r}; `lssar {name}` has {', '.join(entry.commands)}", 2)
    return ["lssar", name], entry.default, rest


def load(command: Command) -> Any:
    module, _, attribute = command.place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def set_openmp_defaults() -> None:
    """Idle OpenMP threads sleep instead of spinning, so that other jobs on the machine do not starve training.

    OpenMP reads these when torch is imported; a value that the user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def usage() -> str:
    lines = ["lssar: softplus attention with re-weighting (LSSA, LSSAR).", "", "usage: lssar COMMAND [arguments]"]
    for title, section in COMMANDS.items():
        lines += ["", f"{title}:"]
        for name, entry in section.items():
            verbs = f" ({', '.join(entry.commands)})" if isinstance(entry, Group) else ""
            lines += entry_lines(name, entry.summary + verbs)
    return "\n".join([*lines, "", "`lssar COMMAND --help` explains a command; `lssar --version` prints the version."])


def group_usage(name: str, group: Group) -> str:
    lines = [f"lssar {name}: {group.summary}", ""]
    if group.default is not None:
        lines += entry_lines(f"lssar {name} {group.default.arguments}", group.default.summary, 26)
    for verb, command in group.commands.items():
        lines += entry_lines(f"lssar {name} {verb}", command.summary, 26)
    return "\n".join([*lines, "", f"`lssar {name} {next(iter(group.commands))} --help` lists its flags."])


def entry_lines(name: str, text: str, column: int = 10) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=f"  {name:<{column}} ", subsequent_indent=" " * (column + 3))


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("lssar")
    except PackageNotFoundError:
        return "(not installed)"


def show(text: str) -> None:
    print(text, flush=True)


def fail(message: str, code: int, label: str = "error: ") -> NoReturn:
    """One line on stderr, then the exit code: 2 for a wrong command line, 1 for a failure, 130 for Ctrl-C."""
    sys.stdout.flush()
    print(f"{label}{message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
