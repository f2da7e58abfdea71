"""What rows see, as transformers' masks say it and as our kernels take it."""

import pytest
import torch

import lssar

pytest.importorskip("transformers")
from lssar.hf import masks
from lssar.hf.attention import masked_attention
from tests.hf.families import make, tokens

close = torch.testing.assert_close

LEFT, RIGHT = ([row, [1] * 9] for row in ([0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0]))
BOTH = [[0, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1]]
STATIC_LEFT = [[0, 0, 1, 1, 1, 1], [1] * 6]
SEEN = {
    "plain": dict(q_length=9, kv_length=9),
    "one query": dict(q_length=1, kv_length=9, q_offset=8),
    "second chunk": dict(q_length=4, kv_length=9, q_offset=5),
    "static, empty": dict(q_length=4, kv_length=9),
    "static, chunk": dict(q_length=3, kv_length=9, q_offset=torch.tensor(2)),
    "static, one query": dict(q_length=1, kv_length=9, q_offset=torch.tensor(4)),
    "left": dict(q_length=9, kv_length=9, attention_mask=LEFT),
    "right": dict(q_length=9, kv_length=9, attention_mask=RIGHT),
    "both sides": dict(q_length=9, kv_length=9, attention_mask=BOTH),
    "holes": dict(q_length=9, kv_length=9, attention_mask=[[1, 0, 1, 1, 1, 0, 0, 1, 1], [1] * 9]),
    "nothing real": dict(q_length=9, kv_length=9, attention_mask=[[0] * 9, [1] * 9]),
    "left, one query": dict(q_length=1, kv_length=9, q_offset=8, attention_mask=LEFT),
    "left, second chunk": dict(q_length=3, kv_length=9, q_offset=6, attention_mask=LEFT),
    "static, left, prefill": dict(q_length=5, kv_length=9, attention_mask=[[0, 0, 1, 1, 1], [1] * 5]),
    "static, left, one query": dict(q_length=1, kv_length=9, q_offset=torch.tensor(5), attention_mask=STATIC_LEFT),
    "static, one token": dict(q_length=1, kv_length=9, q_offset=torch.tensor(0)),
    "static, right, prefill": dict(q_length=5, kv_length=9, attention_mask=[[1, 1, 1, 0, 0], [1] * 5]),
    "left, late chunk": dict(q_length=3, kv_length=9, q_offset=6, attention_mask=[[0] * 4 + [1] * 5] * 2),
    "pack": dict(q_length=9, kv_length=9, pack=[[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1]]),
    "window": dict(q_length=9, kv_length=9, local_size=3),
    "window, left": dict(q_length=9, kv_length=9, local_size=3, attention_mask=LEFT),
    "wide window": dict(q_length=9, kv_length=9, local_size=30),
    "both ways": dict(q_length=9, kv_length=9, both=True, attention_mask=RIGHT),
    "two keys": dict(q_length=2, kv_length=2),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [20, 2**22])
@pytest.mark.parametrize("case", SEEN)
def test_codes_say_what_the_mask_says(case, chunk, codes, monkeypatch):
    from transformers import masking_utils as theirs

    ask = {"batch_size": 2, "mask_function": theirs.causal_mask_function, **SEEN[case]}
    if (pack := ask.pop("pack", None)) is not None:
        pattern = theirs.packed_sequence_mask_function(torch.tensor(pack))
        ask |= {"mask_function": theirs.and_masks(theirs.causal_mask_function, pattern), "allow_is_causal_skip": False}
    if "local_size" in ask:
        ask["mask_function"] = theirs.sliding_window_causal_mask_function(ask["local_size"])
    if ask.pop("both", False):
        ask |= {"mask_function": theirs.bidirectional_mask_function, "allow_is_causal_skip": False}
    real = torch.ones(2, ask["q_length"], dtype=torch.bool)
    if "attention_mask" in ask:
        ask["attention_mask"] = torch.tensor(ask["attention_mask"], dtype=torch.bool)
        first = int(ask.get("q_offset", 0))
        real = ask["attention_mask"][:, first : first + ask["q_length"]]
    monkeypatch.setitem(masks.CHUNK, "cpu", chunk)
    code = masks.visible_keys(**ask)
    dense = theirs.sdpa_mask(**{**ask, "allow_is_causal_skip": False})
    if case not in ("holes", "two keys"):
        assert code is None or code.dtype == torch.int32, "an Lq x Lk mask where a few numbers would do"
    torch.manual_seed(1)
    q = torch.randn(2, 4, ask["q_length"], 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, ask["kv_length"], 8, dtype=torch.float64) for _ in range(2))
    expected = lssar.attention(q, k, v, "lssar", causal=False, mask=dense, impl="reference")
    o, _ = masked_attention(q, k, v, lssar.spec("lssar"), mask=code, causal=case != "both ways")
    close(o.transpose(1, 2)[real], expected.transpose(1, 2)[real])  # no result depends on rows of padding


def test_codes_have_the_kinds_that_the_fused_kernels_take(monkeypatch):
    monkeypatch.setattr(masks, "fused_on", lambda device: True)
    shape = lambda **ask: tuple(masks.visible_keys(batch_size=2, q_length=9, kv_length=9, **ask).shape)  # noqa: E731
    right, left = (torch.tensor([row, [1] * 9], dtype=torch.bool) for row in ([1] * 5 + [0] * 4, [0] * 4 + [1] * 5))
    assert shape(attention_mask=right) == (2, 1, 1, 1)
    assert shape(attention_mask=left) == (2, 1, 9, 1)
    assert tuple(masks.visible_keys(2, 9, 12, attention_mask=left).shape) == (2, 1, 9, 1)  # a static cache's prompt
    late = dict(q_length=3, kv_length=9, q_offset=6, attention_mask=torch.tensor([[0] * 4 + [1] * 5] * 2).bool())
    assert tuple(masks.visible_keys(2, **late).shape) == (2, 1, 3, 2)


def test_masks_of_the_users_own():
    model = make("llama")
    ids = tokens(2, 8)
    seen = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8).clone()
    seen[0, 0, 5:, 2] = False
    as_bool = model(ids, attention_mask=seen).logits
    low = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    close(model(ids, attention_mask=torch.where(seen, 0.0, low)).logits, as_bool)
    close(as_bool[1], model(ids).logits[1])
    assert (as_bool[0, 5:] - model(ids).logits[0, 5:]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="adds no bias to its scores"):
        model(ids, attention_mask=torch.where(seen, 0.5, low))
    with pytest.raises(ValueError, match="must be bool"):
        model(ids, attention_mask=seen.int())
