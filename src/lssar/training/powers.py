"""Schedules of the re-weighting power p over training, as text and as values.

    3:0.4,7:0.7,15      p = 3 for the first 40% of the steps, 7 up to 70%, then 15
    3..15:0.8           p rises from 3 to 15 by a constant factor a step over the first 80% of the steps, then stays
    3:0.2,3..31:0.9     stages and ramps may be combined

The last value holds to the end of training; it is the power of the trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

from lssar.specs import check_power


@dataclass(frozen=True)
class Stage:
    first: float
    """Power of the stage's first step."""
    last: float
    """Power of its last step; as `first`, if it is constant."""
    until: float
    """Share of all steps at which the stage ends."""


@dataclass(frozen=True)
class PowerSchedule:
    """Stages one after the other; made by `PowerSchedule.parse`."""

    stages: tuple[Stage, ...]

    @classmethod
    def parse(cls, text: str) -> PowerSchedule:
        words = text.split(",")
        stages: list[Stage] = []
        for i, word in enumerate(words):
            powers, colon, until = word.partition(":")
            first, ramp, last = powers.partition("..")
            try:
                stage = Stage(float(first), float(last if ramp else first), float(until) if colon else 1.0)
            except ValueError:
                raise ValueError(
                    f"power schedule {text!r}: {word!r} is no stage; wanted P[:UNTIL] or FROM..TO[:UNTIL], "
                    "e.g. 3:0.4,7:0.7,15"
                ) from None
            for power in (stage.first, stage.last):
                try:
                    check_power(power)
                except ValueError as error:
                    raise ValueError(f"power schedule {text!r}: {error}") from None
            if not (stages[-1].until if stages else 0.0) < stage.until <= 1:
                raise ValueError(
                    f"power schedule {text!r}: stages must end at rising shares of the steps, at most 1; got {word!r}"
                )
            if not colon and i < len(words) - 1:
                raise ValueError(f"power schedule {text!r}: {word!r} needs an end, since another stage follows")
            stages.append(stage)
        return cls(tuple(stages))

    @property
    def final(self) -> float:
        """The power at the end of training."""
        return self.stages[-1].last

    def at(self, step: int, steps: int) -> float:
        """The power of a step, counted from 0, of so many."""
        begin = 0
        for stage in self.stages:
            end = round(stage.until * steps)
            if step < end:
                share = (step - begin) / max(1, end - 1 - begin)
                if share in (0, 1) or stage.first == stage.last:
                    return stage.last if share else stage.first
                return stage.first * (stage.last / stage.first) ** share
            begin = end
        return self.final
