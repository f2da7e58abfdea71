"""`lssar data` as a user runs it, and the text that every machine has."""

import json

import numpy as np
import pytest

from lssar.data.decode import decoded
from lssar.data.folder import DataFolder
from lssar.data.shards import write_shard
from lssar.data.synthetic import python_stdlib_text
from lssar_cli import find, parse


def data(*arguments):
    words, command, rest = find(["data", *map(str, arguments)])
    parse(command, words, rest).run()


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(200):
        (tmp_path / f"{number:03d}.txt").write_text(f"text number {number}")
    data("prepare", tmp_path, "--tokenizer", "bytes", "--name", "demo")
    return tmp_path / "data" / "demo"


def test_prepare(prepared):
    manifest = json.loads((prepared / "manifest.json").read_text())
    counts = {split: part["documents"] for split, part in manifest["splits"].items()}
    assert counts == {"train": 198, "val": 2}  # one in a hundred, by default
    assert (prepared / "demo_train_000001.bin").exists() and (prepared / "demo_val_000000.bin").exists()
    with pytest.raises(FileExistsError, match="--overwrite"):
        data("prepare", prepared.parents[1], "--tokenizer", "bytes", "--name", "demo", "--glob", "*.txt")


@pytest.mark.parametrize(
    ("documents", "held_out"),
    [
        (["one document of some words, and no other"], 1),  # the end of it
        ([f"document {number} of a few" for number in range(9)], 1),  # the last
        (["short", "a much longer last document " * 20], 1),  # the end of the last
    ],
    ids=["one", "nine", "short and long"],
)
def test_few_documents_are_enough_for_training_and_evaluation(documents, held_out, tmp_path, capsys):
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    data("prepare", tmp_path, "--tokenizer", "bytes", "--out", tmp_path / "out")
    out, err = capsys.readouterr()
    assert f"validation tokens of {held_out};" in out and not err
    folder = DataFolder(tmp_path / "out")
    folder.check()
    tokenizer = folder.tokenizer()
    train, val = (list(decoded(folder.shards(split), tokenizer)) for split in ("train", "val"))
    assert len(val) == held_out
    assert [*train[:-1], train[-1] + val[0]] == documents or [*train, *val] == documents  # nothing lost, nothing twice
    assert len(val[0]) <= max(0.2 * sum(map(len, documents)), 30)


def test_prepare_warns_when_nothing_is_held_out(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one document")
    data("prepare", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "out", "--val-share", "0")
    out, err = capsys.readouterr()
    assert "nothing is held out" in err
    assert "13 training tokens of 1 documents, 0 validation tokens" in out


def test_show(prepared, capsys):
    data("show", prepared)
    said = capsys.readouterr().out
    assert "uint16, magic 20240520, version 1" in said
    assert "'<|endoftext|>text number 0<|endoftext|>" in said
    assert "largest id: 256" in said and "documents that begin here" in said
    (prepared / "demo_val_000001.bin").write_bytes((prepared / "demo_val_000000.bin").read_bytes()[:-1])
    with pytest.raises(SystemExit, match="1"):
        data("show", prepared)
    out, err = capsys.readouterr()
    assert "demo_val_000001.bin: truncated" in err and "demo_train_000001.bin: " in out


@pytest.mark.parametrize(("damage", "words"), [("remove", "is missing"), ("flip", "is damaged or was replaced")])
def test_show_compares_with_the_manifest(prepared, capsys, damage, words):
    shard = prepared / "demo_val_000000.bin"
    if damage == "remove":
        shard.unlink()
    else:
        raw = bytearray(shard.read_bytes())
        raw[-2] ^= 1
        shard.write_bytes(raw)
    with pytest.raises(SystemExit, match="1"):
        data("show", prepared)
    out, err = capsys.readouterr()
    assert f"{shard} {words}" in err and "demo_train_000001.bin: " in out


def test_show_json(prepared, capsys):
    capsys.readouterr()
    data("show", prepared, "--json")
    shards = json.loads(capsys.readouterr().out)
    assert [shard["dtype"] for shard in shards] == ["uint16", "uint16"]
    assert shards[0]["begins"].startswith("<|endoftext|>text number 0")


@pytest.mark.parametrize("name", ["..", "a/b", "", "."])
def test_names_stay_in_their_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(ValueError, match="name"):
        data("prepare", "a.txt", "--tokenizer", "bytes", "--name", name)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_show_foreign_shards(tmp_path, capsys):
    path = write_shard(tmp_path / "x.bin", np.array([256, 104, 105]), 257)
    data("show", path)
    assert "[256, 104, 105] (text: --tokenizer)" in capsys.readouterr().out
    data("show", path, "--tokenizer", "bytes")
    assert "begins: '<|endoftext|>hi'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name their tokenizer"):
        data("decode", path)


def test_decode(prepared, tmp_path, capsys):
    capsys.readouterr()
    data("decode", prepared, "--max-documents", "2")
    assert capsys.readouterr().out == "text number 0\ntext number 1\n"
    data("decode", prepared, "--out", tmp_path / "back.jsonl")
    lines = [json.loads(line)["text"] for line in (tmp_path / "back.jsonl").read_text().splitlines()]
    assert sorted(lines) == sorted(f"text number {number}" for number in range(200))


def test_stdlib():
    first = list(python_stdlib_text(1_000_000))
    assert list(python_stdlib_text(1_000_000)) == first
    assert 990_000 < sum(len(text.encode()) for _, text in first) <= 1_000_000
    assert {split for split, _ in first} == {"train", "val"}
    assert all(text.endswith("\n") for _, text in first[-1:])
    longer = list(python_stdlib_text(1_100_000))
    assert longer[: len(first) - 1] == first[:-1]  # the last was cut


def test_only_a_folder_with_shards_is_said_to_lack_a_manifest(tmp_path, capsys):
    """An exported model has no data at all; the error that follows says so."""
    DataFolder(tmp_path / "none").check()
    assert not capsys.readouterr().err
    (tmp_path / "x_train_000000.bin").touch()
    DataFolder(tmp_path).check()
    assert "no manifest.json" in capsys.readouterr().err
