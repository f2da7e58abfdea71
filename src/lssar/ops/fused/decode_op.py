"""The kernels of decode.py as a PyTorch custom op; and how a call is divided, for decode_softmax.py too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lssar.ops.fused.autograd import operator, refuse_gradient
from lssar.ops.fused.decode import combine_kernel, score_kernel, value_kernel
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.op import power_arguments, power_value
from lssar.ops.fused.tiles import ceil_div, power_of_two

SHORTEST_SPLIT = 256  # keys: every split looks at the sums of all the others
MOST_PROGRAMS = 16  # on a multiprocessor, whatever its shared memory and registers would hold
REGISTERS = 65536  # of a multiprocessor
SHARED_MEMORY = 227 * 1024  # a multiprocessor's and a program's, where PyTorch does not say
OTHER_BYTES = 8192  # at most, of a program's shared memory besides tiles


def choose_splits(
    heads: int, length: int, tile_bytes: int, registers: int, multiprocessors: int, shared_memory: int
) -> int:
    """Into how many parts to split the keys of each of `heads` (batch x key heads).

    Whole waves of programs: as many as the multiprocessors hold at once, by the shared memory of a program's tiles and
    its registers, or the next multiple of that which leaves at most a tenth of the places of its last wave empty.
    """
    at_once = min(MOST_PROGRAMS, shared_memory // (tile_bytes + 2048), REGISTERS // registers)
    places = multiprocessors * max(1, at_once)
    choices = [max(1, waves * places // heads) for waves in (1, 2, 3, 4)]
    used = [heads * splits / (ceil_div(heads * splits, places) * places) for splits in choices]
    best = next((i for i, share in enumerate(used) if share >= 0.9), used.index(max(used)))
    return max(1, min(choices[best], ceil_div(length, SHORTEST_SPLIT)))


def fitting_tiles(row_bytes: int, block: int, stages: int, shared_memory: int) -> tuple[int, int]:
    """Keys of a tile and stages, at most those given, so that tiles fit a program's shared memory.

    row_bytes: of a key, and of its value where both are fetched ahead. A tile is being used while stages - 2 others are
    fetched.
    """
    while row_bytes * block * (stages - 1) + OTHER_BYTES > shared_memory and block > 16:
        if stages > 2:
            stages -= 1
        else:
            block //= 2
    return block, stages


def can_overlap(x: Tensor) -> bool:
    """Whether a kernel's programs may start before the previous kernel has ended."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 9


@dataclass(frozen=True)
class Plan:
    """How the work of a call is divided; `plan_for` chooses, benchmarks try others."""

    splits: int
    warps: int
    norms: str
    """How norms of keys are computed: see _score_keys in decode.py."""
    ahead: bool
    """Overlap the end of each kernel with the beginning of the next (programmatic dependent launch; from Hopper on)."""
    fetch: bool
    """Ask for keys and values that will be read to be brought to L2."""
    block: int = 64
    """Keys of a tile."""
    stages: int = 3


@dataclass(frozen=True)
class _Cache:
    """Sizes and strides of a cache: (B, Hkv, L, D), or pages (num_blocks, block_size, Hkv, D) with a block table."""

    heads: int
    length: int
    page: int
    """Keys of a page; 0: not paged."""
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    """Of batch (or page), head, key."""
    table: Tensor
    table_stride: int
    wide: bool
    """Whether offsets of keys within a head, or a pool of pages, need 64 bits."""


def cache_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> _Cache:
    order = (0, 1, 2) if block_table is None else (0, 2, 1)
    k_strides, v_strides = (tuple(x.stride(i) for i in order) for x in (k_cache, v_cache))
    if block_table is None:  # any table: never read
        length = k_cache.shape[2]
        wide = (length + 1024) * max(k_strides[2], v_strides[2]) >= 2**31  # programs look past the end
        return _Cache(k_cache.shape[1], length, 0, k_strides, v_strides, q, 0, wide)
    page, heads = k_cache.shape[1], k_cache.shape[2]
    table = block_table.contiguous()
    wide = any(x[0] * k_cache.shape[0] + x[2] * page >= 2**31 for x in (k_strides, v_strides))
    return _Cache(heads, table.shape[1] * page, page, k_strides, v_strides, table, table.stride(0), wide)


