"""The fused kernels against the float64 reference: in Triton's interpreter at small shapes, on a GPU in full."""

from __future__ import annotations

import pytest
import torch

import lssar
from tests.helpers import CUDA, DEVICE, NAMES, seeded, with_gradients

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from lssar.ops.fused import decode_op, fused_attention, fused_decode, op, why_not, window_attention  # noqa: E402
from lssar.ops.fused.primitives import head_and_block  # noqa: E402
from tests.ops.comparing import compare, rms, tensors  # noqa: E402

VIEWS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 20},
    "full window": {"causal": False, "window": 20},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 40, 41, 70])},
    "full pack": {"causal": False, "cu_seqlens": torch.tensor([0, 3, 40, 41, 70])},
}


@pytest.mark.parametrize(
    ("view", "dtype", "p"),
    [
        ("causal", torch.float32, 15),
        ("full", torch.float16, 3),
        ("window", torch.float32, 1.5),
        ("full window", torch.bfloat16, 15),
        ("pack", torch.bfloat16, 3),
        ("full pack", torch.float32, None),
        ("causal", torch.bfloat16, 15),
        ("full", torch.bfloat16, 64),
        ("causal", torch.float16, None),
        ("window", torch.bfloat16, 2),  # p = 1 has a gradient that jumps at the threshold
        ("pack", torch.float16, 15),
        ("full", torch.float32, 64),
    ],
    ids=str,
)
def test_against_float64(view, dtype, p):
    """Pairs of what rows see, dtype and power; in bfloat16 most rows take the shorter arithmetic of steep.py."""
    options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in VIEWS[view].items()}
    compare(*tensors(D=64 if dtype == torch.bfloat16 else 32, dtype=dtype), p=p, note=view, **options)


def test_only_steep_rows_take_the_short_way(monkeypatch):
    """A block of rows does if all its rows are steep. The first keys are too few; a flat row spoils the last block."""
    block = 128 if CUDA else 32  # of at most so many rows, at least 16
    draw = torch.Generator().manual_seed(0)  # always the same: not every draw has a block of steep rows
    q, k, v = (torch.randn(1, 1, 4 * block, 128, generator=draw).to(DEVICE, torch.bfloat16) for _ in range(3))
    q[:, :, -1] = 0
    short = fused_attention(q, k, v, p=15, causal=True)
    monkeypatch.setattr("lssar.ops.fused.op.steep_rows", lambda *_: False)
    monkeypatch.setattr("lssar.ops.fused.op._plan", op._Plan)  # without what it remembers
    exact = fused_attention(q, k, v, p=15, causal=True)
    same = (short == exact).float()[0, 0].mean(1)  # share of equal numbers in each row
    assert same[:16].mean() > 0.99
    assert same[-16:].mean() > 0.99
    assert (same[2 * block : 3 * block] < 1).any()  # by less than bfloat16 shows in most numbers
    close = {"rtol": 0.02, "atol": 0.02}  # the largest weight is no longer a power of two, so it is rounded
    torch.testing.assert_close(short, exact, **close)


@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1), (2, 2), (4, 4), (33, 70), (70, 40)])
def test_lengths(Lq, Lk):
    compare(*tensors(Lq=Lq, Lk=Lk), p=15, note=f"{Lq}, {Lk}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_few_keys(dtype):
    """The first row with a threshold: where its four scores are close, their differences to the mean lose digits."""
    compare(*tensors(B=8, Lq=4, D=64, dtype=dtype), p=15, few_keys=True)


@pytest.mark.parametrize("D", [18, 100])
def test_head_sizes(D):
    compare(*tensors(Lq=37, D=D), p=15)


def test_padding_may_hold_anything():
    q, k, v, do = tensors(B=2)
    lengths = torch.tensor([40, 0], device=DEVICE)
    clean = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True, key_lengths=lengths), (q, k, v), do)
    for b, n in enumerate((40, 0)):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
    dirty = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True, key_lengths=lengths), (q, k, v), do)
    for a, b in zip(clean, dirty):
        assert torch.equal(a, b)
    assert not clean[0][1].any() and not clean[2][1].any() and not clean[3][1].any()


