"""One process at a time in a folder, also if the first one crashes."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lssar import locks
from lssar.locks import FolderInUse, held, hold


def holder(folder) -> subprocess.Popen:
    """A process that holds the folder until it is told otherwise."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom lssar.locks import hold\n"
        "with hold(Path(sys.argv[1]), 'training'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_and_told_who_holds_it(tmp_path):
    first = holder(tmp_path)
    assert held(tmp_path)
    with (
        pytest.raises(FolderInUse, match=rf"in use by process {first.pid} on .*training since \d{{4}}-"),
        hold(tmp_path, "x"),
    ):
        pass
    os.kill(first.pid, signal.SIGKILL)  # a crash releases it
    first.wait()
    assert not held(tmp_path)
    with hold(tmp_path, "training"):
        assert held(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)


def test_a_file_system_without_locks(tmp_path, no_flock, capsys):
    with hold(tmp_path, "training"):
        assert "without file locks" in capsys.readouterr().err
        assert held(tmp_path)
        with (
            pytest.raises(FolderInUse, match=r"or remove .*\.lock\.exclusive if that process is gone"),
            hold(tmp_path, "x"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_without_locks_is_removed_if_its_process_is_gone(tmp_path, no_flock, capsys):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record = {"pid": gone.pid, "host": locks.socket.gethostname()}
    leftover = tmp_path / ".lock.exclusive"
    leftover.write_text(json.dumps(record))
    with hold(tmp_path, "training"):
        assert "left by a process that has ended" in capsys.readouterr().err
    leftover.write_text(json.dumps(record | {"host": "elsewhere"}))
    with pytest.raises(FolderInUse, match="on elsewhere"), hold(tmp_path, "training"):
        pass


def test_a_lock_file_removed_in_between_is_not_held_twice(tmp_path, monkeypatch):
    """Whoever locks a file that its holder has just removed must start again with the new one."""
    real, calls = locks._lock, []

    def lock(handle):
        real(handle)
        if not calls:
            (tmp_path / locks.LOCK).unlink()
        calls.append(handle)

    monkeypatch.setattr(locks, "_lock", lock)
    with hold(tmp_path, "training"):
        assert len(calls) == 2 and (tmp_path / locks.LOCK).exists()


def test_a_folder_removed_in_between_is_made_again(tmp_path, monkeypatch):
    """Another process holds the lock of a new folder for an instant, writes nothing and removes the folder."""
    folder, mkdir, removed = tmp_path / "run", Path.mkdir, []

    def made_and_removed_once(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if path == folder and not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", made_and_removed_once)
    with hold(folder, "testing"):
        assert held(folder)
    assert removed and not folder.exists()


def test_a_lock_that_is_looked_at_is_waited_for(tmp_path, monkeypatch):
    """Another process that calls `held` takes a free lock for an instant."""
    import fcntl

    with open(tmp_path / locks.LOCK, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: fcntl.flock(handle, fcntl.LOCK_UN))
        with hold(tmp_path, "training"):
            assert held(tmp_path)


def test_locks_of_different_names_are_independent(tmp_path):
    with hold(tmp_path, "working on an arm", ".arm.lock"):
        assert not held(tmp_path)
        with hold(tmp_path, "training"):
            assert held(tmp_path) and held(tmp_path, ".arm.lock")
