"""Provenance recorded with each result, and files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import csv
import datetime
import glob
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Machine, versions, commit and time, as plain values."""
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "lssar": _version("lssar"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return record


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree this runs from, marked when files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here))
        return git("rev-parse", "HEAD") + (" with changes" if changed else "") if tracked else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def check_name(name: str) -> None:
    """ValueError for a name that could lead out of the folder its files belong in."""
    if not re.fullmatch(r"[\w.-]+", name) or not name.strip("."):
        raise ValueError(f"name {name!r}: expected letters, digits, dots, dashes and underscores, and not dots alone")


def warn(message: str) -> None:
    """A line on stderr about something that was recovered from; never part of a command's output."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError, which for a full disk has none in it."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        message = f"{error.strerror or error}; what was finished before is not lost"
        raise OSError(error.errno, message, str(path)) from error


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; some file systems report a full disk only here."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, write: Callable[[Path], Any], overwrite: bool = False) -> Path:
    """Write a file so that it appears complete or not at all: `write` fills a temporary file, which is then renamed."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another name, or ask to overwrite it")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def remove_temporary(path: Path) -> None:
    """Delete temporary files that killed calls of `write_file` left beside `path`. Only while its lock is held."""
    for leftover in path.parent.glob(f".{glob.escape(path.stem)}-*{path.suffix}"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, value: Any, overwrite: bool = False) -> Path:
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    return write_file(path, lambda p: p.write_text(text), overwrite)


def read_json(path: Path, kind: type | None = None) -> Any:
    """The value in a JSON file; a ValueError that names the file if it is damaged or is not of the type `kind`."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged") from error
    if kind is not None and not isinstance(value, kind):
        raise ValueError(f"{path}: expected a JSON {_JSON_NAMES[kind]}, found {type(value).__name__}")
    return value


SEAL = "checksum"
"""Key of a JSON object's own checksum, over its other keys."""


def write_sealed_json(path: Path, record: dict[str, Any], overwrite: bool = False) -> Path:
    """Write a JSON object with its checksum in it, so that `read_sealed_json` notices any later change."""
    return write_json(path, {**record, SEAL: _seal(record)}, overwrite)


def read_sealed_json(path: Path) -> dict[str, Any]:
    """The object that `write_sealed_json` wrote, without the checksum. An object that has none is not checked."""
    record = read_json(path, dict)
    expected = record.pop(SEAL, None)
    if expected is not None and expected != _seal(record):
        raise ValueError(f"{path} is damaged, or was changed by hand; if it is as you want it, remove {SEAL!r} from it")
    return record


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


_JSON_NAMES: dict[type, str] = {dict: "object", list: "array"}


def write_csv(path: Path, rows: Iterable[dict[str, Any]], overwrite: bool = False) -> Path:
    rows = list(rows)
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_file(path, lambda p: p.write_text(out.getvalue()), overwrite)


def command_line() -> str:
    return " ".join(["lssar", *sys.argv[1:]])
