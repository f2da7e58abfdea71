# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""dq in Gluon: what the Triton kernel of fused/backward.py computes, with the arithmetic of gradients.py.

A step has four products: two give scores and dO.v, two add to the gradients. The arithmetic between them overlaps with
products that are still running.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lssar.ops.fused.gradients import (
    EDGE_KEYS,
    FULL_BLOCKS,
    query_gradient_of_unit,
    query_row_factors,
    query_terms,
    row_scales,
    store_row_values,
)
from lssar.ops.fused.hopper.memory import (
    announce_pair,
    end_barriers,
    fetch_pair,
    fetch_tile,
    load_pair,
    program_barrier,
    tile_barriers,
    tile_descriptor,
    tile_ring,
    tile_store_wait,
    write_tile,
)
from lssar.ops.fused.hopper.quarters import from_quarters, quarters
from lssar.ops.fused.normalize import VALUE_BLOCK
from lssar.ops.fused.primitives import (
    HIDDEN,
    head_and_block,
    keep_visible,
    keys_of_rows,
    lane_sum,
    reciprocal,
    visible_keys,
)
from lssar.ops.fused.steep import (
    GENERAL,
    LINEAR,
    add_lanes_of_pairs,
    form_of_rows,
    lane_max_of_pairs,
    left_and_right,
    line_of_form,
    pairs_of,
    short_query_terms,
)
from lssar.ops.fused.unit_rows import norm_parts, scaled_unit_rows


