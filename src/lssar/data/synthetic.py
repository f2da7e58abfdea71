"""Text that every machine with Python has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

# Tests, installed packages, and tables that are not code anybody wrote.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}


def python_stdlib_text(max_bytes: int | None = None, val_share: float = 0.1) -> Iterator[tuple[str, str]]:
    """("train" or "val", text) of each source file of the standard library, until `max_bytes` are reached.

    The order and the side come from a hash of the file's name, so they are the same on all machines with the same
    Python, and a file never changes sides. Files are whole, but the last is cut at a line's end.
    """
    root = Path(sysconfig.get_path("stdlib"))
    ranked = sorted((_rank(path.relative_to(root)), path) for path in _sources(root))
    if not ranked:
        raise FileNotFoundError(f"{root}: this Python came without the source of its standard library")
    total = 0
    for rank, path in ranked:
        raw = path.read_bytes()
        if max_bytes is not None and total + len(raw) > max_bytes:
            raw = raw[: raw.rfind(b"\n", 0, max_bytes - total) + 1]
            max_bytes = total + len(raw)
        total += len(raw)
        # The last digits pick the side and the first the order, so each side is spread over the whole order.
        split = "val" if int(rank[-8:], 16) / 2**32 < val_share else "train"
        if raw:
            yield split, raw.decode("utf-8", "replace")  # a few old files are Latin-1
        if total == max_bytes:
            return


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        # _sysconfigdata and config-* describe the machine that built Python.
        if not (_SKIPPED & set(parts) or parts[0].startswith(("config-", "_sysconfigdata"))):
            yield path


def _rank(relative: Path) -> str:
    return blake2b(relative.as_posix().encode(), digest_size=16).hexdigest()
