"""Preparing by several processes, stopped and killed at any point, and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lssar
from lssar.data.shards import ShardInProgress, open_shard
from lssar.data.tokenizers import BytesTokenizer
from tests.data.preparing import SOURCES, files, interrupted, made, prepare_module, write_jsonl


@pytest.fixture
def findable(monkeypatch):
    """Other processes import lssar from where this one does."""
    monkeypatch.setenv("PYTHONPATH", str(Path(lssar.__file__).parents[1]))


def test_workers_change_nothing(tmp_path, monkeypatch, findable):
    monkeypatch.setattr("lssar.data.workers._BATCH_CHARACTERS", 100)
    texts = [f"{number} " * (number % 50) for number in range(400)]
    source = [write_jsonl(tmp_path / "a.jsonl", texts), SOURCES["u16.xz"](tmp_path)]
    changes = dict(val_share=0.05, shard_tokens=999)
    one = made(source, tmp_path / "one", **changes)
    three = made(source, tmp_path / "three", workers=3, **changes)
    assert files(one) == files(three)
    assert len(files(one)) > 10


@pytest.mark.parametrize("changes", [dict(), dict(val_share=0.4), dict(val_documents=3), dict(val_shard=True)], ids=str)
@pytest.mark.parametrize("seconds", [0.0, 1e9])  # a safe point after each document, or after each shard
def test_interrupted_anywhere(tmp_path, monkeypatch, changes, seconds):
    monkeypatch.setattr(prepare_module, "_SAFE_POINT_SECONDS", seconds)
    texts = ["x" * (7 * number % 23) for number in range(30)]
    source = [write_jsonl(tmp_path / "a.jsonl", texts[:20]), write_jsonl(tmp_path / "b.jsonl", texts[20:])]
    straight = files(made(source, tmp_path / "straight", **changes))
    for after in range(1, 31, 9):
        out = tmp_path / f"after-{after}"
        interrupted(out, source, after, **changes)
        interrupted(out, source, 1, **changes)  # and again at once
        assert files(made(source, out, **changes)) == straight


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("texts", [["x" * 700], ["y" * 30, "x" * 300], ["y" * 99] * 12], ids=["1", "2", "12"])
def test_killed_while_a_tail_is_held_out(tmp_path, texts):
    """With fewer documents than the share needs, tokens that are in the training shards move to validation."""
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    straight = files(made(source, tmp_path / "straight", val_share=0.01))
    assert any("_val_" in name for name in straight)
    for moment, count in [("finish", 1), ("finished", 3), ("append", 3), ("saved", 2), ("saved", 3), ("init", 9)]:
        out = tmp_path / f"{moment}-{count}"
        child = os.fork()
        if child == 0:
            try:
                _die_at(moment, count)
                made(source, out, val_share=0.01)
            finally:
                os._exit(0)  # there were fewer moments
        os.waitpid(child, 0)
        if not (out / "manifest.json").exists():
            made(source, out, val_share=0.01)
        assert files(out) == straight


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moment", ["append", "flush", "finish", "finished", "saved"])
def test_killed_at_the_worst_moment(tmp_path, monkeypatch, moment):
    """kill -9 within a process that shares nothing but the disk with the one that resumes."""
    monkeypatch.setattr(prepare_module, "_SAFE_POINT_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * (7 * number % 23) for number in range(30)])
    straight = files(made(source, tmp_path / "straight", val_share=0.2))

    for count in (1, 4):
        out = tmp_path / str(count)
        child = os.fork()
        if child == 0:
            try:
                _die_at(moment, count)
                made(source, out, val_share=0.2)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not (out / "manifest.json").exists()
        assert files(made(source, out, val_share=0.2)) == straight


def _die_at(moment, count):
    owner, name = (
        (prepare_module, "write_sealed_json") if moment == "saved" else (ShardInProgress, moment.removesuffix("ed"))
    )
    name = "__init__" if moment == "init" else name
    original = getattr(owner, name)
    calls = 0

    def deadly(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == count and not moment.endswith("ed"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


SLOW = """
import importlib, sys, time
module = importlib.import_module("lssar.data.prepare")
from lssar.data import workers
from lssar.data.tokenizers import BytesTokenizer
if __name__ == "__main__":
    module._SAFE_POINT_SECONDS, workers._BATCH_CHARACTERS = 0.0, 100
    settings = module.Settings("x", [sys.argv[1]], shard_tokens=50)
    def report(status):
        print(status.total_tokens, flush=True)
        time.sleep(0.01)
    module.prepare(settings, BytesTokenizer(), sys.argv[2], workers=2, report=report)
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_stopped_command_leaves_no_workers_and_resumes(tmp_path, how, findable):
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * (7 * number % 23) for number in range(500)])
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, script, source, tmp_path / "out"],
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(20):
        assert process.stdout.readline()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the workers get it too
    else:
        process.kill()
    process.stdout.close()
    process.wait(timeout=20)
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes were left behind")
    assert (tmp_path / "out" / ".x_progress.json").exists()
    again = []
    out = made(source, tmp_path / "out", report=lambda status: again.append(status.total_tokens))
    assert again[0] > 100  # it resumed, and did not start over
    assert files(out) == files(made(source, tmp_path / "straight"))


def test_a_killed_worker_is_an_error_not_a_hang(tmp_path, monkeypatch, findable):
    monkeypatch.setattr("lssar.data.workers._BATCH_CHARACTERS", 100)
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 50] * 2000)

    class Deadly(BytesTokenizer):
        def __setstate__(self, state):  # the worker that receives it dies, as for lack of memory
            os.kill(os.getpid(), signal.SIGKILL)

        def __getstate__(self):
            return {"a": 1}

    globals()["Deadly"] = Deadly
    Deadly.__qualname__ = "Deadly"
    with pytest.raises(ChildProcessError, match="worker was killed"):
        made(source, tmp_path / "out", Deadly(), workers=2)


def test_a_full_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 400)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        with pytest.raises(OSError, match=r"No space left on device; .* is not lost.*x_train_00000[1-9]\.bin"):
            made(source, mount / "out", shard_tokens=30_000)
        finished = sorted((mount / "out").glob("*.bin"))
        assert finished and all(len(open_shard(path)) == 30_000 for path in finished)
        subprocess.run(["mount", "-o", "remount,size=8m", str(mount)], check=True)
        made(source, mount / "out", shard_tokens=30_000)  # space was made: it resumes
        assert files(mount / "out") == files(made(source, tmp_path / "straight", shard_tokens=30_000))
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
