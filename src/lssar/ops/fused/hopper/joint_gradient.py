# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""dq, dk and dv in one pass over blocks of keys, in Gluon: five products where the two kernels of dq and of dk, dv
have eight, and each power and sigma computed once.

The gradient of scores is known at once because the values of rows come from elsewhere. A program adds its part of dq
in device memory, so the sums depend on the order of programs in their last bits.
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

from lssar.ops.fused.hopper.key_gradient import ROW_PLANES, fetch_row_values, weights_and_ds
from lssar.ops.fused.hopper.memory import (
    add_rows,
    announce,
    announce_pair,
    end_barriers,
    fetch_pair,
    load_pair,
    load_rows,
    load_tile,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_descriptor,
    tile_ring,
)
from lssar.ops.fused.primitives import (
    exact_unit_rows,
    head_and_block,
    not_finite,
    reciprocal,
    rows_of_keys,
    unit_rows_backward,
)


@gluon.jit
def _sums(
    dk, dv, k, v, key_scale, q_tiles, q_ring, do_tiles, do_ring, rows_ready, row_values, row_stride, row_plane,
    values_ring, ds_ring, weight_tile, dq_sums, before, steps, row_lo, first_key, full_lo, full_hi, Lq, Lk, key_stop,
    window, doc_start_ptr, doc_stop_ptr, nothing, no_dq, no_rows, sum_layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, P, REWEIGHT: gl.constexpr,
    LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr, STAGES: gl.constexpr, DEFERRED: gl.constexpr,
    ROOM: gl.constexpr,
):  # fmt: skip
    """dk [N, D] + ds^T q, dv [N, D] + P^T dO over the rows of one query head; ds k is added to dq_sums [rows, D].

    DEFERRED: the products that add to dk and dv run during the arithmetic of the next step. If registers have ROOM, the
    one for dq does so too, and weights [N, M] wait for theirs in registers, else in shared memory (weight_tile).
    """
    DQ_DEFERRED: gl.constexpr = DEFERRED and ROOM
    WEIGHTS_SHARED: gl.constexpr = DEFERRED and not ROOM
    M: gl.constexpr = nothing.shape[1]
    D: gl.constexpr = q_ring.shape[2]
    element: gl.constexpr = q_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [N, M], left factor
    for step in gl.static_range(STAGES - 1):
        start = row_lo + step * M
        stage = (before + step) % STAGES
        fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, start, stage, step < steps)
        fetch_row_values(row_values, row_stride, row_plane, values_ring, start, stage, M)
    weight = gl.convert_layout(nothing.to(element), factor_layout)
    if DEFERRED:  # zeros take the place of the step before the first
        last = (before + STAGES - 1) % STAGES
        q_ring.index(last).store(no_rows)
        do_ring.index(last).store(no_rows)
        ds_ring.index((before + 1) % 2).store(nothing.to(element))
        if WEIGHTS_SHARED:
            weight_tile.store(nothing.to(element))
        fence_async_shared()
    async_copy.wait_group(0)
    program_barrier()  # every warp has the row values
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    for step in range(steps):
        start = row_lo + step * M
        at = before + step
        last = (at + STAGES - 1) % STAGES
        q, do, ds = q_ring.index(at % STAGES), do_ring.index(at % STAGES), ds_ring.index(at % 2)
        last_q, last_do, last_ds = q_ring.index(last), do_ring.index(last), ds_ring.index((at + 1) % 2)
        if WEIGHTS_SHARED:
            program_barrier()  # the weights of the last step are there
        mbarrier.wait(rows_ready.index(at % STAGES), at // STAGES & 1)
        score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        value = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        if DEFERRED:
            dv = warpgroup_mma(weight_tile if WEIGHTS_SHARED else weight, last_do, dv, is_async=True)
            dk = warpgroup_mma(last_ds, last_q, dk, is_async=True)
        if DQ_DEFERRED:
            dq = warpgroup_mma(last_ds.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)  # [M, D]
        async_copy.wait_group(0)
        if STAGES < 3:
            program_barrier()  # the row values of this step were asked for after the last barrier
        x, dp = warpgroup_mma_wait(3 if DQ_DEFERRED else 2 if DEFERRED else 0, (score, value))
        next_weight, ds_part = weights_and_ds(
            x, dp, key_scale, values_ring.index(at % STAGES), start, first_key, full_lo, full_hi, Lq, Lk, key_stop,
            window, doc_start_ptr, doc_stop_ptr, element, factor_layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT,
            LOG_DEGREE, STEEP, True,
        )  # fmt: skip
        # Waiting for a left factor as well keeps it in its registers until the product that reads it ends.
        if DQ_DEFERRED:
            dk, dv, dq_part, weight = warpgroup_mma_wait(0, (dk, dv, dq, weight))
            add_rows(dq_sums, dq_part, gl.maximum(start - M, row_lo), D)  # in the first step zeros
        elif DEFERRED:
            dk, dv = warpgroup_mma_wait(0, (dk, dv))
        weight = next_weight
        if DEFERRED:
            dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
        else:
            dv = warpgroup_mma(weight, do, dv, is_async=True)
            dk = warpgroup_mma(ds_part, q, dk, is_async=True)
        ds.store(ds_part)
        fence_async_shared()
        ahead, wanted = start + (STAGES - 1) * M, step + STAGES - 1 < steps
        announce_pair(q_tiles, do_tiles, rows_ready, last, wanted)
        program_barrier()  # ds of all keys is there, and every warp is done with the step before
        load_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, ahead, last, wanted)
        fetch_row_values(row_values, row_stride, row_plane, values_ring, ahead, last, M)
        if WEIGHTS_SHARED:
            weight_tile.store(weight)
            fence_async_shared()
        if not DQ_DEFERRED:
            dq = warpgroup_mma(ds.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)  # [M, D]
            if DEFERRED:
                dq_part = warpgroup_mma_wait(0, (dq,))
            else:
                dk, dv, dq_part, weight, ds_part = warpgroup_mma_wait(0, (dk, dv, dq, weight, ds_part))
                dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
            add_rows(dq_sums, dq_part, start, D)
    if DEFERRED:  # noqa: SIM102 (what follows `and` would be compiled too)
        if steps > 0:
            at = before + steps - 1
            ds = ds_ring.index(at % 2)
            program_barrier()  # the weights are there
            dv = warpgroup_mma(weight_tile if WEIGHTS_SHARED else weight, do_ring.index(at % STAGES), dv, is_async=True)
            dk = warpgroup_mma(ds, q_ring.index(at % STAGES), dk, is_async=True)
            if DQ_DEFERRED:
                dq = warpgroup_mma(ds.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
                dk, dv, dq_part, weight = warpgroup_mma_wait(0, (dk, dv, dq, weight))
                add_rows(dq_sums, dq_part, row_lo + (steps - 1) * M, D)
            else:
                dk, dv = warpgroup_mma_wait(0, (dk, dv))
            dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    dk, dv = warpgroup_mma_wait(0, (dk, dv))
    async_copy.wait_group(0)
    program_barrier()  # the next head refills the ring
    return dk, dv


@gluon.jit(do_not_specialize=["Lq", "Lk", "window", "programs"])
def joint_gradient_kernel(
    broken_ptr, programs, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l,
    raw_k_stride_b, raw_k_stride_h, raw_k_stride_l,
    dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l, row_stride, row_plane,
    exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, dq_sums_ptr, q_all, v_all, do_all,
    HOST_TILES: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, EXACT_QUERIES: gl.constexpr, STEEP: gl.constexpr,
    CACHE: gl.constexpr, TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    DEFERRED: gl.constexpr,
):  # fmt: skip
    """As key_gradient_kernel, and dq_sums [B, Hq, row_stride, D], float32 and zero before, becomes sum_j ds_ij k^_j
    times the factor that turns a stored query into a unit vector."""
    blocks = gl.cdiv(Lk, BLOCK_N)
    head_kv, block = head_and_block(gl.program_id(0), programs, blocks, CACHE // D // Lq // (Hq // Hkv))
    first_key = block * BLOCK_N  # under a causal mask the first keys have the most rows
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(gl.int64), h_kv.to(gl.int64)
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    raw_k_ptr += b64 * raw_k_stride_b + h64 * raw_k_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h

    warps: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_M, 16])  # [N, M]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, D, 16])  # [N, D]
    # Warp groups share the columns.
    query_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, D * 4 // warps, 16])  # [M, D]
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [warps, 1], [1, 0])
    element: gl.constexpr = do_ptr.dtype.element_ty

    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    row_lo = row_lo // BLOCK_M * BLOCK_M
    raw_k = load_rows(raw_k_ptr, first_key, key_stop, raw_k_stride_l, load_layout, BLOCK_N, D)
    exact_k, key_scale = exact_unit_rows(raw_k.to(gl.float32))
    # A key that is not finite must not reach rows that do not see it: dq multiplies it by zeros.
    exact_k = gl.where((key_scale > 0)[:, None], exact_k, 0.0)
    key_scale = gl.convert_layout(key_scale, gl.SliceLayout(1, score_layout))  # [N]

    k_ring, v_ring = tile_ring(element, 1, BLOCK_N, D), tile_ring(element, 1, BLOCK_N, D)
    q_ring, do_ring = tile_ring(element, STAGES, BLOCK_M, D), tile_ring(element, STAGES, BLOCK_M, D)
    ds_ring = tile_ring(element, 2, BLOCK_N, BLOCK_M)
    ROOM: gl.constexpr = 2 * D <= BLOCK_N
    weight_tile = tile_ring(element, 1, BLOCK_N, BLOCK_M).index(0) if DEFERRED and not ROOM else ds_ring.index(0)
    values_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values_ring = gl.allocate_shared_memory(gl.float32, [STAGES, ROW_PLANES * BLOCK_M], values_layout)
    keys_ready, rows_ready = tile_barriers(1), tile_barriers(STAGES)
    if HOST_TILES:
        v_tiles = v_all, b, h_kv
    else:
        v_tiles = tile_descriptor(v_ptr, key_stop, v_stride_l, BLOCK_N, D)
    announce(v_tiles, keys_ready, 0, True)
    load_tile(v_tiles, v_ring, keys_ready, first_key, 0, True)
    k_ring.index(0).store(exact_k.to(element))
    fence_async_shared()
    program_barrier()  # all of K is there
    mbarrier.wait(keys_ready.index(0), 0)
    k, v = k_ring.index(0), v_ring.index(0)

    steps = gl.cdiv(gl.maximum(row_hi - row_lo, 0), BLOCK_M)
    before = 0  # steps of the heads of the group that are done
    dk = gl.zeros([BLOCK_N, D], gl.float32, sum_layout)
    dv = gl.zeros([BLOCK_N, D], gl.float32, sum_layout)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    no_dq = gl.zeros([BLOCK_M, D], gl.float32, query_layout)
    no_rows = gl.zeros([BLOCK_M, D], element, load_layout)
    for member in range(group):
        h = (h_kv * group + member).to(gl.int64)
        head = b64 * Hq + h
        if HOST_TILES:
            q_tiles = q_all, b, h_kv * group + member
            do_tiles = do_all, b, h_kv * group + member
        else:
            q_tiles = tile_descriptor(q_ptr + head * Lq * D, Lq, D, BLOCK_M, D)
            do_tiles = tile_descriptor(do_ptr + b64 * do_stride_b + h * do_stride_h, Lq, do_stride_l, BLOCK_M, D)
        row_values = rows_ptr + head * row_stride
        dk, dv = _sums(
            dk, dv, k, v, key_scale, q_tiles, q_ring, do_tiles, do_ring, rows_ready, row_values, row_stride, row_plane,
            values_ring, ds_ring, weight_tile, dq_sums_ptr + head * row_stride * D, before, steps, row_lo, first_key,
            full_lo, full_hi, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, nothing, no_dq, no_rows,
            sum_layout, CAUSAL, WINDOWED, PACKED, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, STEEP, STAGES,
            DEFERRED, ROOM,
        )  # fmt: skip
        before += steps
    raw_k = load_rows(raw_k_ptr, first_key, key_stop, raw_k_stride_l, load_layout, BLOCK_N, D).to(gl.float32)
    _, key_scale = exact_unit_rows(raw_k)
    dk = unit_rows_backward(gl.convert_layout(dk, load_layout) * reciprocal(key_scale)[:, None], raw_k)
    store_rows(dk_ptr, dk, first_key, Lk, dk_stride_l, load_layout, BLOCK_N, D)
    store_rows(dv_ptr, gl.convert_layout(dv, load_layout), first_key, Lk, dv_stride_l, load_layout, BLOCK_N, D)
    if not_finite(gl.sum(gl.sum(dv, 1), 0)):
        gl.store(broken_ptr, 1)
    end_barriers(keys_ready)
    end_barriers(rows_ready)
