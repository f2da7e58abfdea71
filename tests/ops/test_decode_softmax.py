"""One row against a cache for softmax kinds: the kernel in Triton's interpreter or on a GPU, and decode steps."""

from __future__ import annotations

import pytest
import torch

import lssar
from lssar.layouts import parse_layout
from lssar.model import GPT, model_config
from lssar.nn import rotary_angles, rotate
from lssar.nn.decoding import DecodeStep
from tests.helpers import DEVICE

pytest.importorskip("triton")
from lssar.ops import fused
from lssar.ops.fused.decode_softmax import decode

SPECS = {
    "softmax": lssar.spec("softmax"),
    "cosine_softmax": lssar.spec("cosine_softmax"),
    "ssmax": lssar.spec("ssmax", head_scale=1.0),
}
BOUNDS = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Relative error in the root mean square."""


def tensors(B=2, Hq=4, Hkv=2, L=70, D=32, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, Hq, 1, D), (B, Hkv, L, D), (B, Hkv, L, D)
    return [torch.randn(s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


def check(q, k, v, name, found, **view):
    exact = lssar.attention(*(x.double() for x in (q, k, v)), SPECS[name], causal=False, impl="reference", **view)
    error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error <= BOUNDS[q.dtype], f"{name}: {error:.2g}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_one_split_and_several(name, dtype):
    q, k, v = tensors(dtype=dtype, D=40)
    spec = SPECS[name]
    for splits in (1, 3):
        poison = torch.full_like(q, torch.nan)
        del poison  # the allocator hands it out again: what is not written shows
        with torch.no_grad():
            found = decode(q, k, v, None, spec.literal, None, None, splits=splits, block=16)
        check(q, k, v, name, found)


@pytest.mark.parametrize("name", SPECS)
def test_lengths_and_what_lies_beyond(name):
    q, k, v = tensors(B=4, L=300)
    lengths = torch.tensor([300, 7, 0, 1], device=DEVICE)
    with torch.no_grad():
        clean = lssar.attention(q, k, v, SPECS[name], causal=False, key_lengths=lengths, impl="fused")
    check(q, k, v, name, clean, key_lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
    longer = torch.where(lengths == 300, 5000, lengths)  # more tokens than slots: a full ring
    with torch.no_grad():
        dirty = fused.softmax_decode(q, k, v, SPECS[name], lengths=longer)
    assert torch.equal(clean, dirty)
    assert not clean[2].any()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("q_size", "k_size"), [(1e30, 1e30), (1e-30, 1e-30), (1e30, 1e-30), (0.0, 1.0), (1.0, 0.0)])
def test_extreme_norms(name, q_size, k_size):
    q, k, v = tensors(Hq=2, Hkv=1)
    q, k = q * q_size, k * k_size
    with torch.no_grad():
        found = fused.softmax_decode(q, k, v, SPECS[name])
    assert found.isfinite().all()
    if name == "cosine_softmax" or max(q_size, k_size) <= 1:  # one score wins, by less than a rounding of the others
        check(q, k, v, name, found)


@pytest.mark.parametrize("exponent", [-146, 125])
def test_keys_at_the_ends_of_the_range(exponent):
    """1 / |k| or the product of query and key is beyond float32's range."""
    q, k, v = tensors()
    k = k.sign() * 2.0 ** k.abs().clamp(max=2).round()  # so that no scale rounds them
    with torch.no_grad():
        found, expected = (fused.softmax_decode(q, x, v, SPECS["cosine_softmax"]) for x in (k * 2.0**exponent, k))
    torch.testing.assert_close(found, expected)


def test_gain_multiplies_cosines():
    q, k, v = tensors()
    gain = torch.tensor([0.5, 2.0, -1.0, 0.0], device=DEVICE)
    spec = lssar.spec("cosine_softmax", head_scale=1.0)
    with torch.no_grad():
        found = lssar.attention(q, k, v, spec, head_scale=gain, impl="fused")
    exact = lssar.attention(*(x.double() for x in (q, k, v)), spec, head_scale=gain.double(), impl="reference")
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_paged_cache():
    q, k, v = tensors(L=64)
    table = torch.tensor([[2, 0, 7, 5], [1, 3, 4, 6]], dtype=torch.int32, device=DEVICE)
    pages_k, pages_v = (torch.empty(8, 16, 2, 32, device=DEVICE) for _ in range(2))
    for b in range(2):
        for i, page in enumerate(table[b].tolist()):
            for pages, x in ((pages_k, k), (pages_v, v)):
                pages[page] = x[b, :, 16 * i : 16 * i + 16].transpose(0, 1)
    lengths = torch.tensor([64, 37], device=DEVICE)
    spec = lssar.spec("softmax")
    with torch.no_grad():
        found = fused.softmax_decode(q, pages_k, pages_v, spec, lengths=lengths, block_table=table)
        assert torch.equal(found, fused.softmax_decode(q, k, v, spec, lengths=lengths))


