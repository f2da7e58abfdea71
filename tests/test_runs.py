"""A run folder as one value: what commands rely on when they open one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lssar.data import folder
from lssar.data.folder import DataFolder, find_data, write_stdlib
from lssar.runs import Run, evaluation_dtype, pick_device, unique_names
from lssar.training import recipe, train
from lssar.training.recipes import RECIPES

TINY = recipe("tiny-cpu", size="tiny", length=32, micro_batch=4, batch_tokens=128, steps=2, eval_batches=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(TINY, folder)
    return folder


def test_a_run_knows_everything_about_itself(run):
    opened = Run.open(run, "cpu")
    assert (opened.step, opened.name, opened.dtype) == (2, "lssar", None)
    assert opened.tokenizer.name == "bytes"
    assert opened.data.vocab_size == 257 and opened.data.eot == 256
    model = opened.model()
    assert not model.training and model.config == opened.recipe.model()
    assert opened.held_out(run / "data").held_out_shards() == opened.data.shards("val")


def test_missing_and_damaged_runs_are_reported_in_a_line(tmp_path, run):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        Run.open(tmp_path / "nothing")
    for text in ("", "[1]", "{}", '{"recipe": {"steps": "many"}}', '{"recipe": {"stepps": 3}}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            Run.open(tmp_path)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        Run.open(tmp_path, "cpu").model()


def change_recipe(path: Path, remove: tuple[str, ...] = (), **changes) -> None:
    record = json.loads(path.read_text())
    record.pop("checksum", None)
    record["recipe"] = {key: value for key, value in record["recipe"].items() if key not in remove} | changes
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("field", ["size", "attention", "heads", "steps"])
def test_a_stored_recipe_is_complete(run, tmp_path, field):
    for name in ("config.json", "export.json"):
        path = tmp_path / name
        path.write_text(json.dumps(json.loads((run / "config.json").read_text()) | {"step": 2}))
        change_recipe(path, (field,))
        with pytest.raises(ValueError, match=rf"{name}: the recipe lacks {field}"):
            Run.open(tmp_path, "cpu")


def test_a_recipe_of_version_0_1_loads(run, tmp_path):
    shutil.copy(run / "config.json", tmp_path)
    later = ("layout", "p_schedule", "context_parallel", "max_non_finite", "skip_non_finite")
    change_recipe(tmp_path / "config.json", later)
    assert Run.open(tmp_path, "cpu").recipe == Run.open(run, "cpu").recipe


@pytest.mark.parametrize(
    "changes", [{"size": "0.8m"}, {"vocab_size": 100}, {"projection": "tpa"}], ids=["size", "vocabulary", "projection"]
)
def test_weights_of_another_model_than_the_recipes(run, tmp_path, changes):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    change_recipe(folder / "config.json", **changes)
    opened = Run.open(folder, "cpu")
    with pytest.raises(
        ValueError, match=r"step-0000002: the weights do not fit the model .*: .* is .* in the file and"
    ):
        opened.model()
    if "vocab_size" not in changes:  # which the data decides
        with pytest.raises(ValueError, match="the weights do not fit"):
            train(opened.recipe, folder)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
def test_one_dtype_rule_for_every_spelling_of_a_device(device):
    assert evaluation_dtype(RECIPES["books-51m"], device) == torch.bfloat16
    assert evaluation_dtype(TINY, device) is None
    assert evaluation_dtype(RECIPES["books-51m"], "cpu") is None


def test_devices_are_checked():
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="unknown device"):
        pick_device("gpu0")
    for device in ("meta", "mps"):
        with pytest.raises(ValueError, match="not supported; use cpu, cuda"):
            pick_device(device)
    if not torch.cuda.is_available():
        assert pick_device().type == "cpu"
        with pytest.raises(ValueError, match="no CUDA device"):
            pick_device("cuda:0")


def test_names_tell_runs_apart():
    own = TINY.replace(layout="softmax@16 ssmax/none")  # its `attention` is not in the model
    assert unique_names([own, TINY.replace(layout="mixed@8*1")]) == ["softmax@16 ssmax/none", "lssar, mixed@8*1"]
    same = [TINY, TINY.replace(seed=1), TINY.replace(p=3.0), TINY.replace(attention="softmax")]
    assert unique_names(same) == ["lssar, seed 0", "lssar, seed 1", "lssar, p=3", "softmax"]
    twins = unique_names([TINY, TINY], [Path("a/first"), Path("b/second")])
    assert twins == ["lssar (first)", "lssar (second)"]


def test_relative_data_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "data" / "books").mkdir(parents=True)
    run = tmp_path / "runs" / "one"
    monkeypatch.chdir(os.path.dirname(tmp_path))
    assert find_data("data/books", run) == tmp_path / "data" / "books"
    assert find_data("data/none", run) == Path("data/none")
    assert find_data("stdlib", run) == run / "data"


def test_a_damaged_manifest_names_the_file(tmp_path):
    for text in ("{", "[]", "{}", '{"vocab_size": "257", "eot": 256, "tokenizer": {}}',
                 '{"vocab_size": 257, "eot": 257, "tokenizer": {"kind": "bytes"}}'):  # fmt: skip
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            DataFolder(tmp_path).tokenizer()


def test_a_missing_stdlib_shard_is_made_again(tmp_path):
    write_stdlib(tmp_path)
    data = DataFolder(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.bin")}
    data.shards("val")[0].unlink()
    (tmp_path / ".stdlib_val_000000-x.bin").write_bytes(b"unfinished")
    assert data.shards("val") == []
    (tmp_path / ".stdlib_train_000000-abc.bin").write_bytes(b"also")
    write_stdlib(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert {path.name: path.read_bytes() for path in data.shards("train") + data.shards("val")} == before


def test_held_out_shards_are_held_to_the_manifest(tmp_path):
    write_stdlib(tmp_path)
    data = DataFolder(tmp_path)
    shard = data.held_out_shards()[0]
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or was replaced"):
        data.held_out_shards()


def test_large_data_is_read_once(tmp_path, monkeypatch):
    write_stdlib(tmp_path)
    monkeypatch.setattr(folder, "VERIFY_ALWAYS", 0)
    read = []
    monkeypatch.setattr(folder, "check_shard", lambda path, expected: read.append(path.name))
    for _ in range(2):
        DataFolder(tmp_path).check()
    assert len(read) == 2
    os.utime(tmp_path / "stdlib_val_000000.bin")
    DataFolder(tmp_path).check()
    assert read[2:] == ["stdlib_val_000000.bin"]
