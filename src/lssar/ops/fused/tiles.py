"""Tile shapes by kernel, head size, element size and architecture, and a launch that falls back to smaller ones.

A table in place of autotuning: no stall at a new length, the same tiles and so the same bits in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from lssar import switches
from lssar.ops.fused.primitives import USE_PTX


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. On the host this is faster than triton.cdiv, which is made for kernels."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Tile:
    """m query rows by n keys; n1, stages1: the same for the forward's first pass (0: as the second)."""

    m: int
    n: int
    warps: int
    stages: int
    n1: int = 0
    stages1: int = 0
    registers: int | None = None  # limit per thread, to fit more programs on a multiprocessor
    tma: bool = False  # load tiles by descriptor where strides allow
    warps_without_tma: int | None = None  # where they do not: addresses need registers, which more warps provide

    def constants(self, kernel: str, itemsize: int, aligned: bool) -> dict:
        tma = self.tma and aligned
        warps = self.warps if tma or self.warps_without_tma is None else self.warps_without_tma
        values = {"BLOCK_M": self.m, "BLOCK_N": self.n, "STAGES": self.stages, "num_warps": warps}
        values |= {"TMA": tma, "CACHE": cached_elements(itemsize)}
        if kernel.startswith("forward"):
            values |= {"BLOCK_N1": self.n1 or self.n, "STAGES1": self.stages1 or self.stages}
        if self.registers is not None and USE_PTX:
            values["maxnreg"] = self.registers
        return values

    def smaller(self) -> Tile | None:
        """The next tile to try on a GPU with less shared memory or fewer registers; None after the smallest."""
        change = partial(dataclasses.replace, self)
        if self.registers is not None:
            return change(registers=None)
        if max(self.stages, self.stages1) > 2:
            return change(stages=min(self.stages, 2), stages1=min(self.stages1, 2))
        if max(self.n, self.n1) > 32:
            return change(n=min(self.n, 32), n1=min(self.n1, 32))
        if self.m > 32:
            return change(m=self.m // 2, warps=4)
        if max(self.stages, self.stages1) > 1:
            return change(stages=1, stages1=1)
        if max(self.m, self.n, self.n1) > 16:
            return change(m=16, n=16, n1=16)
        return None


Key = tuple[str, int, int]  # kernel, padded head size, bytes of an element

HOPPER: dict[Key, Tile] = {
    ("forward", 64, 2): Tile(128, 64, 8, 2, n1=128, stages1=3, registers=128, tma=True),
    ("forward", 128, 2): Tile(64, 32, 4, 3, n1=64, stages1=3, registers=168, tma=True),
    ("forward", 256, 2): Tile(64, 64, 4, 2),
    ("query_gradient", 64, 2): Tile(64, 64, 4, 3),
    ("query_gradient", 128, 2): Tile(64, 64, 4, 2, tma=True),
    ("query_gradient", 256, 2): Tile(64, 32, 8, 2),
    ("key_gradient", 64, 2): Tile(64, 64, 4, 2),
    ("key_gradient", 128, 2): Tile(64, 64, 4, 2, tma=True),
    ("key_gradient", 256, 2): Tile(64, 32, 8, 2),
    # Gluon: one warp group for 64 rows; in the forward, n is half a unit of keys
    ("forward_hopper", 64, 2): Tile(64, 64, 4, 3, stages1=2, registers=168, tma=True),
    ("forward_hopper", 128, 2): Tile(64, 64, 4, 2, stages1=2, tma=True),
    ("query_gradient_hopper", 64, 2): Tile(64, 64, 4, 2, tma=True),
    ("query_gradient_hopper", 128, 2): Tile(64, 64, 4, 2, tma=True),
    ("key_gradient_hopper", 64, 2): Tile(64, 64, 4, 2, tma=True),
    ("key_gradient_hopper", 128, 2): Tile(64, 64, 4, 2, tma=True),
    ("window_query_gradient_hopper", 64, 2): Tile(64, 64, 4, 2, tma=True),
    ("window_query_gradient_hopper", 128, 2): Tile(64, 64, 4, 2, tma=True),
    ("window_key_gradient_hopper", 64, 2): Tile(64, 64, 4, 2, tma=True),
    ("window_key_gradient_hopper", 128, 2): Tile(64, 64, 4, 2, tma=True),
    # chosen from compiler output, not measured: the largest that keep their sums in registers
    ("activation_forward", 64, 2): Tile(128, 64, 8, 3),
    ("activation_forward", 128, 2): Tile(128, 64, 8, 2),
    ("activation_forward", 256, 2): Tile(64, 32, 8, 2),
    ("activation_query_gradient", 64, 2): Tile(64, 64, 4, 3),
    ("activation_query_gradient", 128, 2): Tile(128, 64, 8, 2),
    ("activation_query_gradient", 256, 2): Tile(64, 32, 8, 2),
    ("activation_key_gradient", 64, 2): Tile(64, 64, 4, 2),
    ("activation_key_gradient", 128, 2): Tile(64, 64, 8, 2),
    ("activation_key_gradient", 256, 2): Tile(64, 32, 8, 2),
}

LONG_WINDOW = 192
"""Windows of more keys take the tiles named `_long`."""
WINDOW_PARTS = ("forward", "query_gradient", "key_gradient")
WINDOW_KINDS = ("softmax", "cosine", "softplus")
_NARROW = (Tile(64, 32, 4, 3, registers=168), Tile(64, 32, 4, 3), Tile(64, 32, 8, 2))
_BY_KEYS = (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, tma=True, warps_without_tma=8), Tile(64, 64, 8, 1))
_WINDOW: dict[str, tuple[Tile, ...]] = {  # head sizes 64 and 128 are measured, 256 is not
    "forward_softmax": (Tile(64, 64, 4, 2, registers=128), Tile(64, 32, 4, 3, registers=168), Tile(64, 32, 8, 2)),
    "forward_softmax_long": (Tile(64, 64, 4, 2, registers=128), Tile(64, 64, 4, 3), Tile(64, 32, 8, 2)),
    "forward_cosine": _NARROW,
    "forward_softplus": _NARROW,
    "query_gradient_softmax": (Tile(64, 32, 4, 4, registers=128), *_NARROW[1:]),
    "query_gradient_softmax_long": (Tile(64, 64, 4, 2, registers=128), *_NARROW[1:]),
    "query_gradient_cosine": _NARROW,
    "query_gradient_softplus": (Tile(64, 32, 4, 3), *_NARROW[1:]),
    "key_gradient_softmax": _BY_KEYS,
    "key_gradient_cosine": _BY_KEYS,
    "key_gradient_softplus": _BY_KEYS,
}
_WINDOW_NAMES = [f"{part}_{kind}{size}" for part in WINDOW_PARTS for kind in WINDOW_KINDS for size in ("", "_long")]
HOPPER |= {
    (f"window_{name}", d, 2): tile
    for name in _WINDOW_NAMES
    for d, tile in zip((64, 128, 256), _WINDOW.get(name, _WINDOW[name.removesuffix("_long")]))
}
OTHER: dict[Key, Tile] = {
    (kernel, d, 2): Tile(64, 64 if d <= 64 else 32, 4, 2)
    for part in ("forward", "query_gradient", "key_gradient")
    for kernel in (part, f"activation_{part}")
    for d in (64, 128, 256)
}
OTHER |= {
    (f"window_{name}", d, 2): Tile(64, 64 if d <= 64 else 32, 4, 2) for name in _WINDOW_NAMES for d in (64, 128, 256)
}
FLOAT32 = {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 32, 4, 1)}
INTERPRETED = Tile(32, 32, 1, 1, n1=64, tma=True)

