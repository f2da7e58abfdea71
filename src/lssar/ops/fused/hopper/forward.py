# mypy: ignore-errors
"""Forward in Gluon: what the Triton kernel of fused/forward.py computes, for half types."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from lssar.ops.fused.forward import CAREFUL_SCALE
from lssar.ops.fused.hopper.memory import (
    announce,
    end_barriers,
    fetch_tile,
    load_rows,
    load_tile,
    program_barrier,
    tile_barriers,
    tile_descriptor,
    tile_ring,
    tile_store_wait,
    write_tile,
)
from lssar.ops.fused.primitives import (
    HIDDEN,
    ex2_neg_abs,
    head_and_block,
    kahan_add,
    keep_visible,
    keys_of_rows,
    lane_compound,
    lane_max,
    lane_sum,
    log2_1p,
    not_finite,
    saturate,
    visible_keys,
    weight_line,
    without_broken_rows,
)
from lssar.ops.fused.steep import (
    GENERAL,
    HIDDEN_PAIR,
    form_of_rows,
    hide_pairs,
    lane_max_of_pairs,
    lane_sum_of_pairs,
    max_pairs,
    pairs_of,
    row_max_of_lanes,
    softplus_pairs,
    tile_weights,
)
from lssar.ops.fused.unit_rows import norm_parts, scaled_unit_rows


@gluon.jit
def _scores(q, ring, stage, HALF: gl.constexpr, N: gl.constexpr, nothing):
    """Start q k^T of one half of a unit of keys, [M, N]; asynchronous."""
    keys = ring.index(stage).slice(HALF * N, N)
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _unit_of(turn, units):
    """The unit of keys of a turn: up to three passes over the units follow one another."""
    turn = gl.where(turn < units, turn, turn - units)
    return gl.where(turn < units, turn, turn - units)


@gluon.jit
def _half_statistics(x, excess, linear, largest, row_start, row_stop, start, full_lo, full_hi):
    """Pass 1, scores x [M, N] of a tile: prod(1 + t) - 1 compounded, sums of x + |x| and largest x, all [M, 4].

    A sum of logarithms is the logarithm of a product.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    if (start < full_lo) | (start + N > full_hi):
        keys = (start + gl.arange(0, N, gl.SliceLayout(0, x.type.layout)))[None, :]
        x = keep_visible(x, keys, row_start, row_stop, HIDDEN)
    part = lane_compound(ex2_neg_abs(x), M, N)
    excess = excess + part + excess * part
    return excess, linear + lane_sum(x + gl.abs(x), M, N), gl.maximum(largest, lane_max(x, M, N))


