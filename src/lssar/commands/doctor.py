"""`lssar doctor`."""

from dataclasses import dataclass


@dataclass
class Doctor:
    """What this installation can do."""

    def run(self) -> None:
        print("ok")
