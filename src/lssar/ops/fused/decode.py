"""Decode: one or a few query rows of each head against a long key and value cache, split over the keys.

Three kernels: `score_kernel` reads K once and stores scores and each split's sum and maximum; `value_kernel` derives
the rows' thresholds from those and reads the rows of V whose keys can matter; `combine_kernel` adds the splits.
The query heads of a key head, times the rows, are the R rows of a program. The tensor cores need M >= 16 rows: for
them each row is repeated M / R times; everything else is computed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lssar.ops.fused.autograd import operator, refuse_gradient
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.op import power_arguments, power_value
from lssar.ops.fused.primitives import (
    HIDDEN,
    INTERPRETED,
    dot,
    ex2_neg_abs,
    exact_unit_rows,
    inverse_norms,
    log2_1p,
    power,
    saturate,
    score_scale,
    softplus2,
    weight_line,
    weight_root,
    without_broken_rows,
)
from lssar.ops.fused.tiles import ceil_div, power_of_two

SHORTEST_SPLIT = 256  # keys: every split looks at the sums of all the others
MOST_PROGRAMS = 16  # on a multiprocessor, whatever its shared memory and registers would hold
REGISTERS = 65536  # of a multiprocessor
SHARED_MEMORY = 227 * 1024  # a multiprocessor's, where PyTorch does not say


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


@triton.jit
def let_next_begin(AHEAD: tl.constexpr):
    """AHEAD: programs of the next kernel may start as soon as there is room, and wait where they need this one."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(AHEAD: tl.constexpr):
    if AHEAD:
        gdc_wait()


