"""What can go wrong around a run: nothing is lost, and the message says what to do."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lssar.data.prepare import Settings, prepare
from lssar.data.shards import write_shard
from lssar.data.tokenizers import load_tokenizer
from lssar.locks import FolderInUse, hold
from lssar.runs import Run
from lssar.training import train
from lssar.training.checkpoints import checkpoints, latest
from lssar.training.loop import TrainingDiverged, _Trainer
from lssar.training.metrics import read_metrics
from tests.training.counting import losses, tiny, write_counting


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_counting(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(tiny(shards), run)
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of a finished run with checkpoints of steps 8 and 12."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


# vocabulary and failed starts


@pytest.fixture
def byte_data(tmp_path) -> Path:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} " * 40)
    settings = Settings(name="x", sources=[str(tmp_path / "text")], val_share=0.2)
    prepare(settings, load_tokenizer("bytes"), tmp_path / "bytes")
    return tmp_path / "bytes"


def test_the_vocabulary_is_the_datas(byte_data, tmp_path):
    """Byte data trains 257 logits, also if the recipe has another vocabulary size."""
    train(tiny(byte_data, vocab_size=50257, steps=2), tmp_path / "run")
    opened = Run.open(tmp_path / "run", "cpu")
    assert opened.recipe.vocab_size == opened.model().config.vocab_size == opened.tokenizer.vocab_size == 257
    train(tiny(byte_data, vocab_size=50257, steps=2), tmp_path / "run")  # the same command resumes


def test_a_failed_start_leaves_the_folder_free(shards, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="no training shards"):
        train(tiny(tmp_path / "nowhere"), run)
    with pytest.raises(ValueError, match="does not divide"):
        train(tiny(shards, micro_batch=3), run)
    text = dict(vocab_size=257, retrieval_share=0.5, retrieval_tasks=("passkey",))
    with pytest.raises(ValueError, match="a window of 33 tokens is too short for passkey"):
        train(tiny(shards, **text), run)
    write_shard(tmp_path / "few" / "x_train_000000.bin", np.arange(5), 64)
    with pytest.raises(ValueError, match="too few for a window"):
        train(tiny(tmp_path / "few"), run)
    assert not run.exists()
    assert train(tiny(shards, steps=1), run)["step"] == 1


def test_data_may_move_but_not_change(shards, tmp_path, monkeypatch):
    data = Path(shutil.copytree(shards, tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    train(tiny("data"), run, stop_after=0.0)
    assert json.loads((run / "config.json").read_text())["recipe"]["data"] == str(data)
    moved = data.rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    with pytest.raises(FileNotFoundError, match="say where it is with --data"):
        train(tiny(data), run)
    assert train(tiny(moved), run)["step"] == 12
    assert Run.open(run).data.path == moved
    write_shard(moved / "count_train_000000.bin", np.arange(60).repeat(40), 64, overwrite=True)
    with pytest.raises(ValueError, match=r"train shards .* are not those"):
        train(tiny(moved), run)


# two processes


def test_a_second_process_is_refused_and_harms_nothing(shards, tmp_path):
    run = tmp_path / "run"
    train(tiny(shards), run, stop_after=0.0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused = pytest.raises(FolderInUse, match=f"in use by process {os.getpid()} on .* \\(training since")
    with hold(run, "training"), refused:
        train(tiny(shards), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_torchrun_learns_of_a_refusal(shards, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom lssar.training import Recipe, train\n"
        f"try:\n    train(Recipe.from_dict({tiny(shards).to_dict()!r}), Path({str(tmp_path / 'run')!r}))\n"
        "except ValueError as error:\n    sys.exit(f'other: {error}')\n"
        "except OSError as error:\n    sys.exit(f'main: {error}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    with hold(tmp_path / "run", "training"):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert f"main: {tmp_path / 'run'} is in use by process {os.getpid()}" in done.stderr
    assert not (tmp_path / "run").exists()


# divergence


@pytest.fixture
def diverging(monkeypatch):
    """Loss is NaN after step 6, and from then on or for two steps."""

    def begin(until: int = 10**9):
        real = _Trainer.loss

        def loss(self, batch):
            bad = self.module.training and torch.is_grad_enabled() and 6 <= self.step < until
            return real(self, batch) * (float("nan") if bad else 1.0)

        monkeypatch.setattr(_Trainer, "loss", loss)

    return begin


def test_diverged_training_stops_and_keeps_the_last_finite_checkpoint(shards, tmp_path, diverging, capsys):
    diverging()
    with pytest.raises(TrainingDiverged, match=r"5 steps up to step 11; .*step-0000004\. Try a lower --lr"):
        train(tiny(shards, steps=60, max_non_finite=5), tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000004"]
    assert "step 8: weights or optimiser state are not finite" in capsys.readouterr().err
    assert [row["finite"] for row in read_metrics(tmp_path)] == [True] * 6 + [False] * 5
    assert all(torch.isfinite(x).all() for x in Run.open(tmp_path, "cpu").model().parameters())


def test_diverged_at_the_last_step(shards, tmp_path, diverging):
    diverging()
    with pytest.raises(TrainingDiverged, match=r"step-0000004"):
        train(tiny(shards, steps=8), tmp_path)


@pytest.mark.parametrize(
    ("changes", "kept"), [({}, "is .*step-0000004"), ({"save_every": 50}, "no finite checkpoint was saved")], ids=str
)
def test_stopping_a_diverged_training_is_no_success(shards, tmp_path, diverging, changes, kept):
    diverging()
    stop_at_9 = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 9 else None  # noqa: E731
    with pytest.raises(TrainingDiverged, match=f"step 9 is not saved, since weights .* are not finite; .*{kept}"):
        train(tiny(shards, max_non_finite=50, **changes), tmp_path, stop_at_9)


def test_a_bad_step_may_be_skipped(shards, tmp_path, diverging):
    diverging(until=8)
    last = train(tiny(shards, skip_non_finite=True), tmp_path)
    assert last["step"] == 12 and last["finite"]
    assert [row["finite"] for row in read_metrics(tmp_path)].count(False) == 2
    assert len(checkpoints(tmp_path)) == 2


def test_skipping_changes_nothing_where_all_is_finite(shards, trained, tmp_path):
    train(tiny(shards, skip_non_finite=True), tmp_path)
    assert losses(tmp_path) == losses(trained)


# damaged files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over(shards, trained, run, name, how, capsys):
    """The next older one is used, after a message; a removed list of checksums leaves the form to check."""
    file = run / "checkpoints" / "step-0000012" / name
    flip(file) if how == "flip" else file.unlink() if how == "remove" else os.truncate(file, file.stat().st_size // 2)
    assert train(tiny(shards), run)["step"] == 12
    said = capsys.readouterr().err
    if (name, how) == ("checksums.json", "remove"):
        assert "no checksums.json" in said
        return
    assert "step-0000012 is damaged and not used" in said and "using step-0000008" in said
    assert losses(run) == losses(trained)
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step-0000008", "step-0000012"}
    for one, other in zip(Run.open(run, "cpu").model().parameters(), Run.open(trained, "cpu").model().parameters()):
        assert torch.equal(one, other)


def edit(key: str, value: object):
    def act(checkpoint: Path) -> None:
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(json.dumps(state | {key: value}))

    return act


def drop(name: str, key: str):
    def act(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / name)
        del tensors[key]
        save_file(tensors, checkpoint / name)

    return act


@pytest.mark.parametrize(
    "damage",
    [
        lambda checkpoint: (checkpoint / "state.json").write_text('{"step": 12, "param_groups": []}'),
        edit("param_groups", []),
        edit("param_groups", [3]),
        edit("param_groups", [{}]),
        edit("data", {}),
        edit("data", {"x": 1}),
        edit("step", -5),
        drop("model.safetensors", "blocks.0.up.bias"),
        drop("optimiser.safetensors", "blocks.0.up.bias/exp_avg"),
        drop("optimiser.safetensors", "rng"),
    ],
)
def test_a_checkpoint_without_checksums_is_checked_for_its_form(shards, trained, run, damage, capsys):
    checkpoint = run / "checkpoints" / "step-0000012"
    (checkpoint / "checksums.json").unlink()
    damage(checkpoint)
    train(tiny(shards), run)
    assert "step-0000012 is damaged and not used" in capsys.readouterr().err
    assert losses(run) == losses(trained)


def test_evaluation_passes_over_a_damaged_checkpoint_too(run, capsys):
    flip(run / "checkpoints" / "step-0000012" / "model.safetensors")
    assert Run.open(run, "cpu").step == 8
    assert "step-0000012 is damaged" in capsys.readouterr().err
    flip(run / "checkpoints" / "step-0000008" / "model.safetensors")
    with pytest.raises(ValueError, match="all 2 checkpoints are damaged"):
        Run.open(run, "cpu").model()


def test_evaluation_compares_a_checkpoint_without_checksums_with_the_model(run, capsys):
    (latest(run) / "checksums.json").unlink()
    drop("model.safetensors", "embed.weight")(latest(run))
    assert Run.open(run, "cpu").step == 8
    assert "embed.weight is missing in the file" in capsys.readouterr().err


def test_a_checkpoint_is_hidden_before_it_is_deleted(shards, tmp_path, monkeypatch):
    """A process may be killed in the middle of a deletion."""
    deleted, real = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, *a, **b: (deleted.append(Path(path).name), real(path, *a, **b)))
    train(tiny(shards, keep=1), tmp_path)
    assert ".step-0000004" in deleted
    assert not [name for name in deleted if name.startswith("step-")]


def test_metrics_keep_every_good_line(run, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"step": 4, "lo', b"\xff\n", b"[1]\n", *lines[4:], b'{"step": 13, "l']))
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, *range(5, 13)]
    assert "2 damaged lines are left out, the first is line 4" in capsys.readouterr().err


def test_leftovers_of_a_killed_process_are_removed(shards, run):
    (run / "checkpoints" / ".step-0000016").mkdir()
    (run / ".metrics-abc.jsonl").write_text("half")
    train(tiny(shards), run)
    assert not [path for path in run.rglob("*") if path.name.startswith(".")]


def test_shards_are_held_to_the_manifest(byte_data, tmp_path):
    shard = byte_data / "x_train_000001.bin"
    content = shard.read_bytes()
    flip(shard)
    with pytest.raises(ValueError, match=r"x_train_000001\.bin is damaged or was replaced"):
        train(tiny(byte_data), tmp_path / "run")
    shard.write_bytes(content)
    (byte_data / "x_val_000000.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"x_val_000000\.bin is missing"):
        train(tiny(byte_data), tmp_path / "run")


def test_a_shard_cut_under_a_running_training_is_an_error_not_a_crash(shards, tmp_path):
    data = Path(shutil.copytree(shards, tmp_path / "data"))

    def report(row):
        if row["step"] == 3:
            os.truncate(data / "count_train_000000.bin", 4096)

    with pytest.raises(ValueError, match=r"count_train_000000\.bin was changed while it was in use"):
        train(tiny(data), tmp_path / "run", report)


def test_a_full_disk_is_one_error_and_loses_nothing(shards, tmp_path):
    """A limit on the size of files stands for the disk: checkpoints do not fit, the rest does."""
    run = tmp_path / "run"
    train(tiny(shards, keep=1), run, stop_after=0.0)
    before = {path.name: path.read_bytes() for path in (run / "checkpoints" / "step-0000001").iterdir()}
    script = (
        "import sys\nfrom pathlib import Path\nfrom lssar.training import Recipe, train\n"
        f"try:\n    train(Recipe.from_dict({tiny(shards, keep=1).to_dict()!r}), Path({str(run)!r}))\n"
        "except OSError as error:\n    sys.exit(f'error: {error}')\n"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, preexec_fn=limit
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step-0000004" in done.stderr and "what was finished before is not lost" in done.stderr
    assert {path.name: path.read_bytes() for path in latest(run).iterdir()} == before
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-0000001"]


def test_a_crashed_holder_does_not_block(shards, tmp_path):
    script = (
        "import os, signal\nfrom pathlib import Path\nfrom lssar.training import Recipe, train\n"
        f"train(Recipe.from_dict({tiny(shards).to_dict()!r}), Path({str(tmp_path)!r}), "
        "report=lambda row: os.kill(os.getpid(), signal.SIGKILL) if row['step'] == 6 else None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment())
    assert done.returncode == -signal.SIGKILL and (tmp_path / ".lock").exists()
    assert train(tiny(shards), tmp_path)["step"] == 12
