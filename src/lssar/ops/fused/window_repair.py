"""Kernels that compute again the blocks of rows or keys which the windowed kernels in Gluon have marked as not finite.

They do this by the functions of the windowed kernels in Triton, which keep an infinity or NaN out of results that do
not depend on it. Mostly no block is marked: a program looks at the marks of several blocks at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.window_forward import forward_block
from lssar.ops.fused.window_key_gradient import key_block
from lssar.ops.fused.window_query_gradient import query_block


@triton.jit
def _marks_of_program(broken_ptr, heads, blocks, BLOCKS: tl.constexpr):
    """First block, head and batch row of a program that has BLOCKS blocks; the head's marks, which are in broken_ptr
    (B, heads, blocks); whether any of these blocks is marked."""
    first, h, b = tl.program_id(0) * BLOCKS, tl.program_id(1), tl.program_id(2)
    broken_ptr += (b * heads + h) * blocks
    some = first + tl.arange(0, BLOCKS)
    marked = tl.max(tl.load(broken_ptr + some, mask=some < blocks, other=0), 0) > 0
    return first, h, b, broken_ptr, marked


@triton.jit(do_not_specialize=["Lq", "window", "blocks"])
def forward_repair_kernel(
    broken_ptr, blocks, q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    FIXED: tl.constexpr, SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Computes again those of BLOCKS blocks of rows of a head that broken_ptr (B, Hq, blocks) says are not finite."""
    first, h, b, broken_ptr, marked = _marks_of_program(broken_ptr, Hq, blocks, BLOCKS)
    if marked:
        for block in tl.range(first, tl.minimum(first + BLOCKS, blocks), num_stages=1):
            if tl.load(broken_ptr + block) > 0:
                forward_block(
                    block, h, b, q_ptr, k_ptr, v_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane,
                    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h,
                    v_stride_l, o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr,
                    doc_start_ptr, doc_stop_ptr, 0, 0, KIND, P, COSINE, LOG_N, GAIN, FIXED, SCALE, SMALL, GROUP, D,
                    BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, LOG_DEGREE, DOT, STEEP, BLOCK_M, BLOCK_N, 1,
                    False,
                )  # fmt: skip


@triton.jit(do_not_specialize=["Lq", "Lk", "window", "blocks"])
def query_gradient_repair_kernel(
    broken_ptr, blocks, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p,
    row_plane, q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    o_stride_b, o_stride_h, do_stride_b, do_stride_h, dq_stride_b, dq_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, GAIN: tl.constexpr,
    SCALE: tl.constexpr, SMALL: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, STEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    O_STEP: tl.constexpr, DO_STEP: tl.constexpr, DQ_STEP: tl.constexpr,
):  # fmt: skip
    """Computes again those of BLOCKS blocks of rows of a head that broken_ptr (B, Hq, blocks) says are not finite."""
    first, h, b, broken_ptr, marked = _marks_of_program(broken_ptr, Hq, blocks, BLOCKS)
    if marked:
        for block in tl.range(first, tl.minimum(first + BLOCKS, blocks), num_stages=1):
            if tl.load(broken_ptr + block) > 0:
                query_block(
                    block, h, b, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr,
                    gain_ptr, p, row_plane, q_stride_b, q_stride_h, Q_STEP, k_stride_b, k_stride_h, K_STEP, v_stride_b,
                    v_stride_h, V_STEP, o_stride_b, o_stride_h, O_STEP, do_stride_b, do_stride_h, DO_STEP,
                    dq_stride_b, dq_stride_h, DQ_STEP, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr,
                    doc_stop_ptr, 0, 0,
                    KIND, P, COSINE, LOG_N, GAIN, SCALE, SMALL, GROUP, D, BLOCK_D, CAUSAL, WINDOWED, PACKED,
                    HAS_LENGTHS, LOG_DEGREE, DOT, WIDE, STEEP, BLOCK_M, 16, 1, False, True,
                )  # fmt: skip


@triton.jit(do_not_specialize=["Lq", "Lk", "window", "group", "blocks"])
def key_gradient_repair_kernel(
    broken_ptr, blocks, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    do_stride_b, do_stride_h, dk_stride_b, dk_stride_h, dv_stride_b, dv_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr,
    SMALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    DO_STEP: tl.constexpr, DK_STEP: tl.constexpr, DV_STEP: tl.constexpr,
):  # fmt: skip
    """Computes again those of BLOCKS blocks of keys of a head that broken_ptr (B, Hkv, blocks) says are not finite."""
    first, h_kv, b, broken_ptr, marked = _marks_of_program(broken_ptr, Hkv, blocks, BLOCKS)
    if marked:
        for block in tl.range(first, tl.minimum(first + BLOCKS, blocks), num_stages=1):
            if tl.load(broken_ptr + block) > 0:
                key_block(
                    block, h_kv, b, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p,
                    row_plane, group, q_stride_b, q_stride_h, Q_STEP, k_stride_b, k_stride_h, K_STEP, v_stride_b,
                    v_stride_h, V_STEP, do_stride_b, do_stride_h, DO_STEP, dk_stride_b, dk_stride_h, DK_STEP,
                    dv_stride_b, dv_stride_h, DV_STEP, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr,
                    doc_stop_ptr, 0, 0,
                    KIND, P, COSINE, LOG_N, SCALE, SMALL, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                    LOG_DEGREE, DOT, WIDE, 0, 16, BLOCK_N, 1, False, True,
                )  # fmt: skip
