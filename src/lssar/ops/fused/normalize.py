"""Prologue of forward and backward: unit vectors of q (times the score scale of their row) and of k."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import load_tile, score_scale, store_tile, unit_rows, visible_keys

_LENGTHS = ["Lq", "Lk", "L", "window"]


@triton.jit(do_not_specialize=_LENGTHS)
def normalize_kernel(
    x_ptr, out_ptr, stride_b, stride_h, stride_l, L, H, v_ptr, v_stride_b, v_stride_h, v_stride_l, v_max_ptr,
    Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    SCALE_QUERIES: tl.constexpr, VALUE_MAX: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """x (B, H, L, D) strided -> out (B, H, L, D) contiguous. SCALE_QUERIES: times c_i log2(e).

    VALUE_MAX: x are keys; leave the largest |v| of the keys that exist in v_max_ptr, for each head of keys (a maximum:
    order does not matter).
    """
    start = tl.program_id(1) * BLOCK
    head = tl.program_id(0)  # the second axis of a grid ends at 65535, and heads x batch may not
    b = head // H
    x_ptr += b.to(tl.int64) * stride_b + (head % H).to(tl.int64) * stride_h
    out_ptr += head.to(tl.int64) * L * D
    offsets = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    x = load_tile(x_ptr, start, L, stride_l, offsets, columns, D, True).to(tl.float32)  # [BLOCK, D]
    unit, _, _ = unit_rows(x)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    if VALUE_MAX:
        v_ptr += b.to(tl.int64) * v_stride_b + (head % H).to(tl.int64) * v_stride_h
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True).to(tl.float32)
        tl.atomic_max(v_max_ptr + head, tl.max(tl.abs(v)))
    if SCALE_QUERIES:
        first, last = visible_keys(
            start + offsets, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
        )
        unit = unit * score_scale((last - first).to(tl.float32), LOG_D)[:, None]
    store_tile(out_ptr, unit, start, L, D, offsets, columns, D)