@pytest.mark.parametrize("D", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_no_head_depends_on_another(D):
    """To the bit, whatever stands there: in half types dq is scaled by the values, which must be the head's own."""
    call = lambda *x: fused_attention(*x, p=15, causal=True)  # noqa: E731
    q, k, v, do = tensors(B=2, Hq=4, Hkv=2, D=D, dtype=torch.bfloat16)
    clean = with_gradients(call, (q, k, v), do)
    v[0, 1], v[1, 0, 3] = 1e30, torch.inf
    dirty = with_gradients(call, (q, k, v), do)
    for name, a, b in zip(("o", "dq", "dk", "dv"), clean, dirty):
        a, b = (x.unflatten(1, (2, -1)) for x in (a, b))  # (B, heads of keys, of queries to each, L, D)
        assert torch.equal(a[0, 0], b[0, 0]), name
        assert torch.equal(a[1, 1], b[1, 1]), name


def test_groups_and_strides():
    """Heads shared by groups; q, k, v as slices of one tensor laid out (B, L, heads, D), and no copy of the layout."""
    packed = torch.randn(2, 37, 8, 32, device=DEVICE)
    q, k, v = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:6].transpose(1, 2), packed[:, :, 6:].transpose(1, 2)
    do = torch.randn(2, 37, 4, 32, device=DEVICE).transpose(1, 2)
    compare(q, k, v, do, p=15)
    assert fused_attention(q, k, v, p=15, causal=True).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=NAMES.get)
def test_expanded_queries(dtype):
    """Results have the strides that torch.compile is told: those of empty_like."""
    q, k, v, do = tensors(B=3, Lq=20, D=64, dtype=dtype)
    q = q[:1].transpose(1, 2).contiguous().transpose(1, 2).expand_as(q)
    expanded = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q, k, v), do)
    whole = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q.contiguous(), k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(expanded, whole))
    arguments = None, 15.0, None, True, None, None, None
    o, rows = op.run_forward(q, k, v, *arguments)
    dq = op.run_backward(q, k, v, o, do, rows, *arguments)[0]
    assert o.stride() == dq.stride() == torch.empty_like(q).stride() != q.contiguous().stride()


def test_adversarial_rows():
    q, k, v, do = tensors(Lq=40)
    cases = {
        "equal keys": (q, k[:, :, :1].expand_as(k).contiguous()),
        "anti-aligned": (q, -q[:, :1, -1:].expand_as(k) + 0.01 * k),
        "needle": (q, torch.cat([-q[:, :1, -1:].expand(-1, -1, 39, -1), q[:, :1, -1:]], 2)),
        "tiny and huge": (q * 1e-18, k * 1e18),
        "zero query": (q.clone().index_fill_(2, torch.tensor([7, 30], device=DEVICE), 0), k),
    }
    for note, (a, b) in cases.items():
        got = compare(a, b, v, do, p=15, note=note)
        assert all(x.isfinite().all() for x in got), note


