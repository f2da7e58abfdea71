"""Benchmarks check a contestant before timing it: wrong ones get an error in place of times."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, flex_attention

import lssar
from lssar.benchmark import contestants, measure, run_benchmark
from lssar.benchmark.contestants import Case

CASE = Case(batch=1, heads=2, key_heads=1, length=70, head_size=8, dtype="float32", device="cpu")


def right(q, k, v):
    return lssar.attention(q, k, v)


WRONG = {
    "another mechanism": lambda q, k, v: lssar.attention(q, k, v, "lssa"),
    "another p": lambda q, k, v: lssar.attention(q, k, v, lssar.spec("lssar", p=14)),
    "sees the future": lambda q, k, v: lssar.attention(q, k, v, causal=False),
    "NaN in one row": lambda q, k, v: right(q, k, v).index_fill(2, torch.tensor([69]), torch.nan),
    "gradient cut": lambda q, k, v: right(q.detach(), k, v) + 0 * q,
    "zeros": lambda q, k, v: 0 * right(q, k, v),
}


def test_a_right_implementation_passes():
    errors = measure.check(right, lssar.spec("lssar"), CASE, gradients=True)
    assert set(errors) == {"o", "dq", "dk", "dv"}
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
def test_wrong_implementations_fail(function):
    with pytest.raises(measure.Incorrect):
        measure.check(function, lssar.spec("lssar"), CASE, gradients=True)


def test_what_is_wrong_is_not_timed(monkeypatch):
    from lssar.benchmark import run

    monkeypatch.setitem(contestants._IMPLEMENTATIONS, "tiled", lambda mechanism, case: WRONG["zeros"])
    try:
        row = measure.measure("tiled:lssar", CASE, ("forward", "both"), 0.01)
    except Exception as error:
        row = run._failure(error)
    assert list(row) == ["incorrect"]


def test_a_process_that_dies_is_reported(monkeypatch):
    from lssar.benchmark import run

    monkeypatch.setattr(run, "_child", _dies)
    assert "code 9" in run._in_own_process("tiled:lssar", CASE, ("forward",), 0.01)["failed"]


def _dies(*arguments):
    import os

    os._exit(9)


def test_decoding_is_one_row_against_a_cache():
    case = dataclasses.replace(CASE, decode=True)
    q, k, _, _ = case.inputs()
    assert q.shape[2] == 1 and k.shape[2] == case.length
    for name in ("tiled:lssar", "sdpa:softmax", "eager:lssar"):
        assert measure.measure(name, case, ("forward",), 0.01)["forward_ms"] > 0
    with pytest.raises(ValueError, match="no backward"):
        run_benchmark(["tiled:lssar"], [case], ("both",))


def test_a_window_is_part_of_a_case():
    case = dataclasses.replace(CASE, window=9)
    for name in ("tiled:lssar", "eager:softmax"):
        function, mechanism = contestants.build(name, case)
        assert max(measure.check(function, mechanism, case, gradients=True).values()) < 1e-4
    with pytest.raises(measure.Incorrect):
        measure.check(right, lssar.spec("lssar"), case, gradients=True)
    with pytest.raises(contestants.Unavailable, match="no window"):
        contestants.build("sdpa:softmax", case)


def test_a_cuda_graph_is_timed_by_its_replays(monkeypatch):
    case = dataclasses.replace(CASE, device="cuda", cuda_graph=True)
    monkeypatch.setattr("triton.testing.do_bench_cudagraph", lambda f, **options: 1.0)
    monkeypatch.setattr("triton.testing.do_bench", lambda f, **options: 2.0)
    assert measure._time(lambda: None, case, 0.1) == 1.0
    assert measure._time(lambda: None, dataclasses.replace(case, cuda_graph=False), 0.1) == 2.0
    assert str(case).endswith("CUDA graph")
    with pytest.raises(ValueError, match="needs a GPU"):
        run_benchmark(["tiled:lssar"], [dataclasses.replace(CASE, cuda_graph=True)])
    with pytest.raises(ValueError, match="no backward without its forward"):
        run_benchmark(["tiled:lssar"], [case])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fused:lssar", "fused:cosine_softmax", "cudnn:softmax"])
def test_forward_and_backward_can_be_captured(name):
    case = Case(2, 2, 2, 256, 64, "bfloat16", "cuda", cuda_graph=True)
    times = measure.measure(name, case, ("forward", "both"), 0.02)
    assert times["both_ms"] > 0 and times["forward_ms"] > 0


def dense_flex(q, k, v, score_mod, block_mask=None, scale=None, enable_gqa=False, return_aux=None):
    """What FlexAttention computes, in plain operations: it has no backward on a CPU."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    shape = (*q.shape[:3], k.shape[2])
    b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
    score = score_mod((q @ k.mT).float(), b, h, i, j)
    score = score if block_mask is None else score.masked_fill(j > i, -torch.inf)
    lse = score.logsumexp(-1)
    o = (score - lse[..., None]).exp().to(v.dtype) @ v
    return o if return_aux is None else (o, AuxOutput(lse=lse))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mechanism", ["lssa", "lssar"])
def test_the_flex_attention_peer_computes_the_mechanism(mechanism, dtype, causal):
    case = Case(1, 4, 2, 96, 32, dtype, "cpu", causal=causal)
    for flex, gradients in ((flex_attention, False), (dense_flex, True)):
        peer = contestants.with_flex_attention(flex, lssar.spec(mechanism), case)
        errors = measure.check(peer, lssar.spec(mechanism), case, gradients)
        assert max(errors.values()) < (1e-5 if dtype == "float32" else 0.01)
