"""One process at a time in a folder: `hold` refuses a second one and names the first.

The lock is the file `.lock` in the folder. The kernel's lock on it (flock) ends with the process, however that ends,
so a crash leaves nothing to clean up. On a file system without such locks the existence of a second file serves; there
a crash on another machine leaves a file that has to be removed by hand, and the error says so.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lssar.records import warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
ATTEMPTS = 3
"""`held` takes a free lock for an instant, so one refusal is not yet an answer."""
PAUSE = 0.05
"""Seconds between attempts."""
REMOVALS = 20
"""How often the folder of a lock may disappear between its creation and the opening of the lock."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class FolderInUse(FileExistsError):
    """Another process holds the folder."""


@contextlib.contextmanager
def hold(folder: Path, purpose: str, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if needed, or raise FolderInUse that says who holds it.

    `purpose` completes "a process is ..." in that message, for example "training". Locks of other names are
    independent: a process may hold one for a queue of work and another for the work itself.
    """
    folder = Path(folder)
    created = not folder.exists()
    release = _take(folder / name, purpose)
    if release is None:
        raise FolderInUse(_refusal(folder, folder / name))
    try:
        yield
    finally:
        release()
        if created:
            with contextlib.suppress(OSError):  # a folder in which nothing was written is not left behind
                folder.rmdir()


def held(folder: Path, name: str = LOCK) -> bool:
    """Whether some process, this one included, holds the lock of `folder`."""
    path = folder / name
    if _exclusive(path).exists():
        return _alive(_read(_exclusive(path)))
    if fcntl is None or not path.exists():
        return False
    try:
        with open(path, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _take(path: Path, purpose: str) -> Any:
    """A function that releases the lock, or None if another process holds it."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        handle = _open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            continue
        except OSError as error:
            os.close(handle)
            if error.errno not in NO_LOCKS:
                raise
            return _take_exclusive(path, purpose)
        if not _same_file(handle, path):  # its holder removed it between our open and our lock
            os.close(handle)
            continue
        os.truncate(handle, 0)
        os.write(handle, _description(purpose))

        def release(handle: int = handle) -> None:
            path.unlink(missing_ok=True)
            os.close(handle)

        return release
    return None


def _open(path: Path, flags: int) -> int:
    """Open a lock in a folder that another process, which wrote nothing to it, may be removing."""
    for _ in range(REMOVALS):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o644)
    return os.open(path, flags, 0o644)


def _lock(handle: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no file locks on this system")
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take_exclusive(path: Path, purpose: str) -> Any:
    path.unlink(missing_ok=True)
    exclusive = _exclusive(path)
    warn(f"{path.parent} is on a file system without file locks; {exclusive.name} marks it as in use instead")
    for _ in range(2):
        try:
            handle = _open(exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            if _alive(_read(exclusive)):
                return None
            warn(f"{exclusive} was left by a process that has ended; removing it")
            exclusive.unlink(missing_ok=True)
            continue
        os.write(handle, _description(purpose))
        os.close(handle)
        return lambda: exclusive.unlink(missing_ok=True)
    return None


def _exclusive(path: Path) -> Path:
    """The file whose existence is the lock on file systems without flock."""
    return path.with_name(f"{path.name}.exclusive")


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _description(purpose: str) -> bytes:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = " ".join(sys.argv)[:500]
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "purpose": purpose, "command": command}
    return json.dumps(record).encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process described may still run; unknown or on another machine counts as running."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _refusal(folder: Path, path: Path) -> str:
    exclusive = _exclusive(path)
    holder = _read(exclusive if exclusive.exists() else path)
    if "pid" not in holder:
        who = "another process"
    else:
        who = f"process {holder['pid']} on {holder.get('host')} ({holder.get('purpose')} since {holder.get('since')})"
    remedy = f", or remove {exclusive} if that process is gone" if exclusive.exists() else ""
    return f"{folder} is in use by {who}; wait until it ends, or choose another folder{remedy}"