@pytest.mark.parametrize("rotated", [True, False])
def test_append_rotates_and_writes(rotated):
    qkv = torch.randn(2, 1, 8, 20, device=DEVICE)  # as a projection has it: 4 query heads, 2 key heads
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 2, 2], 2))
    cached = [torch.zeros(2, 2, 5, 20, device=DEVICE) for _ in range(2)]
    at = torch.tensor([13], device=DEVICE)
    angles = rotary_angles(at, 20, 10_000.0) if rotated else None
    turned = fused.append_token(q, k, v, angles, *cached, at)
    expected = [rotate(x, angles) if rotated else x for x in (q, k)]
    torch.testing.assert_close(turned, expected[0])
    torch.testing.assert_close(cached[0][:, :, 3:4], expected[1])
    assert torch.equal(cached[1][:, :, 3:4], v)
    assert not any(x[:, :, i].any() for x in cached for i in (0, 1, 2, 4))


LAYOUTS = ("softmax@5*2 cosine_softmax/none", "softmax@5 lssa+lssar/none", "lssar", "ssmax@3 lssar@7")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"projection": "tpa"}], ids=["plain", "tpa"])
def test_decode_steps_equal_a_full_forward(layout, changes):
    """On a CPU without a graph: positions and lengths are tensors there too."""
    torch.manual_seed(0)
    config = model_config("tiny", vocab_size=61, pattern=parse_layout(layout), layers=3, **changes)
    model = GPT(config).to(DEVICE).eval()
    ids = torch.randint(61, (2, 16), device=DEVICE)
    full = model(ids)
    cache = model.new_cache(16)
    model.prefill(ids[:, :3], cache)
    step = DecodeStep(lambda x: model.logits(model.hidden(x, cache))[:, -1], cache.layers)
    for i in range(3, 15):
        torch.testing.assert_close(step(ids[:, i : i + 1]), full[:, i], atol=2e-5, rtol=1e-4)
    assert cache.length == 15
    torch.testing.assert_close(model(ids[:, 15:], cache)[:, -1], full[:, 15], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="room"):
        step(ids[:, :1])


@pytest.mark.parametrize("layer", ["softmax@4", "lssar", "cosine_softmax@20/none"])
def test_decode_steps_of_a_single_layer(layer):
    torch.manual_seed(0)
    embed, layer = torch.nn.Embedding(11, 32).to(DEVICE), lssar.nn.Attention(32, 2, layer).to(DEVICE)
    ids = torch.randint(11, (2, 12), device=DEVICE)
    with torch.no_grad():
        full = layer(embed(ids))
        cache = layer.new_cache(12)
        layer(embed(ids[:, :2]), cache=cache)
    step = DecodeStep(lambda x: layer(embed(x), cache=cache)[:, -1], [cache])
    for i in range(2, 12):
        torch.testing.assert_close(step(ids[:, i : i + 1]), full[:, i], atol=2e-5, rtol=1e-4)


def test_decode_steps_say_what_they_need():
    model = GPT(model_config("tiny", attention=lssar.spec("softmax"), position="alibi"))
    cache = model.new_cache(4)
    with pytest.raises(ValueError, match="prefill"):
        DecodeStep(lambda x: x, cache.layers)
    model.prefill(torch.zeros(1, 2, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="ALiBi"):
        DecodeStep(lambda x: x, cache.layers)


@pytest.mark.gpu
def test_generation_by_graph_equals_generation_by_calls(monkeypatch):
    torch.manual_seed(0)
    model = GPT(model_config("tiny", vocab_size=61, pattern=parse_layout("softmax@8*2 lssar/none"), layers=3)).cuda()
    ids = torch.randint(61, (2, 5), device="cuda")
    by_graph = torch.stack(list(model.generate(ids, 40, temperature=0)))
    monkeypatch.setattr("lssar.model.GRAPH_FROM", 1000)
    assert torch.equal(by_graph, torch.stack(list(model.generate(ids, 40, temperature=0))))