@pytest.mark.parametrize("exponent", [-30, 30])
def test_norms_to_the_ends_of_bfloat16(exponent):
    """The output does not depend on norms, and the gradient scales with their reciprocal."""
    q, k, v, do = tensors(Lq=20, dtype=torch.bfloat16)
    scale = 2.0 ** (exponent * 3)
    base = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q, k, v), do)
    far = with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q * scale, k / scale, v), do)
    for a, b, factor in zip(base, far, (1, scale, 1 / scale, 1)):
        torch.testing.assert_close(b.float() * factor, a.float(), rtol=2e-2, atol=2e-2 * a.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("window", [None, 9])
def test_gradients_of_very_large_values(window, dtype):
    """Products of dO and v up to 1e35: rows of few keys have large slopes, which must not overflow with them."""
    q, k, v, do = tensors(Hq=1, Lq=40, D=16, dtype=dtype)
    spec = lssar.spec("lssar")
    if window is None:
        call = lambda *x: fused_attention(*x, p=15, causal=True)  # noqa: E731
    else:
        call = lambda *x: window_attention(*x, spec, causal=True, window=window)  # noqa: E731
    near = with_gradients(call, (q, k, v), do)
    for v_scale, do_scale in ((2.0**114, 1.0), (2.0**50, 2.0**64)):
        far = with_gradients(call, (q, k, v * v_scale), do * do_scale)
        factors = (v_scale, v_scale * do_scale, v_scale * do_scale, do_scale)
        for name, a, b, factor in zip(("o", "dq", "dk", "dv"), near, far, factors):
            torch.testing.assert_close(b.double() / factor, a.double(), rtol=2e-2, atol=1e-3 * rms(a), msg=name)


def test_second_derivative_is_refused():
    q, k, v, _ = tensors(Lq=5)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(fused_attention(q, k, v, p=15, causal=True).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("p", [15.0, None])
def test_operators_are_what_pytorch_expects(p):
    """Schema, fakes, autograd and what torch.compile makes of them, by PyTorch's own checks."""
    from lssar.ops.fused.op import forward_op

    q, k, v, _ = (x.requires_grad_() for x in tensors(Lq=128, D=16))  # rows are padded to that, with anything
    gain = torch.ones(2, device=DEVICE, requires_grad=True)
    for options in ((None, p, None), (gain, None, p if p is None else torch.tensor(p))):
        torch.library.opcheck(forward_op, (q, k, v, *options, True, None, None, None))
    row = [x.detach() for x in (q[:, :, -1:], k, v)]
    torch.library.opcheck(decode_op.decode_op, (*row, None, p, None, None, None, 0.0, False))


def test_why_not():
    q, k, v, _ = tensors(Lq=5)
    lssar_spec = lssar.spec("lssar")
    if not CUDA:
        assert why_not(q, k, v, lssar_spec) is None  # the interpreter counts
    assert "impl='tiled'" in why_not(q, k, v, lssar.spec("softmax_recentred"))
    assert "mask" in why_not(q, k, v, lssar_spec, mask=torch.ones(5, 5, dtype=torch.bool))
    assert "return_weights" in why_not(q, k, v, lssar_spec, return_weights=True)
    assert "float64" in why_not(q.double(), k.double(), v.double(), lssar_spec)
    assert "16 to 256" in why_not(q[..., :8], k[..., :8], v[..., :8], lssar_spec)
    assert "contiguous" in why_not(q.mT.contiguous().mT, k, v, lssar_spec)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("D", [16, 64, 80, 96, 100, 128, 256])
def test_gpu_grid(dtype, D):
    for L in (1, 2, 3, 4, 63, 111, 509):
        for p in (15, None):  # few keys: many rows, or the errors compared are those of a few numbers
            q, k, v, do = tensors(B=64 if L <= 4 else 2, Hq=4, Hkv=2, Lq=L, D=D, dtype=dtype)
            compare(q, k, v, do, p=p, note=f"L {L} p {p}", few_keys=L <= 4)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_many_calls(D):
    """Faults in the order of copies and barriers may show in one call of thousands only."""
    draw = lambda: torch.randn(16, 1024, 12, D, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)  # noqa: E731
    x, do = tuple(draw().requires_grad_() for _ in range(3)), draw()
    for p in (15, 7):
        for _ in range(2000):
            got = torch.autograd.grad(fused_attention(*x, p=p, causal=True), x, do)
        assert all(part.isfinite().all() for part in got)


LONG_VIEWS = {
    **{name: view for name, view in VIEWS.items() if "pack" not in name},
    "window": {"window": 100},
    "full window": {"causal": False, "window": 100},
    "pack": {"cu_seqlens": torch.tensor([0, 3, 140, 141, 300])},
    "full pack": {"causal": False, "cu_seqlens": torch.tensor([0, 3, 140, 141, 300])},
    "padding": {"key_lengths": torch.tensor([300, 131])},
    "full padding": {"causal": False, "key_lengths": torch.tensor([1, 200])},
}


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)], ids=str)
@pytest.mark.parametrize("view", LONG_VIEWS)
def test_gpu_what_rows_see(view, D, dtype):
    """Several tiles long, and at the head sizes that have kernels of their own on Hopper."""
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in LONG_VIEWS[view].items()}
    for p in (15, 3, None):
        for group in (1, 4):
            inputs = tensors(B=1 if "pack" in view else 2, Hq=4, Hkv=4 // group, Lq=300, D=D, dtype=dtype)
            compare(*inputs, p=p, note=f"p {p} group {group}", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("Lq", "Lk"), [(1, 300), (70, 300), (129, 257), (1024, 1024)])
def test_gpu_fewer_rows_than_keys(Lq, Lk, D):
    compare(*tensors(Hq=2, Hkv=2, Lq=Lq, Lk=Lk, D=D, dtype=torch.bfloat16), p=15)


@pytest.mark.gpu
def test_gpu_same_bits_every_run():
    q, k, v, do = tensors(B=2, Hq=4, Hkv=2, Lq=777, D=64, dtype=torch.bfloat16)
    runs = [with_gradients(lambda *x: fused_attention(*x, p=15, causal=True), (q, k, v), do) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


@pytest.mark.gpu
def test_gpu_every_output_is_written():
    q, k, v, do = tensors(B=1, Hq=4, Hkv=4, Lq=321, D=128, dtype=torch.bfloat16)
    for _ in range(2):
        poison = [torch.full_like(q, torch.nan) for _ in range(12)]
        del poison  # the allocator hands these blocks out again
        assert all(x.isfinite().all() for x in compare(q, k, v, do, p=15))


@pytest.mark.gpu
def test_gpu_compile_and_cuda_graph():
    q, k, v, do = tensors(B=1, Hq=4, Hkv=4, Lq=256, D=64, dtype=torch.bfloat16)
    call = lambda *x: lssar.attention(*x, "lssar")  # noqa: E731  (what chooses the kernel is traced, too)
    want = with_gradients(call, (q, k, v), do)
    got = with_gradients(torch.compile(call, fullgraph=True), (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    lengths = torch.tensor([100], device=DEVICE)
    row = q[:, :, :1].contiguous()
    fused_decode(row, k, v, p=15, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fused_decode(row, k, v, p=15, lengths=lengths)
    lengths.fill_(200)
    graph.replay()
    assert torch.equal(o, fused_decode(row, k, v, p=15, lengths=lengths))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("D", "L", "p", "causal"),
    [
        (64, 512, 15, True),
        (64, 700, 3, False),
        (64, 700, 63, True),
        (128, 512, 3, True),
        (128, 700, 15, False),
        (128, 512, 63, False),
        (128, 700, 7.25, True),
    ],
)
def test_gpu_steep_rows(D, L, p, causal):
    compare(*tensors(B=2, Hq=4, Hkv=2, Lq=L, D=D, dtype=torch.bfloat16), p=p, causal=causal)


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)])
def test_nothing_to_see(shape):
    """No batch, no keys."""
    B, H, Lk = shape
    q, k, v = (torch.zeros(B, H, L, 16, device=DEVICE) for L in (5, Lk, Lk))
    assert not fused_attention(q, k, v, p=15, causal=True).any()
    if Lk:
        assert fused_decode(q[:, :, :1], k, v, p=15).shape == (B, H, 1, 16)


@pytest.mark.gpu
def test_gpu_more_heads_than_a_grid_is_wide():
    """Batches of short rows: batch x heads beyond 65535, where the second axis of a grid ends."""
    q, k, v, do = tensors(B=6000, Hq=12, Hkv=12, Lq=5, D=64, dtype=torch.bfloat16)
    call = lambda *x: fused_attention(*x, p=15, causal=True)  # noqa: E731
    last = [x[-1:] for x in (q, k, v)]
    assert all(
        torch.equal(a[-1:], b) for a, b in zip(with_gradients(call, (q, k, v), do), with_gradients(call, last, do[-1:]))
    )
    row = q[:, :, -1:].contiguous()
    assert torch.equal(fused_decode(row, k, v, p=15)[-1:], fused_decode(row[-1:], k[-1:], v[-1:], p=15))


@triton.jit
def turns_kernel(heads_ptr, blocks_ptr, blocks, together):
    head, block = head_and_block(tl.program_id(0), tl.num_programs(0), blocks, together)
    tl.store(heads_ptr + tl.program_id(0), head)
    tl.store(blocks_ptr + tl.program_id(0), block)


@pytest.mark.parametrize(
    ("heads", "blocks", "together", "sizes"),
    [
        (5, 3, 0, [1] * 5),
        (5, 3, 1, [1] * 5),
        (5, 3, 2, [1, 2, 2]),
        (16, 2, 5, [4] * 4),  # not 5, 5, 5 and 1, which would leave the last head to itself
        (5, 3, 5, [5]),
        (5, 3, 99, [5]),
        (1, 1, 4, [1]),
    ],
)
def test_programs_take_turns(heads, blocks, together, sizes):
    """Every block of every head once; among heads that go together, longer ones (lower numbers) first."""
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    of, block = (torch.empty(heads * blocks, dtype=torch.int32, device=DEVICE) for _ in range(2))
    turns_kernel[(heads * blocks,)](of, block, blocks, together)
    taken = list(zip(of.tolist(), block.tolist()))
    assert sorted(taken) == [(h, b) for h in range(heads) for b in range(blocks)]
    assert taken == sorted(taken, key=lambda turn: (group_of[turn[0]], turn[1], turn[0]))


@pytest.mark.gpu
def test_gpu_more_elements_than_32_bits_count():
    """The last head of a call with 2^31 elements and more in each tensor is what it is by itself, to the bit."""
    shape = (1, 129, 2**17, 128)
    if torch.cuda.mem_get_info()[0] < 64 * 2**30:
        pytest.skip("needs 64 GiB of free memory")
    generator = seeded(0, DEVICE)
    q, k, v, do = (torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    call = lambda *x: fused_attention(*x, p=15, causal=True, window=200)  # noqa: E731
    together = with_gradients(call, (q, k, v), do)
    last = slice(shape[1] - 1, None)
    alone = with_gradients(call, tuple(x[:, last].contiguous() for x in (q, k, v)), do[:, last])
    for a, b in zip(together, alone):
        assert torch.equal(a[:, last], b)
