import doctest
import math

import pytest
import torch

import lssar
from lssar.nn import (
    Attention,
    LayerCache,
    MultiheadAttention,
    add_alibi,
    alibi_slopes,
    ntk_base,
    rotary_angles,
    rotate,
)


def test_rotation_keeps_norms_and_depends_on_distance_only():
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        angles = [rotary_angles(torch.tensor([at]), 16, 10_000.0) for at in (i, j)]
        return float((rotate(q, angles[0]) * rotate(k, angles[1])).sum())

    # In float32 the angle of position t is off by up to t roundings, and sines and products by a few.
    bound = 2.0**-24 * (104 + 100 + 7 + 3 + 42) * float(q.norm() * k.norm())
    assert score(7, 3) == pytest.approx(score(104, 100), abs=bound)
    assert max(abs(score(7, 3) - score(7, j)) for j in range(4, 8)) > 2 * bound
    rotated = rotate(q, rotary_angles(torch.tensor([9]), 16, 10_000.0))
    torch.testing.assert_close(rotated.norm(), q.norm(), rtol=1e-6, atol=0)


def test_ntk_stretches_the_slowest_wave_by_the_factor():
    """base * s^(d / (d - 2)): the lowest frequency, base^-(d-2)/d, falls by s; the highest stays 1."""
    d, base, s = 64, 10_000.0, 8.0
    slow = lambda b: b ** (-(d - 2) / d)  # noqa: E731
    assert slow(base) / slow(ntk_base(base, s, d)) == pytest.approx(s)
    assert ntk_base(base, 0.5, d) == base


def test_alibi_slopes():
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert len(alibi_slopes(12)) == 12
    assert len(set(alibi_slopes(12).tolist())) == 12


@pytest.mark.parametrize("first_key", [0, 65_300, 2**20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_alibi_adds_its_bias(dtype, first_key):
    """Against the bias written out densely, at positions that bfloat16 cannot hold in one number, or even in two."""
    heads, length, d = 4, 600, 16
    q, k, v = (torch.randn(1, heads, length, d).to(dtype) for _ in range(3))
    slopes = alibi_slopes(heads)
    o = lssar.attention(*add_alibi(q, k, slopes, first_key), v, "softmax")
    i = torch.arange(length)
    bias = slopes[:, None, None].double() * (i[None, :] - i[:, None])
    s = q.double() @ k.double().mT / math.sqrt(d) + bias
    exact = s.masked_fill(i[None, :] > i[:, None], -torch.inf).softmax(-1) @ v.double()
    tolerance = 1e-6 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(o.double(), exact, atol=tolerance, rtol=tolerance)


def test_cache_keeps_order_and_refuses_to_overflow():
    cache = LayerCache(room=5)
    x = torch.arange(10.0).view(1, 1, 5, 2)
    (seen,) = cache.append(x[:, :, :3])
    assert seen.shape[2] == 3
    (seen,) = cache.append(x[:, :, 3:])
    assert torch.equal(seen, x)
    with pytest.raises(ValueError, match=r"room for 5 tokens; 5 \+ 1 do not fit"):
        cache.append(x[:, :, :1])


@pytest.mark.parametrize("layer", [Attention, MultiheadAttention])
def test_examples_in_docstrings_run(layer):
    (test,) = doctest.DocTestFinder(recurse=False).find(layer, globs={"torch": torch, "lssar": lssar})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("lssar", {}),
        ("softmax@5/alibi", {"bias": False}),
        ("lssa+lssar/none", {"key_heads": 2, "window": 7}),
        (lssar.spec("ssmax"), {"head_size": 6, "position": "none"}),
        ("cosine_softmax", {"projection": "tpa", "rope_base": 500.0}),
    ],
)
def test_a_layer_by_itself_decodes_what_a_full_forward_gives(spec, options):
    layer = Attention(32, 4, spec, **options).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    cache = layer.new_cache(17)
    steps = torch.cat([layer(part, cache=cache) for part in x.split([6, 1, 4, 1, 1, 4], 1)], 1)
    torch.testing.assert_close(steps, layer(x), rtol=1e-6, atol=1e-8)
    x = x[:1]
    packed = layer(x, cu_seqlens=torch.tensor([0, 6, 17]))
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :6]), layer(x[:, 6:])], 1), rtol=1e-6, atol=1e-8)


