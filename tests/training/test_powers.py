"""The power schedule: its values, and that training with one resumes to the bit."""

import os
import signal

import pytest

from lssar.training import train
from lssar.training.metrics import read_metrics
from lssar.training.powers import PowerSchedule
from lssar.training.recipes import Recipe, power


def recipe_with(**changes) -> Recipe:
    base = dict(
        size="tiny", layout="softmax@16 lssa+lssar/none", data="stdlib", vocab_size=257, length=32, steps=10,
        batch_tokens=128, micro_batch=4, warmup=2, lr=3e-3, dtype="float32", compile=False, eval_every=10,
        eval_batches=1, save_every=100, p_schedule="3:0.4,7:0.7,15",
    )  # fmt: skip
    return Recipe(**(base | changes))


def test_schedule_in_stages():
    r = recipe_with()
    assert [power(r, step) for step in range(10)] == [3] * 4 + [7] * 3 + [15] * 3
    assert power(recipe_with(p_schedule=None), 3) is None
    assert power(recipe_with(p_schedule="3:0.3,7:0.55,15:0.8,31", steps=900), 494) == 7
    assert power(recipe_with(p_schedule="3:0.3,7:0.55,15:0.8,31", steps=900), 495) == 15


def test_continuous_schedule():
    powers = [PowerSchedule.parse("2..32:0.5").at(step, 10) for step in range(10)]
    assert powers == pytest.approx([2, 4, 8, 16, 32, 32, 32, 32, 32, 32])
    assert PowerSchedule.parse("2..32").at(9, 10) == 32
    both = PowerSchedule.parse("3:0.2,3..15:0.6")
    assert [both.at(step, 10) for step in (0, 1, 2, 5, 9)] == [3, 3, 3, 15, 15]
    assert 3 < both.at(3, 10) < both.at(4, 10) < 15
    assert both.final == 15


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no stage"),
        ("three", "is no stage"),
        ("3:0.4,0.5", "must be a finite number >= 1 .*got 0.5"),
        ("nan", "must be a finite number >= 1"),
        ("3:0.5,2e7:0.8,15", "at most 16777216.*got 20000000.0"),
        ("3..2e7:0.8,15", "at most 16777216"),
        ("3:0.7,7:0.4,15", "rising shares"),
        ("3,7", "needs an end"),
        ("3:1.5", "at most 1"),
    ],
)
def test_wrong_schedules_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        PowerSchedule.parse(text)


def test_a_run_resumes_within_a_stage_to_the_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe_with(), whole)
    stop = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 5 else None  # noqa: E731
    assert train(recipe_with(), parts, report=stop)["step"] == 5
    train(recipe_with(), parts)
    rows = [[(row["loss"], row["p"]) for row in read_metrics(run)] for run in (whole, parts)]
    assert rows[0] == rows[1]
    assert [p for _, p in rows[0]] == [3] * 4 + [7] * 3 + [15] * 3
    assert len({loss for loss, _ in rows[0]}) == 10
