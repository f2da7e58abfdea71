# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""dk and dv in Gluon: what the Triton kernel of fused/backward.py computes, with the arithmetic of gradients.py.

A step has four products: two give scores and dO.v, two add to the gradients. The arithmetic between them overlaps with
products that are still running.
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

from lssar.ops.fused import gradients
from lssar.ops.fused.gradients import (
    key_weights,
    score_gradient,
)
from lssar.ops.fused.hopper.memory import (
    announce_pair,
    end_barriers,
    fetch_pair,
    load_pair,
    pointer_load,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_descriptor,
    tile_ring,
)
from lssar.ops.fused.hopper.quarters import from_quarters, quarters
from lssar.ops.fused.primitives import (
    HIDDEN,
    head_and_block,
    keep_visible,
    not_finite,
    rows_of_keys,
    visible_keys,
)
from lssar.ops.fused.steep import GENERAL, LINEAR, short_key_weights, short_score_gradient
from lssar.ops.fused.unit_rows import norm_parts, unit_rows_backward_of_parts

ROW_PLANES = gl.constexpr(gradients.ROW_PLANES)
FORM_PLANE = gl.constexpr(gradients.FORM_PLANE.value)


@gluon.jit
def fetch_row_values(ptr, row_stride, plane, ring, start, stage, M: gl.constexpr):
    """Start copying the first planes of values of rows start..start + M, as many as the ring holds; past the last row,
    of any other rows."""
    VALUES: gl.constexpr = ring.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([min(4, VALUES // (32 * gl.num_warps()))], [32], [gl.num_warps()], [0])
    at = gl.arange(0, VALUES, layout)
    at = (at // M).to(gl.int64) * plane + gl.minimum(start, row_stride - M) + at % M
    pointer_load(ring.index(stage), ptr + gl.max_contiguous(gl.multiple_of(at, 4), 4))
    async_copy.commit_group()


@gluon.jit
def form_of_block(row_values, M: gl.constexpr):
    """The form that serves all rows of a tile, from their values in shared memory. The first and the last tell: they
    lie in at most two blocks of the dq kernel."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    first = gl.max(row_values.slice(FORM_PLANE * M, 1).load(one), 0)
    last = gl.max(row_values.slice(FORM_PLANE * M + M - 1, 1).load(one), 0)
    return gl.minimum(first, last).to(gl.int32)


@gluon.jit
def _weight_and_ds(
    x, dp, key_scale, row_values, form, row_start, row_stop, keys, FIRST: gl.constexpr, M: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
    ALWAYS_LINEAR: gl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores for columns FIRST.. of a tile, both [N, columns]."""
    layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    COLUMNS: gl.constexpr = x.shape[1]
    slope = row_values.slice(0 * M + FIRST, COLUMNS).load(layout)[None, :]
    intercept = row_values.slice(1 * M + FIRST, COLUMNS).load(layout)[None, :]
    factor = row_values.slice(2 * M + FIRST, COLUMNS).load(layout)[None, :]
    offset = row_values.slice(3 * M + FIRST, COLUMNS).load(layout)[None, :]
    mean = row_values.slice(4 * M + FIRST, COLUMNS).load(layout)[None, :]
    row_factor = row_values.slice(5 * M + FIRST, COLUMNS).load(layout)[None, :]
    x = x * row_factor * key_scale
    if MASKED:
        x = keep_visible(x, keys, row_start, row_stop, HIDDEN)
    scaled_dp = dp * factor - offset
    if SHORT:
        weight, y, th = short_key_weights(x, slope, intercept, form, P, ALWAYS_LINEAR)
        ds = short_score_gradient(scaled_dp, y, mean, th)
    else:
        weight, y, sigma = key_weights(x, slope, intercept, False, P, REWEIGHT, LOG_DEGREE, False)
        if MASKED and REWEIGHT:  # in a flat row hidden keys have the weight of all others
            weight = keep_visible(weight, keys, row_start, row_stop, 0.0)
        ds = score_gradient(scaled_dp, y, mean, sigma, REWEIGHT)
    if MASKED:  # v may not be finite
        ds = keep_visible(ds, keys, row_start, row_stop, 0.0)
    return weight, ds


@gluon.jit
def _weights_and_ds_by_quarters(
    x, dp, key_scale, row_values, form, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
    ALWAYS_LINEAR: gl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores [N, M] of a tile, rounded to element, in the given layout.

    One quarter after the other: registers do not hold the intermediate values of a whole tile.
    """
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    xs = quarters(x)
    dps = quarters(dp)
    quarter_layout: gl.constexpr = xs[0].type.layout
    key_scale = gl.convert_layout(key_scale, gl.SliceLayout(1, quarter_layout))[:, None]
    keys = (first_key + gl.arange(0, N, gl.SliceLayout(1, quarter_layout)))[:, None]
    weights = ()
    gradients = ()
    for i in gl.static_range(4):
        row_start, row_stop = keys, keys
        if MASKED:
            rows = start + i * (M // 4) + gl.arange(0, M // 4, gl.SliceLayout(0, quarter_layout))
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )
            row_start, row_stop = row_start[None, :], row_stop[None, :]
        weight, ds = _weight_and_ds(
            xs[i], dps[i], key_scale, row_values, form, row_start, row_stop, keys, i * (M // 4), M,
            P, REWEIGHT, LOG_DEGREE, MASKED, SHORT, ALWAYS_LINEAR,
        )  # fmt: skip
        weights = weights + (weight.to(element),)
        gradients = gradients + (ds.to(element),)
    weight = from_quarters(weights[0], weights[1], weights[2], weights[3], layout)
    ds = from_quarters(gradients[0], gradients[1], gradients[2], gradients[3], layout)
    return weight, ds


@gluon.jit
def _weights_and_ds_of_form(
    x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_weights_and_ds_by_quarters by the form of the tile's rows."""
    form = form_of_block(row_values, x.shape[1]) if STEEP else GENERAL
    if STEEP:
        if form == GENERAL:
            weight, ds = _weights_and_ds_by_quarters(
                x, dp, key_scale, row_values, form, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr,
                doc_stop_ptr, element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, False, False,
            )  # fmt: skip
        elif MASKED or form != LINEAR:  # tiles with a mask are few: one code for both short forms
            weight, ds = _weights_and_ds_by_quarters(
                x, dp, key_scale, row_values, form, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr,
                doc_stop_ptr, element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, True, False,
            )  # fmt: skip
        else:
            weight, ds = _weights_and_ds_by_quarters(
                x, dp, key_scale, row_values, form, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr,
                doc_stop_ptr, element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, True, True,
            )  # fmt: skip
    else:
        weight, ds = _weights_and_ds_by_quarters(
            x, dp, key_scale, row_values, form, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr,
            doc_stop_ptr, element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, False, False,
        )  # fmt: skip
    return weight, ds


@gluon.jit
def _weights_and_ds(
    x, dp, key_scale, row_values, start, first_key, full_lo, full_hi, Lq, Lk, key_stop, window, doc_start_ptr,
    doc_stop_ptr, element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_weights_and_ds_of_form with a mask where a row of the tile does not see all keys."""
    if (start < full_lo) | (start + x.shape[1] > full_hi):
        weight, ds = _weights_and_ds_of_form(
            x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
            element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, True, STEEP,
        )  # fmt: skip
    else:
        weight, ds = _weights_and_ds_of_form(
            x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
            element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, False, STEEP,
        )  # fmt: skip
    return weight, ds


@gluon.jit
def _key_sums(
    dk, dv, k, v, key_scale, q_tiles, q_ring, do_tiles, do_ring, rows_ready, row_values, row_stride, row_plane,
    values_ring, before, steps, row_lo, first_key, full_lo, full_hi, Lq, Lk, key_stop, window, doc_start_ptr,
    doc_stop_ptr, nothing, sum_layout: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    PACKED: gl.constexpr, P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dk [N, D] + ds^T q, dv [N, D] + P^T dO over the rows of one query head; `before`: steps of the heads before."""
    M: gl.constexpr = nothing.shape[1]
    element: gl.constexpr = q_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [N, M], left factor
    for step in gl.static_range(STAGES - 1):
        start = row_lo + step * M
        stage = (before + step) % STAGES
        fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, start, stage, step < steps)
        fetch_row_values(row_values, row_stride, row_plane, values_ring, start, stage, M)
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    weight = gl.convert_layout(nothing.to(element), factor_layout)
    ds = weight
    for step in range(steps):
        start = row_lo + step * M
        at = before + step
        q, do = q_ring.index(at % STAGES), do_ring.index(at % STAGES)
        mbarrier.wait(rows_ready.index(at % STAGES), at // STAGES & 1)
        score = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        value = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [N, M]
        async_copy.wait_group(STAGES - 2)
        # Waiting for weight and ds as well keeps them in their registers until the products that read them end.
        dk, dv, x, dp, weight, ds = warpgroup_mma_wait(0, (dk, dv, score, value, weight, ds))
        ahead, free = start + (STAGES - 1) * M, (at + STAGES - 1) % STAGES
        announce_pair(q_tiles, do_tiles, rows_ready, free, step + STAGES - 1 < steps)
        program_barrier()  # every warp is done with the stage before, and has its row values
        load_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, ahead, free, step + STAGES - 1 < steps)
        fetch_row_values(row_values, row_stride, row_plane, values_ring, ahead, free, M)
        weight, ds = _weights_and_ds(
            x, dp, key_scale, values_ring.index(at % STAGES), start, first_key, full_lo, full_hi, Lq, Lk, key_stop,
            window, doc_start_ptr, doc_stop_ptr, element, factor_layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT,
            LOG_DEGREE, STEEP,
        )  # fmt: skip
        dv = warpgroup_mma(weight, do, dv, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk, dv, weight, ds = warpgroup_mma_wait(0, (dk, dv, weight, ds))
    async_copy.wait_group(0)
    program_barrier()  # the next head refills the ring
    return dk, dv


@gluon.jit(do_not_specialize=["Lq", "Lk", "window", "programs"])
def key_gradient_kernel(
    broken_ptr, programs, q_ptr, k_ptr, v_ptr, do_ptr, raw_k_ptr, dk_ptr, dv_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, do_stride_b, do_stride_h, do_stride_l,
    raw_k_stride_b, raw_k_stride_h, raw_k_stride_l,
    dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l, row_stride, row_plane,
    exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    q_all, raw_k_all, v_all, do_all,
    HOST_TILES: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, EXACT_QUERIES: gl.constexpr, STEEP: gl.constexpr,
    CACHE: gl.constexpr, TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As backward.key_gradient_kernel for bfloat16, with scores transposed: keys along rows, so that weights go from
    registers straight into the products with dO and q. Keys and values come as tiles."""
    blocks = gl.cdiv(Lk, BLOCK_N)
    head_kv, block = head_and_block(gl.program_id(0), programs, blocks, CACHE // D // Lq // (Hq // Hkv))
    first_key = block * BLOCK_N  # under a causal mask the first keys have the most rows
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(gl.int64), h_kv.to(gl.int64)
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    raw_k_ptr += b64 * raw_k_stride_b + h64 * raw_k_stride_h

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])  # [N, M]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [N, D]
    row_layout: gl.constexpr = gl.SliceLayout(1, sum_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    element: gl.constexpr = do_ptr.dtype.element_ty

    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    row_lo = row_lo // BLOCK_M * BLOCK_M
    k_ring, v_ring = tile_ring(element, 1, BLOCK_N, D), tile_ring(element, 1, BLOCK_N, D)
    q_ring, do_ring = tile_ring(element, STAGES, BLOCK_M, D), tile_ring(element, STAGES, BLOCK_M, D)
    values_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values_ring = gl.allocate_shared_memory(gl.float32, [STAGES, ROW_PLANES * BLOCK_M], values_layout)
    keys_ready, rows_ready = tile_barriers(1), tile_barriers(STAGES)
    if HOST_TILES:
        k_tiles, v_tiles = (raw_k_all, b, h_kv), (v_all, b, h_kv)
    else:
        k_tiles = tile_descriptor(raw_k_ptr, key_stop, raw_k_stride_l, BLOCK_N, D)
        v_tiles = tile_descriptor(v_ptr, key_stop, v_stride_l, BLOCK_N, D)
    # A descriptor has one row at least: that of a sequence without keys is left out, it may hold anything.
    first_row = gl.where(key_stop > 0, first_key, BLOCK_N) if HAS_LENGTHS else first_key
    fetch_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, first_row, 0, True)
    k, v = k_ring.index(0), v_ring.index(0)
    mbarrier.wait(keys_ready.index(0), 0)
    near, norm_scale, rest = norm_parts(k.load(sum_layout).to(gl.float32))
    key_scale = gl.convert_layout(gl.where(rest > 0, rest, 0.0), gl.SliceLayout(1, score_layout))  # [N]
    program_barrier()  # every warp has read the tile
    k.store(near.to(element))  # no bit is lost
    fence_async_shared()
    program_barrier()  # all of K is there

    steps = gl.cdiv(gl.maximum(row_hi - row_lo, 0), BLOCK_M)
    before = 0  # steps of the heads of the group that are done
    dk = gl.zeros([BLOCK_N, D], gl.float32, sum_layout)
    dv = gl.zeros([BLOCK_N, D], gl.float32, sum_layout)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
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
        dk, dv = _key_sums(
            dk, dv, k, v, key_scale, q_tiles, q_ring, do_tiles, do_ring, rows_ready, row_values, row_stride, row_plane,
            values_ring, before, steps, row_lo, first_key, full_lo, full_hi, Lq, Lk, key_stop, window, doc_start_ptr,
            doc_stop_ptr, nothing, sum_layout, CAUSAL, WINDOWED, PACKED, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE,
            STEEP, STAGES,
        )  # fmt: skip
        before += steps
    near = k.load(sum_layout).to(gl.float32)
    dk = unit_rows_backward_of_parts(dk, near, norm_scale, rest)
    program_barrier()  # every warp is done with K
    v.store(dv.to(element))
    k.store(dk.to(element))
    program_barrier()
    # By pointers: with stores by descriptor, ptxas computes addresses of descriptors again in each step (head size 64).
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    store_rows(dv_ptr, v.load(load_layout), first_key, Lk, dv_stride_l, load_layout, BLOCK_N, D)
    store_rows(dk_ptr, k.load(load_layout), first_key, Lk, dk_stride_l, load_layout, BLOCK_N, D)
    keys = first_key + gl.arange(0, BLOCK_N, row_layout)
    gl.store(broken_ptr + keys * 0, 1, mask=not_finite(gl.sum(dv, 1)))
    end_barriers(keys_ready)
    end_barriers(rows_ready)
