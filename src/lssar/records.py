"""What stands beside a figure: where, with what and from which state of the code it came; and files written whole."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
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


def write_file(path: Path, write: Callable[[Path], Any], overwrite: bool = False) -> Path:
    """`write` fills a temporary file beside `path`, which then takes its name: never half a file, never a lost one."""
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
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


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


_JSON_NAMES = {dict: "object", list: "array"}


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
