# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""dk and dv of the windowed kernels in Gluon: what fused/window_key_gradient.py computes in Triton.

As in key_gradient.py scores are transposed, so that weights go from registers straight into the products with dO and q.
A block of keys sees few rows, so all that a program needs is on its way before it does anything else.
"""

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

from lssar.ops.fused.hopper.key_gradient import fetch_row_values, form_of_block
from lssar.ops.fused.hopper.memory import (
    announce_pair,
    end_barriers,
    fetch_pair,
    fetch_tiles,
    load_pair,
    load_rows,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_ring,
)
from lssar.ops.fused.hopper.quarters import from_quarters, quarters
from lssar.ops.fused.primitives import LN2, LOG2E, not_finite, rows_of_keys, visible_keys
from lssar.ops.fused.steep import GENERAL
from lssar.ops.fused.window import EXP, REWEIGHTED
from lssar.ops.fused.window_gradients import orthogonal_part, rest_of_norm
from lssar.ops.fused.window_key_gradient import key_terms, keys_near_one


@gluon.jit
def _terms_by_quarters(
    x, dp, key_scale, key_down, key_up, row_values, p, start, first_key, Lq, Lk, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr, KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr,
    STEEP: gl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores [N, M] of a tile, rounded to element, in the given layout.

    One quarter after the other: registers do not hold the intermediate values of a whole tile.
    """
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = M // 4
    xs = quarters(x)
    dps = quarters(dp)
    quarter_layout: gl.constexpr = xs[0].type.layout
    of_rows: gl.constexpr = gl.SliceLayout(0, quarter_layout)
    keys = (first_key + gl.arange(0, N, gl.SliceLayout(1, quarter_layout)))[:, None]
    weights = ()
    gradients = ()
    for i in gl.static_range(4):
        row_start, row_stop = keys, keys
        if MASKED:
            rows = start + i * COLUMNS + gl.arange(0, COLUMNS, of_rows)
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED
            )
            row_start, row_stop = row_start[None, :], row_stop[None, :]
        first = row_values.slice(i * COLUMNS, COLUMNS).load(of_rows)[None, :]
        second = row_values.slice(M + i * COLUMNS, COLUMNS).load(of_rows)[None, :]
        delta = row_values.slice(2 * M + i * COLUMNS, COLUMNS).load(of_rows)[None, :]
        intercept, mean = delta, delta
        if KIND == REWEIGHTED:
            intercept = row_values.slice(3 * M + i * COLUMNS, COLUMNS).load(of_rows)[None, :]
            mean = row_values.slice(4 * M + i * COLUMNS, COLUMNS).load(of_rows)[None, :]
        weight, ds = key_terms(
            xs[i], dps[i], key_scale[:, None], key_down, key_up, SCALE * LOG2E, first, second, delta, intercept, mean,
            delta, p, keys, row_start, row_stop, MASKED, STEEP, KIND, P, COSINE, LOG_DEGREE, STEEP,
        )  # fmt: skip
        weights = weights + (weight.to(element),)
        gradients = gradients + (ds.to(element),)
    weight = from_quarters(weights[0], weights[1], weights[2], weights[3], layout)
    ds = from_quarters(gradients[0], gradients[1], gradients[2], gradients[3], layout)
    return weight, ds


@gluon.jit
def _terms_if_steep(
    x, dp, key_scale, key_down, key_up, row_values, p, start, first_key, Lq, Lk, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr, KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr,
    STEEP: gl.constexpr,
):  # fmt: skip
    """_terms_by_quarters, short if all rows of the tile are steep."""
    if STEEP:
        if form_of_block(row_values, x.shape[1]) != GENERAL:
            weight, ds = _terms_by_quarters(
                x, dp, key_scale, key_down, key_up, row_values, p, start, first_key, Lq, Lk, window, doc_start_ptr,
                doc_stop_ptr, element, layout, KIND, P, COSINE, SCALE, CAUSAL, PACKED, LOG_DEGREE, MASKED, True,
            )  # fmt: skip
        else:
            weight, ds = _terms_by_quarters(
                x, dp, key_scale, key_down, key_up, row_values, p, start, first_key, Lq, Lk, window, doc_start_ptr,
                doc_stop_ptr, element, layout, KIND, P, COSINE, SCALE, CAUSAL, PACKED, LOG_DEGREE, MASKED, False,
            )  # fmt: skip
    else:
        weight, ds = _terms_by_quarters(
            x, dp, key_scale, key_down, key_up, row_values, p, start, first_key, Lq, Lk, window, doc_start_ptr,
            doc_stop_ptr, element, layout, KIND, P, COSINE, SCALE, CAUSAL, PACKED, LOG_DEGREE, MASKED, False,
        )  # fmt: skip
    return weight, ds


