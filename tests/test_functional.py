"""`lssar.scaled_dot_product_attention` against PyTorch's own function, and what it refuses."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import lssar

R = torch.randn
SHAPES = {
    "usual": ((2, 4, 7, 6), (2, 4, 7, 6), (2, 4, 7, 5)),
    "fewer queries": ((2, 4, 3, 6), (2, 4, 7, 6), (2, 4, 7, 6)),
    "more queries": ((2, 4, 9, 6), (2, 4, 7, 6), (2, 4, 7, 6)),
    "no heads": ((3, 7, 6), (3, 7, 6), (3, 7, 5)),
    "one matrix": ((7, 6), (7, 6), (7, 5)),
    "five dimensions": ((2, 3, 4, 7, 6), (2, 3, 4, 7, 6), (2, 3, 4, 7, 5)),
    "batch that broadcasts": ((2, 4, 7, 6), (1, 4, 7, 6), (1, 4, 7, 6)),
    "one key head": ((2, 4, 7, 6), (2, 1, 7, 6), (2, 1, 7, 6)),
}


def given(name):
    return [R(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES[name]]


def same(inputs, spec="softmax", **options):
    ours = lssar.scaled_dot_product_attention(*inputs, spec=spec, **options)
    theirs = F.scaled_dot_product_attention(*inputs, **options)
    torch.testing.assert_close(ours, theirs)
    do = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, inputs, do), torch.autograd.grad(theirs, inputs, do)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", SHAPES)
def test_softmax_is_pytorchs(name):
    inputs = given(name)
    same(inputs)
    same(inputs, is_causal=True)
    same(inputs, scale=0.3)
    *lead, L, S = (*inputs[0].shape[:-1], inputs[1].shape[-2])
    for shape in ((L, S), (1, S), (*lead[:1], *[1] * len(lead[1:]), L, S), (*lead, L, S)):
        mask = torch.rand(shape) > 0.3
        mask[..., 0] = True  # PyTorch gives NaN for a row that sees nothing
        same(inputs, attn_mask=mask)


def test_grouped_queries():
    inputs = [R(2, h, 7, 6, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    same(inputs, enable_gqa=True, is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True lets query heads be a multiple"):
        lssar.scaled_dot_product_attention(*inputs)


def test_signature_is_pytorchs():
    ours = inspect.signature(lssar.scaled_dot_product_attention).parameters
    assert list(ours) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "spec"]
    defaults = [ours[name].default for name in ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")]
    assert defaults == [None, 0.0, False, None, False]


def test_the_default_is_lssar_as_in_attention():
    q, k, v = (R(2, 4, 7, 6) for _ in range(3))
    torch.testing.assert_close(
        lssar.scaled_dot_product_attention(q, k, v, is_causal=True), lssar.attention(q, k, v, "lssar")
    )
    torch.testing.assert_close(lssar.scaled_dot_product_attention(q, k, v), lssar.attention(q, k, v, causal=False))


def test_switches_a_model_over(monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = R(2, 5, 16)
    plain = layer(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lssar.scaled_dot_product_attention)
    assert not torch.allclose(layer(x), plain)


def test_compiles_without_graph_breaks():
    q, k, v = (R(2, 4, 7, 6) for _ in range(3))
    f = torch.compile(lssar.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(f(q, k, v, is_causal=True), lssar.attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0"),
        ({"dropout_p": None}, "dropout_p must be 0"),
        ({"attn_mask": torch.zeros(7, 7)}, r"attn_mask must be bool, .* got torch.float32"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.bool), "is_causal": True}, "cannot be combined"),
        ({"attn_mask": torch.ones(7, 6, dtype=torch.bool)}, "attn_mask must broadcast to"),
        ({"scale": 0.5}, "the scores of 'lssar' have no such factor"),
        ({"scale": "big", "spec": "softmax"}, "scale must be a finite number"),
        ({"is_causal": 1}, "is_causal must be True or False"),
        ({"query": torch.zeros(6)}, "query must be a tensor"),
        ({"key": torch.zeros(3, 4, 7, 6)}, "must broadcast"),
    ],
)
def test_what_cannot_be_honoured(options, words):
    inputs = {name: R(2, 4, 7, 6) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=words):
        lssar.scaled_dot_product_attention(**{**inputs, **options})
