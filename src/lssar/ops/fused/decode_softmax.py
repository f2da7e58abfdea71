"""Decode for softmax kinds: one query row of each head against a key and value cache, split over the keys.

`split_kernel` computes each split's maximum, sum of weights and weighted values in one pass over K and V, and
`combine_kernel` adds the splits; with one split, as for the ring of a short window, the first kernel writes the output.
`append_kernel` rotates q and k of a new token and writes k and v to their places in the cache.
The query heads of a key head are the R rows of a program. Products have the keys as rows where that saves work, as in
decode.py. Shape letters in tile comments: R rows, N keys, D head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lssar.ops.fused.autograd import operator, refuse_gradient
from lssar.ops.fused.decode import cached_rows, fast_rsqrt, key_offsets, let_next_begin, squares, wait_for_last
from lssar.ops.fused.decode_op import cache_of, can_overlap, plan_for
from lssar.ops.fused.launch import start_kernel
from lssar.ops.fused.primitives import LN2, LOG2E, dot, ex2, saturate
from lssar.ops.fused.tiles import ceil_div, power_of_two
from lssar.ops.fused.unit_rows import exact_unit_rows
from lssar.ops.fused.window import FAR, near_one
from lssar.ops.numerics import scale_factor
from lssar.specs import AttentionSpec

TILES = 1.5
"""Tiles in flight for plan_for: keys, and values in part. At head size 64 this is one wave of six programs on a
multiprocessor, faster than four or eight."""
PLANES = 3
"""Numbers that a split leaves for each row: its largest score, its sum of weights, and what scores are scaled by."""


@triton.jit
def _attend(
    q, row_factor, k_ptr, v_ptr, lo, stop, length, b, h_kv, k_stride_b, k_stride_h, k_stride_l,
    v_stride_b, v_stride_h, v_stride_l, table_ptr, table_stride, columns,
    COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr,
    DOT: tl.constexpr, NORMS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Over keys lo..stop: weighted values [R, D], sum of weights and largest score [R], and whether the norm of a key
    was near the ends of float32's range. NORMS is as in decode.py; scores without cosine are scaled after the largest
    is subtracted, so that they cannot overflow."""
    offsets = tl.arange(0, N)
    highest = tl.full([R], -float("inf"), tl.float32)
    z = tl.zeros([N, R], tl.float32)  # added up at the end: a reduction needs a barrier
    o = tl.zeros([BLOCK_D, R], tl.float32)
    lowest_square = tl.full([N, 1], 1.0, tl.float32)
    highest_square = tl.full([N, 1], 1.0, tl.float32)
    ones = tl.full([BLOCK_D, 1], 1.0, k_ptr.dtype.element_ty)
    k_rows = cached_rows(k_ptr, b, h_kv, k_stride_b, k_stride_h, columns, PAGE)
    v_rows = cached_rows(v_ptr, b, h_kv, v_stride_b, v_stride_h, columns, PAGE)
    for start in tl.range(lo, stop, N, num_stages=STAGES):
        keys = start + offsets
        inside = (keys < stop)[:, None]
        mask = inside & (columns < D)[None, :]
        k_at = key_offsets(keys, length, b, k_stride_b, k_stride_l, table_ptr, table_stride, PAGE, WIDE)
        k = tl.load(k_rows + k_at, mask=mask, other=0.0)  # [N, D]
        v_at = key_offsets(keys, length, b, v_stride_b, v_stride_l, table_ptr, table_stride, PAGE, WIDE)
        v = tl.load(v_rows + v_at, mask=mask, other=0.0)  # [N, D]
        if COSINE and NORMS == "robust":
            k_near, k_scale = exact_unit_rows(k.to(tl.float32))
            k, key_scale = k_near.to(k.dtype), k_scale[:, None]
        x = dot(k, tl.trans(q), PRECISION=DOT)  # [N, R]
        if COSINE:
            if NORMS != "robust":
                if NORMS == "product":
                    square = dot(squares(k), ones, PRECISION=DOT)  # [N, 1]
                else:
                    square = tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)[:, None]
                square = tl.where(inside, square, 1.0)
                lowest_square = tl.minimum(lowest_square, square)
                highest_square = tl.maximum(highest_square, square)
                key_scale = fast_rsqrt(square)
            x = x * key_scale * row_factor[None, :]
        x = tl.where(inside, x, -float("inf"))
        last = highest
        highest = tl.maximum(last, tl.max(x, 0))
        shift = tl.where(highest > -float("inf"), highest, 0.0)
        if COSINE:
            weight, shrink = ex2(x - shift[None, :]), ex2(last - shift)
        else:
            weight, shrink = ex2((x - shift[None, :]) * row_factor[None, :]), ex2((last - shift) * row_factor)
        z = z * shrink[None, :] + weight
        o = dot(tl.trans(v), weight.to(v.dtype), o * shrink[None, :], PRECISION=DOT)
    extreme = (tl.min(lowest_square) < 1e-35) | (tl.max(highest_square) > 1e37)
    return tl.trans(o), tl.sum(z, 0), highest, extreme