@triton.jit
def key_offsets(keys, length, b, h_kv, stride_b, stride_h, stride_l, table_ptr, table_stride, PAGE: tl.constexpr):
    """Element offsets of cache rows [N], int64. PAGE 0: (B, Hkv, L, D); else (pages, PAGE, Hkv, D) by block table."""
    if PAGE == 0:
        return b.to(tl.int64) * stride_b + h_kv.to(tl.int64) * stride_h + keys.to(tl.int64) * stride_l
    else:
        page = tl.load(table_ptr + b * table_stride + keys // PAGE, mask=keys < length, other=0)
        return page.to(tl.int64) * stride_b + h_kv.to(tl.int64) * stride_h + (keys % PAGE).to(tl.int64) * stride_l


@triton.jit
def _visible(rows, length, Lq: tl.constexpr):
    """Keys that row (member, query) of a group sees: the queries are the last Lq positions."""
    return tl.maximum(length - (Lq - 1 - rows % Lq), 0)


@triton.jit
def _row_gains(gain_ptr, h_kv, rows, inside, GROUP: tl.constexpr, Lq: tl.constexpr):
    """The gain of each row's query head."""
    return tl.load(gain_ptr + h_kv * GROUP + rows // Lq, mask=inside, other=1.0)


@triton.jit
def _repeat_rows(x, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [M, N], each row M / R times."""
    if R == M:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[:, None, :], [R, M // R, N]), [M, N])


@triton.jit
def _drop_repeats(x, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The inverse of _repeat_rows."""
    if R == M:
        return x
    else:
        return tl.max(tl.reshape(x, [R, M // R, N]), 1)


@triton.jit
def squares(k):
    """In the type of k."""
    if INTERPRETED:  # it multiplies bfloat16 as if the bits were integers
        return (k.to(tl.float32) * k.to(tl.float32)).to(k.dtype)
    else:
        return k * k


@triton.jit
def _score_keys(
    q, row_scale, n, row_at, row_inside, k_ptr, x_ptr, x_stride, lo, stop, length, b, h_kv,
    k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
    D: tl.constexpr, PAGE: tl.constexpr, PRECISE: tl.constexpr, DOT: tl.constexpr, NORMS: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of keys lo..stop to x_ptr; sum of 2a and largest x [R]; whether a norm was near the ends of float32.

    NORMS: "unit" (the cache holds unit keys), "robust" (right also near the ends of float32's range), "fast", or
    "product": the tensor cores add the squares, rounded to the keys' type, so that nothing is exchanged between
    threads. That is for bfloat16 (the squares of float16 might overflow); its roundings cancel well enough in the sum.
    Sums stay spread over the N slots of a tile until the end: a reduction in the loop would need a barrier.
    """
    offsets = tl.arange(0, N)
    total = tl.zeros([R, N], tl.float32)
    largest = tl.full([R, N], HIDDEN, tl.float32)
    extreme = tl.zeros([M if NORMS == "product" else 1, N], tl.int32)
    ones = tl.full([M, columns.shape[0]], 1.0, k_ptr.dtype.element_ty)
    for start in tl.range(lo, stop, N, num_stages=STAGES):
        keys = start + offsets
        k_at = key_offsets(keys, length, b, h_kv, k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, PAGE)
        k_mask = (keys < stop)[:, None] & (columns < D)[None, :]
        k = tl.load(k_ptr + k_at[:, None] + columns[None, :], mask=k_mask, other=0.0)  # [N, D]
        if NORMS == "robust":
            key_scale = inverse_norms(k.to(tl.float32))[None, :]
        elif NORMS == "fast":
            k_float = k.to(tl.float32)
            square = tl.sum(k_float * k_float, 1)  # [N]
            key_scale = tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
            key_scale, square = key_scale[None, :], square[None, :]
        elif NORMS == "product":
            square = dot(ones, tl.trans(squares(k)), PRECISION=DOT)  # [M, N], rows alike
            key_scale = tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
        if NORMS == "fast" or NORMS == "product":
            extreme |= ((square > 1e37) | ((square < 1e-35) & (keys < stop)[None, :])).to(tl.int32)
        x = dot(q, tl.trans(k), PRECISION=DOT) * row_scale[:, None]  # [M, N]
        if NORMS == "product":
            x *= key_scale
        x = _drop_repeats(x, R, M, N)  # [R, N]
        if NORMS == "fast" or NORMS == "robust":
            x *= key_scale
        x = tl.where(keys[None, :] < tl.minimum(n, stop)[:, None], x, HIDDEN)
        x_mask = row_inside[:, None] & (keys < stop)[None, :]
        tl.store(x_ptr + row_at[:, None] * x_stride + keys[None, :], x, mask=x_mask)
        total += x + tl.abs(x) + 2.0 * log2_1p(ex2_neg_abs(x), PRECISE)
        largest = tl.maximum(largest, x)
    return tl.sum(total, 1), tl.max(largest, 1), tl.max(extreme)


@triton.jit(do_not_specialize=["Lk", "split_length", "splits"])
def score_kernel(
    q_ptr, k_ptr, x_ptr, sum_ptr, max_ptr, lengths_ptr, table_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, table_stride, x_stride,
    Hkv, Lk, split_length, splits, gain_ptr,
    HAS_GAIN: tl.constexpr,
    GROUP: tl.constexpr, Lq: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PAGE: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, NORMS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    let_next_begin(AHEAD)
    head, split = tl.program_id(0), tl.program_id(1)  # b * Hkv + h_kv
    b, h_kv = head // Hkv, head % Hkv
    length = tl.load(lengths_ptr + b) if HAS_LENGTHS else Lk
    columns = tl.arange(0, BLOCK_D)
    tile_rows = tl.arange(0, BLOCK_M) // (BLOCK_M // BLOCK_R)  # [M], which of the R rows
    q_head = (h_kv * GROUP + tile_rows // Lq).to(tl.int64)
    q_at = b.to(tl.int64) * q_stride_b + q_head * q_stride_h + tile_rows % Lq * q_stride_l
    q_mask = (tile_rows < GROUP * Lq)[:, None] & (columns < D)[None, :]
    q_raw = tl.load(q_ptr + q_at[:, None] + columns[None, :], mask=q_mask, other=0.0)  # [M, D]
    q, row_scale = exact_unit_rows(q_raw.to(tl.float32))
    if q_raw.dtype == tl.float16:  # unit vectors fit fp16 better than powers of two
        q = q * row_scale[:, None]
        row_scale = tl.where(row_scale > 0, 1.0, 0.0)
    q = q.to(q_raw.dtype)
    row_scale *= score_scale(_visible(tile_rows, length, Lq).to(tl.float32), LOG_D, True)
    if HAS_GAIN:
        row_scale *= _row_gains(gain_ptr, h_kv, tile_rows, tile_rows < GROUP * Lq, GROUP, Lq)
    rows = tl.arange(0, BLOCK_R)
    row_inside = rows < GROUP * Lq
    n = _visible(rows, length, Lq)  # [R]
    row_at = head.to(tl.int64) * BLOCK_R + rows

    lo = split * split_length
    stop = tl.minimum(lo + split_length, length)
    total, largest, extreme = _score_keys(
        q, row_scale, n, row_at, row_inside, k_ptr, x_ptr, x_stride, lo, stop, length, b, h_kv,
        k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
        D, PAGE, LOG_DEGREE == 0, DOT, NORMS, BLOCK_R, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    if NORMS != "unit":  # noqa: SIM102 (the outer one is decided when compiling)
        if extreme != 0:
            total, largest, extreme = _score_keys(
                q, row_scale, n, row_at, row_inside, k_ptr, x_ptr, x_stride, lo, stop, length, b, h_kv,
                k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
                D, PAGE, LOG_DEGREE == 0, DOT, "robust", BLOCK_R, BLOCK_M, BLOCK_N, 1,
            )  # fmt: skip
    tl.store(sum_ptr + row_at * splits + split, total, mask=row_inside)
    tl.store(max_ptr + row_at * splits + split, largest, mask=row_inside)


@triton.jit
def _select_keys(
    x_ptr, x_stride, list_ptr, weight_ptr, row_at, list_at, row_inside, lo, stop, slope, intercept, matters,
    P, LOG_DEGREE: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Keys of lo..stop that matter to any row, and their weights, packed from lo on; how many, and sums of all [R]."""
    offsets = tl.arange(0, N)
    count = 0
    z = tl.zeros([R], tl.float32)
    for start in tl.range(lo, stop, N):
        keys = start + offsets
        x_mask = row_inside[:, None] & (keys < stop)[None, :]
        x = tl.load(x_ptr + row_at[:, None] * x_stride + keys[None, :], mask=x_mask, other=HIDDEN)  # [R, N]
        root = weight_root(softplus2(x, LOG_DEGREE), slope[:, None], intercept[:, None], LOG_DEGREE)
        weight = tl.where(x > HIDDEN, power(root, P), 0.0)
        z += tl.sum(weight, 1)
        needed = tl.max(weight - matters[:, None], 0) > 0  # [N]
        slot = lo + count + tl.cumsum(needed.to(tl.int32), 0) - 1
        tl.store(list_ptr + list_at + slot, keys, mask=needed)
        weight_at = weight_ptr + row_at[:, None] * x_stride + slot[None, :]
        tl.store(weight_at, weight.to(weight_ptr.dtype.element_ty), mask=row_inside[:, None] & needed[None, :])
        count += tl.sum(needed.to(tl.int32), 0)
    return count, z


@triton.jit(do_not_specialize=["Lk", "split_length", "splits", "tolerance"])
def value_kernel(
    x_ptr, v_ptr, sum_ptr, max_ptr, o_ptr, z_ptr, list_ptr, weight_ptr, lengths_ptr, table_ptr,
    v_stride_b, v_stride_h, v_stride_l, table_stride, x_stride, Hkv, Lk, split_length, splits, tolerance,
    exponent, gain_ptr, HAS_GAIN: tl.constexpr,
    GROUP: tl.constexpr, Lq: tl.constexpr, P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """With REWEIGHT, first which keys matter, then their values alone, gathered into full tiles."""
    head, split = tl.program_id(0), tl.program_id(1)
    b, h_kv = head // Hkv, head % Hkv
    length = tl.load(lengths_ptr + b) if HAS_LENGTHS else Lk
    rows = tl.arange(0, BLOCK_R)
    row_inside = rows < GROUP * Lq
    columns = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
    n = _visible(rows, length, Lq)  # [R]
    row_at = head.to(tl.int64) * BLOCK_R + rows
    list_at = head.to(tl.int64) * x_stride
    lo = split * split_length
    stop = tl.minimum(lo + split_length, length)
    let_next_begin(AHEAD)
    wait_for_last(AHEAD)

    if REWEIGHT:
        every = tl.arange(0, BLOCK_SPLITS)
        part_at = row_at[:, None] * splits + every[None, :]
        part_mask = row_inside[:, None] & (every < splits)[None, :]
        total = tl.sum(tl.load(sum_ptr + part_at, mask=part_mask, other=0.0), 1)  # [R]
        x_max = tl.max(tl.load(max_ptr + part_at, mask=part_mask, other=HIDDEN), 1)
        n_float = n.to(tl.float32)
        gain_size = tl.abs(_row_gains(gain_ptr, h_kv, rows, row_inside, GROUP, Lq)) if HAS_GAIN else 1.0
        slope, intercept = weight_line(total, x_max, n_float, P if P > 0 else exponent, LOG_D, LOG_DEGREE, gain_size)
        # keys of at most tolerance / n of the largest weight weigh together at most tolerance times that
        root = weight_root(softplus2(x_max, LOG_DEGREE), slope, intercept, LOG_DEGREE)
        largest = power(root, P if P > 0 else exponent)
        matters = tolerance / tl.maximum(n_float, 1.0) * largest
        count, z = _select_keys(
            x_ptr, x_stride, list_ptr, weight_ptr, row_at, list_at, row_inside, lo, stop, slope, intercept, matters,
            P if P > 0 else exponent, LOG_DEGREE, BLOCK_R, BLOCK_X,
        )  # fmt: skip
        tl.debug_barrier()  # what one thread listed, others read
        last = lo + count
    else:
        z = tl.zeros([BLOCK_R], tl.float32)
        last = stop

    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    spoiled = tl.zeros([BLOCK_R], tl.int32)
    for start in tl.range(lo, last, BLOCK_N, num_stages=STAGES):
        slots = start + offsets
        inside = slots < last
        mask = row_inside[:, None] & inside[None, :]
        if REWEIGHT:
            keys = tl.load(list_ptr + list_at + slots, mask=inside, other=0)
            weight = tl.load(weight_ptr + row_at[:, None] * x_stride + slots[None, :], mask=mask, other=0.0)  # [R, N]
        else:
            keys = slots
            x = tl.load(x_ptr + row_at[:, None] * x_stride + slots[None, :], mask=mask, other=HIDDEN)
            weight = softplus2(x, LOG_DEGREE)
            z += tl.sum(weight, 1)
        at = key_offsets(keys, length, b, h_kv, v_stride_b, v_stride_h, v_stride_l, table_ptr, table_stride, PAGE)
        v = tl.load(v_ptr + at[:, None] + columns[None, :], mask=inside[:, None] & (columns < D)[None, :], other=0.0)
        if Lq > 1:  # some of the last keys are hidden from some rows, and their values may not be finite
            v, broken = without_broken_rows(v)
            here = tl.where(inside[None, :] & (keys[None, :] < n[:, None]), broken[None, :], 0)
            spoiled = tl.maximum(spoiled, tl.max(here, 1))
        o = dot(_repeat_rows(weight.to(v.dtype), BLOCK_R, BLOCK_M, BLOCK_N), v, o, PRECISION=DOT)  # v: [N, D]
    o = _drop_repeats(o, BLOCK_R, BLOCK_M, BLOCK_D)  # [R, D]
    if REWEIGHT:
        z = tl.where(slope == slope, z, slope)  # a NaN score spoils the row
    z = tl.where(spoiled > 0, float("nan"), z)
    out_at = (row_at * splits + split)[:, None] * D + columns[None, :]
    tl.store(o_ptr + out_at, o, mask=row_inside[:, None] & (columns < D)[None, :])
    tl.store(z_ptr + row_at * splits + split, z, mask=row_inside)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    o_part_ptr, z_part_ptr, o_ptr, o_stride_b, o_stride_h, o_stride_l, Hkv, splits,
    GROUP: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a row and BLOCK_D columns: the splits' sums, divided by the row's weight."""
    head, row = tl.program_id(0), tl.program_id(1)
    b, h = head // Hkv, head % Hkv * GROUP + row // Lq
    every = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    part_at = (head * BLOCK_R + row).to(tl.int64) * splits + every
    wait_for_last(AHEAD)
    z = tl.sum(tl.load(z_part_ptr + part_at, mask=every < splits, other=0.0), 0)
    mask = (every < splits)[:, None] & (columns < D)[None, :]
    o = tl.sum(tl.load(o_part_ptr + part_at[:, None] * D + columns[None, :], mask=mask, other=0.0), 0)  # [D]
    o = o / tl.where(z == 0, 1.0, z)
    at = b.to(tl.int64) * o_stride_b + h.to(tl.int64) * o_stride_h + row % Lq * o_stride_l
    tl.store(o_ptr + at + columns, saturate(o, o_ptr.dtype.element_ty), mask=columns < D)


def can_overlap(x: Tensor) -> bool:
    """Whether a kernel's programs may start before the previous kernel has ended."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 9


@dataclass(frozen=True)
class Plan:
    """How the work of a call is divided; `plan_for` chooses, benchmarks try others."""

    splits: int
    warps: int
    norms: str
    """How norms of keys are computed: see _score_keys."""
    ahead: bool
    """Overlap the end of each kernel with the beginning of the next (programmatic dependent launch; from Hopper on)."""
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


def cache_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> _Cache:
    order = (0, 1, 2) if block_table is None else (0, 2, 1)
    k_strides, v_strides = (tuple(x.stride(i) for i in order) for x in (k_cache, v_cache))
    if block_table is None:  # any table: never read
        return _Cache(k_cache.shape[1], k_cache.shape[2], 0, k_strides, v_strides, q, 0)
    page, heads = k_cache.shape[1], k_cache.shape[2]
    table = block_table.contiguous()
    return _Cache(heads, table.shape[1] * page, page, k_strides, v_strides, table, table.stride(0))


def plan_for(
    q: Tensor, heads: int, length: int, unit_keys: bool, *, splits: int | None = None, warps: int | None = None,
    norms: str | None = None, ahead: bool | None = None, block: int = Plan.block, stages: int = Plan.stages,
    tiles: int = 1,
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
    if splits is None:
        registers = 32 * warps * max(80, block_d)  # about what the compiler uses
        shared_memory = getattr(card, "shared_memory_per_multiprocessor", SHARED_MEMORY)
        tile_bytes = tiles * stages * block * block_d * q.element_size()
        splits = choose_splits(programs, length, tile_bytes, registers, processors, shared_memory)
    if ahead is None:
        ahead = can_overlap(q)
    return Plan(splits, warps, norms, ahead, block, stages)


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
    scores = q.new_empty((rows, x_stride), dtype=torch.float32)
    sums, largest, weight_sums = q.new_empty((3, rows, splits), dtype=torch.float32).unbind()
    o_parts = q.new_empty((rows, splits, D), dtype=torch.float32)
    listed = q.new_empty((B * cache.heads, x_stride) if reweight else 0, dtype=torch.int32)
    weights = q.new_empty((rows, x_stride) if reweight else 0)
    o = torch.empty_like(q)
    counts = q if lengths is None else lengths.to(device=q.device, dtype=torch.int32).contiguous()  # may be expanded
    gains = q if gain is None else gain.float().contiguous()
    shape: dict[str, Any] = {"GROUP": group, "Lq": Lq, "D": D, "BLOCK_R": block_r, "AHEAD": how.ahead}
    common: dict[str, Any] = {
        **shape, "LOG_D": math.log(D), "BLOCK_D": max(16, power_of_two(D)), "HAS_LENGTHS": lengths is not None,
        "PAGE": cache.page, "LOG_DEGREE": 0 if q.dtype == torch.float32 else 5, "BLOCK_M": max(16, block_r),
        "DOT": "ieee" if q.dtype == torch.float32 else "tf32", "HAS_GAIN": gain is not None,
        "BLOCK_N": how.block, "STAGES": how.stages, "num_warps": how.warps,
    }  # fmt: skip
    following = {"launch_pdl": True} if how.ahead else {}
    grid = (B * cache.heads, splits)
    extent = (cache.table_stride, x_stride, cache.heads, cache.length, split_length, splits)

    arguments: tuple[Any, ...] = (
        q, k_cache, scores, sums, largest, counts, cache.table, *q.stride()[:3], *cache.k_strides, *extent, gains,
    )  # fmt: skip
    start_kernel(score_kernel, grid, arguments, {"NORMS": how.norms, **common})
    arguments = (
        scores, v_cache, sums, largest, o_parts, weight_sums, listed, weights, counts, cache.table, *cache.v_strides,
        *extent, float(tolerance), exponent, gains,
    )  # fmt: skip
    constants = {
        "P": constant_power, "REWEIGHT": reweight, "BLOCK_X": max(64, min(512, 2048 // block_r)),
        "BLOCK_SPLITS": power_of_two(splits), **common, **following,
    }  # fmt: skip
    start_kernel(value_kernel, grid, arguments, constants)
    columns = min(common["BLOCK_D"], 32)
    constants = {"BLOCK_D": columns, "BLOCK_SPLITS": power_of_two(splits), "num_warps": 4, **shape, **following}
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
