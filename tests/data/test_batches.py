"""Batches: every token once an epoch, the same for any number of ranks, exactly resumed."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lssar.data.batches import TokenBatches, permuted
from lssar.data.shards import write_shard
from lssar.data.stream import DocumentReader
from lssar.ops.loss import IGNORE

EOT = 256


@pytest.fixture
def shards(tmp_path):
    """103 tokens 0, 1, 2, ... over three shards."""
    parts = np.split(np.arange(103), [40, 41])
    return [write_shard(tmp_path / f"x_train_{i:06d}.bin", part, 257) for i, part in enumerate(parts)]


def take(batches, count):
    return list(itertools.islice(batches, count))


def test_windows_in_order(shards):
    batches = TokenBatches(shards, batch=2, length=10, shuffle=False)
    assert batches.windows == 10
    got = take(batches, 5)
    assert got[0].inputs.dtype == got[0].targets.dtype == torch.int64
    assert got[0].inputs.shape == (2, 10) and got[0].cu_seqlens is None
    assert torch.cat([batch.inputs for batch in got]).view(-1).tolist() == list(range(100))
    assert torch.cat([batch.targets for batch in got]).view(-1).tolist() == list(range(1, 101))


def test_every_window_once_an_epoch_in_an_order_of_its_own(shards):
    batches = TokenBatches(shards, batch=3, length=10, seed=5)  # 3 does not divide the 10 windows
    firsts = torch.cat([batch.inputs[:, 0] for batch in take(batches, 10)]).tolist()
    epochs = [firsts[:10], firsts[10:20], firsts[20:]]
    assert all(sorted(epoch) == list(range(0, 100, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert batches.epoch == 3
    again = TokenBatches(str(shards[0].parent / "*.bin"), batch=3, length=10, seed=5)
    assert torch.cat([batch.inputs[:, 0] for batch in take(again, 10)]).tolist() == firsts
    other = TokenBatches(shards, batch=10, length=10, seed=6)
    assert next(other).inputs[:, 0].tolist() != firsts[:10]


@pytest.mark.parametrize("pack", [False, True])
def test_ranks_share_the_batch_of_one(shards, pack):
    whole = take(TokenBatches(shards, batch=4, length=7, pack=pack, eot=50), 9)
    for world in (2, 4):
        ranks = [
            take(TokenBatches(shards, batch=4 // world, length=7, rank=r, world=world, pack=pack, eot=50), 9)
            for r in range(world)
        ]
        for step in range(9):
            inputs = torch.cat([rank[step].inputs.view(-1) for rank in ranks])
            targets = torch.cat([rank[step].targets.view(-1) for rank in ranks])
            assert torch.equal(inputs, whole[step].inputs.view(-1))
            assert torch.equal(targets, whole[step].targets.view(-1))


@pytest.mark.parametrize("steps", [0, 1, 5, 7, 10, 12])  # 5 and 10 end an epoch
def test_resumes_from_a_state(shards, steps):
    batches = TokenBatches(shards, batch=2, length=10, seed=1)
    take(batches, steps)
    state = json.loads(json.dumps(batches.state_dict()))
    expected = [batch.inputs.tolist() for batch in take(batches, 8)]
    again = TokenBatches(shards, batch=2, length=10, seed=1)
    again.load_state_dict(state)
    assert again.epoch == steps // 5
    assert [batch.inputs.tolist() for batch in take(again, 8)] == expected
    # The order is that of windows, so other ranks or batches resume at the same place.
    wider = TokenBatches(shards, batch=4, length=10, seed=1)
    wider.load_state_dict(state)
    assert next(wider).inputs.tolist() == expected[0] + expected[1]


def test_a_state_of_other_data_is_refused(shards):
    state = TokenBatches(shards, batch=2, length=10).state_dict()
    for change, message in [
        (dict(length=9), "length was 10, is 9"),
        (dict(seed=1), "seed was 0, is 1"),
        (dict(shuffle=False), "shuffle was True"),
        (dict(pack=True, eot=EOT), "pack was False"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenBatches(shards, **(dict(batch=2, length=10) | change)).load_state_dict(state)
    with pytest.raises(ValueError, match="tokens was 103, is 62"):
        TokenBatches(shards[2:], batch=2, length=10).load_state_dict(state)
    write_shard(shards[0], np.arange(40)[::-1], 257, overwrite=True)  # same name, same size
    with pytest.raises(ValueError, match="digest was"):
        TokenBatches(shards, batch=2, length=10).load_state_dict(state)


def test_moved_shards_are_the_same(shards, tmp_path):
    batches = TokenBatches(shards, batch=2, length=10)
    next(batches)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    there = TokenBatches([shard.rename(moved / shard.name) for shard in shards], batch=2, length=10)
    there.load_state_dict(batches.state_dict())
    assert there.position == 2


def test_pack(tmp_path):
    tokens = [EOT, 1, 2, EOT, 3, 4, 5, 6, EOT, EOT, 7, 8, 9]
    path = write_shard(tmp_path / "x.bin", np.array(tokens), 257)
    batch = next(TokenBatches([path], batch=2, length=6, pack=True, eot=EOT, shuffle=False))
    assert batch.inputs.tolist() == [tokens[:12]]
    #           window 1: EOT 1 2 | EOT 3 4          window 2: 5 6 | EOT | EOT 7 8
    assert batch.targets.tolist() == [[1, 2, IGNORE, 3, 4, 5, 6, IGNORE, IGNORE, 7, 8, 9]]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8, 9, 12]
    assert batch.cu_seqlens.dtype == torch.int32


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=9, max_size=60), length=st.integers(1, 4), batch=st.integers(1, 3))
def test_packed_documents_never_look_across(tmp_path_factory, tokens, length, batch):
    path = write_shard(tmp_path_factory.mktemp("pack") / "x.bin", np.array(tokens), 257)
    packed = next(TokenBatches([path], batch=batch, length=length, pack=True, eot=0, seed=3))
    plain = next(TokenBatches([path], batch=batch, length=length, seed=3))
    assert torch.equal(packed.inputs, plain.inputs.view(1, -1))
    assert torch.equal(packed.targets, plain.targets.view(1, -1).masked_fill(plain.targets.view(1, -1) == 0, IGNORE))
    bounds = packed.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == batch * length and bounds == sorted(set(bounds))
    for start, end in itertools.pairwise(bounds):
        assert end - start <= length and 0 not in packed.inputs[0, start + 1 : end]
        assert packed.targets[0, start : end - 1].tolist() == packed.inputs[0, start + 1 : end].tolist()


def test_packed_batches_fit_attention(tmp_path):
    from lssar import attention

    path = write_shard(tmp_path / "x.bin", np.array([EOT, 1, 2, EOT, 3, 4, 5]), 257)
    batch = next(TokenBatches([path], batch=1, length=6, pack=True, eot=EOT))
    q = torch.randn(1, 1, 6, 4)
    together = attention(q, q, q, cu_seqlens=batch.cu_seqlens)
    apart = [attention(part, part, part) for part in q.split([3, 3], dim=2)]
    assert torch.allclose(together, torch.cat(apart, dim=2), atol=1e-5)


def test_wrong_settings_are_refused(shards):
    for arguments, message in [
        (dict(batch=0, length=1), "at least 1"),
        (dict(batch=1, length=0), "at least 1"),
        (dict(batch=1, length=1, rank=1), "rank"),
        (dict(batch=1, length=1, seed=-1), "seed"),
        (dict(batch=1, length=1, pack=True), "eot"),
        (dict(batch=1, length=103), "103 tokens, too few for a window of 103"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenBatches(shards, **arguments)
    assert next(TokenBatches(shards, batch=2, length=102)).inputs.shape == (2, 102)
    batches = TokenBatches(shards, batch=10, length=10, vocab_size=60, shuffle=False)
    with pytest.raises(ValueError, match=r"x_train_000002\.bin: token 19 is 60"):
        next(batches)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_order_is_a_permutation(n, seed, epoch):
    order = permuted(np.arange(n), n, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(n))
    some = np.arange(0, n, 7)
    assert np.array_equal(permuted(some, n, seed, epoch), order[some])


def test_permutation_is_well_spread():
    n = 10_000
    orders = np.stack([permuted(np.arange(n), n, 0, epoch) for epoch in range(4)])
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    assert abs(np.corrcoef(orders)[np.triu_indices(4, 1)]).max() < 0.05
    assert len(np.unique(permuted(np.arange(10**9, 10**9 + 1000), 10**13, 0, 0))) == 1000  # no table of 10^13


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    least=st.integers(1, 6),
    before=st.booleans(),
)
def test_documents(tmp_path_factory, documents, cuts, least, before):
    folder = tmp_path_factory.mktemp("documents")
    stream = np.concatenate([[0, *document] if before else [*document, 0] for document in documents])
    for number, part in enumerate(np.split(stream, sorted(cuts))):
        write_shard(folder / f"{number}.bin", part, 257)
    long = [document for document in documents if len(document) >= least]
    reader = DocumentReader(folder, 0, least, with_eot=False)
    assert [document.tolist() for document in reader] == long
    assert [document.tolist() for document in reader] == long
    assert len(list(DocumentReader(folder, 0, least, max_documents=2, with_eot=False))) == min(2, len(long))
    cut = DocumentReader(folder, 0, least, max_tokens=least, with_eot=False)
    assert [document.tolist() for document in cut] == [document[:least] for document in long]
    if before:
        assert [document.tolist() for document in DocumentReader(folder, 0)] == [[0, *d] for d in documents]
