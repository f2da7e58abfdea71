# mypy: ignore-errors
"""dq of the windowed kernels in Gluon: what fused/window_query_gradient.py computes in Triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lssar.ops.fused.hopper.memory import (
    announce_pair,
    end_barriers,
    fetch_pair,
    load_pair,
    load_rows,
    pointer_load,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_ring,
)
from lssar.ops.fused.primitives import LOG2E, keys_of_rows, not_finite, visible_keys
from lssar.ops.fused.window import (
    EXP,
    FAR,
    REWEIGHTED,
    near_one,
    scale_near_one,
    score_factor,
    steep_rows,
)
from lssar.ops.fused.window_gradients import GAIN_PLANE, orthogonal_part, rest_of_norm
from lssar.ops.fused.window_query_gradient import query_terms, saved_numbers, store_for_keys


@gluon.jit
def _fetch_key_scales(ptr, ring, start, stage, Lk, N: gl.constexpr, COSINE: gl.constexpr):
    """Start copying 1 / |k| of a tile; past the last key, of it."""
    if COSINE:
        keys = start + gl.arange(0, N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        pointer_load(ring.index(stage), ptr + gl.minimum(keys, Lk - 1))
    async_copy.commit_group()


@gluon.jit
def _terms(
    x, dp, key_scale, row_factor, first, second, delta, p, start, row_start, row_stop, full_lo, full_hi, steep,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """query_terms of a tile, the sum of g and, for the product with k, the gradient of scores."""
    N: gl.constexpr = x.shape[1]
    keys = (start + gl.arange(0, N, gl.SliceLayout(0, x.type.layout)))[None, :]
    g, sigma = query_terms(
        x, dp, key_scale, row_factor[:, None], first[:, None], second[:, None], delta[:, None], steep, p, keys,
        row_start[:, None], row_stop[:, None], (start < full_lo) | (start + N > full_hi),
        KIND, P, COSINE, LOG_DEGREE, STEEP,
    )  # fmt: skip
    total = row_factor
    if KIND == REWEIGHTED:
        total = gl.sum(g, 1)
    if KIND != EXP:
        g *= sigma
    return g, sigma, total


@gluon.jit(do_not_specialize=["Lq", "Lk", "window"])
def window_query_gradient_kernel(
    broken_ptr, o_ptr, dq_ptr, rows_ptr, to_keys_ptr, key_scale_ptr, gain_ptr, p, row_plane,
    o_stride_b, o_stride_h, dq_stride_b, dq_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_all, k_all, v_all, do_all,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, LOG_N: gl.constexpr, GAIN: gl.constexpr,
    SCALE: gl.constexpr, SMALL: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    PACKED: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, O_STEP: gl.constexpr, DQ_STEP: gl.constexpr,
):  # fmt: skip
    """As the kernel in Triton for bfloat16; and whether dq is not finite, for the kernel that repairs it."""
    block, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first_row, h_kv = block * BLOCK_M, h // GROUP
    b64, h64 = b.to(gl.int64), h.to(gl.int64)
    key_scale_ptr += (b64 * Hkv + h_kv) * Lk
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])  # [M, N]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [M, D]
    query_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    of_sums: gl.constexpr = gl.SliceLayout(1, sum_layout)
    element: gl.constexpr = o_ptr.dtype.element_ty

    lo, hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED, BLOCK_M, BLOCK_N
    )
    steps = gl.maximum(gl.cdiv(hi - lo, BLOCK_N), 1)  # a loop that may make no step: ptxas serialises its products

    q_ring, do_ring = tile_ring(element, 1, BLOCK_M, D), tile_ring(element, 1, BLOCK_M, D)
    k_ring, v_ring = tile_ring(element, STAGES, BLOCK_N, D), tile_ring(element, STAGES, BLOCK_N, D)
    scales_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], scales_layout)
    rows_ready, keys_ready = tile_barriers(1), tile_barriers(STAGES)
    program_barrier()  # all threads see the barriers' start
    q_tiles = q_all, b, h
    do_tiles = do_all, b, h
    k_tiles = k_all, b, h_kv
    v_tiles = v_all, b, h_kv
    fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, first_row, 0, True)
    for step in gl.static_range(STAGES - 1):
        start = lo + step * BLOCK_N
        fetch_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, start, step, step < steps)
        _fetch_key_scales(key_scale_ptr, scales, start, step, Lk, BLOCK_N, COSINE)

    rows = first_row + gl.arange(0, BLOCK_M, of_rows)
    inside = rows < Lq
    at = (b64 * Hq + h64) * Lq + rows
    row_plane = gl.cast(row_plane, gl.int64)
    first, second, z = saved_numbers(rows_ptr + at, row_plane, inside, KIND, COSINE)
    o = load_rows(o_ptr + b64 * o_stride_b + h64 * o_stride_h, first_row, Lq, O_STEP, load_layout, BLOCK_M, D)
    row_start, row_stop = visible_keys(rows, Lq, Lk, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED)
    n = (row_stop - row_start).to(gl.float32)
    if GAIN:
        gain = gl.load(gain_ptr + h).to(gl.float32)
    else:
        gain = 1.0
    factor = score_factor(n, gain, SCALE, LOG_N, False)
    mbarrier.wait(rows_ready.index(0), 0)
    do = do_ring.index(0)
    delta = gl.sum(do.load(load_layout).to(gl.float32) * o.to(gl.float32), 1)
    delta = gl.convert_layout(delta, of_rows)  # [M]
    q = q_ring.index(0).load(sum_layout).to(gl.float32)
    if COSINE:
        inverse_norm = gl.load(rows_ptr + at + (1 if KIND == EXP else 3) * row_plane, mask=inside, other=0.0)
        up = scale_near_one(inverse_norm, SMALL)
        q = q * gl.convert_layout(up, of_sums)[:, None]
        raw_factor = gl.minimum(gl.maximum(factor * LOG2E * inverse_norm, -FAR), FAR)  # for products with q as it is
        row_factor = factor * LOG2E * rest_of_norm(inverse_norm, SMALL)
    else:
        q, _, up = near_one(q, SMALL, False)
        up = gl.convert_layout(up, of_rows)
        row_factor = gl.minimum(gl.maximum(factor * LOG2E * up, 1.0 / FAR), FAR)
        raw_factor, inverse_norm = factor, factor
    IN_SHARED: gl.constexpr = KIND == REWEIGHTED and D == 128  # two sums leave no registers for the queries
    q_near = gl.convert_layout(q.to(element), query_layout)
    if IN_SHARED:
        program_barrier()  # all have read q
        q_ring.index(0).store(q.to(element))
        fence_async_shared()
        program_barrier()
        q_near = q_ring.index(0)
    steep, line_slope, line_intercept, row_factor = steep_rows(first, second, row_factor, inside, p, P, STEEP)

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
    # Left to run on into the next step, the last product makes ptxas serialise all (head size 64: C7513, two: C7511).
    AWAITED: gl.constexpr = D == 64 or KIND == REWEIGHTED
    gk = gl.zeros([BLOCK_M, D], gl.float32, sum_layout)
    sk = gk
    if not AWAITED:
        gk = warpgroup_mma_init(gk)
    g = gl.convert_layout(nothing.to(element), factor_layout)
    sigma = g
    g_sum = n * 0.0
    for step in range(steps):
        stage = step % STAGES
        start = lo + step * BLOCK_N
        k, v = k_ring.index(stage), v_ring.index(stage)
        mbarrier.wait(keys_ready.index(stage), step // STAGES & 1)
        score = warpgroup_mma(q_near, k.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [M, N]
        value = warpgroup_mma(do, v.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [M, N]
        async_copy.wait_group(STAGES - 2)
        # Waiting for factors as well keeps them in their registers until the products that read them end.
        if IN_SHARED:
            x, dp = warpgroup_mma_wait(0, (score, value))
        elif AWAITED:
            x, dp, q_near = warpgroup_mma_wait(0, (score, value, q_near))
        else:
            gk, x, dp, q_near, g = warpgroup_mma_wait(0, (gk, score, value, q_near, g))
        free = (step + STAGES - 1) % STAGES
        ahead = start + (STAGES - 1) * BLOCK_N
        announce_pair(k_tiles, v_tiles, keys_ready, free, step + STAGES - 1 < steps)
        program_barrier()  # every warp is done with the stage before, and has its part of 1 / |k|
        load_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, ahead, free, step + STAGES - 1 < steps)
        _fetch_key_scales(key_scale_ptr, scales, ahead, free, Lk, BLOCK_N, COSINE)
        key_scale = scales.index(stage).load(gl.SliceLayout(0, score_layout))[None, :]
        if STEEP:
            if steep:
                ds, twice_sigma, part = _terms(
                    x, dp, key_scale, row_factor, line_slope, line_intercept, delta, p, start, row_start, row_stop,
                    full_lo, full_hi, True, KIND, P, COSINE, LOG_DEGREE, True,
                )  # fmt: skip
            else:
                ds, twice_sigma, part = _terms(
                    x, dp, key_scale, row_factor, line_slope, line_intercept, delta, p, start, row_start, row_stop,
                    full_lo, full_hi, False, KIND, P, COSINE, LOG_DEGREE, False,
                )  # fmt: skip
        else:
            ds, twice_sigma, part = _terms(
                x, dp, key_scale, row_factor, first, second, delta, p, start, row_start, row_stop, full_lo, full_hi,
                False, KIND, P, COSINE, LOG_DEGREE, False,
            )  # fmt: skip
        g = gl.convert_layout(ds.to(element), factor_layout)
        gk = warpgroup_mma(g, k, gk, is_async=True)
        if KIND == REWEIGHTED:
            g_sum += part
            sigma = gl.convert_layout(twice_sigma.to(element), factor_layout)
            sk = warpgroup_mma(sigma, k, sk, is_async=True)
            gk, sk, g, sigma = warpgroup_mma_wait(0, (gk, sk, g, sigma))
        elif AWAITED:
            gk, g = warpgroup_mma_wait(0, (gk, g))
    if not AWAITED:
        gk, g = warpgroup_mma_wait(0, (gk, g))
    async_copy.wait_group(0)

    mean, half = store_for_keys(
        to_keys_ptr + at, row_plane, inside, first, second, z, raw_factor, up, delta, g_sum, n, steep, p,
        KIND, COSINE, LOG_DEGREE, STEEP,
    )  # fmt: skip
    if KIND == REWEIGHTED:
        gk = gk - sk * gl.convert_layout(mean, of_sums)[:, None]
    if KIND != EXP:  # before the norm: the product of the two may leave float32's range
        gk = gk * gl.convert_layout(half, of_sums)[:, None]
    if COSINE:
        norm = gl.convert_layout(inverse_norm, of_sums)
        lacking = norm
        if IN_SHARED:
            lacking = rest_of_norm(norm, SMALL)
        unit = q_ring.index(0).load(sum_layout).to(gl.float32) * lacking[:, None]
        gk, along = orthogonal_part(gk, unit, norm * gl.convert_layout(factor, of_sums))
        checked = gl.sum(along, 0)
        if GAIN:
            along = gl.convert_layout(along, of_rows) * score_factor(n, 1.0, SCALE, LOG_N, False)
            gl.store(to_keys_ptr + at + GAIN_PLANE * row_plane, along, mask=inside)
    else:
        gk = gk * gl.convert_layout(factor, of_sums)[:, None]
        checked = gl.sum(gl.sum(gk, 1), 0)
    dq = gl.convert_layout(gk.to(element), load_layout)
    store_rows(dq_ptr + b64 * dq_stride_b + h64 * dq_stride_h, dq, first_row, Lq, DQ_STEP, load_layout, BLOCK_M, D)
    gl.store(broken_ptr + (b64 * Hq + h64) * gl.num_programs(0) + block, not_finite(checked).to(gl.int32))
    end_barriers(rows_ready)
    end_barriers(keys_ready)
