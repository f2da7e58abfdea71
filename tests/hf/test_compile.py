"""torch.compile of transformers models with our mechanisms."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from lssar.hf import masks  # noqa: E402
from tests.hf.families import FAMILIES, greedy, make, padded, tokens  # noqa: E402


def compiled_equals_eager(family, how, backend="aot_eager"):
    torch._dynamo.reset()
    model = make(family, lssar={"p": 3}).train()
    batch = {"input_ids": tokens(2, 12)}
    if how == "padded":
        batch = padded([tokens(12, seed=1), tokens(8, seed=2)], "right")
    if how == "packed":
        batch |= {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(10), *range(2)]])}
    real = batch.get("attention_mask", torch.ones(2, 12)).bool()
    results = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        logits = run(**batch, use_cache=False).logits[real]
        logits.logsumexp(-1).sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for a, b in zip(*results):  # norms and rotary angles are float32 for any weights, and inductor rounds differently
        assert (a - b).norm() <= (1e-4 if backend == "inductor" else 1e-9) * a.norm()


def test_compiled_equals_eager(codes):
    compiled_equals_eager("llama", "padded")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_compiled_equals_eager(family, how, codes):
    compiled_equals_eager(family, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "padded", "packed"])
def test_compiled_by_inductor_equals_eager(how, codes):
    compiled_equals_eager("llama", how, backend="inductor")


@pytest.mark.slow
def test_generation_with_compiled_steps_is_the_same():
    """A static cache whose steps are compiled, as `generate` does by itself on a GPU."""
    torch._dynamo.reset()
    model = make("llama")
    batch = padded([tokens(9, seed=1), tokens(5, seed=2)], "left")
    expected = greedy(model, batch)
    settings = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    settings._compile_all_devices = True
    assert greedy(model, batch, cache_implementation="static", compile_config=settings).tolist() == expected.tolist()


def test_compiled_refuses_holes_where_it_cannot_look(monkeypatch):
    monkeypatch.setattr(masks, "fused_on", lambda device: True)
    torch._dynamo.reset()
    batch = padded([tokens(12, seed=1), tokens(8, seed=2)], "right")
    batch["attention_mask"][0, 4] = 0
    with pytest.raises(RuntimeError, match=r"under torch\.compile lssar takes padding at the sides"):
        torch.compile(make("llama"), backend="aot_eager", fullgraph=True)(**batch, use_cache=False)
