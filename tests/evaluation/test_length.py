import numpy as np
import pytest
import torch

import lssar
from lssar.evaluation.diagnostics import STATISTICS, diagnose, row_statistics
from lssar.evaluation.length import evaluate_length, interval, pieces_of
from lssar.layouts import parse_layout
from lssar.model import GPT, ModelConfig


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(layers=2, width=32, heads=4, vocab_size=50, train_length=16)).eval()


def test_pieces_are_whole_and_do_not_overlap():
    documents = [np.arange(100), np.arange(20), np.arange(65)]
    pieces = pieces_of(documents, 32)
    assert [int(p[0]) for p in pieces] == [0, 32, 64, 0, 32]
    assert all(len(p) == 33 for p in pieces)
    assert len(pieces_of(documents, 32, most=2)) == 2


def test_the_curves_are_the_models_losses(model):
    pieces = [torch.randint(50, (65,)) for _ in range(3)]
    result = evaluate_length(model, pieces, [16, 32, 64])
    for point in result["by_length"]:
        length = point["length"]
        parts = [p[i : i + length + 1] for p in pieces for i in range(0, 64, length)]
        direct = [float(model(x[None, :-1], targets=x[None, 1:]).detach()) for x in parts]
        assert point["loss"] == pytest.approx(sum(direct) / len(direct), rel=1e-4)
        assert point["low"] < point["loss"] < point["high"]
    given = [model.token_losses(p[None, 32:-1], p[None, 33:])[0, -16:].mean() for p in pieces]
    at_32 = next(p for p in result["last"] if p["context"] == 32)
    assert at_32["loss"] == pytest.approx(float(torch.stack(given).mean()), rel=1e-4)
    bins = result["by_position"]
    assert bins[0]["start"] == 0
    assert bins[-1]["stop"] == 64
    widths = [b["stop"] - b["start"] for b in bins]
    mean = sum(b["loss"] * w for b, w in zip(bins, widths)) / 64
    assert mean == pytest.approx(result["by_length"][-1]["loss"], rel=1e-4)


def test_ntk_and_window_are_for_the_evaluation_only(model):
    pieces = [torch.randint(50, (65,)) for _ in range(2)]
    plain, ntk, window = (
        evaluate_length(model, pieces, [16, 64], **options) for options in ({}, {"ntk": "length"}, {"window": 8})
    )
    assert plain["by_length"][0] == ntk["by_length"][0]  # at the trained length nothing is stretched
    assert plain["by_length"][1] != ntk["by_length"][1]
    assert plain["by_length"][1] != window["by_length"][1]
    assert (model.ntk, model.window) == ("off", None)


def test_bad_requests(model):
    with pytest.raises(ValueError, match="needs pieces of 65"):
        evaluate_length(model, [torch.zeros(10, dtype=torch.int64)], [64])
    with pytest.raises(ValueError, match="must divide the longest"):
        evaluate_length(model, [torch.zeros(65, dtype=torch.int64)], [48, 64])


def test_intervals_cover_the_mean():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = interval(list(rng.normal(2.0, 0.5, 30)))
        hits += found["low"] <= 2.0 <= found["high"]
    assert 0.9 < hits / 400 < 0.98


def test_row_statistics_of_known_rows():
    uniform, needle = torch.full((8,), 1 / 8), torch.eye(8)[0]
    found = row_statistics(torch.stack([uniform, needle]).double())
    torch.testing.assert_close(found["effective"], torch.tensor([8.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(found["largest"], torch.tensor([0.125, 1.0], dtype=torch.float64))
    torch.testing.assert_close(found["first_token"], torch.tensor([0.125, 1.0], dtype=torch.float64))
    torch.testing.assert_close(found["matters"], torch.tensor([1.0, 0.125], dtype=torch.float64))


def test_diagnose_sees_what_the_model_does(model):
    ids = torch.randint(50, (2, 32))
    result = diagnose(model, ids, [16, 32], rows=3)
    assert set(result["statistics"]) == set(STATISTICS)
    assert np.array(result["statistics"]["entropy"]).shape == (2, 2, 4)
    x = model.blocks[0].norm1(model.embed(ids))
    q, k, v = model.blocks[0].attention.qkv(x, model._positions(ids, None, None))
    w = lssar.attention(q, k, v, impl="reference", return_weights=True)[1][:, :, -3:]
    np.testing.assert_allclose(result["statistics"]["largest"][1][0], w.max(-1).values.mean((0, 2)).detach(), rtol=1e-4)
    with pytest.raises(ValueError, match="needs as many"):
        diagnose(model, ids, [64])


def test_diagnose_of_mixed_layers():
    """A local row has as many entries as its window; of divided heads, those of LSSA see every key."""
    config = ModelConfig(layers=2, width=32, heads=4, vocab_size=50, pattern=parse_layout("softmax@8 lssa+lssar/none"))
    found = diagnose(GPT(config), torch.randint(50, (2, 32)), [32], rows=3)["statistics"]
    assert max(found["effective"][0][0]) <= 8
    assert found["matters"][0][1][:2] == [1.0, 1.0]
    assert max(found["matters"][0][1][2:]) < 1
