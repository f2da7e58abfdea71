"""Environment switches, read once, when this module is imported. docs/switches.md lists them."""

from __future__ import annotations

import os
from pathlib import Path

COMPILE = os.environ.get("LSSAR_COMPILE") != "0"
"""Whether large calls of the tiled implementation go through torch.compile."""

GLUON = os.environ.get("LSSAR_GLUON") != "0"
"""Whether Hopper GPUs use the Gluon kernels. Gluon is experimental in Triton: this is the way out if it breaks."""

NATIVE = os.environ.get("LSSAR_NATIVE") != "0"
"""Whether the tiled implementation uses the C extension on a CPU."""

NATIVE_ISA = os.environ.get("LSSAR_NATIVE_ISA", "")
"""Instruction set of the C extension, `avx512`, `avx2` or `baseline`; empty: the best that the processor has."""

CACHE = Path(
    os.environ.get("LSSAR_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lssar"
)
"""Folder in which `lssar tune` stores tile sizes."""
