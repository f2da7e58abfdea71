"""Prologue of forward and backward: unit vectors of k, and for the backward sizes of values, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import load_tile, not_finite, store_tile
from lssar.ops.fused.unit_rows import unit_rows

VALUE_BLOCK = tl.constexpr(32)
"""Rows of a program, and keys whose largest value is known as a whole."""


@triton.jit(do_not_specialize=["H", "L"])
def normalize_kernel(
    k_ptr, v_ptr, unit_k_ptr, sizes_ptr, block_sizes_ptr, broken_ptr,
    k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l, H, L, key_lengths_ptr,
    FOR_BACKWARD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    BY_KEY: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """k (B, H, L, D) strided -> unit_k contiguous, float16 or float32.

    Programs: the blocks of rows of all heads along the first axis of the grid, which alone has no limit that matters.
    FOR_BACKWARD: rows that are not finite give zero vectors, so that products with them stay finite (the forward has
    marked who sees them); and the largest finite |v| of each key, up to the key lengths, goes to sizes_ptr (B, H, L),
    that of each block of keys to block_sizes_ptr (B, H, blocks). Unless BY_KEY, sizes are those of the keys of a block
    up to each: rows see all keys up to one of them. broken_ptr gets a 0.
    """
    blocks = tl.cdiv(L, BLOCK)
    head, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    k_ptr += b * k_stride_b + h * k_stride_h
    offsets = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr, start, L, k_stride_l, offsets, columns, D, True)  # [BLOCK, D]
    unit = unit_rows(k.to(tl.float32))
    if FOR_BACKWARD:
        if tl.program_id(0) == 0:
            tl.store(broken_ptr, 0)
        unit = tl.where(unit == unit, unit, 0.0)
        key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else L
        v_ptr += b * v_stride_b + h * v_stride_h
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True).to(tl.float32)
        size = tl.max(tl.where(not_finite(v), 0.0, tl.abs(v)), 1)  # [BLOCK]
        known = size
        if not BY_KEY:
            known = tl.max(tl.where(offsets[:, None] >= offsets[None, :], size[None, :], 0.0), 1)
        tl.store(sizes_ptr + head.to(tl.int64) * L + start + offsets, known, mask=start + offsets < L)
        tl.store(block_sizes_ptr + head.to(tl.int64) * blocks + start // BLOCK, tl.max(size, 0))
    store_tile(unit_k_ptr + head.to(tl.int64) * L * D, unit, start, L, D, offsets, columns, D)
