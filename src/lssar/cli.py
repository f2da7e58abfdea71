"""`lssar ...`: finds the command, runs it, and turns an error that a user can mend into one line."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import tyro

COMMANDS: dict[str, str] = {
    "demo": "lssar.commands.demo:Demo",
    "rows": "lssar.commands.demo:RowsDemo",
    "train": "lssar.commands.train:Train",
    "data": "lssar.commands.data:DataCommand",
    "eval": "lssar.cli:Evaluate",
    "diagnose": "lssar.commands.diagnose:Diagnose",
    "generate": "lssar.commands.generate:Generate",
    "report": "lssar.commands.report:Report",
    "explore": "lssar.commands.explore:Explore",
    "plot": "lssar.commands.plot:Plot",
    "reproduce": "lssar.commands.reproduce:Reproduce",
    "export": "lssar.commands.export:Export",
    "newton": "lssar.commands.newton:Newton",
    "bench": "lssar.commands.bench:Bench",
    "tune": "lssar.commands.bench:Tune",
    "specs": "lssar.commands.specs:Specs",
}
"""Where each command is; imported when asked for, so that one command's extras are no other's."""


MENDABLE = (ValueError, OSError, ImportError)
"""Errors that say what a user can do; anything else is ours, and shows where it came from."""


EVALUATIONS = {
    "length": "lssar.commands.eval_length:Length",
    "retrieval": "lssar.commands.eval_retrieval:Retrieval",
    "downstream": "lssar.commands.eval_downstream:Downstream",
}


class Evaluate:
    """Evaluate runs: `lssar eval length | retrieval | downstream RUN...`."""

    @classmethod
    def parse(cls, arguments: list[str]) -> Any:
        if not arguments or arguments[0] not in EVALUATIONS:
            raise ValueError(f"`lssar eval` wants one of: {', '.join(EVALUATIONS)}")
        kind, *rest = arguments
        return tyro.cli(imported(EVALUATIONS[kind]), prog=f"lssar eval {kind}", args=rest)


def load(name: str) -> Any:
    return imported(COMMANDS[name])


def imported(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def usage() -> str:
    lines = [f"  {name:<10} {(load(name).__doc__ or '').splitlines()[0]}" for name in COMMANDS]
    return (
        "lssar: softplus attention with re-weighting.\n\n" + "\n".join(lines) + "\n\n`lssar COMMAND --help` says more."
    )


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}\n\n{usage()}")
        sys.exit(2)
    try:
        command = load(name)
        parse = getattr(command, "parse", None)  # a command whose flags depend on its first word reads them itself
        made = parse(rest) if parse else tyro.cli(command, prog=f"lssar {name}", args=rest)
        made.run()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, `| head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MENDABLE as error:
        print(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
