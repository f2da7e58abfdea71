"""`lssar specs`."""

from __future__ import annotations

from dataclasses import dataclass

from lssar.commands.common import console


@dataclass
class Specs:
    """The mechanisms by name, with the fields that make them."""

    def run(self) -> None:
        from lssar.specs import spec, specs

        for name in specs():
            console.print(repr(spec(name)), highlight=False)
