"""The public call: its contract, its errors, and how it behaves inside PyTorch's machinery."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lssar
from lssar.testing import assert_close_to_reference
from tests.helpers import qkv, with_gradients


def test_the_calls_of_the_contract():
    q, k, v = qkv(grad=False)
    mask = torch.rand(2, 1, 19, 19) > 0.3
    outputs = [
        lssar.attention(q, k, v),
        lssar.attention(q, k, v, "lssa", causal=False),
        lssar.attention(q, k, v, lssar.spec("lssar", p=3), mask=mask),
        lssar.attention(q, k, v, lssar.spec("softmax").reweighted(p=3)),
        lssar.attention(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 7, 19], dtype=torch.int32)),
        lssar.attention(q, k, v, return_weights=True)[0],
    ]
    assert all(o.shape == (o.shape[0], 4, 19, 6) for o in outputs)
    torch.testing.assert_close(outputs[0], lssar.attention(q, k, v, lssar.spec("lssar", p=15), impl="reference"))


def test_softmax_is_pytorchs_softmax():
    q, k, v = qkv(grad=False)
    for impl in ("reference", "tiled"):
        torch.testing.assert_close(
            lssar.attention(q, k, v, "softmax", impl=impl),
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        )


def test_learned_scale_of_ssmax():
    q, k, v = qkv()
    scale = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: lssar.attention(q, k, v, "ssmax", head_scale=s), scale, fast_mode=True)
    n = torch.arange(1, 20, dtype=torch.float64)[:, None]
    s = q @ k.repeat_interleave(2, 1).mT / 6**0.5 * n.log() * scale[:, None, None]
    s = s.masked_fill(torch.ones(19, 19, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(
        lssar.attention(q, k, v, "ssmax", head_scale=scale), s.softmax(-1) @ v.repeat_interleave(2, 1)
    )
    default = lssar.attention(q, k, v, "ssmax")
    filled = torch.full((4,), lssar.spec("ssmax").head_scale, dtype=torch.float64)
    torch.testing.assert_close(default, lssar.attention(q, k, v, "ssmax", head_scale=filled))


F = torch.randn
BAD_CALLS = {
    "q is no tensor": (dict(q=[1.0]), "q must be a tensor"),
    "q has three dimensions": (dict(q=F(4, 8, 6)), r"q must be a tensor \(batch, heads, length, head size\)"),
    "integers": (dict(q=torch.ones(2, 4, 8, 6, dtype=torch.int64)), "q must be float16, bfloat16"),
    "two dtypes": (dict(k=F(2, 2, 8, 6).double()), "must have one dtype"),
    "two devices": (dict(v=F(2, 2, 8, 6, device="meta")), "must be on one device"),
    "two batch sizes": (dict(k=F(3, 2, 8, 6)), "one batch size"),
    "two head sizes": (dict(k=F(2, 2, 8, 5)), "one head size"),
    "head size 0": (dict(q=F(2, 4, 8, 0), k=F(2, 2, 8, 0)), "at least 1"),
    "k and v of different length": (dict(v=F(2, 2, 7, 6)), "same heads and length"),
    "heads that do not divide": (dict(q=F(2, 3, 8, 6)), "multiple of key heads, at least one of each; got 3 and 2"),
    "unknown spec": (dict(spec="lsar"), "unknown attention spec 'lsar'; known: softmax,"),
    "unknown impl": (dict(impl="fast"), "impl must be one of 'auto', 'reference', 'tiled', 'fused'; got 'fast'"),
    "causal as a number": (dict(causal=1), "causal must be True or False"),
    "float mask": (dict(mask=torch.zeros(8, 8)), "mask must be a bool tensor"),
    "mask of another shape": (dict(mask=torch.ones(8, 7, dtype=torch.bool)), "mask must broadcast to"),
    "head_scale of integers": (
        dict(spec="ssmax", head_scale=torch.ones(4).long()),
        "must be a float tensor",
    ),
    "mask of five dimensions": (dict(mask=torch.ones(1, 1, 1, 8, 8, dtype=torch.bool)), "mask must broadcast to"),
    "mask on another device": (dict(mask=torch.ones(8, 8, dtype=torch.bool, device="meta")), "mask must be on cpu"),
    "no heads": (dict(q=F(2, 0, 8, 6), k=F(2, 0, 8, 6), v=F(2, 0, 8, 6)), "at least one of each; got 0 and 0"),
    "no query heads": (dict(q=F(2, 0, 8, 6)), "at least one of each; got 0 and 2"),
    "values of size 0": (dict(v=F(2, 2, 8, 0)), "v must have a head size of at least 1"),
    "nested": (
        dict(q=torch.nested.nested_tensor([F(4, 8, 6)] * 2, layout=torch.jagged)),
        "q must be .* nested",
    ),
    "sparse": (dict(k=F(2, 2, 8, 6).to_sparse()), "k must be a tensor .* sparse"),
    "sparse mask": (dict(mask=torch.ones(8, 8, dtype=torch.bool).to_sparse()), "mask must be a bool tensor"),
    "return_weights as a number": (dict(return_weights=1), "return_weights must be True or False; got 1"),
    "return_weights as text": (dict(return_weights="no"), "return_weights must be True or False; got 'no'"),
    "more queries than keys": (dict(k=F(2, 2, 3, 6), v=F(2, 2, 3, 6)), "the first 5 of them would see nothing"),
    "p of a spec without": (dict(spec="lssa", p=3), "'lssa' is not re-weighted"),
    "p below 1": (dict(p=0.5), "p must be a finite number >= 1"),
    "p below 1, a tensor": (dict(p=torch.tensor(0.5)), "p must be a finite number >= 1"),
    "p of several numbers": (dict(p=torch.tensor([3.0])), "p must be a number, or a 0-dim float tensor on the CPU"),
    "p that is learned": (dict(p=torch.tensor(3.0, requires_grad=True)), "without gradient; got .* requires one"),
    "threshold where there is none": (dict(threshold=torch.ones(4)), "has no learned_threshold"),
    "window 0": (dict(window=0), "window must be an integer >= 1"),
    "window as float": (dict(window=2.0), "window must be an integer >= 1"),
    "pack of two batch rows": (dict(cu_seqlens=torch.tensor([0, 8])), "one packed batch row"),
    "pack of floats": (dict(cu_seqlens=torch.tensor([0.0, 8.0])), "cu_seqlens must be a 1-D int32 or int64"),
    "lengths and pack": (
        dict(cu_seqlens=torch.tensor([0, 8]), key_lengths=torch.tensor([8, 8])),
        "cannot be combined",
    ),
    "one length for two rows": (dict(key_lengths=torch.tensor([3])), r"key_lengths must have shape \(2,\)"),
    "length beyond the keys": (dict(key_lengths=torch.tensor([3, 9])), r"key_lengths must lie in 0\.\.8; got 3\.\.9"),
    "negative length": (dict(key_lengths=torch.tensor([-1, 8])), r"key_lengths must lie in 0\.\.8"),
    "ranges of floats": (dict(key_ranges=torch.zeros(2, 8, 2)), "key_ranges must be an int32 or int64 tensor"),
    "ranges of keys": (dict(key_ranges=torch.zeros(2, 2, 8).int()), r"key_ranges must have shape \(2, 8, 2\)"),
    "head_scale where there is none": (dict(head_scale=torch.ones(4)), "has no head_scale"),
    "head_scale of key heads": (
        dict(spec="ssmax", head_scale=torch.ones(2)),
        r"head_scale must be a float tensor of shape \(4,\)",
    ),
    "head_scale of a nested tensor": (
        dict(spec="ssmax", head_scale=torch.nested.nested_tensor([F(2), F(3)], layout=torch.jagged)),
        "must be a float tensor .* nested",
    ),
    "fused without a GPU": (dict(impl="fused"), "impl='fused' cannot run this call: "),
}


@pytest.mark.parametrize(("changes", "words"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(changes, words):
    arguments = {"q": F(2, 4, 8, 6), "k": F(2, 2, 8, 6), "v": F(2, 2, 8, 6)}
    for impl in ("tiled", "reference"):
        with pytest.raises(ValueError, match=words):
            lssar.attention(**{**arguments, "impl": impl, **changes})


def test_window_and_power_may_be_numpy_scalars():
    q, k, v = qkv(grad=False)
    for window, p in ((np.int64(4), np.float32(3)), (4, np.int64(3))):
        got = lssar.attention(q, k, v, window=window, p=p)
        assert torch.equal(got, lssar.attention(q, k, v, lssar.spec("lssar", p=3), window=4))


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_a_static_cache(impl):
    """Room for more keys than there are: the queries are the last rows of each batch row's own length."""
    q, k, v = qkv(B=3, Lq=4, Lk=16, dtype=torch.float32)
    lengths = torch.tensor([16, 7, 4])
    for options in ({}, {"window": 3}, {"window": 3, "causal": False}):
        for name in ("lssar", "softmax", "softmax_recentred"):
            do = torch.randn(3, 4, 4, 6)
            call = lambda *x: lssar.attention(*x, name, impl=impl, key_lengths=lengths, **options)  # noqa: B023, E731
            got = with_gradients(call, (q, k, v), do)
            for b, length in enumerate(lengths.tolist()):
                one = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
                alone = lambda *x: lssar.attention(*x, name, impl=impl, **options)  # noqa: B023, E731
                for x, y in zip(got, with_gradients(alone, one, do[b : b + 1])):
                    torch.testing.assert_close(x[b : b + 1, :, : y.shape[2]], y)
    short = lssar.attention(q, k, v, impl=impl, key_lengths=torch.tensor([0, 1, 2]))
    assert [int((x != 0).any(-1).sum()) for x in short] == [0, 4, 8]  # as many rows as there are keys, in four heads