@triton.jit(do_not_specialize=["Lk", "split_length", "splits", "part_plane"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, part_ptr, lengths_ptr, table_ptr, gain_ptr, q_stride_b, q_stride_h,
    k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, table_stride,
    Hkv, Lk, split_length, splits, part_plane,
    COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr,
    HAS_GAIN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, DOT: tl.constexpr, NORMS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """WHOLE: there is one split, whose output is final.

    Several splits share a long cache: programs of the next kernel, waiting, would take the place of some of them.
    """
    if WHOLE:
        let_next_begin(AHEAD)
    wait_for_last(AHEAD)
    head, split = tl.program_id(0), tl.program_id(1)  # b * Hkv + h_kv
    b, h_kv = head // Hkv, head % Hkv
    length = tl.minimum(tl.load(lengths_ptr + b), Lk) if HAS_LENGTHS else Lk
    columns = tl.arange(0, BLOCK_D)
    member = tl.arange(0, BLOCK_R)  # which of the group's query heads
    h = (h_kv * GROUP + member).to(tl.int64)
    inside = member < GROUP
    q_at = b.to(tl.int64) * q_stride_b + h * q_stride_h
    q_mask = inside[:, None] & (columns < D)[None, :]
    q_raw = tl.load(q_ptr + q_at[:, None] + columns[None, :], mask=q_mask, other=0.0)  # [R, D]
    factor = SCALE * LOG2E
    if LOG_N:
        n = tl.maximum(length, 1).to(tl.float32)
        factor = SCALE * LN2 * LOG2E * tl.log2(n)
    if COSINE:
        q, row_factor = exact_unit_rows(q_raw.to(tl.float32))
        row_factor *= factor
        if HAS_GAIN:
            row_factor *= tl.load(gain_ptr + h, mask=inside, other=1.0)
    else:
        q, _, up = near_one(q_raw.to(tl.float32), SMALL, False)
        row_factor = tl.minimum(tl.maximum(factor * up, 1.0 / FAR), FAR)
    q = q.to(q_raw.dtype)

    lo = split * split_length
    stop = tl.minimum(lo + split_length, length)
    o, z, highest, extreme = _attend(
        q, row_factor, k_ptr, v_ptr, lo, stop, length, b, h_kv, k_stride_b, k_stride_h, k_stride_l,
        v_stride_b, v_stride_h, v_stride_l, table_ptr, table_stride, columns,
        COSINE, D, BLOCK_D, PAGE, WIDE, DOT, NORMS, BLOCK_R, BLOCK_N, STAGES,
    )  # fmt: skip
    if COSINE:  # noqa: SIM102 (the outer one is decided when compiling)
        if extreme:
            o, z, highest, extreme = _attend(
                q, row_factor, k_ptr, v_ptr, lo, stop, length, b, h_kv, k_stride_b, k_stride_h, k_stride_l,
                v_stride_b, v_stride_h, v_stride_l, table_ptr, table_stride, columns,
                COSINE, D, BLOCK_D, PAGE, WIDE, DOT, "robust", BLOCK_R, BLOCK_N, 1,
            )  # fmt: skip
    o_mask = inside[:, None] & (columns < D)[None, :]
    if WHOLE:
        o = o / tl.where(z == 0, 1.0, z)[:, None]
        at = b.to(tl.int64) * o_stride_b + h * o_stride_h
        tl.store(o_ptr + at[:, None] + columns[None, :], saturate(o, o_ptr.dtype.element_ty), mask=o_mask)
    else:
        at = (head.to(tl.int64) * GROUP + member) * splits + split
        tl.store(o_ptr + at[:, None] * D + columns[None, :], o, mask=o_mask)
        tl.store(part_ptr + at, highest, mask=inside)
        tl.store(part_ptr + part_plane + at, z, mask=inside)
        tl.store(part_ptr + 2 * tl.cast(part_plane, tl.int64) + at, row_factor, mask=inside)


@triton.jit(do_not_specialize=["splits", "part_plane"])
def combine_kernel(
    o_part_ptr, part_ptr, o_ptr, o_stride_b, o_stride_h, Hq, splits, part_plane,
    COSINE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a query head and BLOCK_D columns."""
    let_next_begin(AHEAD)
    row = tl.program_id(0)  # b * Hq + h
    every = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * splits + every
    wait_for_last(AHEAD)
    highest = tl.load(part_ptr + at, mask=every < splits, other=-float("inf"))
    z = tl.load(part_ptr + part_plane + at, mask=every < splits, other=0.0)
    most = tl.max(highest, 0)
    most = tl.where(most > -float("inf"), most, 0.0)
    if COSINE:
        share = ex2(highest - most)
    else:
        factor = tl.load(part_ptr + 2 * tl.cast(part_plane, tl.int64) + at, mask=every < splits, other=1.0)
        share = ex2((highest - most) * factor)
    total = tl.sum(z * share, 0)
    mask = (every < splits)[:, None] & (columns < D)[None, :]
    parts = tl.load(o_part_ptr + at[:, None] * D + columns[None, :], mask=mask, other=0.0)
    o = tl.sum(parts * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    out = (row // Hq).to(tl.int64) * o_stride_b + (row % Hq).to(tl.int64) * o_stride_h
    tl.store(o_ptr + out + columns, saturate(o, o_ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, at_ptr,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, out_stride_b, out_stride_h,
    k_cache_stride_b, k_cache_stride_h, k_cache_stride_l, v_cache_stride_b, v_cache_stride_h, v_cache_stride_l,
    Hq, Hkv, size, ROTATE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a head of q, k or v: its vector, rotated if it is of q or k, to the output or to its slot."""
    let_next_begin(AHEAD)
    wait_for_last(AHEAD)
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, BLOCK)
    mask = half < D // 2
    slot = tl.load(at_ptr).to(tl.int64) % size
    kind = (h >= Hq).to(tl.int32) + (h >= Hq + Hkv).to(tl.int32)
    h = (h - (kind > 0).to(tl.int32) * Hq - (kind > 1).to(tl.int32) * Hkv).to(tl.int64)
    if kind == 0:
        source, target = q_ptr + b * q_stride_b + h * q_stride_h, q_out_ptr + b * out_stride_b + h * out_stride_h
    elif kind == 1:
        source = k_ptr + b * k_stride_b + h * k_stride_h
        target = k_cache_ptr + b * k_cache_stride_b + h * k_cache_stride_h + slot * k_cache_stride_l
    else:
        source = v_ptr + b * v_stride_b + h * v_stride_h
        target = v_cache_ptr + b * v_cache_stride_b + h * v_cache_stride_h + slot * v_cache_stride_l
    first = tl.load(source + half, mask=mask).to(tl.float32)
    second = tl.load(source + D // 2 + half, mask=mask).to(tl.float32)
    if ROTATE:
        cos, sin = tl.load(cos_ptr + half, mask=mask, other=1.0), tl.load(sin_ptr + half, mask=mask, other=0.0)
        cos, sin = tl.where(kind < 2, cos, 1.0), tl.where(kind < 2, sin, 0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(target + half, first.to(target.dtype.element_ty), mask=mask)
    tl.store(target + D // 2 + half, second.to(target.dtype.element_ty), mask=mask)


@lru_cache(maxsize=256)
def _constants(literal: str, d: int, dtype: torch.dtype) -> dict[str, Any]:
    spec = AttentionSpec.from_literal(literal)
    return {
        "COSINE": spec.cosine, "LOG_N": spec.log_n, "SCALE": scale_factor(d, spec),
        "SMALL": 1.0 if dtype == torch.float16 else 2.0**-12, "D": d, "BLOCK_D": max(16, power_of_two(d)),
        "DOT": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, gain: Tensor | None, spec: str, lengths: Tensor | None,
    block_table: Tensor | None, **plan: Any,
) -> Tensor:  # fmt: skip
    """See lssar.ops.fused.softmax_decode. No host synchronisation: the grid follows the cache's capacity."""
    o = torch.empty_like(q)
    if q.numel() == 0:
        return o
    B, Hq, _, D = q.shape
    cache = cache_of(q, k_cache, v_cache, block_table)
    if cache.length == 0:
        return o.zero_()
    constants = _constants(spec, D, q.dtype)
    how = plan_for(q, cache.heads, cache.length, False, tiles=TILES, **plan)
    group = Hq // cache.heads
    split_length = ceil_div(ceil_div(cache.length, how.splits), how.block) * how.block
    splits = ceil_div(cache.length, split_length)
    whole = splits == 1
    o_parts = o if whole else q.new_empty((B * Hq, splits, D), dtype=torch.float32)
    parts = q.new_empty(0 if whole else (PLANES, B * Hq, splits), dtype=torch.float32)
    counts = q if lengths is None else lengths.to(device=q.device, dtype=torch.int32).contiguous()  # may be expanded
    gains = q if gain is None else gain.float().contiguous()
    overlap: dict[str, Any] = {"AHEAD": how.ahead, **({"launch_pdl": True} if how.ahead else {})}
    arguments: tuple[Any, ...] = (
        q, k_cache, v_cache, o_parts, parts, counts, cache.table, gains, *q.stride()[:2], *cache.k_strides,
        *cache.v_strides, *o.stride()[:2], cache.table_stride, cache.heads, cache.length, split_length, splits,
        parts.numel() // PLANES,
    )  # fmt: skip
    grid = (B * cache.heads, splits)
    more = {
        "GROUP": group, "HAS_GAIN": gain is not None, "HAS_LENGTHS": lengths is not None, "PAGE": cache.page,
        "WIDE": cache.wide, "NORMS": how.norms, "WHOLE": whole, "BLOCK_R": power_of_two(group),
        "BLOCK_N": how.block, "STAGES": how.stages, "num_warps": how.warps,
    }  # fmt: skip
    start_kernel(split_kernel, grid, arguments, constants | more | overlap)
    if not whole:
        columns = min(constants["BLOCK_D"], 32)
        arguments = (o_parts, parts, o, *o.stride()[:2], Hq, splits, parts.numel() // PLANES)
        more = {
            "COSINE": constants["COSINE"], "D": D, "BLOCK_D": columns, "BLOCK_SPLITS": power_of_two(splits),
            "num_warps": 4,
        }  # fmt: skip
        start_kernel(combine_kernel, (B * Hq, ceil_div(D, columns)), arguments, more | overlap)
    return o


def append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor,
    at: Tensor,
) -> Tensor:  # fmt: skip
    """See lssar.ops.fused.append_token."""
    B, Hq, _, D = q.shape
    Hkv, size = k_cache.shape[1], k_cache.shape[2]
    rotated = q.new_empty((B, Hq, 1, D))
    angles = (q, q) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    arguments = (
        q, k, v, *angles, rotated, k_cache, v_cache, at, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *rotated.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], Hq, Hkv, size,
    )  # fmt: skip
    ahead = can_overlap(q)
    constants: dict[str, Any] = {
        "ROTATE": cos is not None, "D": D, "BLOCK": power_of_two(D // 2), "AHEAD": ahead, "num_warps": 1,
        **({"launch_pdl": True} if ahead else {}),
    }  # fmt: skip
    start_kernel(append_kernel, (B, Hq + 2 * Hkv), arguments, constants)
    return rotated


decode_op = operator(
    "softmax_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? gain, str spec, Tensor? lengths, Tensor? block_table)"
    " -> Tensor",
    decode,
    lambda q, *_: torch.empty_like(q),
)
refuse_gradient(decode_op, "softmax_decode has no gradient; lssar.attention has")
append_op = operator(
    "append_token",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor at)"
    " -> Tensor",
    append,
    lambda q, *_: q.new_empty(q.shape),
)