def plan_for(
    q: Tensor, heads: int, length: int, unit_keys: bool, *, splits: int | None = None, warps: int | None = None,
    norms: str | None = None, ahead: bool | None = None, fetch: bool | None = None, block: int | None = None,
    stages: int | None = None, tiles: float = 1,
) -> Plan:  # fmt: skip
    """The plan for queries against `heads` key heads of `length` keys; what is given stays. tiles: how many of `block`
    keys or values a program has in flight at each stage."""
    block_d = max(16, power_of_two(q.shape[-1]))
    card = torch.cuda.get_device_properties(q.device) if q.is_cuda else None
    processors = getattr(card, "multi_processor_count", 1)
    programs = q.shape[0] * heads
    if norms is None:
        norms = "unit" if unit_keys else "product" if q.dtype == torch.bfloat16 else "fast"
    if warps is None:  # computing norms pays for two more, except for small bfloat16 heads that do not fill the GPU
        warps = 2 if unit_keys or (norms == "product" and block_d <= 64 and programs < processors) else 4
    if block is None and stages is None:
        most = getattr(card, "shared_memory_per_block_optin", SHARED_MEMORY)
        row_bytes = math.ceil(tiles) * block_d * q.element_size()
        block, stages = fitting_tiles(row_bytes, Plan.block, Plan.stages, most)
    block, stages = block or Plan.block, stages or Plan.stages
    if splits is None:
        registers = 32 * warps * max(80, block_d)  # about what the compiler uses
        shared_memory = getattr(card, "shared_memory_per_multiprocessor", SHARED_MEMORY)
        tile_bytes = int(tiles * stages * block * block_d * q.element_size())
        splits = choose_splits(programs, length, tile_bytes, registers, processors, shared_memory)
    if ahead is None:
        ahead = can_overlap(q)
    if fetch is None:  # at head size 128 it takes longer than it saves, by 2 to 8%
        fetch = block_d <= 64
    return Plan(splits, warps, norms, ahead, fetch, block, stages)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, gain: Tensor | None, p: float | None, p_tensor: Tensor | None,
    lengths: Tensor | None, block_table: Tensor | None, tolerance: float, unit_keys: bool = False, **plan: Any,
) -> Tensor:  # fmt: skip
    """See lssar.ops.fused.fused_decode. No host synchronisation: the grid follows the cache's capacity."""
    if q.numel() == 0:
        return torch.empty_like(q)
    B, Hq, Lq, D = q.shape
    cache = cache_of(q, k_cache, v_cache, block_table)
    how = plan_for(q, cache.heads, cache.length, unit_keys, **plan)
    power = power_value(p, p_tensor)
    constant_power, exponent = power_arguments(power)
    reweight = power is not None
    group = Hq // cache.heads
    block_r = power_of_two(group * Lq)
    split_length = ceil_div(ceil_div(max(cache.length, 1), how.splits), how.block) * how.block
    splits = ceil_div(max(cache.length, 1), split_length)

    rows = B * cache.heads * block_r
    x_stride = ceil_div(cache.length, 16) * 16
    half = q.dtype != torch.float32
    wide = cache.wide or (cache.length + 1024) * block_r >= 2**31  # the cosines' offsets, too
    cosines = q.new_empty(rows * x_stride, dtype=torch.int16 if half else torch.float32)
    sums, largest, weight_sums = q.new_empty((3, rows, splits), dtype=torch.float32).unbind()
    o_parts = q.new_empty((rows, splits, D), dtype=torch.float32)
    listed = q.new_empty((B * cache.heads, x_stride) if reweight else 0, dtype=torch.int32)
    o = torch.empty_like(q)
    counts = q if lengths is None else lengths.to(device=q.device, dtype=torch.int32).contiguous()  # may be expanded
    gains = q if gain is None else gain.float().contiguous()
    shape: dict[str, Any] = {"GROUP": group, "Lq": Lq, "D": D, "BLOCK_R": block_r, "AHEAD": how.ahead}
    if how.ahead:
        shape["launch_pdl"] = True
    common: dict[str, Any] = {
        **shape, "LOG_D": math.log(D), "BLOCK_D": max(16, power_of_two(D)), "HAS_LENGTHS": lengths is not None,
        "PAGE": cache.page, "WIDE": wide, "LOG_DEGREE": 5 if half else 0, "DOT": "tf32" if half else "ieee",
        "HAS_GAIN": gain is not None, "BLOCK_N": how.block, "STAGES": how.stages, "num_warps": how.warps,
        "FETCH": how.fetch,
    }  # fmt: skip
    grid = (B * cache.heads, splits)
    extent = (cache.table_stride, x_stride, cache.heads, cache.length, split_length, splits)

    arguments: tuple[Any, ...] = (
        q, k_cache, cosines, sums, largest, counts, cache.table, *q.stride()[:3], *cache.k_strides, *extent, gains,
    )  # fmt: skip
    start_kernel(score_kernel, grid, arguments, {"NORMS": how.norms, **common})
    arguments = (
        cosines, v_cache, sums, largest, o_parts, weight_sums, listed, counts, cache.table, *cache.v_strides, *extent,
        float(tolerance), exponent, gains,
    )  # fmt: skip
    constants = {
        "P": constant_power, "REWEIGHT": reweight, "BLOCK_X": max(64, min(512, 2048 // block_r)),
        "BLOCK_SPLITS": power_of_two(splits), **common,
    }  # fmt: skip
    start_kernel(value_kernel, grid, arguments, constants)
    columns = min(common["BLOCK_D"], 32)
    constants = {"BLOCK_D": columns, "BLOCK_SPLITS": power_of_two(splits), "num_warps": 4, **shape}
    arguments = (o_parts, weight_sums, o, *o.stride()[:3], cache.heads, splits)
    start_kernel(combine_kernel, (B * cache.heads, group * Lq, ceil_div(D, columns)), arguments, constants)
    return o


decode_op = operator(
    "fused_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? gain, float? p, Tensor? p_tensor, Tensor? lengths, "
    "Tensor? block_table, float tolerance, bool unit_keys) -> Tensor",
    decode,
    lambda q, *_: torch.empty_like(q),
)
refuse_gradient(decode_op, "fused_decode has no gradient; lssar.attention has")
