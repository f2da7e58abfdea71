# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""Backward in Gluon: what the Triton kernels of fused/backward.py compute, with the arithmetic of gradients.py.

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
    EDGE_KEYS,
    FULL_BLOCKS,
    key_weights,
    query_gradient,
    query_row_factors,
    query_terms,
    row_scales,
    score_gradient,
    store_row_values,
)
from lssar.ops.fused.hopper.memory import (
    announce,
    announce_pair,
    end_barriers,
    fetch_pair,
    load_pair,
    load_rows,
    load_tile,
    pointer_load,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_descriptor,
    tile_ring,
)
from lssar.ops.fused.normalize import VALUE_BLOCK
from lssar.ops.fused.primitives import (
    HIDDEN,
    exact_unit_rows,
    head_and_block,
    keep_visible,
    keys_of_rows,
    lane_sum,
    not_finite,
    rows_of_keys,
    unit_rows_backward,
    visible_keys,
)
from lssar.ops.fused.steep import (
    add_lanes_of_pairs,
    all_steep,
    lane_max_of_pairs,
    left_and_right,
    pairs_of,
    short_key_weights,
    short_line,
    short_query_terms,
)

ROW_PLANES = gl.constexpr(gradients.ROW_PLANES)


@gluon.jit
def _quarters(x):
    """[N, M] as four [N, M / 4] of neighbouring columns. No data moves: they lie in different registers."""
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    x = x.reshape([N, 4, M // 4]).permute((0, 2, 1)).reshape([N, M // 4, 2, 2])
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _from_quarters(x0, x1, x2, x3, layout: gl.constexpr):
    N: gl.constexpr = x0.shape[0]
    M: gl.constexpr = x0.shape[1] * 4
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    return gl.convert_layout(x.reshape([N, M // 4, 4]).permute((0, 2, 1)).reshape([N, M]), layout)


@gluon.jit
def _fetch_row_values(ptr, row_stride, plane, ring, start, stage, M: gl.constexpr):
    """Start copying the ROW_PLANES values of rows start..start + M; past the last row, of any other rows."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = gl.arange(0, ROW_PLANES * M, layout)
    at = (at // M).to(gl.int64) * plane + gl.minimum(start, row_stride - M) + at % M
    pointer_load(ring.index(stage), ptr + gl.max_contiguous(gl.multiple_of(at, 4), 4))
    async_copy.commit_group()


@gluon.jit
def _steep_block(row_values, M: gl.constexpr):
    """backward.steep_block, from the values of a tile's rows in shared memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    first = gl.max(row_values.slice(6 * M, 1).load(one), 0)
    last = gl.max(row_values.slice(7 * M - 1, 1).load(one), 0)
    return (first > 0) & (last > 0)


@gluon.jit
def _weight_and_ds(
    x, dp, key_scale, row_values, row_start, row_stop, keys, FIRST: gl.constexpr, M: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
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
        weight, y, sigma = short_key_weights(x, slope, intercept, P)
    else:
        weight, y, sigma = key_weights(x, slope, intercept, False, P, REWEIGHT, LOG_DEGREE, False)
    if MASKED and REWEIGHT and not SHORT:  # in a flat row hidden keys have the weight of all others
        weight = keep_visible(weight, keys, row_start, row_stop, 0.0)
    ds = score_gradient(scaled_dp, y, mean, sigma, REWEIGHT)
    if MASKED:  # v may not be finite
        ds = keep_visible(ds, keys, row_start, row_stop, 0.0)
    return weight, ds


@gluon.jit
def _weights_and_ds_by_quarters(
    x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores [N, M] of a tile, rounded to element, in the given layout.

    One quarter after the other: registers do not hold the intermediate values of a whole tile.
    """
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    xs = _quarters(x)
    dps = _quarters(dp)
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
            xs[i], dps[i], key_scale, row_values, row_start, row_stop, keys, i * (M // 4), M,
            P, REWEIGHT, LOG_DEGREE, MASKED, SHORT,
        )  # fmt: skip
        weights = weights + (weight.to(element),)
        gradients = gradients + (ds.to(element),)
    weight = _from_quarters(weights[0], weights[1], weights[2], weights[3], layout)
    ds = _from_quarters(gradients[0], gradients[1], gradients[2], gradients[3], layout)
    return weight, ds


@gluon.jit
def _weights_and_ds_if_steep(
    x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
    element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_weights_and_ds_by_quarters, short if all rows of the tile are steep."""
    if STEEP:
        if _steep_block(row_values, x.shape[1]):
            weight, ds = _weights_and_ds_by_quarters(
                x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
                element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, True,
            )  # fmt: skip
        else:
            weight, ds = _weights_and_ds_by_quarters(
                x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
                element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, False,
            )  # fmt: skip
    else:
        weight, ds = _weights_and_ds_by_quarters(
            x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
            element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, MASKED, False,
        )  # fmt: skip
    return weight, ds


@gluon.jit
def _weights_and_ds(
    x, dp, key_scale, row_values, start, first_key, full_lo, full_hi, Lq, Lk, key_stop, window, doc_start_ptr,
    doc_stop_ptr, element: gl.constexpr, layout: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_weights_and_ds_if_steep with a mask where a row of the tile does not see all keys."""
    if (start < full_lo) | (start + x.shape[1] > full_hi):
        weight, ds = _weights_and_ds_if_steep(
            x, dp, key_scale, row_values, start, first_key, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr,
            element, layout, CAUSAL, WINDOWED, PACKED, P, REWEIGHT, LOG_DEGREE, True, STEEP,
        )  # fmt: skip
    else:
        weight, ds = _weights_and_ds_if_steep(
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
        _fetch_row_values(row_values, row_stride, row_plane, values_ring, start, stage, M)
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
        _fetch_row_values(row_values, row_stride, row_plane, values_ring, ahead, free, M)
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
    exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_all, v_all, do_all,
    HOST_TILES: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, EXACT_QUERIES: gl.constexpr, STEEP: gl.constexpr,
    CACHE: gl.constexpr, TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As backward.key_gradient_kernel for bfloat16, with scores transposed: keys along rows, so that weights go from
    registers straight into the products with dO and q."""
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

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])  # [N, M]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [N, D]
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    element: gl.constexpr = do_ptr.dtype.element_ty

    key_stop, row_lo, row_hi, full_lo, full_hi = rows_of_keys(
        first_key, b, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
        CAUSAL, WINDOWED, PACKED, HAS_LENGTHS, BLOCK_N,
    )  # fmt: skip
    row_lo = row_lo // BLOCK_M * BLOCK_M
    raw_k = load_rows(raw_k_ptr, first_key, key_stop, raw_k_stride_l, load_layout, BLOCK_N, D)
    exact_k, key_scale = exact_unit_rows(raw_k.to(gl.float32))
    key_scale = gl.convert_layout(key_scale, gl.SliceLayout(1, score_layout))  # [N]

    k_ring, v_ring = tile_ring(element, 1, BLOCK_N, D), tile_ring(element, 1, BLOCK_N, D)
    q_ring, do_ring = tile_ring(element, STAGES, BLOCK_M, D), tile_ring(element, STAGES, BLOCK_M, D)
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
    raw_k = load_rows(raw_k_ptr, first_key, key_stop, raw_k_stride_l, load_layout, BLOCK_N, D)
    dk = unit_rows_backward(gl.convert_layout(dk, load_layout), raw_k.to(gl.float32))
    store_rows(dk_ptr, dk, first_key, Lk, dk_stride_l, load_layout, BLOCK_N, D)
    store_rows(dv_ptr, gl.convert_layout(dv, load_layout), first_key, Lk, dv_stride_l, load_layout, BLOCK_N, D)
    if not_finite(gl.sum(gl.sum(dv, 1), 0)):
        gl.store(broken_ptr, 1)
    end_barriers(keys_ready)
    end_barriers(rows_ready)


@gluon.jit
def _gradient_terms(
    x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start,
    element: gl.constexpr, layout: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """g sigma and sigma [M, N] of a tile, rounded to element, in the given layout; g_lanes [M, 4] + sums of g.

    slope and the other values of rows are [M, 1] in the layout of a quarter.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    xs = _quarters(x)
    dps = _quarters(dp)
    quarter_layout: gl.constexpr = xs[0].type.layout
    products = ()
    sigmas = ()
    if SHORT:
        g_pairs = lane_max_of_pairs(pairs_of(xs[0])) * 0  # zeros [M, 4]
    for i in gl.static_range(4):
        x, dp = xs[i], dps[i]
        if MASKED:
            keys = (start + i * (N // 4) + gl.arange(0, N // 4, gl.SliceLayout(0, quarter_layout)))[None, :]
            x = keep_visible(x, keys, row_start, row_stop, HIDDEN)
            dp = keep_visible(dp, keys, row_start, row_stop, 0.0)  # v may not be finite
        if SHORT:
            g, g_sigma, sigma = short_query_terms(x, dp, slope, intercept, unit_scale, delta, P)
            g_pairs = add_lanes_of_pairs(pairs_of(g), g_pairs)
        else:
            g, sigma = query_terms(
                x, dp, slope, intercept, unit_scale, delta, False, P, REWEIGHT, LOG_DEGREE, False
            )  # fmt: skip
            if REWEIGHT:
                g_lanes += lane_sum(g, M, N // 4)
            g_sigma = g * sigma
        products = products + (g_sigma.to(element),)
        sigmas = sigmas + (sigma.to(element),)
    if SHORT:
        left, right = left_and_right(g_pairs)
        g_lanes += gl.convert_layout(left + right, g_lanes.type.layout)
    return (
        _from_quarters(products[0], products[1], products[2], products[3], layout),
        _from_quarters(sigmas[0], sigmas[1], sigmas[2], sigmas[3], layout),
        g_lanes,
    )


@gluon.jit
def _gradient_terms_if_steep(
    x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, steep,
    element: gl.constexpr, layout: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_gradient_terms, short if steep."""
    if STEEP:
        if steep:
            g_sigma, sigma, g_lanes = _gradient_terms(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, element, layout,
                P, REWEIGHT, LOG_DEGREE, MASKED, True,
            )  # fmt: skip
        else:
            g_sigma, sigma, g_lanes = _gradient_terms(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, element, layout,
                P, REWEIGHT, LOG_DEGREE, MASKED, False,
            )  # fmt: skip
    else:
        g_sigma, sigma, g_lanes = _gradient_terms(
            x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, element, layout,
            P, REWEIGHT, LOG_DEGREE, MASKED, False,
        )  # fmt: skip
    return g_sigma, sigma, g_lanes


@gluon.jit
def _query_sums(
    q, do, k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo, steps, full_lo, full_hi, slope, intercept, unit_scale,
    delta, row_start, row_stop, steep, nothing, sum_layout: gl.constexpr, P, REWEIGHT: gl.constexpr,
    LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """sum g sigma k and sum sigma k [M, D] in sum_layout, and sum g [M]; values of rows are [M] in any layout."""
    M: gl.constexpr = nothing.shape[0]
    N: gl.constexpr = nothing.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    element: gl.constexpr = k_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [M, N], left factor
    quarter = _quarters(nothing)[0]
    tile_row: gl.constexpr = gl.SliceLayout(1, quarter.type.layout)
    g_lanes = lane_sum(quarter, M, N // 4)
    if STEEP:
        steep_slope, steep_intercept = short_line(slope, intercept)
        slope, intercept = gl.where(steep, steep_slope, slope), gl.where(steep, steep_intercept, intercept)
    slope = gl.convert_layout(slope, tile_row)[:, None]
    intercept = gl.convert_layout(intercept, tile_row)[:, None]
    unit_scale = gl.convert_layout(unit_scale, tile_row)[:, None]
    delta = gl.convert_layout(delta, tile_row)[:, None]
    row_start = gl.convert_layout(row_start, tile_row)[:, None]
    row_stop = gl.convert_layout(row_stop, tile_row)[:, None]
    gk = warpgroup_mma_init(gl.zeros([M, D], gl.float32, sum_layout))
    sk = warpgroup_mma_init(gl.zeros([M, D], gl.float32, sum_layout))
    g_sigma = gl.convert_layout(nothing.to(element), factor_layout)
    sigma = g_sigma
    for step in range(steps):
        start = key_lo + step * N
        k, v = k_ring.index(step % STAGES), v_ring.index(step % STAGES)
        mbarrier.wait(keys_ready.index(step % STAGES), step // STAGES & 1)
        score = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [M, N]
        value = warpgroup_mma(do, v.permute((1, 0)), nothing, use_acc=False, is_async=True)  # [M, N]
        gk, sk, x, dp, g_sigma, sigma = warpgroup_mma_wait(0, (gk, sk, score, value, g_sigma, sigma))
        ahead, free = start + (STAGES - 1) * N, (step + STAGES - 1) % STAGES
        announce_pair(k_tiles, v_tiles, keys_ready, free, step + STAGES - 1 < steps)
        program_barrier()  # every warp is done with the stage before
        load_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, ahead, free, step + STAGES - 1 < steps)
        if (start < full_lo) | (start + N > full_hi):
            g_sigma, sigma, g_lanes = _gradient_terms_if_steep(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, steep, element,
                factor_layout, P, REWEIGHT, LOG_DEGREE, True, STEEP,
            )  # fmt: skip
        else:
            g_sigma, sigma, g_lanes = _gradient_terms_if_steep(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, row_start, row_stop, start, steep, element,
                factor_layout, P, REWEIGHT, LOG_DEGREE, False, STEEP,
            )  # fmt: skip
        gk = warpgroup_mma(g_sigma, k, gk, is_async=True)
        if REWEIGHT:
            sk = warpgroup_mma(sigma, k, sk, is_async=True)
        else:
            sk = warpgroup_mma_init(sk)
    gk, sk, g_sigma, sigma = warpgroup_mma_wait(0, (gk, sk, g_sigma, sigma))
    return gk, sk, gl.sum(g_lanes, 1)


@gluon.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, raw_q_ptr, dq_ptr, exact_q_ptr, sizes_ptr, block_sizes_ptr,
    slope_ptr, intercept_ptr, z_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l,
    raw_q_stride_b, raw_q_stride_h, raw_q_stride_l, dq_stride_b, dq_stride_h, dq_stride_l, row_stride, row_plane,
    gain_ptr, exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_all, k_all, v_all,
    do_all, HOST_TILES: gl.constexpr, HAS_GAIN: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, EXACT_QUERIES: gl.constexpr, STEEP: gl.constexpr,
    CACHE: gl.constexpr, TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As backward.query_gradient_kernel for bfloat16."""
    blocks = gl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(gl.program_id(0), gl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = head // Hq, head % Hq
    h_kv = (h // (Hq // Hkv)).to(gl.int64)
    b64, h = b.to(gl.int64), h.to(gl.int64)
    q_ptr += head.to(gl.int64) * Lq * D
    exact_q_ptr += head.to(gl.int64) * Lq * D
    k_ptr += (b64 * Hkv + h_kv) * Lk * D
    v_ptr += b64 * v_stride_b + h_kv * v_stride_h
    o_ptr += b64 * o_stride_b + h * o_stride_h
    do_ptr += b64 * do_stride_b + h * do_stride_h
    raw_q_ptr += b64 * raw_q_stride_b + h * raw_q_stride_h
    dq_ptr += b64 * dq_stride_b + h * dq_stride_h

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])  # [M, N]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [M, D]
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, load_layout)
    value_element: gl.constexpr = v_ptr.dtype.element_ty
    key_element: gl.constexpr = k_ptr.dtype.element_ty

    q_ring, do_ring = tile_ring(key_element, 1, BLOCK_M, D), tile_ring(value_element, 1, BLOCK_M, D)
    k_ring, v_ring = tile_ring(key_element, STAGES, BLOCK_N, D), tile_ring(value_element, STAGES, BLOCK_N, D)
    rows_ready, keys_ready = tile_barriers(1), tile_barriers(STAGES)
    key_stop = gl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    if HOST_TILES:
        q_tiles, do_tiles = (q_all, b, head % Hq), (do_all, b, head % Hq)
        k_tiles, v_tiles = (k_all, b, head % Hq // (Hq // Hkv)), (v_all, b, head % Hq // (Hq // Hkv))
        fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, first_row, 0, True)
    else:
        q_tiles = tile_descriptor(q_ptr, Lq, D, BLOCK_M, D)
        do_tiles = tile_descriptor(do_ptr, Lq, do_stride_l, BLOCK_M, D)
        fetch_pair(q_tiles, q_ring, do_tiles, do_ring, rows_ready, first_row, 0, True)
        k_tiles = tile_descriptor(k_ptr, key_stop, D, BLOCK_N, D)
        v_tiles = tile_descriptor(v_ptr, key_stop, v_stride_l, BLOCK_N, D)

    # What each row sees, and its values [M], in the layout of whole rows
    rows = first_row + gl.arange(0, BLOCK_M, row_layout)
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    key_lo, key_hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    steps = gl.cdiv(gl.maximum(key_hi - key_lo, 0), BLOCK_N)
    for step in gl.static_range(STAGES - 1):
        fetch_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo + step * BLOCK_N, step, step < steps)
    at = head.to(gl.int64) * row_stride + rows
    inside = rows < Lq
    slope = gl.load(slope_ptr + at, mask=inside, other=0.0)
    intercept = gl.load(intercept_ptr + at, mask=inside, other=0.0)
    do_rows = load_rows(do_ptr, first_row, Lq, do_stride_l, load_layout, BLOCK_M, D).to(gl.float32)
    o_rows = load_rows(o_ptr, first_row, Lq, o_stride_l, load_layout, BLOCK_M, D).to(gl.float32)
    delta, bound, unit_scale = row_scales(
        do_rows, o_rows, sizes_ptr + (b64 * Hkv + h_kv) * Lk,
        block_sizes_ptr + (b64 * Hkv + h_kv) * gl.cdiv(Lk, VALUE_BLOCK), row_start, row_stop, key_lo, key_hi, full_lo,
        full_hi, gl.arange(0, EDGE_KEYS, gl.SliceLayout(0, load_layout)),
        gl.arange(0, FULL_BLOCKS, gl.BlockedLayout([4], [32], [gl.num_warps()], [0])), WINDOWED or PACKED,
    )  # fmt: skip

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
    steep = all_steep(slope, intercept, inside, P if P > 0 else exponent) if STEEP else False
    mbarrier.wait(rows_ready.index(0), 0)
    gk, sk, g_sum = _query_sums(
        q_ring.index(0), do_ring.index(0), k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo, steps, full_lo,
        full_hi, slope, intercept, unit_scale, delta * unit_scale, row_start, row_stop, steep, nothing, sum_layout,
        P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, STEEP, STAGES,
    )  # fmt: skip

    n = (row_stop - row_start).to(gl.float32)
    z = gl.load(z_ptr + at, mask=inside, other=0.0)
    mean, scale, kappa = query_row_factors(
        gl.convert_layout(g_sum, row_layout), n, slope, z, bound, P if P > 0 else exponent, LOG_D, False
    )  # fmt: skip
    if REWEIGHT:
        gk = gk - sk * gl.convert_layout(mean, gl.SliceLayout(1, sum_layout))[:, None]
    raw_q = load_rows(raw_q_ptr, first_row, Lq, raw_q_stride_l, load_layout, BLOCK_M, D).to(gl.float32)
    dq, radial, scale, sound = query_gradient(
        gl.convert_layout(gk, load_layout), raw_q, z, delta, mean, kappa, scale, gain_ptr + h, HAS_GAIN, True
    )
    store_rows(dq_ptr, dq, first_row, Lq, dq_stride_l, load_layout, BLOCK_M, D)
    exact_q, to_unit = exact_unit_rows(raw_q)
    exact_q = gl.where(sound[:, None], exact_q, 0.0)
    store_rows(exact_q_ptr, exact_q, first_row, Lq, D, load_layout, BLOCK_M, D)
    store_row_values(
        rows_ptr + at, row_plane, rows < row_stride, sound, slope, intercept, z, delta, mean * kappa, scale * to_unit,
        steep, radial, P if P > 0 else exponent, EXACT_QUERIES, STEEP, HAS_GAIN, True,
    )  # fmt: skip
    end_barriers(rows_ready)
    end_barriers(keys_ready)
