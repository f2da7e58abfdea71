"""What follows hopper/joint_gradient.py: dq from its sums over keys."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import exact_unit_rows, load_tile, reciprocal, store_tile, unit_rows_backward


@triton.jit(do_not_specialize=["Lq"])
def finish_query_gradient_kernel(
    sums_ptr, q_ptr, dq_ptr, broken_rows_ptr, q_stride_b, q_stride_h, q_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    row_stride, Hq, Lq, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """sums (B, Hq, row_stride, D), gradients of unit queries times the factors of exact_unit_rows -> dq.

    broken_rows (B, Hq, row_stride): NaN for rows that see a value which is not finite, whose dq is NaN; else a number.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, first_row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    first = head.to(tl.int64) * row_stride  # of the head
    sums = load_tile(sums_ptr + first * D, first_row, Lq, D, offsets, columns, D, True)  # [M, D]
    q_ptr += b * q_stride_b + h * q_stride_h
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, offsets, columns, D, True).to(tl.float32)  # [M, D]
    broken = tl.load(broken_rows_ptr + first + first_row + offsets, mask=first_row + offsets < Lq, other=0.0)
    _, to_unit = exact_unit_rows(q)
    dq = unit_rows_backward(sums * reciprocal(to_unit)[:, None], q)
    dq = tl.where((broken == broken)[:, None], dq, float("nan"))
    store_tile(dq_ptr + b * dq_stride_b + h * dq_stride_h, dq, first_row, Lq, dq_stride_l, offsets, columns, D)
