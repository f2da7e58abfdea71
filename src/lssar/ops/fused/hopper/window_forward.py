# mypy: ignore-errors
# (tuples that grow in a loop are unrolled, which mypy cannot know)
"""Forward of windows of at most three tiles of keys in Gluon: what fused/window_forward.py computes in Triton.

All tiles that the rows of a program see are on their way at once, and all scores stay in registers. So LSSAR needs its
scores once, not twice, and softmax its maximum once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lssar.ops.fused.hopper.memory import (
    end_barriers,
    fetch_tiles,
    pointer_load,
    program_barrier,
    store_rows,
    tile_barriers,
    tile_ring,
)
from lssar.ops.fused.primitives import (
    HIDDEN,
    LOG2E,
    ex2,
    ex2_neg_abs,
    keys_of_rows,
    log2_1p,
    softplus2,
    visible_keys,
    weight_root,
)
from lssar.ops.fused.steep import TANH_SCALE, short_root
from lssar.ops.fused.window import (
    EXP,
    FAR,
    REWEIGHTED,
    hide_keys,
    inverse_length,
    near_one,
    norm_in_range,
    score_factor,
    steep_rows,
    weight_power,
)
from lssar.ops.fused.window_forward import product_of_sums, store_row_numbers, window_line

TILES = gl.constexpr(3)


@gluon.jit
def _fetch_key_scales(ptr, ring, first_key, Lk):
    """Start copying 1 / |k| of the keys of all tiles; past the last key, of it."""
    N: gl.constexpr = ring.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(TILES):
        keys = first_key + i * N + gl.arange(0, N, layout)
        pointer_load(ring.index(i), ptr + gl.minimum(keys, Lk - 1))
    async_copy.commit_group()


@gluon.jit
def _tile_weights(
    x, row_factor, shift, slope, intercept, p, keys, row_start, row_stop, masked,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """Weights of scores x (without cosine: of products) in which those of hidden keys are hidden."""
    if KIND == EXP:
        return ex2(x - shift) if COSINE else ex2(x * row_factor - shift)
    elif KIND != REWEIGHTED:
        return softplus2(x, LOG_DEGREE)
    elif STEEP:
        return weight_power(short_root(x * TANH_SCALE, slope, intercept)[0], p, P, 0)
    else:
        root = weight_root(softplus2(x, LOG_DEGREE), slope, intercept, LOG_DEGREE)
        # in a flat row hidden keys have the weight of all others
        return hide_keys(weight_power(root, p, P, 0), keys, row_start, row_stop, masked, 0.0)


@gluon.jit
def _weights_and_sum(
    xs, row_factor, shift, slope, intercept, p, first_key, row_start, row_stop, full_lo, full_hi,
    element: gl.constexpr, layout: gl.constexpr,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """Weights of three tiles, rounded to element, in the given layout; and the sum of each row."""
    N: gl.constexpr = xs[0].shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, xs[0].type.layout)
    weights = ()
    sums = ()
    for i in gl.static_range(TILES):
        start = first_key + i * N
        keys = (start + gl.arange(0, N, columns))[None, :]
        weight = _tile_weights(
            xs[i], row_factor[:, None], shift[:, None], slope[:, None], intercept[:, None], p, keys, row_start,
            row_stop, (start < full_lo) | (start + N > full_hi), KIND, P, COSINE, LOG_DEGREE, STEEP,
        )  # fmt: skip
        sums = sums + (gl.sum(weight, 1),)
        weights = weights + (gl.convert_layout(weight.to(element), layout),)
    return weights[0], weights[1], weights[2], sums[0] + sums[1] + sums[2]


@gluon.jit(do_not_specialize=["Lq", "Lk", "window"])
def window_forward_kernel(
    broken_ptr, o_ptr, rows_ptr, key_scale_ptr, gain_ptr, p, row_plane, o_stride_b, o_stride_h, o_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr, q_all, k_all, v_all,
    KIND: gl.constexpr, P: gl.constexpr, COSINE: gl.constexpr, LOG_N: gl.constexpr, GAIN: gl.constexpr,
    FIXED: gl.constexpr, SCALE: gl.constexpr, SMALL: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, PACKED: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """As window.forward_kernel for bfloat16; whether the output is not finite, for the kernel that repairs it.

    Tiles have BLOCK rows or keys. No tile of rows sees keys of more than three.
    """
    block, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first_row, h_kv = block * BLOCK, h // GROUP
    b64, h64 = b.to(gl.int64), h.to(gl.int64)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])  # [M, N]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [M, D]
    query_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    element: gl.constexpr = o_ptr.dtype.element_ty

    first_key, _, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED, BLOCK, BLOCK
    )
    ring, ready = tile_ring(element, 1 + 2 * TILES, BLOCK, D), tile_barriers(3)  # of q, then K, then V
    scales_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [TILES, BLOCK], scales_layout)
    program_barrier()  # all threads see the barriers' start
    q_tiles = q_all, b, h
    k_tiles = k_all, b, h_kv
    v_tiles = v_all, b, h_kv
    fetch_tiles(q_tiles, ring, 0, 1, ready.index(0), first_row)
    fetch_tiles(k_tiles, ring, 1, TILES, ready.index(1), first_key)
    fetch_tiles(v_tiles, ring, 1 + TILES, TILES, ready.index(2), first_key)
    if COSINE:
        _fetch_key_scales(key_scale_ptr + (b64 * Hkv + h_kv) * Lk, scales, first_key, Lk)

    rows = first_row + gl.arange(0, BLOCK, of_rows)
    row_start, row_stop = visible_keys(rows, Lq, Lk, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, True, PACKED)
    n = (row_stop - row_start).to(gl.float32)
    if GAIN:
        gain = gl.load(gain_ptr + h).to(gl.float32)
    else:
        gain = 1.0
    factor = score_factor(n, gain, SCALE, LOG_N, False) * LOG2E
    at = rows_ptr + (b64 * Hq + h64) * Lq + rows
    row_plane = gl.cast(row_plane, gl.int64)
    inside = rows < Lq
    mbarrier.wait(ready.index(0), 0)
    q, down, up = near_one(ring.index(0).load(sum_layout).to(gl.float32), SMALL, False)
    if COSINE:
        one_over = inverse_length(q, False)
        norm = gl.convert_layout(norm_in_range(one_over * down), of_rows)
        gl.store(at + (1 if KIND == EXP else 3) * row_plane, norm, mask=inside)
        row_factor = factor * gl.convert_layout(one_over, of_rows)
    else:
        row_factor = gl.minimum(gl.maximum(factor * gl.convert_layout(up, of_rows), 1.0 / FAR), FAR)
    q = gl.convert_layout(q.to(element), query_layout)

    nothing = gl.zeros([BLOCK, BLOCK], gl.float32, score_layout)
    products = ()
    mbarrier.wait(ready.index(1), 0)
    for i in gl.static_range(TILES):
        products = products + (
            warpgroup_mma(q, ring.index(1 + i).permute((1, 0)), nothing, use_acc=False, is_async=True),
        )
    x0, x1, x2, q = warpgroup_mma_wait(0, (products[0], products[1], products[2], q))
    if COSINE:
        async_copy.wait_group(0)
        program_barrier()  # every thread has copied its part of 1 / |k|

    products = x0, x1, x2
    xs = ()
    columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    for i in gl.static_range(TILES):
        start = first_key + i * BLOCK
        x = products[i]
        if COSINE:
            x = x * scales.index(i).load(columns)[None, :] * row_factor[:, None]
        keys = (start + gl.arange(0, BLOCK, columns))[None, :]
        masked = (start < full_lo) | (start + BLOCK > full_hi)
        xs = xs + (hide_keys(x, keys, row_start, row_stop, masked, -float("inf") if KIND == EXP else HIDDEN),)

    slope, intercept = gl.where(n > 0, 1.0, 0.0), n * 0.0
    shift = gl.abs(factor)
    highest = shift
    if KIND == REWEIGHTED:
        total, x_max = n * 0.0, n * 0.0 + HIDDEN
        for i in gl.static_range(TILES):
            total += 2.0 * log2_1p(product_of_sums(ex2_neg_abs(xs[i])), False) + gl.sum(xs[i] + gl.abs(xs[i]), 1)
            x_max = gl.maximum(x_max, gl.max(xs[i], 1))
        slope, intercept = window_line(total, x_max, n, gl.abs(factor), p, LOG_DEGREE)
        slope += total * 0.0  # NaN where a score is NaN
    elif KIND == EXP and not FIXED:
        highest = gl.maximum(gl.maximum(gl.max(xs[0], 1), gl.max(xs[1], 1)), gl.max(xs[2], 1))
        shift = gl.minimum(gl.maximum(highest if COSINE else highest * row_factor, -FAR), FAR)
    steep, line_slope, line_intercept, _ = steep_rows(slope, intercept, row_factor, inside, p, P, STEEP)
    if STEEP:
        if steep:
            w0, w1, w2, z = _weights_and_sum(
                xs, row_factor, shift, line_slope, line_intercept, p, first_key, row_start, row_stop, full_lo, full_hi,
                element, weight_layout, KIND, P, COSINE, LOG_DEGREE, True,
            )  # fmt: skip
        else:
            w0, w1, w2, z = _weights_and_sum(
                xs, row_factor, shift, line_slope, line_intercept, p, first_key, row_start, row_stop, full_lo, full_hi,
                element, weight_layout, KIND, P, COSINE, LOG_DEGREE, False,
            )  # fmt: skip
    else:
        w0, w1, w2, z = _weights_and_sum(
            xs, row_factor, shift, slope, intercept, p, first_key, row_start, row_stop, full_lo, full_hi, element,
            weight_layout, KIND, P, COSINE, LOG_DEGREE, False,
        )  # fmt: skip

    o = warpgroup_mma_init(gl.zeros([BLOCK, D], gl.float32, sum_layout))
    mbarrier.wait(ready.index(2), 0)
    o = warpgroup_mma(w0, ring.index(4), o, is_async=True)
    o = warpgroup_mma(w1, ring.index(5), o, is_async=True)
    o = warpgroup_mma(w2, ring.index(6), o, is_async=True)
    inverse = gl.where(z > 0, 1.0 / gl.where(z > 0, z, 1.0), z * 0.0)  # NaN where a score is NaN
    if KIND == REWEIGHTED:
        inverse += slope * 0.0  # weight_root makes NaN 0
    shift = shift if COSINE else gl.where(n > 0, highest, 0.0)
    store_row_numbers(at, row_plane, inside, shift, z, slope, intercept, KIND, COSINE, False)
    o, w0, w1, w2 = warpgroup_mma_wait(0, (o, w0, w1, w2))
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, sum_layout))[:, None]
    finite = (gl.convert_layout(gl.sum(o * 0.0, 1), of_rows) == 0) & ((z > 0) | (n == 0))
    gl.store(broken_ptr + (b64 * Hq + h64) * gl.num_programs(0) + block, 1 - gl.min(finite.to(gl.int32), 0))
    o = gl.convert_layout(o.to(element), load_layout)
    store_rows(o_ptr + b64 * o_stride_b + h64 * o_stride_h, o, first_row, Lq, o_stride_l, load_layout, BLOCK, D)
    end_barriers(ready)
