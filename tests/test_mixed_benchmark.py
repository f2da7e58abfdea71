"""benchmarks/mixed_model.py compares what it says: the peer computes the same function."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmarks import mixed_model, training_step

import lssar
from lssar.model import GPT, model_config
from lssar.nn.decoding import DecodeStep
from lssar.training.recipes import recipe


@pytest.fixture
def models():
    config = model_config("tiny", vocab_size=61, attention=lssar.spec("softmax"))
    torch.manual_seed(0)
    ours, peer = GPT(config).eval(), mixed_model.PlainSoftmax(config).eval()
    peer.load_state_dict(ours.state_dict())
    return ours, peer


def test_the_peer_of_training_is_the_same_model(models):
    ours, peer = models
    ids = torch.randint(61, (2, 20))
    torch.testing.assert_close(peer(ids, targets=ids), ours(ids, targets=ids), rtol=1e-5, atol=1e-6)


def test_the_peer_of_decoding_is_the_same_model(models):
    model, _ = models
    ids = torch.randint(61, (2, 9))
    expected = model(ids)[:, -1]
    for attend in (None, mixed_model.fixed_length_sdpa(9)):
        cache = model.new_cache(12)
        model.prefill(ids[:, :8], cache)
        step = DecodeStep(partial(mixed_model.next_logits, model, cache, attend), cache.layers)
        torch.testing.assert_close(step(ids[:, 8:]), expected, rtol=1e-4, atol=1e-5)


def test_a_training_step_is_one_of_the_recipe():
    """As many tokens in two micro-batches as in one, on tokens that are the same in both: the same losses."""
    losses = []
    for micro_steps in (1, 2):
        r = recipe("tiny-cpu", size="tiny", length=16, batch_tokens=32 * micro_steps, micro_batch=2, vocab_size=61)
        torch.manual_seed(0)
        step = training_step.training_step(GPT(r.model()), r)
        losses.append([step() for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][3] < losses[0][0]


def test_ratios_are_to_the_uniform_model_of_the_same_setting():
    rows = [
        {"arm": arm, "length": length, "tokens_per_s": speed}
        for length, speeds in ((1, (100, 150)), (2, (10, 25)))
        for arm, speed in zip(mixed_model.ARMS, speeds)
    ]
    mixed_model._add_ratios(rows, "tokens_per_s", ("length",))
    assert [row["tokens_per_s_ratio"] for row in rows] == [1.0, 1.5, 1.0, 2.5]


@pytest.mark.parametrize("arm", mixed_model.ARMS)
@pytest.mark.parametrize("length", [1024, 8192, 32768])
def test_recipes_fit(arm, length):
    r = mixed_model.recipe_of("long-124m", arm, length)
    assert r.micro_batch * length * r.micro_steps(1) == r.batch_tokens == 65_536
