"""What the backward knows of each row before it reads a key: from o and `lower` of the forward, and dO."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.gradients import query_row_factors, store_row_values
from lssar.ops.fused.primitives import (
    exact_unit_rows,
    load_tile,
    not_finite,
    store_tile,
    visible_keys,
    with_gain,
)
from lssar.ops.fused.steep import all_steep


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def row_values_kernel(
    q_ptr, o_ptr, do_ptr, lower_ptr, exact_q_ptr, slope_ptr, intercept_ptr, z_ptr, y_ptr, rows_ptr,
    q_stride_b, q_stride_h, q_stride_l, o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l,
    row_stride, row_plane, gain_ptr, exponent, Hq, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    HAS_GAIN: tl.constexpr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The planes that query_gradient_kernel stores (store_row_values), and with EXACT_QUERIES its exact_q, contiguous.

    lower, y: what forward_kernel leaves with SAVE_LOWER; not read for LSSA, whose gradient has no mean. The part of the
    gain's gradient is not known without a pass over the keys: in its plane there is a 0, or NaN in rows that are not
    sound, whose dq is not finite either.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, first_row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    columns = tl.arange(0, BLOCK_D)
    at = head.to(tl.int64) * row_stride + rows
    inside = rows < Lq
    slope = tl.load(slope_ptr + at, mask=inside, other=0.0)
    intercept = tl.load(intercept_ptr + at, mask=inside, other=0.0)
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)

    do_ptr += b * do_stride_b + h * do_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, offsets, columns, D, True).to(tl.float32)  # [M, D]
    o = load_tile(o_ptr, first_row, Lq, o_stride_l, offsets, columns, D, True).to(tl.float32)
    delta = tl.sum(do * o, 1)
    y = tl.load(y_ptr + at, mask=inside, other=0.0) if REWEIGHT else z * 0.0
    mean, scale, kappa = query_row_factors(y, n, slope, z, P if P > 0 else exponent, LOG_D, LOG_DEGREE == 0)
    sound = (z == z) & (not_finite(delta) == 0)
    if REWEIGHT:
        lower_ptr += head.to(tl.int64) * Lq * D
        lower = load_tile(lower_ptr, first_row, Lq, D, offsets, columns, D, True).to(tl.float32)  # [M, D]
        apart = 2.0 * tl.sum(do * lower, 1)  # the mean of dO.v - delta, weighted as y
        sound = sound & (not_finite(apart) == 0)
        mean = mean * kappa * apart
    if HAS_GAIN:
        scale = with_gain(scale, tl.load(gain_ptr + h), LOG_DEGREE != 0)

    to_unit = scale * 0.0
    if EXACT_QUERIES:
        q_ptr += b * q_stride_b + h * q_stride_h
        q = load_tile(q_ptr, first_row, Lq, q_stride_l, offsets, columns, D, True).to(tl.float32)  # [M, D]
        exact_q, to_unit = exact_unit_rows(q)
        exact_q = tl.where(sound[:, None], exact_q, 0.0)
        store_tile(exact_q_ptr + head.to(tl.int64) * Lq * D, exact_q, first_row, Lq, D, offsets, columns, D)
    steep = all_steep(slope, intercept, inside, P if P > 0 else exponent) if STEEP else False
    radial = tl.where(sound, 0.0, float("nan"))
    store_row_values(
        rows_ptr + at, row_plane, rows < row_stride, sound, slope, intercept, z, delta, mean, scale * to_unit, steep,
        radial, P if P > 0 else exponent, EXACT_QUERIES, LOG_DEGREE == 0, STEEP, True, SHORT,
    )  # fmt: skip
