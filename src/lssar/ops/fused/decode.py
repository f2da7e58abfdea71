"""Decode: one or a few query rows of each head against a long key and value cache, split over the keys.

Three kernels: `score_kernel` reads K once and stores cosines and each split's sum and maximum of scores; `value_kernel`
derives the rows' thresholds from those and reads the rows of V whose keys can matter; `combine_kernel` adds the splits.
The query heads of a key head, times the rows, are the R rows of a program. Products of q and k have the keys as rows
and the queries as columns, of which the tensor cores take as few as eight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lssar.ops.fused.primitives import (
    HIDDEN,
    INTERPRETED,
    LN2,
    USE_PTX,
    dot,
    ex2_neg_abs,
    log2_1p,
    power,
    saturate,
    score_scale,
    softplus2,
    weight_line,
    weight_root,
    without_broken_rows,
)
from lssar.ops.fused.unit_rows import exact_unit_rows

FETCHED_BYTES = tl.constexpr(64)  # that a request brings to L2
COSINE_CODES = tl.constexpr(32000.0)  # what cosines are multiplied by as 16-bit integers: leaves room for roundings
TO_INTEGERS = tl.constexpr(1.5 * 2.0**23)  # float32 numbers of this size have no fraction
FAR_SCORE = tl.constexpr(1e30)


@triton.jit
def let_next_begin(AHEAD: tl.constexpr):
    """AHEAD: programs of the next kernel may start as soon as there is room, and wait where they need this one."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(AHEAD: tl.constexpr):
    if AHEAD:
        gdc_wait()


@triton.jit
def cached_rows(ptr, b, h_kv, stride_b, stride_h, columns, PAGE: tl.constexpr):
    """Pointers [1, D] to which `key_offsets` are added. PAGE 0: cache (B, Hkv, L, D); else (pages, PAGE, Hkv, D)."""
    if PAGE == 0:
        ptr += b.to(tl.int64) * stride_b
    return ptr + h_kv.to(tl.int64) * stride_h + columns[None, :]