REPAIR = "key_gradient_repair"
BORROWED = {REPAIR: "key_gradient"}
"""Launches with the tiles of another one, which `lssar tune` does not measure: nearly always they do nothing."""

CHOSEN: dict[Key, Tile] = {}
"""Tiles that `lssar tune` found, or the smaller ones that a launch fell back to; these take precedence."""


def stored_path() -> Path:
    """The file in which `lssar tune` stores the tiles for this GPU and this version of Triton."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    name = "".join(c if c.isalnum() else "-" for c in f"{card}-triton-{triton.__version__}")
    return switches.CACHE / f"tiles-{name}.json"


@functools.cache
def _load_stored() -> None:
    """Read the stored tiles, once per process. A file that cannot be read gives a warning and is left alone."""
    path = stored_path()
    try:
        for text, fields in json.loads(path.read_text()).items():
            kernel, d, itemsize = text.split("/")
            CHOSEN.setdefault((kernel, int(d), int(itemsize)), Tile(**fields))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as problem:
        warnings.warn(f"{path} is not used: {problem}; `lssar tune` writes a new one", stacklevel=2)


def key_of(kernel: str, d: int, itemsize: int) -> Key:
    return BORROWED.get(kernel, kernel), max(64, power_of_two(d)), itemsize


def tile_for(kernel: str, d: int, itemsize: int) -> Tile:
    key = key_of(kernel, d, itemsize)
    _load_stored()
    if key in CHOSEN:
        return CHOSEN[key]
    if not torch.cuda.is_available():
        return INTERPRETED
    if itemsize == 4:
        return FLOAT32[key[1]]
    hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    return (HOPPER if hopper else OTHER)[key]


def launch(name: str, d: int, itemsize: int, aligned: bool, run: Callable[[Tile, dict], None]) -> Tile:
    """run(tile, constants) launches the kernel; on too little shared memory or too few registers, smaller tiles are
    tried. Returns the tile that was used.

    aligned: every tensor that is read by tiles has a start and strides that the tensor memory accelerator can take.
    """
    tile = tile_for(name, d, itemsize)
    while True:
        try:
            if tile.tma and aligned:
                triton.set_allocator(_allocate)  # a context variable: autograd's threads do not inherit it
            run(tile, tile.constants(name, itemsize, aligned))
            return tile
        except OutOfResources:
            following = tile.smaller()
            if following is None:
                raise
            tile = CHOSEN[key_of(name, d, itemsize)] = following


@functools.cache
def cached_elements(itemsize: int) -> int:
    """Elements of each of two tensors that a third of the L2 cache holds; see primitives.head_and_block."""
    card = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return getattr(card, "L2_cache_size", 3 * 2**24) // 3 // (2 * itemsize)


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def tma_aligned(*tensors: torch.Tensor) -> bool:
    return all(t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1]) for t in tensors)
