"""Forward and backward of mechanisms whose weights are phi(s) over a divisor: every activation, l1 or a fixed divisor.

That is all of them but re-weighting and re-centring, and exp without l1 (whose range needs more care). One pass over
the keys, since no weight waits for a statistic of its row: an l1 sum divides the output in the end, as in softmax.
Scores are s = factor_i q.k + bias_i with row numbers that depend on the count n_i of visible keys alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lssar.ops.fused.primitives import (
    HIDDEN,
    INTERPRETED,
    dot,
    load_tile,
    saturate,
    store_tile,
    visible_keys,
    visible_rows,
)


@triton.jit
def _erf(x):
    if INTERPRETED:  # it has no erf: Abramowitz and Stegun 7.1.26, to 1.5e-7
        t = 1.0 / (1.0 + 0.3275911 * tl.abs(x))
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        y = 1.0 - tail * tl.exp(-x * x)
        return tl.where(x < 0, -y, y)
    else:
        return tl.erf(x)


@triton.jit
def _sigmoid(s):
    t = tl.exp(-tl.abs(s))
    return tl.where(s >= 0, 1.0, t) / (1.0 + t)


@triton.jit
def _softplus(s):
    t = tl.exp(-tl.abs(s))
    small = t * (1.0 - t * (0.5 - t * (1.0 / 3.0 - t * 0.25)))  # where 1 + t would lose t
    return tl.maximum(s, 0.0) + tl.where(t < 0.01, small, tl.log(1.0 + t))


@triton.jit
def _mish_gate(s):
    """tanh(softplus(s))."""
    e = tl.exp(tl.minimum(s, 20.0))
    return e * (e + 2.0) / (e * (e + 2.0) + 2.0)


@triton.jit
def activate(s, shift, ACTIVATION: tl.constexpr):
    """phi(s); exp(s - shift) for exp."""
    if ACTIVATION == "exp":
        return tl.exp(s - shift)
    elif ACTIVATION == "relu":
        return tl.maximum(s, 0.0)
    elif ACTIVATION == "relu2":
        return tl.maximum(s, 0.0) * tl.maximum(s, 0.0)
    elif ACTIVATION == "relu6":
        return tl.minimum(tl.maximum(s, 0.0), 6.0)
    elif ACTIVATION == "gelu":
        return 0.5 * s * (1.0 + _erf(s * 0.7071067811865476))
    elif ACTIVATION == "sigmoid":
        return _sigmoid(s)
    elif ACTIVATION == "softplus":
        return _softplus(s)
    elif ACTIVATION == "mish":
        return s * _mish_gate(s)
    else:
        return s


@triton.jit
def slope_of(s, a, ACTIVATION: tl.constexpr):
    """phi'(s), a = phi(s)."""
    if ACTIVATION == "exp":
        return a
    elif ACTIVATION == "relu":
        return tl.where(s > 0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        return 2.0 * tl.maximum(s, 0.0)
    elif ACTIVATION == "relu6":
        return tl.where((s > 0) & (s < 6.0), 1.0, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * (1.0 + _erf(s * 0.7071067811865476)) + s * 0.3989422804014327 * tl.exp(-0.5 * s * s)
    elif ACTIVATION == "sigmoid":
        return a * (1.0 - a)
    elif ACTIVATION == "softplus":
        return _sigmoid(s)
    elif ACTIVATION == "mish":
        gate = _mish_gate(s)
        return gate + s * (1.0 - gate * gate) * _sigmoid(s)
    else:
        return s * 0.0 + 1.0


@triton.jit
def _sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))


@triton.jit
def row_numbers(n, SCALE: tl.constexpr, LOG_N: tl.constexpr, BIAS: tl.constexpr, LOG_LENGTH: tl.constexpr):
    """factor_i and bias_i of the scores, [M]; n is a float tensor of visible keys."""
    log_n = tl.log(tl.maximum(n, 1.0))
    factor = log_n * SCALE if LOG_N else n * 0.0 + SCALE
    if BIAS == "-log_n":
        bias = -log_n
    elif BIAS == "-log_L":
        bias = n * 0.0 - LOG_LENGTH
    else:
        bias = n * 0.0
    return factor, bias


