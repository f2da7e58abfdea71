"""The attack on purpose, short by default; `python -m tests.attack` runs the long one and records its counts."""

import pytest

from tests.attack.corruption import GOOD, matrix, newest_checkpoint
from tests.attack.kills import VICTIMS, kill_preparation, kill_training
from tests.attack.processes import kill_one_process


def test_killed_training_loses_nothing(tmp_path):
    assert kill_training(VICTIMS[0], kills=3, folder=tmp_path)["kills"] == 3


def test_killed_preparation_loses_nothing(tmp_path):
    assert kill_preparation(kills=5, folder=tmp_path)["kills"] == 5


def test_damaged_files_are_never_silent(tmp_path):
    """The damages that change the least, under the command that reads the file first."""
    wanted = {"config.json": "train", "state.json": "train", "manifest.json": "train", "model.safetensors": "generate",
              "x_train_000001.bin": "train", "metrics.jsonl": "train"}  # fmt: skip

    def few(file, damage, command):
        newest = "checkpoints" not in file.parts or "step-0000008" in file.parts
        return newest and damage in ("bit flipped",) and wanted.get(file.name) == command

    rows = list(matrix(tmp_path, few))
    assert len(rows) == len(wanted)
    assert all(row["outcome"] in GOOD for row in rows), [row for row in rows if row["outcome"] not in GOOD]


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS, ids=lambda victim: victim.name)
def test_many_kills_of_training(tmp_path, victim):
    assert kill_training(victim, kills=12, folder=tmp_path)["kills"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_many_kills_of_preparation(tmp_path, workers):
    assert kill_preparation(kills=20, folder=tmp_path, workers=workers)["kills"] == 20


@pytest.mark.slow
def test_many_kills_of_one_process(tmp_path):
    assert kill_one_process(kills=12, folder=tmp_path)["kills"] == 12


@pytest.mark.slow
def test_the_whole_corruption_matrix(tmp_path):
    bad = [row for row in matrix(tmp_path) if row["outcome"] not in GOOD]
    assert not bad


@pytest.mark.slow
def test_the_corruption_matrix_of_sharded_checkpoints(tmp_path):
    bad = [row for row in matrix(tmp_path, newest_checkpoint, processes=2) if row["outcome"] not in GOOD]
    assert not bad
