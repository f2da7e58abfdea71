"""LSSAR and LSSA with a few rows against a cache, against float64: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import lssar
from lssar.ops.reference import reference_attention
from lssar.visibility import visibility
from tests.helpers import DEVICE, NAMES, eager

pytest.importorskip("triton")
from lssar.ops.fused import decode_op, decode_softmax, fused_decode
from tests.ops.comparing import spec_of, tensors


def test_decode_refuses_a_gradient():
    q, k, v, _ = tensors(Lq=1, Lk=20)
    with pytest.raises(RuntimeError, match="no gradient"):
        fused_decode(q.requires_grad_(), k, v, p=15).sum().backward()


def paged(x, table, page):
    """(B, H, L, D) scattered into pages (blocks, page, H, D), with NaN where no key is."""
    B, H, _, D = x.shape
    cache = x.new_full((table.numel(), page, H, D), torch.nan)
    for b in range(B):
        for i, block in enumerate(table[b].tolist()):
            rows = x[b, :, i * page : (i + 1) * page].transpose(0, 1)
            cache[block, : rows.shape[0]] = rows
    return cache


@pytest.mark.parametrize(("page", "p", "rows"), [(0, 15, 1), (16, None, 3), (16, 1.5, 2)])
def test_decode(page, p, rows):
    q, k, v, _ = tensors(B=2, Hq=4, Hkv=2, Lq=rows, Lk=90, D=20)
    lengths = torch.tensor([77, 3], device=DEVICE)
    table, cache = None, (k, v)
    if page:
        table = torch.randperm(12, device=DEVICE).view(2, 6).int()
        cache = paged(k, table, page), paged(v, table, page)
    o = fused_decode(q, *cache, p=p, lengths=lengths, block_table=table, tolerance=0.0)
    for b, n in enumerate((77, 3)):
        see = visibility(rows, n, q.device, causal=True).dense(n)
        inputs = (x[b : b + 1].double() for x in (q, k[:, :, :n], v[:, :, :n]))
        exact = reference_attention(*inputs, see, spec_of(p))[0]
        torch.testing.assert_close(o[b : b + 1].double(), exact, rtol=2e-5, atol=2e-5)


def test_numbers_of_keys_and_pages_may_have_any_stride():
    """As those of a Hugging Face static cache, which are one number expanded."""
    q, k, v, _ = tensors(B=2, Hq=4, Hkv=2, Lq=1, Lk=90, D=20)
    table = torch.randperm(12, device=DEVICE).view(2, 6).int()
    cache = paged(k, table, 16), paged(v, table, 16)
    apart = torch.tensor([77, 90, 3, 90], dtype=torch.int32, device=DEVICE)[::2]
    for lengths in (apart, apart[:1].expand(2)):
        plain = lengths.clone(memory_format=torch.contiguous_format)
        expected = fused_decode(q, k, v, p=15, lengths=plain)
        assert torch.equal(fused_decode(q, k, v, p=15, lengths=lengths), expected)
        assert torch.equal(fused_decode(q, *cache, p=15, lengths=lengths, block_table=table.T.contiguous().T), expected)
        for spec in ("lssar", "sigmoid"):
            full = dict(causal=False, impl="fused")
            expected_full = lssar.attention(q, k, v, spec, key_lengths=plain, **full)
            assert torch.equal(lssar.attention(q, k, v, spec, key_lengths=lengths, **full), expected_full)


def test_decode_tolerance_bounds_the_error():
    q, k, v, _ = tensors(Lq=1, Lk=150)
    exact = fused_decode(q, k, v, p=15, tolerance=0.0)
    for tolerance in (2.0**-10, 0.5):
        off = (fused_decode(q, k, v, p=15, tolerance=tolerance) - exact).abs().max()
        assert off <= tolerance * v.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)], ids=["fp16", "bf16"])
def test_decode_of_half_types_keeps_cosines_finely(dtype, bound):
    """Gains of either sign raise scores, and with them what a rounded cosine costs; a loose selection costs nothing."""
    q, k, v, _ = tensors(Hq=4, Hkv=2, Lq=1, Lk=2000, D=64, dtype=dtype)
    gain = torch.tensor([4.0, -3.0, 1.0, 0.5], device=DEVICE)
    k[:, :, ::7] += 2 * q[:, ::2]
    exact = fused_decode(*(x.float() for x in (q, k, v)), p=15, gain=gain, tolerance=0.0)
    for tolerance in (0.0, 2.0**-10):
        o = fused_decode(q, k, v, p=15, gain=gain, tolerance=tolerance)
        assert (o.float() - exact).norm() < bound * exact.norm(), tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=NAMES.get)
def test_decode_of_keys_that_are_closer_than_stored_cosines(dtype):
    """Two bundles of keys, apart by less than a step of what is stored, or by a few: some keys have all the weight."""
    for seed in range(8):
        q, k, v, _ = tensors(Hq=1, Lq=1, Lk=90, dtype=dtype, seed=seed)
        k = k[:, :, :1].repeat(1, 1, 90, 1)
        smallest = k[0, 0, 0].abs().argmin()
        k[:, :, 40:, smallest] *= 1.01 if seed % 2 else 0.99
        o = fused_decode(q, k, v.abs() + 1, p=15)
        assert o.min() >= 1, seed


@pytest.mark.parametrize("page", [0, 16])
def test_decode_with_offsets_of_64_bits(page, monkeypatch):
    q, k, v, _ = tensors(Hq=4, Hkv=2, Lq=1, Lk=90, D=20)
    table, cache = None, (k, v)
    if page:
        table = torch.randperm(6 * k.shape[0], device=DEVICE).view(-1, 6).int()
        cache = paged(k, table, page), paged(v, table, page)
    lengths = torch.full((k.shape[0],), 90, device=DEVICE)
    call = partial(fused_decode, q, *cache, p=15, lengths=lengths, block_table=table)
    expected = call()
    found = []
    cache_of = decode_op.cache_of
    monkeypatch.setattr(decode_op, "cache_of", lambda *a: found.append(cache_of(*a)) or replace(found[-1], wide=True))
    assert torch.equal(call(), expected)
    assert [x.wide for x in found] == [False]


def test_offsets_of_cosines_need_64_bits_before_those_of_keys(monkeypatch):
    """32 rows have twice as many cosines with a key as the key has entries."""
    wide = []
    monkeypatch.setattr(decode_op, "start_kernel", lambda *a: wide.append(a[-1].get("WIDE")))
    for length, expected in ((2**25, False), (2**26, True)):
        sizes = (1, 32, 1, 16), (1, 1, length, 16)
        q, k = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in sizes)
        decode_op.decode(q, k, k, None, 15, None, None, None, 0.0)
        assert wide == [expected, expected, None]
        wide.clear()


def test_decode_of_unit_keys():
    q, k, v, _ = tensors(Lq=1, Lk=70)
    unit = k / k.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(fused_decode(q, unit, v, p=15, unit_keys=True), fused_decode(q, k, v, p=15))


def test_decode_of_extreme_norms():
    q, k, v, _ = tensors(Lq=1, Lk=70, dtype=torch.bfloat16)
    k = k.sign() * 2.0 ** k.abs().clamp(max=2).round()  # so that no scale rounds them
    exact = eager(q.double(), k.double(), v.double(), spec_of(15), torch.float64, causal=True)
    # neither the squares of the keys nor their products with the query are lost or overflow, nor does 1 / |k|
    for exponent in (0, -90, 60, -132, 125):
        o = fused_decode(q * 2.0 ** min(max(-exponent, -100), 100), k * 2.0**exponent, v, p=15)
        assert (o.double() - exact).norm() < 0.01 * exact.norm(), exponent


@pytest.mark.parametrize("kilobytes", [227, 163, 99])
def test_tiles_of_decode_fit_shared_memory(kilobytes, monkeypatch):
    monkeypatch.setattr(decode_op, "SHARED_MEMORY", kilobytes * 1024)
    for size in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            q = torch.empty(1, 4, 1, size, dtype=dtype)
            for tiles in (1, decode_softmax.TILES):
                plan = decode_op.plan_for(q, 1, 1000, False, tiles=tiles)
                kinds = 1 if tiles == 1 else 2  # keys, and values
                assert kinds * (plan.stages - 1) * plan.block * size * dtype.itemsize < kilobytes * 1024
                assert size == 256 or plan.block == 64
    assert decode_op.plan_for(q, 1, 1000, False, block=64, stages=3).stages == 3  # what is given stays


def test_splits_of_decode_fill_the_card():
    from lssar.ops.fused.decode_op import choose_splits

    tile = 3 * 64 * 128 * 2  # bytes of three stages of 64 bfloat16 keys of 128
    card = {"multiprocessors": 132, "shared_memory": 228 * 1024, "registers": 64 * 80}
    assert choose_splits(8, 2**17, tile, **card) == 66  # one wave: four programs on each of 132
    assert choose_splits(16, 2**17, tile // 2, **card) == 66  # eight on each
    assert choose_splits(300, 2**17, tile, **card) == 5  # one wave would be 300 of 528 places, three are 1500 of 1584
    assert choose_splits(16, 2**17, tile // 2, **card | {"registers": 128 * 80}) == 49  # six: registers for no more
    assert choose_splits(8, 600, tile, **card) == 3  # none shorter than 256 keys
    assert choose_splits(10_000, 2**17, tile, **card) == 1
    assert choose_splits(3, 1, tile, registers=2**17, multiprocessors=1, shared_memory=1024) == 1
