"""Backward in Triton: a kernel over row blocks for dq and each row's sums, then one over key blocks for dk and dv.

The arithmetic is in gradients.py. There are no atomics, so gradients are the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.gradients import (
    EDGE_KEYS,
    FORM_PLANE,
    FULL_BLOCKS,
    key_weights,
    precise_score_gradient,
    query_gradient,
    query_row_factors,
    query_terms,
    row_scales,
    score_gradient,
    store_row_values,
)
from lssar.ops.fused.normalize import VALUE_BLOCK
from lssar.ops.fused.primitives import (
    HIDDEN,
    dot,
    head_and_block,
    keep_visible,
    keys_of_rows,
    lane_sum,
    load_tile,
    not_finite,
    read_tile,
    rows_of_keys,
    saturate,
    store_tile,
    tile_source,
    visible_keys,
    without_broken_rows,
)
from lssar.ops.fused.steep import GENERAL, TANH_SCALE, form_of_rows, general_line
from lssar.ops.fused.unit_rows import exact_unit_rows, norm_parts, scaled_unit_rows, unit_rows_backward


@triton.jit
def _query_sums(
    gk, sk, g_sum, q, do, k_ptr, v_ptr, v_stride, lo, hi, full_lo, full_hi, row_start, row_stop, key_stop,
    slope, intercept, unit_scale, delta, steep, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P, REWEIGHT: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, STEEP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Over keys lo..hi: gk [M, D] += sum g sigma k, sk [M, D] += sum sigma k, g_sum [M, 4] += sum g."""
    offsets = tl.arange(0, N)
    for start in tl.range(lo, hi, N, num_stages=STAGES):
        k = read_tile(k_ptr, start, key_stop, D, offsets, columns, D, TMA)  # [N, D]
        v = read_tile(v_ptr, start, key_stop, v_stride, offsets, columns, D, TMA)  # [N, D]
        x = dot(q, tl.trans(k), PRECISION=DOT)  # [M, N]
        dp = dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + N > full_hi)
        if masked:
            keys = (start + offsets)[None, :]
            x = keep_visible(x, keys, row_start[:, None], row_stop[:, None], HIDDEN)
            dp = keep_visible(dp, keys, row_start[:, None], row_stop[:, None], 0.0)  # v may not be finite
        g, sigma = query_terms(
            x, dp, slope[:, None], intercept[:, None], unit_scale[:, None], delta[:, None], steep & (masked == 0),
            P, REWEIGHT, LOG_DEGREE, STEEP,
        )  # fmt: skip
        if REWEIGHT:
            g_sum += lane_sum(g, M, N)
        g_sigma = (g * sigma).to(k.dtype)
        gk = dot(g_sigma, k, gk, PRECISION=DOT)
        if REWEIGHT:
            sk = dot(sigma.to(k.dtype), k, sk, PRECISION=DOT)
    return gk, sk, g_sum


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, passed_q_ptr, sizes_ptr, block_sizes_ptr,
    slope_ptr, intercept_ptr, z_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l,
    q_stride_b, q_stride_h, q_stride_l, dq_stride_b, dq_stride_h, dq_stride_l, row_stride, row_plane,
    gain_ptr, exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    HAS_GAIN: tl.constexpr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr,
    CACHE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, and what the dk, dv kernel needs of each row (store_row_values).

    That includes, at passed_q_ptr, contiguous, the queries scaled by a power of two in their own dtype with
    EXACT_QUERIES, else unit queries times their score scale. k: unit keys, contiguous.
    """
    blocks = tl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = head // Hq, head % Hq
    h_kv = h // (Hq // Hkv)
    b, h = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b * q_stride_b + h * q_stride_h
    passed_q_ptr += head.to(tl.int64) * Lq * D
    k_ptr += (b * Hkv + h_kv) * Lk * D
    v_ptr += b * v_stride_b + h_kv.to(tl.int64) * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h

    offsets = tl.arange(0, BLOCK_M)
    rows = first_row + offsets
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    key_lo, key_hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED,
        BLOCK_M, 1,
    )  # fmt: skip
    n = (row_stop - row_start).to(tl.float32)
    at = head.to(tl.int64) * row_stride + rows
    inside = rows < Lq
    slope = tl.load(slope_ptr + at, mask=inside, other=0.0)
    intercept = tl.load(intercept_ptr + at, mask=inside, other=0.0)
    z = tl.load(z_ptr + at, mask=inside, other=0.0)

    raw_q = load_tile(q_ptr, first_row, Lq, q_stride_l, offsets, columns, D, True)  # [M, D]
    near, norm_scale, rest = norm_parts(raw_q.to(tl.float32))
    q = scaled_unit_rows(near, rest, n, gain_ptr + h, LOG_D, HAS_GAIN, k_ptr.dtype.element_ty)
    if not EXACT_QUERIES:
        finite = tl.where(q == q, q, 0.0)  # products with it too; the forward has marked the row
        store_tile(passed_q_ptr, finite, first_row, Lq, D, offsets, columns, D)
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, offsets, columns, D, True)  # [M, D]
    o = load_tile(o_ptr, first_row, Lq, o_stride_l, offsets, columns, D, True)
    delta, bound, unit_scale = row_scales(
        do.to(tl.float32), o.to(tl.float32), sizes_ptr + (b * Hkv + h_kv) * Lk,
        block_sizes_ptr + (b * Hkv + h_kv) * tl.cdiv(Lk, VALUE_BLOCK), row_start, row_stop, key_lo, key_hi, full_lo,
        full_hi, tl.arange(0, EDGE_KEYS), tl.arange(0, FULL_BLOCKS), WINDOWED or PACKED,
    )  # fmt: skip

    form = form_of_rows(slope, intercept, inside, P if P > 0 else exponent) if STEEP else GENERAL
    gk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    g_lanes = tl.zeros([BLOCK_M, 4], tl.float32)
    keys = tile_source(k_ptr, key_stop, D, D, BLOCK_N, BLOCK_D, TMA)
    values = tile_source(v_ptr, key_stop, v_stride_l, D, BLOCK_N, BLOCK_D, TMA)
    for _ in range(tl.minimum(Lq, 1)):  # one turn: see scaled_unit_rows
        gk, sk, g_lanes = _query_sums(
            gk, sk, g_lanes, q, do, keys, values, v_stride_l, key_lo // BLOCK_N * BLOCK_N, key_hi, full_lo, full_hi,
            row_start, row_stop, key_stop, slope, intercept, unit_scale, delta * unit_scale, form != GENERAL, columns,
            D, BLOCK_M, BLOCK_N, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, DOT, STEEP, TMA, STAGES,
        )  # fmt: skip
        q = tl.zeros([BLOCK_M, BLOCK_D], q.dtype)

    mean, scale, kappa = query_row_factors(
        tl.sum(g_lanes, 1), n, slope, z, P if P > 0 else exponent, LOG_D, LOG_DEGREE == 0
    )  # fmt: skip
    raw_q = load_tile(q_ptr, first_row, Lq, q_stride_l, offsets, columns, D, True, True).to(tl.float32)
    near = raw_q * norm_scale[:, None]
    if REWEIGHT:
        gk = gk - sk * mean[:, None]
    dq, radial, scale, sound = query_gradient(
        gk, near, norm_scale, rest, z, delta, bound, mean, kappa, scale, gain_ptr + h, HAS_GAIN, LOG_DEGREE != 0
    )
    store_tile(dq_ptr, dq, first_row, Lq, dq_stride_l, offsets, columns, D)

    to_unit = scale * 0.0
    if EXACT_QUERIES:
        to_unit = tl.where(rest > 0, rest, 0.0)
        exact_q = tl.where(sound[:, None], near, 0.0)
        store_tile(passed_q_ptr, exact_q, first_row, Lq, D, offsets, columns, D)
    store_row_values(
        rows_ptr + at, row_plane, rows < row_stride, sound, slope, intercept, z, delta,
        mean * kappa * bound, scale * to_unit, form, radial, P if P > 0 else exponent,
        EXACT_QUERIES, LOG_DEGREE == 0, STEEP, HAS_GAIN, False,
    )  # fmt: skip


@triton.jit
def steep_block(flags_ptr, ROWS: tl.constexpr):
    """Whether ROWS rows are all steep. The first and the last tell: they lie in at most two blocks of the dq kernel."""
    return (tl.load(flags_ptr) > 0) & (tl.load(flags_ptr + ROWS - 1) > 0)


@triton.jit
def _key_sums(
    dk, dv, k_t, v_t, key_scale, q_ptr, do_ptr, rows_ptr, row_plane, do_stride, lo, hi, full_lo, full_hi,
    first_key, key_stop, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, columns,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P, REWEIGHT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr, REPAIR: tl.constexpr, SHORT_FORMS: tl.constexpr,
):  # fmt: skip
    """Over rows lo..hi: dk [N, D] += ds^T q, dv [N, D] += P^T dO.

    REPAIR: without rows whose dO is not finite. SHORT_FORMS: as in store_row_values of the kernel that stored the rows.
    """
    offsets = tl.arange(0, M)
    keys = first_key + tl.arange(0, N)
    for start in tl.range(lo, hi, M, num_stages=STAGES):
        q = read_tile(q_ptr, start, Lq, D, offsets, columns, D, TMA)  # [M, D]
        do = read_tile(do_ptr, start, Lq, do_stride, offsets, columns, D, TMA)  # [M, D]
        if REPAIR:
            do, broken = without_broken_rows(do)
        x = dot(q, k_t, PRECISION=DOT)  # [M, N]
        rows = start + offsets  # the values of rows past the last are zeros
        slope = tl.load(rows_ptr + rows)  # [M]
        intercept = tl.load(rows_ptr + row_plane + rows)
        factor = tl.load(rows_ptr + 2 * row_plane + rows)
        offset = tl.load(rows_ptr + 3 * row_plane + rows)
        mean = tl.load(rows_ptr + 4 * row_plane + rows)
        row_factor = tl.load(rows_ptr + 5 * row_plane + rows)
        if REPAIR and SHORT_FORMS:
            form = tl.load(rows_ptr + FORM_PLANE * row_plane + rows).to(tl.int32)
            slope, intercept = general_line(slope, intercept, form)
            row_factor = tl.where(form == GENERAL, row_factor, row_factor / TANH_SCALE)
            half = tl.where(form == GENERAL, 1.0, 2.0)
            factor, offset, mean = factor * half, offset * half, mean * half
        if EXACT_QUERIES:
            x = x * row_factor[:, None] * key_scale[None, :]
        masked = (start < full_lo) | (start + M > full_hi)
        if masked:
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )
            x = keep_visible(x, keys[None, :], row_start[:, None], row_stop[:, None], HIDDEN)
        short = steep_block(rows_ptr + FORM_PLANE * row_plane + start, M) & (masked == 0) if STEEP else False
        weight, y, sigma = key_weights(
            x, slope[:, None], intercept[:, None], short, P, REWEIGHT, LOG_DEGREE, STEEP
        )  # fmt: skip
        if not EXACT_QUERIES:
            weight = weight * row_factor[:, None]
        if masked:  # in a flat row hidden keys have the weight of all others
            weight = tl.where(x > HIDDEN, weight, 0.0)
        if REPAIR:
            weight = tl.where((broken == 0)[:, None], weight, 0.0)
        dv = dot(tl.trans(weight.to(do.dtype)), do, dv, PRECISION=DOT)
        dp = dot(do, v_t, PRECISION=DOT)  # [M, N], late, to save registers
        if LOG_DEGREE == 0:
            ds = precise_score_gradient(dp, factor[:, None], offset[:, None], y, mean[:, None], sigma, REWEIGHT)
        else:
            ds = score_gradient(dp * factor[:, None] - offset[:, None], y, mean[:, None], sigma, REWEIGHT)
        if masked:  # v may not be finite
            ds = tl.where(x > HIDDEN, ds, 0.0)
        if REPAIR:
            ds = tl.where((broken == 0)[:, None], ds, 0.0)
        if q.dtype == tl.float16:
            ds = saturate(ds, tl.float16)
        dk = dot(tl.trans(ds.to(q.dtype)), q, dk, PRECISION=DOT)
    return dk, dv


@triton.jit
def _key_block(
    program, programs, broken_ptr, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l,
    raw_k_stride_b, raw_k_stride_h, raw_k_stride_l,
    dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l, row_stride, row_plane,
    exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr,
    CACHE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    REPAIR: tl.constexpr, SHORT_FORMS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of a program's block of keys; with REPAIR, only if its dv is not finite. Arguments as below."""
    blocks = tl.cdiv(Lk, BLOCK_N)
    head_kv, block = head_and_block(program, programs, blocks, CACHE // D // Lq // (Hq // Hkv))
    first_key = block * BLOCK_N  # under a causal mask the first keys have the most rows
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(tl.int64), h_kv.to(tl.int64)
    k_ptr += head_kv.to(tl.int64) * Lk * D
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    raw_k_ptr += b64 * raw_k_stride_b + h64 * raw_k_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h

    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    wanted = True
    if REPAIR:
        written = load_tile(dv_ptr, first_key, Lk, dv_stride_l, offsets, columns, D, True)
        wanted = not_finite(tl.sum(written.to(tl.float32)))
    if wanted:
        key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
            first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
            CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
        )  # fmt: skip

        if EXACT_QUERIES:
            raw_k = load_tile(raw_k_ptr, first_key, key_stop, raw_k_stride_l, offsets, columns, D, True)  # [N, D]
            exact_k, key_scale = exact_unit_rows(raw_k.to(tl.float32))
            k = exact_k.to(raw_k.dtype)
        else:
            k = load_tile(k_ptr, first_key, key_stop, D, offsets, columns, D, True)  # [N, D]
            key_scale = tl.full([BLOCK_N], 1.0, tl.float32)
        v = load_tile(v_ptr, first_key, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for member in range(group):  # even for a group of one: without this loop ptxas serialises the products (C7515)
            h = h_kv * group + member
            head = (b * Hq + h).to(tl.int64)
            h = h.to(tl.int64)
            q_head = tile_source(q_ptr + head * Lq * D, Lq, D, D, BLOCK_M, BLOCK_D, TMA)
            do_head = do_ptr + b64 * do_stride_b + h * do_stride_h
            do_head = tile_source(do_head, Lq, do_stride_l, D, BLOCK_M, BLOCK_D, TMA)
            rows_head = rows_ptr + head * row_stride
            dk, dv = _key_sums(
                dk, dv, tl.trans(k), tl.trans(v), key_scale, q_head, do_head, rows_head, row_plane, do_stride_l,
                row_lo // BLOCK_M * BLOCK_M, row_hi, full_lo, full_hi,
                first_key, key_stop, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, columns,
                D, BLOCK_M, BLOCK_N, P if P > 0 else exponent, REWEIGHT, CAUSAL, WINDOWED, PACKED, LOG_DEGREE, DOT,
                EXACT_QUERIES, STEEP, TMA, STAGES, REPAIR, SHORT_FORMS,
            )  # fmt: skip
        raw_k = load_tile(raw_k_ptr, first_key, key_stop, raw_k_stride_l, offsets, columns, D, True, True)
        dk = unit_rows_backward(dk, raw_k.to(tl.float32))
        store_tile(dk_ptr, dk, first_key, Lk, dk_stride_l, offsets, columns, D)
        store_tile(dv_ptr, dv, first_key, Lk, dv_stride_l, offsets, columns, D)
        if not REPAIR and not_finite(tl.sum(dv)):
            tl.store(broken_ptr, 1)


@triton.jit(do_not_specialize=["Lq", "Lk", "window", "programs"])
def key_gradient_kernel(
    broken_ptr, programs, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l,
    raw_k_stride_b, raw_k_stride_h, raw_k_stride_l,
    dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l, row_stride, row_plane,
    exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr, EXACT_QUERIES: tl.constexpr, STEEP: tl.constexpr,
    CACHE: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    REPAIR: tl.constexpr, SHORT_FORMS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them.

    q: the queries that query_gradient_kernel passes on.

    REPAIR: after this kernel, or the one in Gluon, has run with as many `programs`, of this tile. A dO that is not
    finite makes dv NaN for all keys of a tile, since 0 * inf is NaN: broken_ptr then holds a 1, and a few programs look
    at all blocks and compute those whose dv is not finite again, without such rows. SHORT_FORMS: see _key_sums.
    """
    if REPAIR:
        if tl.load(broken_ptr) != 0:
            for program in range(tl.program_id(0), programs, tl.num_programs(0)):
                _key_block(
                    program, programs, broken_ptr, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
                    v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l, raw_k_stride_b,
                    raw_k_stride_h, raw_k_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h,
                    dv_stride_l, row_stride, row_plane, exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr,
                    doc_start_ptr, doc_stop_ptr, P, REWEIGHT, D, BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS,
                    LOG_DEGREE, DOT, EXACT_QUERIES, STEEP, CACHE, TMA, BLOCK_M, BLOCK_N, STAGES, REPAIR, SHORT_FORMS,
                )  # fmt: skip
    else:
        _key_block(
            tl.program_id(0), programs, broken_ptr, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
            v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l, raw_k_stride_b, raw_k_stride_h,
            raw_k_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l, row_stride,
            row_plane, exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, P, REWEIGHT, D,
            BLOCK_D, CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, LOG_DEGREE, DOT, EXACT_QUERIES, STEEP, CACHE, TMA, BLOCK_M,
            BLOCK_N, STAGES, REPAIR, SHORT_FORMS,
        )  # fmt: skip
