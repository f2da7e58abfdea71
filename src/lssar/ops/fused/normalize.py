"""Prologue of forward and backward: unit vectors of q, times the score scale of their row, and of k, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    load_tile,
    not_finite,
    score_scale,
    store_tile,
    unit_rows,
    visible_keys,
    with_gain,
)

VALUE_BLOCK = tl.constexpr(32)
"""Rows of a program, and keys whose largest value is known as a whole."""


@triton.jit(do_not_specialize=["B", "Lq", "Lk", "window"])
def normalize_kernel(
    q_ptr, k_ptr, v_ptr, unit_q_ptr, unit_k_ptr, sizes_ptr, block_sizes_ptr, broken_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    gain_ptr, B, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    HAS_GAIN: tl.constexpr, FOR_BACKWARD: tl.constexpr,
    LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """q, k (B, H, L, D) strided -> unit_q (times c_i log2(e) and the head's gain), unit_k (B, H, L, D) contiguous.

    Programs: the blocks of rows of all heads of q, then those of k, along the first axis of the grid, which alone has
    no limit that matters. FOR_BACKWARD: rows that are not finite give zero vectors, so that products with them stay
    finite (the forward has marked who sees them); and the largest finite |v| of each key, up to the key lengths, goes
    to sizes_ptr (B, Hkv, Lk), that of each block of keys to block_sizes_ptr (B, Hkv, blocks). If rows see all keys
    up to one of them, sizes are those of the keys of a block up to each. broken_ptr gets a 0.
    """
    program = tl.program_id(0)
    query_blocks = tl.cdiv(Lq, BLOCK)
    query_programs = B * Hq * query_blocks
    queries = program < query_programs
    program = tl.where(queries, program, program - query_programs)
    H = tl.where(queries, Hq, Hkv)
    L = tl.where(queries, Lq, Lk)
    blocks = tl.cdiv(L, BLOCK)
    head, start = program // blocks, program % blocks * BLOCK
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    if FOR_BACKWARD and tl.program_id(0) == 0:
        tl.store(broken_ptr, 0)
    if queries:
        x_ptr = q_ptr + b * q_stride_b + h * q_stride_h
        stride_l = tl.cast(q_stride_l, tl.int64)
        out_ptr = unit_q_ptr
    else:
        x_ptr = k_ptr + b * k_stride_b + h * k_stride_h
        stride_l = tl.cast(k_stride_l, tl.int64)
        out_ptr = unit_k_ptr
    offsets = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, start, L, stride_l, offsets, columns, D, True).to(tl.float32)  # [BLOCK, D]
    unit = unit_rows(x)
    if FOR_BACKWARD:
        unit = tl.where(unit == unit, unit, 0.0)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    if queries:
        first, last = visible_keys(
            start + offsets, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
        )
        half: tl.constexpr = unit_q_ptr.dtype.element_ty == tl.float16
        scale = score_scale((last - first).to(tl.float32), LOG_D, not half)
        if HAS_GAIN:
            scale = with_gain(scale, tl.load(gain_ptr + h), half)
        unit = unit * scale[:, None]
    elif FOR_BACKWARD:
        v_ptr += b * v_stride_b + h * v_stride_h
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True).to(tl.float32)
        size = tl.max(tl.where(not_finite(v), 0.0, tl.abs(v)), 1)  # [BLOCK]
        known = size
        if not (WINDOWED or PACKED):  # rows see the first keys, up to one of them
            known = tl.max(tl.where(offsets[:, None] >= offsets[None, :], size[None, :], 0.0), 1)
        tl.store(sizes_ptr + head.to(tl.int64) * Lk + start + offsets, known, mask=start + offsets < Lk)
        tl.store(block_sizes_ptr + head.to(tl.int64) * blocks + start // BLOCK, tl.max(size, 0))
    store_tile(out_ptr + head.to(tl.int64) * L * D, unit, start, L, D, offsets, columns, D)
