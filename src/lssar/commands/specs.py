"""`lssar specs`."""

from __future__ import annotations

from dataclasses import dataclass

from lssar.commands.common import print_json, say


@dataclass
class Specs:
    """The attention mechanisms by name, with the fields that define them."""

    json: bool = False
    """Print a JSON object with the fields of each mechanism."""

    def run(self) -> None:
        from lssar.specs import spec, specs

        if self.json:
            print_json({name: spec(name).to_dict() for name in specs()})
            return
        for name in specs():
            say(repr(spec(name)))
