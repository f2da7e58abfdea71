"""dk and dv of short windows (see window.py), from the numbers of rows that the dq kernel leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    LN2,
    LOG2E,
    dot,
    ex2,
    load_tile,
    not_finite,
    rows_of_keys,
    sigmoid2,
    softplus2,
    visible_keys,
)
from lssar.ops.fused.steep import GENERAL, SHORT, TANH_SCALE, line_of_form
from lssar.ops.fused.window import (
    EXP,
    FAR,
    REWEIGHTED,
    head_source,
    near_one,
    read_head,
    scale_near_one,
    score_factor,
    weight_power,
)
from lssar.ops.fused.window_gradients import (
    STEEP_PLANE,
    finite_entries,
    hide_both,
    orthogonal_part,
    program_numbers,
    rest_of_norm,
    root_and_twice_sigma,
    store_gradient,
)


@triton.jit
def _values_of_rows(
    at, row_plane, inside, KIND: tl.constexpr, COSINE: tl.constexpr, LOG_DEGREE: tl.constexpr
):  # fmt: skip
    """Six numbers a row that key_terms takes, [M, 1]; those that it does not need repeat others."""
    first = tl.load(at, mask=inside, other=FAR if KIND == EXP else 0.0)[:, None]
    second = tl.load(at + row_plane, mask=inside, other=FAR if KIND == EXP and not COSINE else 0.0)[:, None]
    delta = tl.load(at + 2 * row_plane, mask=inside, other=0.0)[:, None]
    intercept, mean, inverse = delta, delta, delta
    if KIND == REWEIGHTED:
        intercept = tl.load(at + 3 * row_plane, mask=inside, other=0.0)[:, None]
        mean = tl.load(at + 4 * row_plane, mask=inside, other=0.0)[:, None]
        if LOG_DEGREE == 0:
            inverse = tl.load(at + 5 * row_plane, mask=inside, other=0.0)[:, None]
    return first, second, delta, intercept, mean, inverse


@triton.jit
def key_terms(
    x, dp, key_scale, key_down, key_up, factor, first, second, delta, intercept, mean, inverse, p,
    keys, row_start, row_stop, masked, steep,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_DEGREE: tl.constexpr, STEEP: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores of a tile; with cosine the latter times what makes products scores. first to
    inverse: as the dq kernel stores them (in _store_three or _store_line). All arguments are broadcast."""
    if KIND == EXP:
        if COSINE:
            weight = ex2(x * second * key_scale - first)
            ds = weight * (dp * second - delta)
        else:
            weight = ex2(tl.minimum((x - first * key_down) * (factor * key_up) - second, 0.0))
            ds = weight * (dp - delta)
        weight, ds = hide_both(weight, ds, keys, row_start, row_stop, masked)
    else:
        slope, to_score = first, second
        scale = 2.0 * slope
        if KIND == REWEIGHTED:
            line_factor = to_score
            if STEEP:
                slope, intercept = line_of_form(slope, intercept, tl.where(steep, SHORT, GENERAL))
                line_factor = tl.where(steep, to_score * TANH_SCALE, to_score)
            x = x * line_factor * key_scale
            root, sigma = root_and_twice_sigma(x, 0.5 * to_score, slope, intercept, steep, LOG_DEGREE, STEEP)
            y = weight_power(root, p, P, 1)
            weight = y * root
            scale *= p
            if LOG_DEGREE == 0:
                weight *= inverse
                scale *= inverse
            if LOG_DEGREE == 0:
                ds = (dp - delta) * y * scale - mean  # in this order: far from one, dp * scale overflows
            else:
                ds = (dp * scale - delta * scale) * y - mean
        else:
            x = x * to_score * key_scale
            two_a = softplus2(x, LOG_DEGREE)
            sigma = sigmoid2(x, two_a, LOG_DEGREE) * to_score
            weight = two_a * slope
            ds = dp * scale - delta * scale
        weight, sigma = hide_both(weight, sigma, keys, row_start, row_stop, masked)
        ds *= sigma  # last: with tiny queries and steep weights the product of all factors overflows
    return weight, ds