def test_a_layer_says_what_it_is():
    assert "lssa+lssar, window=7, position='none'" in repr(Attention(32, 4, "lssa+lssar@7/none"))
    for arguments, words in [
        ((30, 4), "multiple of heads"),
        ((32, 4, "softmax lssar"), "wanted one layer"),
        ((36, 4), "even head size"),
    ]:
        with pytest.raises(ValueError, match=words):
            Attention(*arguments)


def torchs_and_ours(**options):
    torchs = torch.nn.MultiheadAttention(32, 4, **options).double()
    ours = MultiheadAttention(32, 4, spec="softmax", **options).double()
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("options", "shapes", "masks"),
    [
        ({"batch_first": True}, [(2, 9, 32)] * 3, {}),
        ({}, [(9, 2, 32)] * 3, {"padding": True}),
        ({"batch_first": True, "bias": False}, [(2, 5, 32), (2, 9, 32), (2, 9, 32)], {"padding": True, "mask": "rows"}),
        ({"batch_first": True}, [(2, 5, 32), (2, 9, 32), (2, 9, 32)], {"mask": "heads"}),
        ({"kdim": 12, "vdim": 8}, [(5, 2, 32), (9, 2, 12), (9, 2, 8)], {}),
        ({}, [(5, 32), (9, 32), (9, 32)], {"padding": True}),
    ],
)
def test_multihead_attention_is_torchs(options, shapes, masks, average):
    """With softmax, and PyTorch's weights loaded: the same outputs, weights and gradients."""
    torchs, ours = torchs_and_ours(**options)
    q, k, v = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    batched, others = q.dim() == 3, {}
    if masks.get("padding"):
        others["key_padding_mask"] = torch.arange(9) >= (torch.tensor([[9], [6]]) if batched else torch.tensor(6))
    if masks.get("mask"):
        shape = (5, 9) if masks["mask"] == "rows" else (8, 5, 9)
        others["attn_mask"] = (torch.rand(shape) < 0.4) & (torch.arange(9) != 0)
    found = []
    for module in (torchs, ours):
        o, w = module(q, k, v, average_attn_weights=average, **others)
        (o * o).sum().backward()
        found.append([o, w, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-9)
    assert torch.equal(ours(q, k, v, need_weights=False, **others)[0], found[1][0])


def test_multihead_attention_is_causal_on_request():
    torchs, ours = torchs_and_ours(batch_first=True)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    expected = torchs(x, x, x, attn_mask=mask)[0]
    for others in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}):
        torch.testing.assert_close(ours(x, x, x, **others)[0], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("spec", ["lssar", "lssa+lssar", "ssmax"])
def test_multihead_attention_in_torchs_encoder(spec):
    """Inference must not take PyTorch's fast path, which would compute softmax with these weights."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(32, 4, spec=spec, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([[9], [6]])
    trained = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), trained)
        changed = x.clone()
        changed[1, 6:] = 7
        torch.testing.assert_close(encoder(changed, src_key_padding_mask=padding)[1, :6], trained[1, :6])
    a, b = layer.self_attn(x, x, x)[0], lssar.nn.MultiheadAttention(32, 4, spec="softmax", batch_first=True)
    b.load_state_dict(layer.self_attn.state_dict(), strict=False)
    assert not torch.allclose(a, b(x, x, x)[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultiheadAttention(32, 4, dropout=0.1), "not supported"),
        (lambda: MultiheadAttention(30, 4), "multiple of num_heads"),
        (lambda: MultiheadAttention(32, 4, spec="lssa:1+lssar:2"), "do not divide"),
        (lambda: MultiheadAttention(32, 4)(*[torch.randn(3, 2, 32)] * 2, torch.randn(3, 32)), "three dimensions each"),
        (lambda: MultiheadAttention(32, 4)(*[torch.randn(3, 2, 32)] * 3, attn_mask=torch.ones(3, 3)), "no bias"),
        (lambda: MultiheadAttention(32, 4)(*[torch.randn(3, 2, 32)] * 3, attn_mask=torch.zeros(2, 3) > 0), "shapes"),
    ],
)
def test_multihead_attention_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()