def test_more_queries_than_keys_with_a_mask():
    """The mask says what rows see, so that rows without any are meant."""
    q, k, v = qkv(Lq=5, Lk=3)
    for options in ({"mask": torch.ones(5, 3, dtype=torch.bool)}, {"key_ranges": torch.tensor([0, 3]).expand(1, 5, 2)}):
        o = lssar.attention(q, k, v, **options)
        assert not o[:, :, :2].any() and o[:, :, 2:].any()


def test_forward_mode_is_exact_in_the_reference_and_refused_elsewhere():
    q, k, v = qkv(B=1, Lq=5, Lk=5, D=3, grad=False)
    for name in ("lssar", "softmax", "softmax_recentred_l1"):
        f = lambda x: lssar.attention(x, k, v, name, impl="reference")  # noqa: B023, E731
        jacobian = torch.autograd.functional.jacobian(f, q)
        torch.testing.assert_close(torch.func.jacfwd(f)(q), jacobian)
        tangent = torch.randn_like(q)
        expected = (jacobian.flatten(-4) * tangent.flatten()).sum(-1)
        torch.testing.assert_close(torch.func.jvp(f, (q,), (tangent,))[1], expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        for impl in ("tiled", "auto"):
            with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .* use impl='reference'"):
                lssar.attention(dual, k, v, impl=impl)
        lssar.attention(q, k, v)  # has no tangent
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        torch.func.jvp(lambda x: lssar.attention(x, k, v), (q,), (torch.ones_like(q),))


def test_compiled_forward_mode_is_refused():
    q, k, v = qkv(B=1, Lq=5, Lk=5, D=3, grad=False)
    call = lambda x: lssar.attention(x, k, v)  # noqa: E731
    compiled, tangent = torch.compile(call, backend="eager"), torch.ones_like(q)
    torch.testing.assert_close(compiled(q), call(q))
    of_compiled = lambda x: torch.func.jvp(compiled, (x,), (tangent,))  # noqa: E731
    compiled_of = torch.compile(lambda x: torch.func.jvp(call, (x,), (tangent,)), backend="eager")
    for run in (of_compiled, compiled_of):
        with pytest.raises(NotImplementedError, match="impl='reference'"):
            run(q)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_beyond_the_range_of_integers_hide_nothing(causal):
    q, k, v = qkv(Lq=4, Lk=7, grad=False)
    for lengths in (None, torch.tensor([7, 5])):
        options = {"causal": causal, "key_lengths": lengths, "impl": "tiled"}
        expected = lssar.attention(q, k, v, **options)
        for window in (2**63 - 1, 2**63, 2**70):
            assert torch.equal(lssar.attention(q, k, v, window=window, **options), expected)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("name", ["lssar", "cosine_softmax", "softmax"])
def test_learned_gain_and_threshold(name, impl):
    q, k, v = qkv(B=1, Lq=9, Lk=9, D=4)
    spec = lssar.spec(name, p=2.5, head_scale=1.0, learned_threshold=True)
    gain = torch.tensor([1.5, -0.7, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor([1.1, 0.5, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    call = lambda *x: lssar.attention(*x[:3], spec, head_scale=x[3], threshold=x[4], impl=impl)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, gain, threshold), fast_mode=True, atol=1e-6, rtol=1e-3)
    same = call(q, k, v, torch.full_like(gain, 0.3), torch.full_like(threshold, 0.5))
    fixed = spec.replace(head_scale=0.3, threshold=0.5, learned_threshold=False)
    torch.testing.assert_close(same, lssar.attention(q, k, v, fixed, impl=impl))
    plain = spec.replace(head_scale=None, learned_threshold=False)
    torch.testing.assert_close(lssar.attention(q, k, v, spec, impl=impl), lssar.attention(q, k, v, plain, impl=impl))


@pytest.mark.parametrize("name", ["lssar", "cosine_softmax", "softmax", "ssmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_learned_numbers_in_float32(name, dtype):
    """The native kernels where there are any: gradients of gain and threshold against float64."""
    spec = lssar.spec(name, head_scale=1.0)
    if name in ("lssar", "softmax"):
        spec = spec.replace(p=3, learned_threshold=True)
    inputs = [x.to(dtype) for x in qkv(Lq=150, Lk=150, D=16, grad=False)]
    of_heads = [torch.tensor([1.5, -0.7, 0.3, 2.0]), torch.tensor([1.1, 0.5, 1.0, 0.0])][: 1 + spec.learned_threshold]
    do = torch.randn(2, 4, 150, 16).to(dtype)

    def call(impl):
        return lambda *x: lssar.attention(*x[:3], spec, head_scale=x[3], threshold=(*x, None)[4], impl=impl)

    wide = tuple(x.double() for x in (*inputs, *of_heads))
    exact = with_gradients(call("reference"), wide, do)
    got = with_gradients(call("tiled"), (*inputs, *of_heads), do)
    for x, y in zip(got[:4], exact):
        assert float((x.double() - y).norm()) <= (torch.finfo(dtype).eps + 40 * 2.0**-24) * float(y.norm())
    # A head's number gets a sum over all its rows: its error is relative to the terms, which cancel.
    for place, (x, y) in enumerate(zip(got[4:], exact[4:]), 3):
        step = [torch.zeros_like(x) for x in wide]
        step[place] = torch.ones_like(step[place])
        terms = (do * torch.func.jvp(call("reference"), wide, tuple(step))[1]).abs().sum((0, 2, 3))
        assert ((x.double() - y).abs() <= 40 * 2.0**-24 * terms).all()


def test_one_graph_for_all_powers():
    torch._dynamo.reset()
    q, k, v = qkv(grad=False)
    compiled = torch.compile(lambda q, k, v, p: lssar.attention(q, k, v, p=p), fullgraph=True, backend="aot_eager")
    counts = torch._dynamo.utils.counters["stats"]
    for index, p in enumerate((3.0, 7.5, 15.0, 31.0)):
        got = compiled(q, k, v, torch.tensor(p))
        torch.testing.assert_close(got, lssar.attention(q, k, v, lssar.spec("lssar", p=p)))
        if index == 0:
            graphs = counts["unique_graphs"]
    assert counts["unique_graphs"] == graphs
    number = torch.compile(lambda q, k, v: lssar.attention(q, k, v, p=3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(number(q, k, v), lssar.attention(q, k, v, p=3))
    with pytest.raises(ValueError, match="p must be a finite number >= 1"):
        compiled(q, k, v, torch.tensor(0.5))


@pytest.mark.parametrize("bounds", [[0], [1, 8], [0, 7], [0, 5, 4, 8], [0, 9]])
def test_bad_packs(bounds):
    q, k, v = qkv(B=1, Lq=8, Lk=8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        lssar.attention(q, k, v, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("name", ["lssar", "softmax"])
def test_autocast(name):
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [lssar.attention(q, k, v, name, impl=impl) for impl in ("tiled", "reference")]
    plain = lssar.attention(*(x.bfloat16() for x in (q, k, v)), name)
    for o in outputs:
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o, plain)
        grads = torch.autograd.grad(o.float().sum(), (q, k, v))
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(backend, dynamic):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend, dynamic=dynamic)
    def f(q, k, v):
        return lssar.attention(q.sin(), k, v) + lssar.attention(q, k, v, "softmax", window=4)

    def plain(q, k, v):
        return lssar.attention(q.sin(), k, v) + lssar.attention(q, k, v, "softmax", window=4)

    for length in (8, 13):
        inputs = qkv(Lq=length, Lk=length)
        do = torch.randn(2, 4, length, 6, dtype=torch.float64)
        for a, b in zip(with_gradients(f, inputs, do), with_gradients(plain, inputs, do)):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["softmax", "cosine_softmax", "ssmax"])
def test_softmax_kinds_through_sdpa(name):
    """impl='fused' of a softmax kind is PyTorch's kernel: the same numbers, and no graph break."""
    torch._dynamo.reset()
    inputs = qkv(dtype=torch.float32, Lq=33, Lk=33, D=16)
    do = torch.randn(2, 4, 33, 16)
    compiled = torch.compile(lambda *x: lssar.attention(*x, name, impl="fused"), fullgraph=True, backend="aot_eager")
    for f in (lambda *x: lssar.attention(*x, name, impl="fused"), compiled):
        assert_close_to_reference(with_gradients(f, inputs, do), *inputs, name, do=do)
    q, k, v = inputs
    for options in ({"causal": False}, {}):
        rows = slice(-1, None) if not options else slice(None)
        expected = lssar.attention(q[:, :, rows], k, v, name, impl="reference", **options)
        torch.testing.assert_close(lssar.attention(q[:, :, rows], k, v, name, impl="fused", **options), expected)
    huge = lssar.attention(q * 1e30, k * 1e30, v, name, impl="fused")
    assert huge.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": torch.ones(8, 8, dtype=torch.bool)}, "or use impl='tiled'"),
        ({"return_weights": True}, "needs impl='reference' or impl='tiled'"),
        ({"spec": "softmax_recentred"}, "needs impl='tiled'"),
    ],
)
def test_what_no_kernel_can_do(options, words):
    q, k, v = qkv(dtype=torch.float32, Lq=8, Lk=8, D=16, grad=False)
    with pytest.raises(ValueError, match=words):
        lssar.attention(q, k, v, **{"spec": "softmax", "impl": "fused", **options})


def test_compiled_pack_and_padding():
    torch._dynamo.reset()
    q, k, v = qkv(B=1, grad=False)
    f = torch.compile(lssar.attention, fullgraph=True, backend="aot_eager")
    cu, lengths = torch.tensor([0, 5, 19]), torch.tensor([7])
    torch.testing.assert_close(f(q, k, v, cu_seqlens=cu), lssar.attention(q, k, v, cu_seqlens=cu))
    torch.testing.assert_close(f(q, k, v, key_lengths=lengths), lssar.attention(q, k, v, key_lengths=lengths))


def test_gradient_checkpointing():
    inputs = qkv()
    do = torch.randn(2, 4, 19, 6, dtype=torch.float64)
    plain = with_gradients(lambda *x: lssar.attention(*x), inputs, do)
    saved = with_gradients(lambda *x: checkpoint(lssar.attention, *x, use_reentrant=False), inputs, do)
    for a, b in zip(saved, plain):
        assert torch.equal(a, b)


def test_double_backward_is_refused_where_it_is_not_there():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(lssar.attention(q, k, v, impl="tiled").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; use impl='reference'"):
        torch.autograd.grad(dq.sum(), q)
    small = qkv(B=1, Hq=1, Hkv=1, Lq=5, Lk=5, D=3)
    assert torch.autograd.gradgradcheck(lambda *x: lssar.attention(*x, "lssa", impl="reference"), small)


def test_inputs_are_left_alone():
    inputs = qkv(grad=False)
    copies = [x.clone() for x in inputs]
    for name in lssar.specs():
        lssar.attention(*inputs, name)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies))


def test_same_bits_every_time():
    inputs = qkv(B=1, Lq=257, Lk=257, D=16, dtype=torch.float32)
    do = torch.randn(1, 4, 257, 16)
    first, second = (with_gradients(lssar.attention, inputs, do) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("name", ["softmax", "cosine_softmax", "ssmax"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_few_rows_against_a_cache_through_sdpa(name, rows):
    """SDPA aligns its own causal mask at the other end, and log n goes by the key's place, not the row's."""
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, 20, 20))
    torch.testing.assert_close(
        lssar.attention(q, k, v, name, impl="fused"), lssar.attention(q, k, v, name, impl="reference")
    )


@pytest.mark.parametrize("name", ["softmax", "lssar", "lssa", "cosine_softmax"])
@pytest.mark.parametrize(("rows", "window"), [(1, 7), (4, 7), (30, 7), (30, 30), (30, 100), (1, 100)])
def test_keys_behind_a_window_are_not_read(name, rows, window):
    q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (rows, 30, 30))
    whole = lssar.attention(q, k, v, name, window=window, impl="reference", return_weights=True)[0]
    for impl in ("tiled", "reference", "auto"):
        torch.testing.assert_close(lssar.attention(q, k, v, name, window=window, impl=impl), whole)
    if rows + window <= 30:
        k[:, :, : 30 - rows - window + 1] = v[:, :, : 30 - rows - window + 1] = torch.nan
        torch.testing.assert_close(lssar.attention(q, k, v, name, window=window), whole)