@gluon.jit
def _gradient_terms(
    x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start,
    element: gl.constexpr, layout: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, SHORT: gl.constexpr,
    ALWAYS_LINEAR: gl.constexpr,
):  # fmt: skip
    """g sigma and sigma [M, N] of a tile, rounded to element, in the given layout; g_lanes [M, 4] + sums of g.

    slope and the other values of rows are [M, 1] in the layout of a quarter.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    xs = quarters(x)
    dps = quarters(dp)
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
            g, g_sigma, sigma = short_query_terms(x, dp, slope, intercept, unit_scale, delta, form, P, ALWAYS_LINEAR)
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
        from_quarters(products[0], products[1], products[2], products[3], layout),
        from_quarters(sigmas[0], sigmas[1], sigmas[2], sigmas[3], layout),
        g_lanes,
    )


@gluon.jit
def _gradient_terms_of_form(
    x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start,
    element: gl.constexpr, layout: gl.constexpr,
    P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, MASKED: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """_gradient_terms by the form of the rows."""
    if STEEP:
        if form == GENERAL:
            g_sigma, sigma, g_lanes = _gradient_terms(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element, layout,
                P, REWEIGHT, LOG_DEGREE, MASKED, False, False,
            )  # fmt: skip
        elif MASKED or form != LINEAR:  # tiles with a mask are few: one code for both short forms
            g_sigma, sigma, g_lanes = _gradient_terms(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element, layout,
                P, REWEIGHT, LOG_DEGREE, MASKED, True, False,
            )  # fmt: skip
        else:
            g_sigma, sigma, g_lanes = _gradient_terms(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element, layout,
                P, REWEIGHT, LOG_DEGREE, MASKED, True, True,
            )  # fmt: skip
    else:
        g_sigma, sigma, g_lanes = _gradient_terms(
            x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element, layout,
            P, REWEIGHT, LOG_DEGREE, MASKED, False, False,
        )  # fmt: skip
    return g_sigma, sigma, g_lanes


@gluon.jit
def _query_sums(
    q, do, k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo, steps, full_lo, full_hi, slope, intercept, unit_scale,
    delta, row_start, row_stop, form, nothing, sum_layout: gl.constexpr, P, REWEIGHT: gl.constexpr,
    LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """sum g sigma k and sum sigma k [M, D] in sum_layout, and sum g [M]; values of rows are [M] in any layout."""
    M: gl.constexpr = nothing.shape[0]
    N: gl.constexpr = nothing.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    element: gl.constexpr = k_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [M, N], left factor
    quarter = quarters(nothing)[0]
    tile_row: gl.constexpr = gl.SliceLayout(1, quarter.type.layout)
    g_lanes = lane_sum(quarter, M, N // 4)
    if STEEP:
        slope, intercept = line_of_form(slope, intercept, form)
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
            g_sigma, sigma, g_lanes = _gradient_terms_of_form(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element,
                factor_layout, P, REWEIGHT, LOG_DEGREE, True, STEEP,
            )  # fmt: skip
        else:
            g_sigma, sigma, g_lanes = _gradient_terms_of_form(
                x, dp, g_lanes, slope, intercept, unit_scale, delta, form, row_start, row_stop, start, element,
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
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, passed_q_ptr, sizes_ptr, block_sizes_ptr,
    slope_ptr, intercept_ptr, z_ptr, rows_ptr,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, do_stride_b, do_stride_h, do_stride_l,
    q_stride_b, q_stride_h, q_stride_l, dq_stride_b, dq_stride_h, dq_stride_l, row_stride, row_plane,
    gain_ptr, exponent, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    q_all, o_all, do_all, dq_all, passed_q_all, k_all, v_all,
    HOST_TILES: gl.constexpr, HAS_GAIN: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, EXACT_QUERIES: gl.constexpr, STEEP: gl.constexpr,
    CACHE: gl.constexpr, TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As backward.query_gradient_kernel for bfloat16.

    Rows of q, o, dO, dq and of the queries that are passed on come and go as tiles, by descriptors from the host
    (that of o: of its bits as float16). In registers they have the layout of the sums, in which a thread has two rows:
    values of rows are computed by four threads, not by sixteen as in a layout for loads of 16 bytes.
    """
    blocks = gl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(gl.program_id(0), gl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b, h = head // Hq, head % Hq
    h_kv = h // (Hq // Hkv)

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])  # [M, N]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [M, D]
    row_layout: gl.constexpr = gl.SliceLayout(1, sum_layout)
    # The same in all warps, so that a reduction needs no exchange between them
    each_warp: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0]))
    value_element: gl.constexpr = v_ptr.dtype.element_ty
    key_element: gl.constexpr = k_ptr.dtype.element_ty

    q_ring, do_ring = tile_ring(key_element, 1, BLOCK_M, D), tile_ring(value_element, 1, BLOCK_M, D)
    k_ring, v_ring = tile_ring(key_element, STAGES, BLOCK_N, D), tile_ring(value_element, STAGES, BLOCK_N, D)
    if BLOCK_M == BLOCK_N:  # the last stages are free until the first step
        raw_q_tile, o_tile = v_ring.index(STAGES - 1), k_ring.index(STAGES - 1)
    else:
        raw_q_tile = tile_ring(value_element, 1, BLOCK_M, D).index(0)
        o_tile = tile_ring(key_element, 1, BLOCK_M, D).index(0)
    q, do = q_ring.index(0), do_ring.index(0)
    rows_ready, keys_ready = tile_barriers(1), tile_barriers(STAGES)
    row_bytes: gl.constexpr = BLOCK_M * D * value_element.primitive_bitwidth // 8
    mbarrier.expect(rows_ready.index(0), 3 * row_bytes)
    fetch_tile((q_all, b, h), raw_q_tile, rows_ready.index(0), first_row)
    fetch_tile((do_all, b, h), do, rows_ready.index(0), first_row)
    fetch_tile((o_all, b, h), o_tile, rows_ready.index(0), first_row)
    key_stop = gl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    head_kv = (b * Hkv + h_kv).to(gl.int64)
    if HOST_TILES:
        k_tiles, v_tiles = (k_all, b, h_kv), (v_all, b, h_kv)
    else:
        v_start = b.to(gl.int64) * v_stride_b + h_kv.to(gl.int64) * v_stride_h
        k_tiles = tile_descriptor(k_ptr + head_kv * Lk * D, key_stop, D, BLOCK_N, D)
        v_tiles = tile_descriptor(v_ptr + v_start, key_stop, v_stride_l, BLOCK_N, D)
    key_lo, key_hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    steps = gl.cdiv(gl.maximum(key_hi - key_lo, 0), BLOCK_N)
    for step in gl.static_range(STAGES - 1):
        fetch_pair(k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo + step * BLOCK_N, step, step < steps)

    # What each row sees, and its values [M]
    first_at = head.to(gl.int64) * row_stride + first_row
    offsets = gl.arange(0, BLOCK_M, row_layout)
    rows = first_row + offsets
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    inside = rows < Lq
    slope = gl.load(slope_ptr + first_at + offsets, mask=inside, other=0.0)
    intercept = gl.load(intercept_ptr + first_at + offsets, mask=inside, other=0.0)
    z = gl.load(z_ptr + first_at + offsets, mask=inside, other=0.0)
    n = (row_stop - row_start).to(gl.float32)
    form = GENERAL
    if STEEP:
        all_rows = gl.arange(0, BLOCK_M, each_warp)
        exists = first_row + all_rows < Lq
        form = form_of_rows(
            gl.load(slope_ptr + first_at + all_rows, mask=exists, other=0.0),
            gl.load(intercept_ptr + first_at + all_rows, mask=exists, other=0.0), exists, P if P > 0 else exponent,
        )  # fmt: skip
    mbarrier.wait(rows_ready.index(0), 0)
    near, norm_scale, rest = norm_parts(raw_q_tile.load(sum_layout).to(gl.float32))
    q.store(scaled_unit_rows(near, rest, n, gain_ptr + h, LOG_D, HAS_GAIN, key_element))
    exact_q = gl.where((rest > 0)[:, None], near, 0.0).to(value_element)  # no bit is lost
    program_barrier()  # every warp has read the tile
    write_tile((passed_q_all, b, h), raw_q_tile, exact_q, first_row)
    delta, bound, unit_scale = row_scales(
        do.load(sum_layout).to(gl.float32),
        o_tile.load(sum_layout).to(value_element, bitcast=True).to(gl.float32),
        sizes_ptr + head_kv * Lk, block_sizes_ptr + head_kv * gl.cdiv(Lk, VALUE_BLOCK), row_start, row_stop, key_lo,
        key_hi, full_lo, full_hi, gl.arange(0, EDGE_KEYS, gl.SliceLayout(0, sum_layout)),
        gl.arange(0, FULL_BLOCKS, each_warp), WINDOWED or PACKED,
    )  # fmt: skip

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
    tile_store_wait(0)
    program_barrier()  # the last stages of K and V are free
    gk, sk, g_sum = _query_sums(
        q, do, k_tiles, k_ring, v_tiles, v_ring, keys_ready, key_lo, steps, full_lo,
        full_hi, slope, intercept, unit_scale, delta * unit_scale, row_start, row_stop, form, nothing, sum_layout,
        P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, STEEP, STAGES,
    )  # fmt: skip

    mean, scale, kappa = query_row_factors(
        gl.convert_layout(g_sum, row_layout), n, slope, z, P if P > 0 else exponent, LOG_D, False
    )  # fmt: skip
    if REWEIGHT:
        gk = gk - sk * mean[:, None]
    if HAS_GAIN:  # the queries of the products lack what a small gain rounds off
        program_barrier()  # every warp is done with dO
        mbarrier.expect(rows_ready.index(0), row_bytes)
        fetch_tile((q_all, b, h), do, rows_ready.index(0), first_row)
        mbarrier.wait(rows_ready.index(0), 1)
        projected, to_unit = do.load(sum_layout).to(gl.float32) * norm_scale[:, None], rest
    else:
        projected, to_unit = q.load(sum_layout).to(gl.float32), reciprocal(scale)
    dq, radial, scale, sound = query_gradient_of_unit(
        gk, projected, to_unit, norm_scale, rest, z, delta, bound, mean, kappa, scale, gain_ptr + h, HAS_GAIN, True
    )
    program_barrier()  # every warp is done with dO
    write_tile((dq_all, b, h), do, dq.to(value_element), first_row)
    store_row_values(
        rows_ptr + first_at + offsets, row_plane, rows < row_stride, sound, slope, intercept, z, delta,
        mean * kappa * bound, scale * gl.where(rest > 0, rest, 0.0), form, radial, P if P > 0 else exponent,
        EXACT_QUERIES, False, STEEP, HAS_GAIN, True,
    )  # fmt: skip
    tile_store_wait(0)
    end_barriers(rows_ready)
    end_barriers(keys_ready)
