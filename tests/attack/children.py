"""Processes to kill: forked from one that has imported everything, so that an attempt takes a second, not ten."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

TRACEBACK = 70
"""Exit status of a child whose error was not one for users."""


ENDED: dict[int, int] = {}
"""Exit statuses of processes that have ended, by process id; negative for signals."""


def fork(act: Callable[[], None], output: Path, environment: dict[str, str] | None = None) -> int:
    """Run `act` in a forked process with its output in a file; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        ENDED.pop(pid, None)
        return pid
    status = 0
    try:
        os.setsid()
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))  # not pytest's
        os.environ.update(environment or {})
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        act()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException:
        traceback.print_exc()
        status = TRACEBACK
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def fork_ranks(act: Callable[[], None], output: Path, size: int) -> list[int]:
    """The same in `size` processes with the environment that torchrun gives them; one process if size is 1."""
    if size == 1:
        return [fork(act, output)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [fork(act, output, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(size)]


def wait(pids: Sequence[int], seconds: float) -> list[int] | None:
    """Exit statuses, negative for signals; None if a process still runs after so many seconds. May be called again."""
    limit = time.monotonic() + seconds
    while True:
        for pid in pids:
            if pid not in ENDED:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ENDED[pid] = os.waitstatus_to_exitcode(status)
        if all(pid in ENDED for pid in pids):
            return [ENDED[pid] for pid in pids]
        if time.monotonic() > limit:
            return None
        time.sleep(0.005)


def kill(pids: Sequence[int]) -> None:
    """SIGKILL to each process, which are their own groups, so workers go too."""
    pids = [pid for pid in pids if pid not in ENDED]
    for pid in pids:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def run_and_read(act: Callable[[], None], seconds: float = 300) -> tuple[int, str]:
    """Exit status and output of `act` in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        pid = fork(act, output)
        ends = wait([pid], seconds)
        if ends is None:
            kill([pid])
            return TRACEBACK, "did not end\n" + output.read_text(errors="replace")
        return ends[0], output.read_text(errors="replace")
