"""The protocol for long readers: lengths, joined text, numbers of questions, and when the commands use it."""

import json

import numpy as np
import pytest

from lssar.cli import main
from lssar.data.folder import write_stdlib
from lssar.data.tasks import TaskMaker
from lssar.data.tokenizers import load_tokenizer
from lssar.evaluation.long import (
    QUESTIONS,
    far_multiples,
    is_long_reader,
    joined_pieces,
    needles_of,
    retrieval_multiples,
    retrieval_settings,
)
from lssar.training.recipes import recipe


@pytest.fixture
def maker() -> TaskMaker:
    return TaskMaker(load_tokenizer("bytes"), lambda rng, count: rng.integers(97, 123, count))


def test_lengths():
    assert far_multiples() == [1, 4, 16, 64, 256, 512]
    assert retrieval_multiples() == [1, 4, 16, 64, 512]
    assert all(512 % multiple == 0 for multiple in far_multiples())
    assert far_multiples(16) == [1, 4, 16]


def test_every_cell_has_enough_questions(maker):
    for task, each in (("passkey", 5), ("recall", 16), ("needles", needles_of(maker, 512))):
        settings = retrieval_settings(maker, task, 512)
        assert settings["samples"] * each >= QUESTIONS
    assert needles_of(maker, 512) == 8
    assert 1 <= needles_of(maker, 128) < 8
    sample = maker.make("needles", np.random.default_rng(0), 128, retrieval_settings(maker, "needles", 128)["depths"])
    assert len(sample.context) <= 128


def test_pieces_are_joined_and_spread(tmp_path):
    write_stdlib(tmp_path)
    pieces = joined_pieces(tmp_path, 2000, 20_000)
    assert len(pieces) == 10
    assert all(len(piece) == 2001 for piece in pieces)
    assert any(256 in piece[1:].tolist() for piece in pieces)  # a boundary of two documents
    with pytest.raises(ValueError, match="need twice as many"):
        joined_pieces(tmp_path, 10**8, 10**9)


def test_which_models_are_long_readers():
    assert is_long_reader(recipe("long-33m").model())
    assert is_long_reader(recipe("long-tiny").model())
    assert not is_long_reader(recipe("tiny-cpu").model())
    assert not is_long_reader(recipe("tiny-cpu", window=32).model())


def test_the_commands_use_it_for_mixed_layouts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "1", "--batch-tokens", "1024", "--micro-batch", "8", "--out", "run"]
    main(["train", "long-tiny", *words])
    main(["eval", "retrieval", "run", "--multiples", "1", "4", "--device", "cpu", "--out", "r"])
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["settings"]["protocol"] == "long"
    rows = result["arms"][0]["rows"]
    assert [(row["task"], row["length"]) for row in rows] == [
        ("passkey", 128), ("needles", 128), ("passkey", 512), ("needles", 512),
    ]  # fmt: skip
    assert all(row["greedy"]["of"] >= 32 and "choice" not in row for row in rows)
    assert rows[1]["greedy"]["contexts"] < rows[1]["greedy"]["of"]
    assert "choice" not in capsys.readouterr().out
    main(["eval", "retrieval", "run", "--protocol", "short", "--tasks", "passkey", "--multiples", "1", "--samples", "1",
          "--device", "cpu", "--out", "s"])  # fmt: skip
    assert json.loads((tmp_path / "s.json").read_text())["settings"]["samples"] == 1