@triton.jit
def keys_near_one(k, key_scale_ptr, keys, key_stop, COSINE: tl.constexpr, SMALL: tl.constexpr):
    """k [N, D] times powers of two that bring it near one; with cosine 1 / |k| and what the unit vectors still lack,
    both [N], else the power and its inverse."""
    if COSINE:
        inverse_norm = tl.load(key_scale_ptr + keys, mask=keys < key_stop, other=0.0)
        down = scale_near_one(inverse_norm, SMALL)
        return (k.to(tl.float32) * down[:, None]).to(k.dtype), inverse_norm, rest_of_norm(inverse_norm, SMALL), 1.0, 1.0
    else:
        near, down, up = near_one(k.to(tl.float32), SMALL, True)
        nothing = keys.to(tl.float32) * 0.0
        return near.to(k.dtype), nothing, nothing, down, up


@triton.jit
def key_block(
    block, h_kv, b, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_tiles, do_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr,
    SMALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    STEEP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of a block of keys; returns whether any of it is not finite.

    AGAIN: the same for a block that was not finite. Rows whose delta is not finite (see query_block) contribute
    nothing, and their infinities and NaNs count as 0, since 0 * inf is NaN.
    """
    first_key = block * BLOCK_N
    batch, first_head = b, h_kv * group
    h_kv, b = h_kv.to(tl.int64), b.to(tl.int64)
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    dk_ptr += b * dk_stride_b + h_kv * dk_stride_h
    dv_ptr += b * dv_stride_b + h_kv * dv_stride_h
    row_plane = tl.cast(row_plane, tl.int64)

    row_offsets, offsets, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = (first_key + offsets)[None, :]
    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    v = load_tile(v_ptr, first_key, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
    k_raw = load_tile(k_ptr, first_key, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
    k, inverse_norm, key_scale, key_down, key_up = keys_near_one(
        k_raw, key_scale_ptr + (b * Hkv + h_kv) * Lk, first_key + offsets, key_stop, COSINE, SMALL
    )
    TURNED: tl.constexpr = BLOCK_N < 64  # sums as [D, N]: the tensor cores of Hopper make 64 rows at once
    dk = tl.zeros([BLOCK_D, BLOCK_N] if TURNED else [BLOCK_N, BLOCK_D], tl.float32)
    dv = dk
    for member in range(group):
        h = h_kv * group + member
        q_head = q_ptr + b * q_stride_b + h * q_stride_h
        do_head = do_ptr + b * do_stride_b + h * do_stride_h
        rows_head = to_keys_ptr + (b * Hq + h) * Lq
        q_source = head_source(q_head, q_tiles, batch, first_head + member, TMA)
        do_source = head_source(do_head, do_tiles, batch, first_head + member, TMA)
        for start in tl.range(row_lo // BLOCK_M * BLOCK_M, row_hi, BLOCK_M, num_stages=STAGES):
            rows = start + row_offsets
            q = read_head(q_source, start, Lq, q_stride_l, row_offsets, columns, D, TMA)  # [M, D]
            do = read_head(do_source, start, Lq, do_stride_l, row_offsets, columns, D, TMA)  # [M, D]
            if AGAIN:
                q, do = finite_entries(q), finite_entries(do)
            x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
            dp = dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )  # [M]
            factor = rows.to(tl.float32) * 0.0 + SCALE * LOG2E
            if LOG_N and not COSINE:
                factor = score_factor((row_stop - row_start).to(tl.float32), LOG2E, SCALE, LOG_N, LOG_DEGREE == 0)
            masked = (start < full_lo) | (start + BLOCK_M > full_hi)
            if AGAIN:
                of_row = tl.load(rows_head + 2 * row_plane + rows, mask=rows < Lq, other=0.0)
                row_stop = tl.where(not_finite(of_row), row_start, row_stop)
                masked = True
            steep = False
            if STEEP_ROWS > 0:
                steep = True
                for row in tl.static_range(0, BLOCK_M, min(BLOCK_M, STEEP_ROWS)):
                    steep &= tl.load(rows_head + STEEP_PLANE * row_plane + start + row, start + row < Lq, 1.0) > 0
            first, second, delta, intercept, mean, inverse = _values_of_rows(
                rows_head + rows, row_plane, rows < Lq, KIND, COSINE, LOG_DEGREE
            )
            weight, ds = key_terms(
                x, dp, key_scale[None, :], key_down, key_up, factor[:, None], first, second, delta, intercept, mean,
                inverse, p, keys, row_start[:, None], row_stop[:, None], masked, steep,
                KIND, P, COSINE, LOG_DEGREE, STEEP_ROWS > 0,
            )  # fmt: skip
            if LOG_N and not COSINE:
                ds *= factor[:, None]
            if AGAIN:
                weight, ds = hide_both(weight, ds, keys, row_start[:, None], row_stop[:, None], masked)
            operand = q.to(tl.float32) if WIDE else q
            weight, ds = weight.to(do.dtype), ds.to(operand.dtype)
            if TURNED:
                dv = dot(tl.trans(do), weight, dv, PRECISION=DOT)
                dk = dot(tl.trans(operand), ds, dk, PRECISION=DOT)
            else:
                dv = dot(tl.trans(weight), do, dv, PRECISION=DOT)
                dk = dot(tl.trans(ds), operand, dk, PRECISION=DOT)
    if TURNED:
        dk, dv = tl.trans(dk), tl.trans(dv)
    if COSINE:
        k_raw = load_tile(k_ptr, first_key, key_stop, k_stride_l, offsets, columns, D, True, True)
        if AGAIN:
            k_raw = finite_entries(k_raw)
        unit = k_raw.to(tl.float32) * inverse_norm[:, None]
        dk, along = orthogonal_part(dk, unit, inverse_norm * (LN2 if KIND == EXP else 1.0))  # scores are in base 2
    else:
        dk *= LN2 if LOG_N else SCALE
    store_gradient(dk_ptr, dk, first_key, Lk, dk_stride_l, offsets, columns, D)
    store_gradient(dv_ptr, dv, first_key, Lk, dv_stride_l, offsets, columns, D)
    # A sum of numbers that are not all finite is not finite. (One that overflows repeats the block for nothing.)
    return not_finite(tl.sum(dv) + tl.sum(along) if COSINE else tl.sum(dk + dv))


@triton.jit(do_not_specialize=["Lq", "Lk", "window", "group"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane, group,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    do_stride_b, do_stride_h, dk_stride_b, dk_stride_h, dv_stride_b, dv_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_tiles, do_tiles,
    KIND: tl.constexpr, P: tl.constexpr, COSINE: tl.constexpr, LOG_N: tl.constexpr, SCALE: tl.constexpr,
    SMALL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    STEEP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    DO_STEP: tl.constexpr, DK_STEP: tl.constexpr, DV_STEP: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them. STEEP_ROWS: rows of a block of the dq
    kernel, each of which says whether its rows are steep; 0: none does. q_tiles, do_tiles: descriptors, with TMA."""
    broken = True
    for AGAIN in tl.static_range(2):
        if broken:
            block, h_kv, b = program_numbers(AGAIN)
            broken = key_block(
                block, h_kv, b, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p,
                row_plane, group, q_stride_b, q_stride_h, Q_STEP, k_stride_b, k_stride_h, K_STEP, v_stride_b,
                v_stride_h, V_STEP, do_stride_b, do_stride_h, DO_STEP, dk_stride_b, dk_stride_h, DK_STEP, dv_stride_b,
                dv_stride_h, DV_STEP, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
                q_tiles, do_tiles,
                KIND, P, COSINE, LOG_N, SCALE, SMALL, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                LOG_DEGREE, DOT, WIDE, 0 if AGAIN else STEEP_ROWS, 16 if AGAIN else BLOCK_M, BLOCK_N,
                1 if AGAIN else STAGES, TMA and not AGAIN, AGAIN,
            )  # fmt: skip