@gluon.jit
def _rough_statistics(x, total, largest, row_start, row_stop, start, full_lo, full_hi):
    """Pass 1 for steep rows, scores x [M, N] in half arithmetic: sums of a and pairs of largest x, both [M, 4]."""
    N: gl.constexpr = x.shape[1]
    pairs = pairs_of(x)
    if (start < full_lo) | (start + N > full_hi):
        keys = (start + 2 * gl.arange(0, N // 2, gl.SliceLayout(0, pairs.type.layout)))[None, :]
        pairs = hide_pairs(pairs, keys, row_start, row_stop)
    return total + lane_sum_of_pairs(softplus_pairs(pairs)), max_pairs(largest, lane_max_of_pairs(pairs))


@gluon.jit
def _half_weights(
    x, z, slope, intercept, form, row_start, row_stop, start, full_lo, full_hi, element: gl.constexpr,
    layout: gl.constexpr, P, REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """Pass 2, scores x [M, N] of a tile: weights, rounded to element, in the given layout; z [M, 4] + their sums."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    weight = tile_weights(x, slope, intercept, form, P, REWEIGHT, LOG_DEGREE, STEEP)
    if (start < full_lo) | (start + N > full_hi):
        keys = (start + gl.arange(0, N, gl.SliceLayout(0, x.type.layout)))[None, :]
        weight = keep_visible(weight, keys, row_start, row_stop, 0.0)
    return gl.convert_layout(weight.to(element), layout), z + lane_sum(weight, M, N)


@gluon.jit
def _start_loads(
    k_tiles, k_ring, k_ready, v_tiles, v_ring, v_ready, key_lo, units, key_turns, N: gl.constexpr,
    STAGES1: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start loading the first units of K and the first tiles of V."""
    for i in gl.static_range(STAGES1):
        announce(k_tiles, k_ready, i, i < key_turns)
    for i in gl.static_range(STAGES):
        announce(v_tiles, v_ready, i, i < 2 * units)
    program_barrier()
    for i in gl.static_range(STAGES1):
        load_tile(k_tiles, k_ring, k_ready, key_lo + _unit_of(i, units) * (2 * N), i, i < key_turns)
    for i in gl.static_range(STAGES):
        load_tile(v_tiles, v_ring, v_ready, key_lo + i * N, i, i < 2 * units)


@gluon.jit
def _next_unit(
    odd_scores, q, k_tiles, k_ring, k_ready, key_lo, units, turn, wanted, nothing, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of the second half of a unit, once they are there, and the asynchronous ones of the next unit's first.

    Between the two the unit's stage is refilled, if that is wanted.
    """
    stage, following = turn % STAGES, turn + 1
    x_odd = warpgroup_mma_wait(0, (odd_scores,))
    row = key_lo + _unit_of(turn + STAGES, units) * (2 * N)
    announce(k_tiles, k_ready, stage, wanted)
    program_barrier()  # every warp is done with this unit
    load_tile(k_tiles, k_ring, k_ready, row, stage, wanted)
    mbarrier.wait(k_ready.index(following % STAGES), following // STAGES & 1)
    return x_odd, _scores(q, k_ring, following % STAGES, 0, N, nothing)


@gluon.jit
def _rough_pass(
    x, q, k_tiles, k_ring, k_ready, key_lo, units, row_start, row_stop, full_lo, full_hi, nothing,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Pass 1 in half arithmetic: scores of the unit after the last, sums of 2a and largest x [M] of each row."""
    N: gl.constexpr = x.shape[1]
    pair_row: gl.constexpr = gl.SliceLayout(1, pairs_of(nothing).type.layout)
    pair_start = gl.convert_layout(row_start, pair_row)[:, None]
    pair_stop = gl.convert_layout(row_stop, pair_row)[:, None]
    pair_lanes = lane_max_of_pairs(pairs_of(nothing))
    total = pair_lanes.to(gl.float32)
    largest = pair_lanes + HIDDEN_PAIR
    for unit in range(units):
        start = key_lo + unit * (2 * N)
        odd_scores = _scores(q, k_ring, unit % STAGES, 1, N, nothing)
        total, largest = _rough_statistics(x, total, largest, pair_start, pair_stop, start, full_lo, full_hi)
        x_odd, even_scores = _next_unit(
            odd_scores, q, k_tiles, k_ring, k_ready, key_lo, units, unit, True, nothing, N, STAGES
        )
        total, largest = _rough_statistics(x_odd, total, largest, pair_start, pair_stop, start + N, full_lo, full_hi)
        x = warpgroup_mma_wait(0, (even_scores,))
    return x, 2.0 * gl.sum(total, 1), row_max_of_lanes(largest)


@gluon.jit
def _exact_pass(
    x, q, k_tiles, k_ring, k_ready, key_lo, units, turn, key_turns, row_start, row_stop, full_lo, full_hi, nothing,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Pass 1: scores of the unit after the last, sums of 2a and largest x [M] of each row."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    lanes = lane_sum(nothing, M, N)  # zeros [M, 4]
    total, lost, largest = lanes, lanes, lanes + HIDDEN
    for unit in range(units):
        start = key_lo + unit * (2 * N)
        odd_scores = _scores(q, k_ring, turn % STAGES, 1, N, nothing)
        excess, linear, largest = _half_statistics(
            x, lanes, lanes, largest, row_start, row_stop, start, full_lo, full_hi
        )
        x_odd, even_scores = _next_unit(
            odd_scores, q, k_tiles, k_ring, k_ready, key_lo, units, turn, turn + STAGES < key_turns, nothing, N, STAGES
        )
        excess, linear, largest = _half_statistics(
            x_odd, excess, linear, largest, row_start, row_stop, start + N, full_lo, full_hi
        )
        # compensated: a flat row must be flat to rounding at any length
        total, lost = kahan_add(total, lost, 2.0 * log2_1p(excess, False) + linear)
        x = warpgroup_mma_wait(0, (even_scores,))
        turn += 1
    return x, gl.sum(total - lost, 1), gl.max(largest, 1)


@gluon.jit
def _weight_lines(
    x, q, k_tiles, k_ring, k_ready, key_lo, units, key_turns, row_start, row_stop, tile_start, tile_stop, full_lo,
    full_hi, n, inside, gain_size, nothing, P, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, LOG_DEGREE: gl.constexpr,
    STEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The passes over K before the one over V: scores of the next unit, its turn, and how many turns there are in all;
    slope and intercept of each row's weights [M]; and their form.

    x: scores of unit 0. tile_start, tile_stop: row_start, row_stop in the layout of a tile. n: visible keys.
    inside: which rows exist.
    """
    row_layout: gl.constexpr = row_start.type.layout
    turn = 0  # the unit of x, of key_turns
    slope = gl.where(n > 0, 1.0, 0.0)
    intercept = slope * 0.0
    form = units * GENERAL if STEEP else GENERAL  # not known yet
    if STEEP:  # noqa: SIM102 (decided when compiling)
        if units >= STAGES:  # with fewer, loads for a third pass would start before it is known to be needed
            x, total, x_max = _rough_pass(
                x, q, k_tiles, k_ring, k_ready, key_lo, units, row_start, row_stop, full_lo, full_hi, nothing, STAGES
            )
            turn += units
            total, x_max = gl.convert_layout(total, row_layout), gl.convert_layout(x_max, row_layout)
            slope, intercept = weight_line(total, x_max, n, P, LOG_D, LOG_DEGREE, gain_size)
            form = form_of_rows(slope, intercept, inside, P)
            key_turns = units * gl.where(form == GENERAL, 3, 2)
    if REWEIGHT and (form == GENERAL):
        x, total, x_max = _exact_pass(
            x, q, k_tiles, k_ring, k_ready, key_lo, units, turn, key_turns, tile_start, tile_stop, full_lo, full_hi,
            nothing, STAGES,
        )  # fmt: skip
        turn += units
        total, x_max = gl.convert_layout(total, row_layout), gl.convert_layout(x_max, row_layout)
        slope, intercept = weight_line(total, x_max, n, P, LOG_D, LOG_DEGREE, gain_size)
    return x, turn, key_turns, slope, intercept, form


@gluon.jit
def _value_pass(
    x, q, k_tiles, k_ring, k_ready, v_tiles, v_ring, v_ready, key_lo, units, turn, key_turns, slope, intercept, form,
    row_start, row_stop, full_lo, full_hi, nothing, sum_layout: gl.constexpr, D: gl.constexpr, P,
    REWEIGHT: gl.constexpr, LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr, STAGES1: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Pass 2: sums of weights times v [M, D] in sum_layout, and sums of weights [M]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    element: gl.constexpr = v_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [M, N], left factor
    z = lane_sum(nothing, M, N)  # zeros [M, 4]
    o = warpgroup_mma_init(gl.zeros([M, D], gl.float32, sum_layout))
    odd = gl.convert_layout(nothing.to(element), factor_layout)
    for unit in range(units):
        stage, following = turn % STAGES1, turn + 1
        start = key_lo + unit * (2 * N)
        tile = 2 * unit
        odd_scores = _scores(q, k_ring, stage, 1, N, nothing)
        even, z = _half_weights(
            x, z, slope, intercept, form, row_start, row_stop, start, full_lo, full_hi, element, factor_layout,
            P, REWEIGHT, LOG_DEGREE, STEEP,
        )  # fmt: skip
        # Waiting for the weights as well keeps them in their registers until the product that reads them ends.
        o, x_odd, odd = warpgroup_mma_wait(0, (o, odd_scores, odd))
        refill = turn + STAGES1
        row = key_lo + _unit_of(refill, units) * (2 * N)
        v_refill = tile - 1 + STAGES
        v_wanted = (unit > 0) & (v_refill < 2 * units)
        announce(k_tiles, k_ready, stage, refill < key_turns)
        announce(v_tiles, v_ready, v_refill % STAGES, v_wanted)
        program_barrier()  # every warp is done with this unit of K and the tile of V before
        load_tile(k_tiles, k_ring, k_ready, row, stage, refill < key_turns)
        load_tile(v_tiles, v_ring, v_ready, key_lo + v_refill * N, v_refill % STAGES, v_wanted)
        mbarrier.wait(v_ready.index(tile % STAGES), tile // STAGES & 1)
        o = warpgroup_mma(even, v_ring.index(tile % STAGES), o, is_async=True)
        # The scores after the last unit are not used: any stage will do, without waiting for it.
        mbarrier.wait(k_ready.index(following % STAGES1), following // STAGES1 & 1, pred=unit + 1 < units)
        even_scores = _scores(q, k_ring, following % STAGES1, 0, N, nothing)
        odd, z = _half_weights(
            x_odd, z, slope, intercept, form, row_start, row_stop, start + N, full_lo, full_hi, element,
            factor_layout, P, REWEIGHT, LOG_DEGREE, STEEP,
        )  # fmt: skip
        o, x, even = warpgroup_mma_wait(0, (o, even_scores, even))
        v_refill = tile + STAGES
        announce(v_tiles, v_ready, tile % STAGES, v_refill < 2 * units)
        program_barrier()  # every warp is done with this tile of V
        load_tile(v_tiles, v_ring, v_ready, key_lo + v_refill * N, tile % STAGES, v_refill < 2 * units)
        mbarrier.wait(v_ready.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1)
        o = warpgroup_mma(odd, v_ring.index((tile + 1) % STAGES), o, is_async=True)
        turn += 1
    o, odd = warpgroup_mma_wait(0, (o, odd))
    return o, gl.sum(z, 1)


@gluon.jit
def _careful_values(
    q, k_ptr, k_ring, v_ptr, v_stride, v_ring, key_lo, key_hi, key_stop, slope, intercept, form, row_start, row_stop,
    nothing, sum_layout: gl.constexpr, load_layout: gl.constexpr, D: gl.constexpr, P, REWEIGHT: gl.constexpr,
    LOG_DEGREE: gl.constexpr, STEEP: gl.constexpr,
):  # fmt: skip
    """As forward._careful_values, without overlap: sums of weights times v, sums of weights [M], and the scale."""
    M: gl.constexpr = nothing.shape[0]
    N: gl.constexpr = nothing.shape[1]
    element: gl.constexpr = v_ring.dtype
    factor_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)  # [M, N], left factor
    key_layout: gl.constexpr = gl.SliceLayout(0, nothing.type.layout)
    scale = 1.0 if element == gl.float16 else CAREFUL_SCALE
    o = gl.zeros([M, D], gl.float32, sum_layout)
    z = lane_sum(nothing, M, N)
    spoiled = gl.max(nothing, 1)
    k_tile, v_tile = k_ring.index(0).slice(0, N), v_ring.index(0)
    for start in range(key_lo, key_hi, N):
        v, broken = without_broken_rows(load_rows(v_ptr, start, key_stop, v_stride, load_layout, N, D))
        program_barrier()  # every warp is done with the tiles before
        k_tile.store(load_rows(k_ptr, start, key_stop, D, load_layout, N, D))
        v_tile.store(v)
        fence_async_shared()
        program_barrier()
        score = warpgroup_mma(q, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, (score,))
        keys = (start + gl.arange(0, N, key_layout))[None, :]
        weight = tile_weights(x, slope, intercept, form, P, REWEIGHT, LOG_DEGREE, STEEP)
        weight = keep_visible(weight, keys, row_start, row_stop, 0.0)
        z += lane_sum(weight, M, N)
        here = nothing + gl.convert_layout(broken, key_layout)[None, :].to(gl.float32)
        spoiled = gl.maximum(spoiled, gl.max(keep_visible(here, keys, row_start, row_stop, 0.0), 1))
        factor = gl.convert_layout((weight * scale).to(element), factor_layout)
        o, factor = warpgroup_mma_wait(0, (warpgroup_mma(factor, v_tile, o, is_async=True), factor))
    z_row = gl.sum(z, 1)
    spoiled = gl.convert_layout(spoiled, z_row.type.layout)
    return o, gl.where(spoiled > 0, float("nan"), z_row), scale


@gluon.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, slope_ptr, intercept_ptr, z_ptr, q_stride_b, q_stride_h, q_stride_l,
    v_stride_b, v_stride_h, v_stride_l, o_stride_b, o_stride_h, o_stride_l, row_stride, Hq, Hkv,
    exponent, gain_ptr, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    q_all, o_all, k_all, v_all,
    HOST_TILES: gl.constexpr, HAS_GAIN: gl.constexpr,
    P: gl.constexpr, REWEIGHT: gl.constexpr, LOG_D: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    LOG_DEGREE: gl.constexpr, DOT: gl.constexpr, STEEP: gl.constexpr, CACHE: gl.constexpr, TMA: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N1: gl.constexpr, BLOCK_N: gl.constexpr, STAGES1: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As forward.forward_kernel, for half types: keys in units of 2 BLOCK_N, a half of it at a time.

    The arithmetic of one half overlaps with the scores of the next half and the product with V of the half before.
    K has STAGES1 stages of a unit, V has STAGES stages of half a unit. q and o come and go as tiles of their bits, by
    descriptors from the host that have the type of the keys.
    """
    blocks = gl.cdiv(Lq, BLOCK_M)
    head, block = head_and_block(gl.program_id(0), gl.num_programs(0), blocks, CACHE // D // Lk)
    first_row = (blocks - 1 - block) * BLOCK_M
    b = head // Hq
    b64, h = b.to(gl.int64), (head % Hq).to(gl.int64)
    h_kv = h // (Hq // Hkv)
    k_ptr += (b64 * Hkv + h_kv) * Lk * D
    v_ptr += b64 * v_stride_b + h_kv * v_stride_h

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])  # [M, N]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])  # [M, D]
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    tile_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    sum_row: gl.constexpr = gl.SliceLayout(1, sum_layout)
    key_element: gl.constexpr = k_ptr.dtype.element_ty
    element: gl.constexpr = v_ptr.dtype.element_ty

    UNIT: gl.constexpr = 2 * BLOCK_N
    q_ring = tile_ring(key_element, 1, BLOCK_M, D)
    k_ring = tile_ring(key_element, STAGES1, UNIT, D)
    v_ring = tile_ring(element, STAGES, BLOCK_N, D)
    q_ready, k_ready, v_ready = tile_barriers(1), tile_barriers(STAGES1), tile_barriers(STAGES)
    q = q_ring.index(0)
    mbarrier.expect(q_ready.index(0), BLOCK_M * D * key_element.primitive_bitwidth // 8)
    fetch_tile((q_all, b, head % Hq), q, q_ready.index(0), first_row)
    key_stop = gl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    if HOST_TILES:
        k_tiles, v_tiles = (k_all, b, head % Hq // (Hq // Hkv)), (v_all, b, head % Hq // (Hq // Hkv))
    else:
        k_tiles = tile_descriptor(k_ptr, key_stop, D, UNIT, D)
        v_tiles = tile_descriptor(v_ptr, key_stop, v_stride_l, BLOCK_N, D)

    rows = first_row + gl.arange(0, BLOCK_M, tile_row)
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    key_lo, key_hi, full_lo, full_hi = keys_of_rows(
        first_row, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip
    units = gl.cdiv(gl.maximum(key_hi - key_lo, 0), UNIT)
    key_turns = units * (2 if REWEIGHT else 1)  # units of K that are read, one pass after the other
    _start_loads(k_tiles, k_ring, k_ready, v_tiles, v_ring, v_ready, key_lo, units, key_turns, BLOCK_N, STAGES1, STAGES)
    n = (row_stop - row_start).to(gl.float32)
    mbarrier.wait(q_ready.index(0), 0)
    raw_q = q.load(sum_layout).to(element, bitcast=True)
    near, _, rest = norm_parts(raw_q.to(gl.float32))
    unit_q = scaled_unit_rows(
        near, rest, gl.convert_layout(n, sum_row), gain_ptr + h, LOG_D, HAS_GAIN, q_ring.dtype
    )  # fmt: skip
    program_barrier()  # every warp has read the tile
    q.store(unit_q)
    fence_async_shared()
    program_barrier()  # all of Q is there
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
    tile_start, tile_stop = row_start[:, None], row_stop[:, None]
    gain_size = gl.abs(gl.load(gain_ptr + h)) if HAS_GAIN else 1.0
    mbarrier.wait(k_ready.index(0), 0, pred=units > 0)
    x = warpgroup_mma_wait(0, (_scores(q, k_ring, 0, 0, BLOCK_N, nothing),))
    x, turn, key_turns, slope, intercept, form = _weight_lines(
        x, q, k_tiles, k_ring, k_ready, key_lo, units, key_turns, row_start, row_stop, tile_start, tile_stop, full_lo,
        full_hi, n, rows < Lq, gain_size, nothing, P if P > 0 else exponent, REWEIGHT, LOG_D, LOG_DEGREE, STEEP,
        STAGES1,
    )  # fmt: skip
    tile_slope, tile_intercept = slope[:, None], intercept[:, None]
    o, z = _value_pass(
        x, q, k_tiles, k_ring, k_ready, v_tiles, v_ring, v_ready, key_lo, units, turn, key_turns, tile_slope,
        tile_intercept, form, tile_start, tile_stop, full_lo, full_hi, nothing, sum_layout,
        D, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE, STEEP, STAGES1, STAGES,
    )  # fmt: skip

    divisor = z
    if gl.max(not_finite(gl.sum(o, 1)).to(gl.int32), 0) > 0:  # a sum may overflow where o does not, which does no harm
        o, z, scale = _careful_values(
            q, k_ptr, k_ring, v_ptr, v_stride_l, v_ring, key_lo, key_hi, key_stop, tile_slope, tile_intercept, form,
            tile_start, tile_stop, nothing, sum_layout, load_layout, D, P if P > 0 else exponent, REWEIGHT, LOG_DEGREE,
            STEEP,
        )  # fmt: skip
        divisor = z * scale
    spoiled = slope != slope
    divisor = gl.convert_layout(divisor, tile_row)
    inverse = gl.where(spoiled, slope, 1.0 / gl.where(divisor == 0, 1.0, divisor))
    o = o * gl.convert_layout(inverse, sum_row)[:, None]
    if element == gl.float16:
        o = saturate(o, element)
    program_barrier()  # every warp is done with Q
    write_tile((o_all, b, head % Hq), q, o.to(element).to(key_element, bitcast=True), first_row)
    at = head.to(gl.int64) * row_stride + rows
    gl.store(slope_ptr + at, slope, mask=rows < Lq)
    gl.store(intercept_ptr + at, intercept, mask=rows < Lq)
    gl.store(z_ptr + at, gl.where(spoiled, slope, gl.convert_layout(z, tile_row)), mask=rows < Lq)
    tile_store_wait(0)
    end_barriers(q_ready)
    end_barriers(k_ready)
    end_barriers(v_ready)