@triton.jit
def fixed_divisor(n, DIVISOR: tl.constexpr, GAMMA: tl.constexpr, LENGTH: tl.constexpr):
    n = tl.maximum(n, 1.0)
    if DIVISOR == "L":
        return n * 0.0 + LENGTH
    elif DIVISOR == "n":
        return n
    elif DIVISOR == "sqrt_n":
        return GAMMA * tl.sqrt(n / 2.0)
    else:
        return n * 0.0 + 1.0


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, inverse_ptr, shift_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    o_stride_b, o_stride_h, o_stride_l, Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output, and for each row what its activations are multiplied by (inverse) and what exp was shifted by."""
    blocks = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    head = program // blocks  # b * Hq + h
    first_row = (blocks - 1 - program % blocks) * BLOCK_M  # the longest rows of a head go first
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    o_ptr += b * o_stride_b + h * o_stride_h

    rows = first_row + tl.arange(0, BLOCK_M)
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    n = (row_stop - row_start).to(tl.float32)
    factor, bias = row_numbers(n, SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, tl.arange(0, BLOCK_M), columns, D, True)  # [M, D]
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    shift = tl.full([BLOCK_M], HIDDEN, tl.float32)
    for start in tl.range(tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop), BLOCK_N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        s = dot(q, tl.trans(k), PRECISION=DOT) * factor[:, None] + bias[:, None]  # [M, N]
        masked = (start < full_lo) | (start + BLOCK_N > full_hi)
        keys = (start + offsets)[None, :]
        if ACTIVATION == "exp":
            if masked:
                s = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), s, HIDDEN)
            higher = tl.maximum(shift, tl.max(s, 1))
            shrink = tl.exp(shift - higher)
            o, total, shift = o * shrink[:, None], total * shrink, higher
        a = activate(s, shift[:, None], ACTIVATION)
        if masked:
            a = tl.where((keys >= row_start[:, None]) & (keys < row_stop[:, None]), a, 0.0)
        if DIVISOR == "l1":
            total += tl.sum(tl.abs(a), 1)
        o = dot(saturate(a, v.dtype), v, o, PRECISION=DOT)
    divisor = total if DIVISOR == "l1" else fixed_divisor(n, DIVISOR, GAMMA, LENGTH)
    inverse = tl.where(divisor > 0, SIGN / tl.where(divisor > 0, divisor, 1.0), 0.0)
    store_tile(o_ptr, o * inverse[:, None], first_row, Lq, o_stride_l, tl.arange(0, BLOCK_M), columns, D)
    at = head.to(tl.int64) * Lq + rows
    tl.store(inverse_ptr + at, inverse, mask=rows < Lq)
    if ACTIVATION == "exp":
        tl.store(shift_ptr + at, shift, mask=rows < Lq)


@triton.jit
def _weights_and_ds(
    qk, dp, factor, bias, shift, inverse, delta, row_start, row_stop, keys, masked,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    """Weights and gradients of scores [M, N] from products q.k and dO.v; row numbers are [M, 1]."""
    s = qk * factor + bias
    if ACTIVATION == "exp":  # noqa: SIM102 (the outer one is decided when compiling)
        if masked:  # exp(s - shift) of a hidden key may overflow
            s = tl.where((keys >= row_start) & (keys < row_stop), s, HIDDEN)
    a = activate(s, shift, ACTIVATION)
    da = dp * inverse
    if DIVISOR == "l1":
        da -= tl.abs(inverse) * delta * _sign(a)
    ds = da * slope_of(s, a, ACTIVATION)
    weight = a * inverse
    if masked:
        seen = (keys >= row_start) & (keys < row_stop)
        weight, ds = tl.where(seen, weight, 0.0), tl.where(seen, ds, 0.0)
    return weight, ds


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, inverse_ptr, shift_ptr, delta_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dq_stride_b, dq_stride_h, dq_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    head = program // blocks
    first_row = (blocks - 1 - program % blocks) * BLOCK_M
    b, h = (head // Hq).to(tl.int64), (head % Hq).to(tl.int64)
    h_kv = h // (Hq // Hkv)
    q_ptr += b * q_stride_b + h * q_stride_h
    k_ptr += b * k_stride_b + h_kv * k_stride_h
    v_ptr += b * v_stride_b + h_kv * v_stride_h
    do_ptr += b * do_stride_b + h * do_stride_h
    dq_ptr += b * dq_stride_b + h * dq_stride_h

    row_offsets = tl.arange(0, BLOCK_M)
    rows = first_row + row_offsets
    offsets = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    row_start, row_stop = visible_keys(
        rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )  # [M]
    factor, bias = row_numbers((row_stop - row_start).to(tl.float32), SCALE, LOG_N, BIAS, LOG_LENGTH)
    full_lo, full_hi = tl.max(row_start), tl.min(row_stop)
    at = head.to(tl.int64) * Lq + rows
    inverse = tl.load(inverse_ptr + at, mask=rows < Lq, other=0.0)
    shift = tl.load(shift_ptr + at, mask=rows < Lq, other=0.0) if ACTIVATION == "exp" else inverse
    delta = tl.load(delta_ptr + at, mask=rows < Lq, other=0.0)
    q = load_tile(q_ptr, first_row, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
    do = load_tile(do_ptr, first_row, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(tl.min(row_start) // BLOCK_N * BLOCK_N, tl.max(row_stop), BLOCK_N, num_stages=STAGES):
        k = load_tile(k_ptr, start, key_stop, k_stride_l, offsets, columns, D, True)  # [N, D]
        v = load_tile(v_ptr, start, key_stop, v_stride_l, offsets, columns, D, True)  # [N, D]
        qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
        masked = (start < full_lo) | (start + BLOCK_N > full_hi)
        _, ds = _weights_and_ds(
            qk, dp, factor[:, None], bias[:, None], shift[:, None], inverse[:, None], delta[:, None],
            row_start[:, None], row_stop[:, None], (start + offsets)[None, :], masked, ACTIVATION, DIVISOR,
        )  # fmt: skip
        dq = dot(saturate(ds, k.dtype), k, dq, PRECISION=DOT)
    store_tile(dq_ptr, dq * factor[:, None], first_row, Lq, dq_stride_l, row_offsets, columns, D)


@triton.jit(do_not_specialize=["Lq", "Lk", "window"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, inverse_ptr, shift_ptr, delta_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, dk_stride_b, dk_stride_h, dk_stride_l, dv_stride_b, dv_stride_h, dv_stride_l,
    Hq, Hkv, Lq, Lk, window, key_lengths_ptr, doc_start_ptr, doc_stop_ptr,
    ACTIVATION: tl.constexpr, DIVISOR: tl.constexpr, SIGN: tl.constexpr, SCALE: tl.constexpr, LOG_N: tl.constexpr,
    BIAS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr, GAMMA: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over the query heads that share them."""
    blocks = tl.cdiv(Lk, BLOCK_N)
    program = tl.program_id(0)
    head_kv = program // blocks
    first_key = program % blocks * BLOCK_N
    b, h_kv = head_kv // Hkv, head_kv % Hkv
    group = Hq // Hkv
    b64, h64 = b.to(tl.int64), h_kv.to(tl.int64)
    k_ptr += b64 * k_stride_b + h64 * k_stride_h
    v_ptr += b64 * v_stride_b + h64 * v_stride_h
    dk_ptr += b64 * dk_stride_b + h64 * dk_stride_h
    dv_ptr += b64 * dv_stride_b + h64 * dv_stride_h

    key_offsets = tl.arange(0, BLOCK_N)
    row_offsets = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    key_stop = tl.load(key_lengths_ptr + b) if HAS_LENGTHS else Lk
    last_key = tl.minimum(first_key + BLOCK_N, Lk) - 1
    row_lo, row_hi, full_lo, full_hi = visible_rows(
        first_key, last_key, Lq, Lk, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
    )
    if first_key + BLOCK_N > key_stop:  # a ragged block has no tile without a mask
        full_hi = 0
    if first_key >= key_stop:
        row_hi = row_lo
    k = load_tile(k_ptr, first_key, key_stop, k_stride_l, key_offsets, columns, D, True)  # [N, D]
    v = load_tile(v_ptr, first_key, key_stop, v_stride_l, key_offsets, columns, D, True)  # [N, D]
    keys = (first_key + key_offsets)[None, :]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(group):
        h = (h_kv * group + member).to(tl.int64)
        q_head = q_ptr + b64 * q_stride_b + h * q_stride_h
        do_head = do_ptr + b64 * do_stride_b + h * do_stride_h
        row_at = (b64 * Hq + h) * Lq
        for start in tl.range(row_lo // BLOCK_M * BLOCK_M, row_hi, BLOCK_M, num_stages=STAGES):
            rows = start + row_offsets
            inside = rows < Lq
            q = load_tile(q_head, start, Lq, q_stride_l, row_offsets, columns, D, True)  # [M, D]
            do = load_tile(do_head, start, Lq, do_stride_l, row_offsets, columns, D, True)  # [M, D]
            inverse = tl.load(inverse_ptr + row_at + rows, mask=inside, other=0.0)  # rows past the last: no weight
            shift = tl.load(shift_ptr + row_at + rows, mask=inside, other=0.0) if ACTIVATION == "exp" else inverse
            delta = tl.load(delta_ptr + row_at + rows, mask=inside, other=0.0)
            row_start, row_stop = visible_keys(
                rows, Lq, Lk, key_stop, window, doc_start_ptr, doc_stop_ptr, CAUSAL, WINDOWED, PACKED
            )  # [M]
            factor, bias = row_numbers((row_stop - row_start).to(tl.float32), SCALE, LOG_N, BIAS, LOG_LENGTH)
            qk, dp = dot(q, tl.trans(k), PRECISION=DOT), dot(do, tl.trans(v), PRECISION=DOT)  # [M, N]
            masked = (start < full_lo) | (start + BLOCK_M > full_hi)
            weight, ds = _weights_and_ds(
                qk, dp, factor[:, None], bias[:, None], shift[:, None], inverse[:, None], delta[:, None],
                row_start[:, None], row_stop[:, None], keys, masked, ACTIVATION, DIVISOR,
            )  # fmt: skip
            dv = dot(tl.trans(saturate(weight, do.dtype)), do, dv, PRECISION=DOT)
            dk = dot(tl.trans(saturate(ds * factor[:, None], q.dtype)), q, dk, PRECISION=DOT)
    store_tile(dk_ptr, dk, first_key, Lk, dk_stride_l, key_offsets, columns, D)
    store_tile(dv_ptr, dv, first_key, Lk, dv_stride_l, key_offsets, columns, D)