@triton.jit
def key_offsets(keys, length, b, stride_b, stride_l, table_ptr, table_stride, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets [N, 1] of cache rows; with pages, by block table. WIDE: they need 64 bits."""
    if PAGE == 0:
        return ((keys.to(tl.int64) if WIDE else keys) * stride_l)[:, None]
    else:
        page = tl.load(table_ptr + b * table_stride + keys // PAGE, mask=keys < length, other=0)
        within = keys % PAGE
        if WIDE:
            page, within = page.to(tl.int64), within.to(tl.int64)
        return (page * stride_b + within * stride_l)[:, None]


@triton.jit
def _visible(rows, length, Lq: tl.constexpr):
    """Keys that row (member, query) of a group sees: the queries are the last Lq positions."""
    return tl.maximum(length - (Lq - 1 - rows % Lq), 0)


@triton.jit
def _row_scales(
    gain_ptr, h_kv, rows, n, GROUP: tl.constexpr, Lq: tl.constexpr, LOG_D: tl.constexpr, HAS_GAIN: tl.constexpr
):
    """What the cosines of each row are multiplied by for scores [R]."""
    scale = score_scale(n.to(tl.float32), LOG_D, True)
    if HAS_GAIN:
        scale *= _row_gains(gain_ptr, h_kv, rows, GROUP, Lq)
    return scale


@triton.jit
def _row_gains(gain_ptr, h_kv, rows, GROUP: tl.constexpr, Lq: tl.constexpr):
    """The gain of each row's query head."""
    return tl.load(gain_ptr + h_kv * GROUP + rows // Lq, mask=rows < GROUP * Lq, other=1.0)


@triton.jit
def fetch_lines(row_pointers, wanted, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Ask for rows of D elements (pointers [N, 1] to them) to be brought to L2, where wanted [N]; reads nothing."""
    if USE_PTX:
        size: tl.constexpr = row_pointers.dtype.element_ty.primitive_bitwidth // 8
        piece = tl.arange(0, max(1, BLOCK_D * size // FETCHED_BYTES)) * FETCHED_BYTES
        address = row_pointers.to(tl.int64) + piece[None, :]
        do = (wanted[:, None] & (piece < D * size)[None, :]).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [address, do], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def squares(k):
    """In the type of k."""
    if INTERPRETED:  # it multiplies bfloat16 as if the bits were integers
        return (k.to(tl.float32) * k.to(tl.float32)).to(k.dtype)
    else:
        return k * k


@triton.jit
def fast_rsqrt(x):
    """Right where x is neither tiny nor huge."""
    if USE_PTX:
        return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.rsqrt(x)


@triton.jit
def _cosine_offsets(keys, R: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets [N, 1] of the cosines of R rows with each key. WIDE: they may need 64 bits."""
    return ((keys.to(tl.int64) if WIDE else keys) * R)[:, None]


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """Cosines as they are stored: for 16-bit integers, which are finer than half floats of scores, x is rounded."""
    if dtype != tl.int16:
        return x
    elif USE_PTX:  # saturates
        return tl.inline_asm_elementwise("cvt.rni.s16.f32 $0, $1;", "=h,f", [x], tl.int16, True, 1)
    else:
        return tl.minimum(tl.maximum(x, -32767.0), 32767.0).to(tl.int16)


@triton.jit
def _scale_of_stored(scale, dtype: tl.constexpr):
    if dtype == tl.int16:
        return scale * (1.0 / COSINE_CODES)
    else:
        return scale


@triton.jit
def _score_keys(
    q, q_scale, row_scale, n, rows, k_ptr, x_ptr, lo, stop, length, b, h_kv,
    k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
    D: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, PRECISE: tl.constexpr, DOT: tl.constexpr,
    NORMS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cosines of keys lo..stop to x_ptr; sum of 2a and largest x [R]; whether a norm was near the ends of float32.

    q times q_scale are unit vectors, times COSINE_CODES where cosines become 16-bit integers; row_scale makes scores of
    what is stored. Sum and maximum are of what is stored too: of close keys, all might be rounded to below the mean.
    NORMS: "unit" (the cache holds unit keys), "robust" (right also near the ends of float32's range), "fast", or
    "product": the tensor cores add the squares, rounded to the keys' type, so that nothing is exchanged between
    threads. That is for bfloat16 (the squares of float16 might overflow); its roundings cancel well enough in the sum.
    Sums stay spread over the N slots of a tile until the end: a reduction in the loop would need a barrier.
    """
    offsets = tl.arange(0, N)
    total = tl.zeros([N, R], tl.float32)
    largest = tl.full([N, R], HIDDEN, tl.float32)
    # of the squares
    lowest = tl.full([N, 1], 1.0, tl.float32)
    highest = tl.full([N, 1], 1.0, tl.float32)
    ones = tl.full([columns.shape[0], 1], 1.0, k_ptr.dtype.element_ty)
    k_rows = cached_rows(k_ptr, b, h_kv, k_stride_b, k_stride_h, columns, PAGE)
    x_rows = x_ptr + rows[None, :]
    for start in tl.range(lo, stop, N, num_stages=STAGES):
        keys = start + offsets
        k_at = key_offsets(keys, length, b, k_stride_b, k_stride_l, table_ptr, table_stride, PAGE, WIDE)
        inside = (keys < stop)[:, None]
        k_mask = inside & (columns < D)[None, :]
        k = tl.load(k_rows + k_at, mask=k_mask, other=0.0)  # [N, D]
        if NORMS == "robust":
            k_near, k_scale = exact_unit_rows(k.to(tl.float32))
            k = k_near.to(k.dtype)
        x = dot(k, tl.trans(q), PRECISION=DOT) * q_scale[None, :]  # [N, R]
        if NORMS == "robust":
            x *= k_scale[:, None]
        elif NORMS != "unit":
            if NORMS == "product":
                square = dot(squares(k), ones, PRECISION=DOT)  # [N, 1]
            else:
                k_float = k.to(tl.float32)
                square = tl.sum(k_float * k_float, 1)[:, None]
            square = tl.where(inside, square, 1.0)
            lowest = tl.minimum(lowest, square)
            highest = tl.maximum(highest, square)
            x *= fast_rsqrt(square)
        if x_ptr.dtype.element_ty == tl.int16:
            x = (x + TO_INTEGERS) - TO_INTEGERS
        tl.store(x_rows + _cosine_offsets(keys, R, WIDE), _stored(x, x_ptr.dtype.element_ty), mask=inside)
        x = tl.where(keys[:, None] < n[None, :], x * row_scale[None, :], HIDDEN)
        total += x + tl.abs(x) + 2.0 * log2_1p(ex2_neg_abs(x), PRECISE)
        largest = tl.maximum(largest, x)
    extreme = (tl.min(lowest) < 1e-35) | (tl.max(highest) > 1e37)
    return tl.sum(total, 0), tl.max(largest, 0), extreme


@triton.jit(do_not_specialize=["Lk", "split_length", "splits"])
def score_kernel(
    q_ptr, k_ptr, x_ptr, sum_ptr, max_ptr, lengths_ptr, table_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, table_stride, x_stride,
    Hkv, Lk, split_length, splits, gain_ptr,
    HAS_GAIN: tl.constexpr,
    GROUP: tl.constexpr, Lq: tl.constexpr, LOG_D: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, LOG_DEGREE: tl.constexpr,
    DOT: tl.constexpr, NORMS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    let_next_begin(AHEAD)
    head, split = tl.program_id(0), tl.program_id(1)  # b * Hkv + h_kv
    b, h_kv = head // Hkv, head % Hkv
    lo = split * split_length
    length = Lk
    if HAS_LENGTHS:  # which the previous kernel may have written
        wait_for_last(AHEAD)
        length = tl.load(lengths_ptr + b)
    stop = tl.minimum(lo + split_length, length)
    if FETCH and PAGE == 0:  # the first keys, before anything is waited for that is not needed to find them
        keys = lo + tl.arange(0, 2 * BLOCK_N)
        at = key_offsets(keys, Lk, b, k_stride_b, k_stride_l, table_ptr, table_stride, PAGE, WIDE)
        k_first = cached_rows(k_ptr, b, h_kv, k_stride_b, k_stride_h, tl.zeros([1], tl.int32), PAGE)
        fetch_lines(k_first + at, keys < stop, D, BLOCK_D)
    if not HAS_LENGTHS:
        wait_for_last(AHEAD)
    columns = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_R)
    row_inside = rows < GROUP * Lq
    q_head = (h_kv * GROUP + rows // Lq).to(tl.int64)
    q_at = b.to(tl.int64) * q_stride_b + q_head * q_stride_h + rows % Lq * q_stride_l
    q_mask = row_inside[:, None] & (columns < D)[None, :]
    q_raw = tl.load(q_ptr + q_at[:, None] + columns[None, :], mask=q_mask, other=0.0)  # [R, D]
    q, q_scale = exact_unit_rows(q_raw.to(tl.float32))
    if q_raw.dtype == tl.float16:  # unit vectors fit fp16 better than powers of two
        q = q * q_scale[:, None]
        q_scale = tl.where(q_scale > 0, 1.0, 0.0)
    q = q.to(q_raw.dtype)
    n = _visible(rows, length, Lq)  # [R]
    row_scale = _row_scales(gain_ptr, h_kv, rows, n, GROUP, Lq, LOG_D, HAS_GAIN)
    row_scale = _scale_of_stored(row_scale, x_ptr.dtype.element_ty)
    if x_ptr.dtype.element_ty == tl.int16:
        q_scale *= COSINE_CODES
    x_ptr += head.to(tl.int64) * x_stride * BLOCK_R
    total, largest, extreme = _score_keys(
        q, q_scale, row_scale, tl.minimum(n, stop), rows, k_ptr, x_ptr, lo, stop, length, b, h_kv,
        k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
        D, PAGE, WIDE, LOG_DEGREE == 0, DOT, NORMS, BLOCK_R, BLOCK_N, STAGES,
    )  # fmt: skip
    if NORMS != "unit":  # noqa: SIM102 (the outer one is decided when compiling)
        if extreme:
            tl.debug_barrier()  # what follows overwrites what other threads have stored
            # smaller tiles: with those of the first pass, this one decides how many registers the kernel needs
            total, largest, extreme = _score_keys(
                q, q_scale, row_scale, tl.minimum(n, stop), rows, k_ptr, x_ptr, lo, stop, length, b, h_kv,
                k_stride_b, k_stride_h, k_stride_l, table_ptr, table_stride, columns,
                D, PAGE, WIDE, LOG_DEGREE == 0, DOT, "robust", BLOCK_R, BLOCK_N // 2, 1,
            )  # fmt: skip
    row_at = head.to(tl.int64) * BLOCK_R + rows
    tl.store(sum_ptr + row_at * splits + split, total, mask=row_inside)
    tl.store(max_ptr + row_at * splits + split, largest, mask=row_inside)


@triton.jit
def _least_score(matters, slope, intercept, P, PRECISE: tl.constexpr):
    """A score x [R] below which no weight is above matters [R]; at most a little too low."""
    root = tl.exp2(tl.log2(matters) / P)
    a = 0.5 * (root - intercept) / tl.where(slope > 0, slope, 1.0)  # log2(1 + 2^x)
    series = a * LN2 * (1.0 - a * (0.5 * LN2))
    below = a + tl.log2(tl.where(a < 0.03125, series, 1.0 - tl.exp2(-a)))  # NaN where a < 0
    margin = 0.02 + 1e-4 * tl.abs(below)  # far more than roundings
    return tl.where((a > 0) & (slope > 0), below - margin, tl.where(slope == slope, -FAR_SCORE, FAR_SCORE))


@triton.jit(do_not_specialize=["Lk", "split_length", "splits", "tolerance"])
def value_kernel(
    x_ptr, v_ptr, sum_ptr, max_ptr, o_ptr, z_ptr, list_ptr, lengths_ptr, table_ptr,
    v_stride_b, v_stride_h, v_stride_l, table_stride, x_stride, Hkv, Lk, split_length, splits, tolerance,
    exponent, gain_ptr, HAS_GAIN: tl.constexpr,
    GROUP: tl.constexpr, Lq: tl.constexpr, P: tl.constexpr, REWEIGHT: tl.constexpr, LOG_D: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr,
    LOG_DEGREE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """With REWEIGHT, first which of BLOCK_X keys matter, then their values alone, gathered into full tiles.

    FETCH: the values of all keys found to matter are requested at once, so that tiles come from L2.
    """
    let_next_begin(AHEAD)
    head, split = tl.program_id(0), tl.program_id(1)
    b, h_kv = head // Hkv, head % Hkv
    rows = tl.arange(0, BLOCK_R)
    row_inside = rows < GROUP * Lq
    columns = tl.arange(0, BLOCK_D)
    row_at = head.to(tl.int64) * BLOCK_R + rows
    x_rows = x_ptr + head.to(tl.int64) * x_stride * BLOCK_R + rows[None, :]
    list_ptr += head.to(tl.int64) * x_stride
    v_rows = cached_rows(v_ptr, b, h_kv, v_stride_b, v_stride_h, columns, PAGE)
    v_first = cached_rows(v_ptr, b, h_kv, v_stride_b, v_stride_h, tl.zeros([1], tl.int32), PAGE)
    lo = split * split_length
    wait_for_last(AHEAD)
    length = tl.load(lengths_ptr + b) if HAS_LENGTHS else Lk
    stop = tl.minimum(lo + split_length, length)
    n = _visible(rows, length, Lq)  # [R]
    n_float = n.to(tl.float32)
    scale = _scale_of_stored(_row_scales(gain_ptr, h_kv, rows, n, GROUP, Lq, LOG_D, HAS_GAIN), x_ptr.dtype.element_ty)
    o = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    z = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    spoiled = tl.zeros([BLOCK_R], tl.int32)
    if REWEIGHT:
        power_p = P if P > 0 else exponent
        some = tl.arange(0, BLOCK_X)
        # before the sums, which are used first: the two waits become one
        cosines = tl.load(
            x_rows + _cosine_offsets(lo + some, BLOCK_R, WIDE), mask=(lo + some < stop)[:, None], other=0
        )  # [X, R]
        every = tl.arange(0, BLOCK_SPLITS)
        part_at = row_at[:, None] * splits + every[None, :]
        part_mask = row_inside[:, None] & (every < splits)[None, :]
        totals = tl.load(sum_ptr + part_at, mask=part_mask, other=0.0)  # [R, splits]
        tops = tl.load(max_ptr + part_at, mask=part_mask, other=HIDDEN)
        total, x_max = tl.sum(totals, 1), tl.max(tops, 1)
        gain_size = tl.abs(_row_gains(gain_ptr, h_kv, rows, GROUP, Lq)) if HAS_GAIN else 1.0
        slope, intercept = weight_line(total, x_max, n_float, power_p, LOG_D, LOG_DEGREE, gain_size)
        # The largest weights of the splits add up to at most the row's sum of weights. Keys of at most tolerance / n of
        # that weigh together at most tolerance times it.
        roots = weight_root(softplus2(tops, LOG_DEGREE), slope[:, None], intercept[:, None], LOG_DEGREE)
        least_sum = tl.sum(tl.where(tops > HIDDEN, power(roots, power_p), 0.0), 1)
        matters = tolerance / tl.maximum(n_float, 1.0) * least_sum
        least = _least_score(matters, slope, intercept, power_p, LOG_DEGREE == 0) / tl.maximum(tl.abs(scale), 1e-30)
        least = tl.where(row_inside, least, FAR_SCORE)
        sign = tl.where(scale < 0, -1, 1)
        if x_ptr.dtype.element_ty == tl.int16:
            least = tl.floor(tl.minimum(tl.maximum(least, -40000.0), 40000.0)).to(tl.int32)
        else:
            sign = sign.to(tl.float32)
        scored = slope
    else:
        scored = tl.load(sum_ptr + row_at * splits + split, mask=row_inside, other=0.0)  # [R]
    count = 0  # keys listed
    done = lo  # where the list is read next
    for first in tl.range(lo, stop, BLOCK_X if REWEIGHT else split_length):
        if REWEIGHT:
            candidates = first + some
            following = candidates + BLOCK_X
            cosine = cosines.to(sign.dtype)
            x_at = _cosine_offsets(following, BLOCK_R, WIDE)
            cosines = tl.load(x_rows + x_at, mask=(following < stop)[:, None], other=0)
            if HAS_GAIN:  # which may be negative
                cosine *= sign[None, :]
            above = cosine > least[None, :]
            if Lq > 1:
                above &= candidates[:, None] < n[None, :]
            needed = (tl.max(above.to(tl.int32), 1) > 0) & (candidates < stop)  # [X]
            if FETCH:
                lines = key_offsets(candidates, length, b, v_stride_b, v_stride_l, table_ptr, table_stride, PAGE, WIDE)
                fetch_lines(v_first + lines, needed, D, BLOCK_D)
            slot = lo + count + tl.cumsum(needed.to(tl.int32), 0) - 1
            tl.store(list_ptr + slot, candidates, mask=needed)
            ready = count // BLOCK_N * BLOCK_N  # full tiles of what was requested before
            count += tl.sum(needed.to(tl.int32), 0)
            tl.debug_barrier()  # what one thread listed, others read
            last = lo + (count if first + BLOCK_X >= stop else ready)
        else:
            last = stop
        slots = done + tl.arange(0, BLOCK_N)
        if REWEIGHT:
            listed = tl.load(list_ptr + slots, mask=slots < last, other=0)
        for start in tl.range(done, last, BLOCK_N, num_stages=1 if REWEIGHT else STAGES):
            slots = start + tl.arange(0, BLOCK_N)
            inside = slots < last
            keys = slots
            if REWEIGHT:
                keys = listed
                listed = tl.load(list_ptr + slots + BLOCK_N, mask=slots + BLOCK_N < last, other=0)
            at = key_offsets(keys, length, b, v_stride_b, v_stride_l, table_ptr, table_stride, PAGE, WIDE)
            v_mask = inside[:, None] & (columns < D)[None, :]
            v = tl.load(v_rows + at, mask=v_mask, other=0.0)  # [N, D]
            x = tl.load(x_rows + _cosine_offsets(keys, BLOCK_R, WIDE), mask=inside[:, None], other=0)  # [N, R]
            two_a = softplus2(x.to(tl.float32) * scale[None, :], LOG_DEGREE)
            if REWEIGHT:
                weight = power(weight_root(two_a, slope[None, :], intercept[None, :], LOG_DEGREE), power_p)
            else:
                weight = two_a
            visible = inside[:, None] & (keys[:, None] < n[None, :])
            weight = tl.where(visible, weight, 0.0)
            z += weight
            if Lq > 1:  # some of the last keys are hidden from some rows, and their values may not be finite
                v, broken = without_broken_rows(v)
                spoiled = tl.maximum(spoiled, tl.max(tl.where(visible, broken[:, None], 0), 0))
            o = dot(tl.trans(weight.to(v.dtype)), v, o, PRECISION=DOT)  # [R, D]
        done = last
    z_sum = tl.sum(z, 0)  # [R]
    z_sum = tl.where(scored == scored, z_sum, scored)  # a NaN score, which integers do not hold, spoils the row
    z_sum = tl.where(spoiled > 0, float("nan"), z_sum)
    out_at = (row_at * splits + split)[:, None] * D + columns[None, :]
    tl.store(o_ptr + out_at, o, mask=row_inside[:, None] & (columns < D)[None, :])
    tl.store(z_ptr + row_at * splits + split, z_sum, mask=row_inside)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    o_part_ptr, z_part_ptr, o_ptr, o_stride_b, o_stride_h, o_stride_l, Hkv, splits,
    GROUP: tl.constexpr, Lq: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program a row and BLOCK_D columns: the splits' sums, divided by the row's weight.

    The next kernel may begin when value_kernel has ended: before, its programs would wait beside those of value_kernel.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    b, h = head // Hkv, head % Hkv * GROUP + row // Lq
    every = tl.arange(0, BLOCK_SPLITS)
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    part_at = (head * BLOCK_R + row).to(tl.int64) * splits + every
    wait_for_last(AHEAD)
    let_next_begin(AHEAD)
    z = tl.sum(tl.load(z_part_ptr + part_at, mask=every < splits, other=0.0), 0)
    mask = (every < splits)[:, None] & (columns < D)[None, :]
    o = tl.sum(tl.load(o_part_ptr + part_at[:, None] * D + columns[None, :], mask=mask, other=0.0), 0)  # [D]
    o = o / tl.where(z == 0, 1.0, z)
    at = b.to(tl.int64) * o_stride_b + h.to(tl.int64) * o_stride_h + row % Lq * o_stride_l
    tl.store(o_ptr + at + columns, saturate(o, o_ptr.dtype.element_ty), mask=columns < D)