@gluon.jit
def _place(step, h_kv, row_lo, steps, GROUP: gl.constexpr, M: gl.constexpr):
    """Query head and first row of a step; `steps` of each head of the group."""
    if GROUP == 1:
        return h_kv, row_lo + step * M
    else:
        return h_kv * GROUP + step // steps, row_lo + step % steps * M


@gluon.jit
def _key_scale(
    ptr, first_key, Lk, N: gl.constexpr, COSINE: gl.constexpr, SMALL: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """What the unit vectors of keys_near_one still lack, [N]; ones if there is none."""
    keys = first_key + gl.arange(0, N, layout)
    if COSINE:
        return rest_of_norm(gl.load(ptr + keys, mask=keys < Lk, other=0.0), SMALL)
    else:
        return keys.to(gl.float32) * 0.0 + 1.0


@gluon.jit(do_not_specialize=["Lq", "Lk", "window"])
def window_key_gradient_kernel(
    broken_ptr, k_ptr, dk_ptr, dv_ptr, to_keys_ptr, key_scale_ptr, p, row_plane,
    k_stride_b, k_stride_h, dk_stride_b, dk_stride_h, dv_stride_b, dv_stride_h,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_all, v_all, do_all,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, SCALE: gl.constexpr, SMALL: gl.constexpr,
    D: gl.constexpr, CAUSAL: gl.constexpr, PACKED: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    K_STEP: gl.constexpr, DK_STEP: gl.constexpr, DV_STEP: gl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of bfloat16, and whether they are not finite, for the kernel that repairs them.

    BLOCK_M divides Lq; q_all, v_all, do_all: descriptors. STEEP: the dq kernel says which rows are steep.
    """
    block, h_kv, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first_key = block * BLOCK_N
    b64, h64 = b.to(gl.int64), h_kv.to(gl.int64)
    k_ptr += b64 * k_stride_b + h64 * k_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h
    key_scale_ptr += (b64 * Hkv + h64) * Lk
    to_keys_ptr += b64 * Hq * Lq

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])  # [N, M]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [N, D]
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [N, M], left factor
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    element: gl.constexpr = k_ptr.dtype.element_ty
    PLANES: gl.constexpr = 8 if KIND == REWEIGHTED else 4  # of to_keys_ptr; a power of two

    _, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED, False, BLOCK_N
    )
    row_lo = row_lo // BLOCK_M * BLOCK_M
    steps = gl.maximum(gl.cdiv(row_hi - row_lo, BLOCK_M), 1)  # of each head
    total = steps * GROUP

    k_ring, v_ring = tile_ring(element, 1, BLOCK_N, D), tile_ring(element, 1, BLOCK_N, D)
    q_ring, do_ring = tile_ring(element, STAGES, BLOCK_M, D), tile_ring(element, STAGES, BLOCK_M, D)
    values_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values_ring = gl.allocate_shared_memory(gl.float32, [STAGES, PLANES * BLOCK_M], values_layout)
    keys_ready, rows_ready = tile_barriers(1), tile_barriers(STAGES)
    program_barrier()  # all threads see the barriers' start
    v_tiles = v_all, b, h_kv
    fetch_tiles(v_tiles, v_ring, 0, 1, keys_ready.index(0), first_key)
    for step in gl.static_range(STAGES - 1):
        h, start = _place(gl.minimum(step, total - 1), h_kv, row_lo, steps, GROUP, BLOCK_M)
        q_tiles = q_all, b, h
        do_tiles = do_all, b, h
        fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, start, step, step < total)
        fetch_row_values(to_keys_ptr + h.to(gl.int64) * Lq, Lq, row_plane, values_ring, start, step, BLOCK_M)

    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, load_layout))
    raw_k = load_rows(k_ptr, first_key, Lk, K_STEP, load_layout, BLOCK_N, D)
    near_k, inverse_norm, key_scale, key_down, key_up = keys_near_one(raw_k, key_scale_ptr, keys, Lk, COSINE, SMALL)
    k_ring.index(0).store(near_k)
    fence_async_shared()
    program_barrier()  # all of K is there
    mbarrier.wait(keys_ready.index(0), 0)
    k, v = k_ring.index(0), v_ring.index(0)

    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    quarter_layout: gl.constexpr = quarters(nothing)[0].type.layout
    key_scale = _key_scale(key_scale_ptr, first_key, Lk, BLOCK_N, COSINE, SMALL, gl.SliceLayout(1, quarter_layout))
    dk = warpgroup_mma_init(gl.zeros([BLOCK_N, D], gl.float32, sum_layout))
    dv = warpgroup_mma_init(gl.zeros([BLOCK_N, D], gl.float32, sum_layout))
    weight = gl.convert_layout(nothing.to(element), factor_layout)
    ds = weight
    for step in range(total):
        stage = step % STAGES
        q, do = q_ring.index(stage), do_ring.index(stage)
        mbarrier.wait(rows_ready.index(stage), step // STAGES & 1)
        score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        value = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        async_copy.wait_group(STAGES - 2)
        # Waiting for weight and ds as well keeps them in their registers until the products that read them end.
        dk, dv, x, dp, weight, ds = warpgroup_mma_wait(0, (dk, dv, score, value, weight, ds))
        ahead, free = step + STAGES - 1, (step + STAGES - 1) % STAGES
        h, start = _place(gl.minimum(ahead, total - 1), h_kv, row_lo, steps, GROUP, BLOCK_M)
        q_tiles = q_all, b, h
        do_tiles = do_all, b, h
        announce_pair(q_tiles, do_tiles, rows_ready, free, ahead < total)
        program_barrier()  # every warp is done with the stage before, and has its row values
        load_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, start, free, ahead < total)
        fetch_row_values(to_keys_ptr + h.to(gl.int64) * Lq, Lq, row_plane, values_ring, start, free, BLOCK_M)
        h, start = _place(step, h_kv, row_lo, steps, GROUP, BLOCK_M)
        if (start < full_lo) | (start + BLOCK_M > full_hi):
            weight, ds = _terms_if_steep(
                x, dp, key_scale, key_down, key_up, values_ring.index(stage), p, start, first_key, Lq, Lk, window,
                doc_start_ptr, doc_stop_ptr, element, factor_layout, KIND, P, COSINE, SCALE, CAUSAL, PACKED,
                LOG_DEGREE, True, STEEP,
            )  # fmt: skip
        else:
            weight, ds = _terms_if_steep(
                x, dp, key_scale, key_down, key_up, values_ring.index(stage), p, start, first_key, Lq, Lk, window,
                doc_start_ptr, doc_stop_ptr, element, factor_layout, KIND, P, COSINE, SCALE, CAUSAL, PACKED,
                LOG_DEGREE, False, STEEP,
            )  # fmt: skip
        dv = warpgroup_mma(weight, do, dv, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk, dv, weight, ds = warpgroup_mma_wait(0, (dk, dv, weight, ds))
    async_copy.wait_group(0)

    checked = gl.sum(gl.sum(dv, 1), 0)
    if COSINE:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, sum_layout))
        inverse_norm = gl.load(key_scale_ptr + keys, mask=keys < Lk, other=0.0)
        unit = k.load(sum_layout).to(gl.float32) * rest_of_norm(inverse_norm, SMALL)[:, None]
        dk, along = orthogonal_part(dk, unit, inverse_norm * (LN2 if KIND == EXP else 1.0))  # scores are in base 2
        checked += gl.sum(along, 0)
    else:
        dk *= SCALE
        checked += gl.sum(gl.sum(dk, 1), 0)
    dk, dv = gl.convert_layout(dk.to(element), load_layout), gl.convert_layout(dv.to(element), load_layout)
    store_rows(dk_ptr, dk, first_key, Lk, DK_STEP, load_layout, BLOCK_N, D)
    store_rows(dv_ptr, dv, first_key, Lk, DV_STEP, load_layout, BLOCK_N, D)
    gl.store(broken_ptr + (b64 * Hkv + h64) * gl.num_programs(0) + block, not_finite(checked).to(gl.int32))
    end_barriers(keys_ready)
    end_barriers(rows_ready)
