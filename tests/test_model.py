import pytest
import torch

import lssar
from lssar.model import GPT, SIZES, ModelConfig, model_config
from lssar.ops.loss import IGNORE


def small(**changes) -> GPT:
    torch.manual_seed(0)
    fields = dict(layers=2, width=32, heads=4, vocab_size=61, train_length=16) | changes
    return GPT(ModelConfig(**fields)).double()


VARIANTS = {
    "rope": {},
    "no positions": {"position": "none"},
    "alibi": {"position": "alibi", "attention": lssar.spec("softmax")},
    "grouped queries": {"key_heads": 2},
    "window": {"window": 5},
    "tpa": {"projection": "tpa"},
    "tpa softmax": {"projection": "tpa", "attention": lssar.spec("softmax")},
    "a mechanism a layer": {"attention": (lssar.spec("softmax"), lssar.spec("lssar"))},
    "no bias": {"bias": False},
}


def decoded_in_steps(model: GPT, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    cache = model.new_cache(ids.shape[1])
    return torch.cat([model(part, cache) for part in ids.split(steps, 1)], 1)


@pytest.mark.parametrize("name", lssar.specs())
@pytest.mark.parametrize("ntk", ["off", 2.0, "length"])
def test_cache_equals_full_forward_for_every_mechanism(name, ntk):
    model = small(attention=lssar.spec(name, train_length=16))
    model.ntk = ntk
    ids = torch.randint(61, (2, 24))
    torch.testing.assert_close(decoded_in_steps(model, ids, [9, 1, 1, 5, 1, 7]), model(ids), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_cache_equals_full_forward_for_every_variant(changes):
    model = small(**changes)
    ids = torch.randint(61, (2, 24))
    torch.testing.assert_close(decoded_in_steps(model, ids, [9, 1, 1, 5, 1, 7]), model(ids), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_no_token_sees_the_future(changes):
    model = small(**changes)
    ids = torch.randint(61, (1, 20))
    other = ids.clone()
    other[0, 12:] = (other[0, 12:] + 1) % 61
    torch.testing.assert_close(model(ids)[:, :12], model(other)[:, :12])
    assert not torch.allclose(model(ids)[:, 12:], model(other)[:, 12:])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_packed_documents_equal_separate_ones(changes):
    model = small(**changes)
    ids = torch.randint(61, (1, 20))
    packed = model(ids, cu_seqlens=torch.tensor([0, 7, 20]))
    separate = torch.cat([model(ids[:, :7]), model(ids[:, 7:])], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", lssar.specs())
def test_every_mechanism_learns(name):
    """Seventy steps on one batch: the loss falls, and well below that of guessing."""
    model = small(attention=lssar.spec(name, train_length=16)).float()
    ids = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(5))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(70):
        loss = model(ids[:, :-1], targets=ids[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.log(torch.tensor(61.0)).item(), abs=0.3)
    assert losses[-1] < 0.5, losses[-1]
    if model.blocks[0].attention.head_scale is not None:
        assert not torch.equal(model.blocks[0].attention.head_scale, torch.full((4,), lssar.spec(name).head_scale))


def test_layer_checkpoints_change_nothing():
    ids = torch.randint(61, (2, 17))
    grads = []
    for checkpoint_layers in (False, True):
        model = small(checkpoint_layers=checkpoint_layers)
        model(ids[:, :-1], targets=ids[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_token_losses_are_the_loss():
    model = small()
    ids = torch.randint(61, (2, 17))
    targets = ids[:, 1:].clone()
    targets[0, :5] = IGNORE
    each = model.token_losses(ids[:, :-1], targets, rows=7)
    assert (each[0, :5] == 0).all()
    mean = each.sum() / (targets != IGNORE).sum()
    torch.testing.assert_close(mean.float(), model(ids[:, :-1], targets=targets).float())


def test_sizes_have_the_names_of_their_parameters():
    for name, count in {"45m": 45e6, "51m": 51e6, "124m": 124e6, "355m": 355e6, "0.8m": 0.8e6}.items():
        changes = {"vocab_size": 257} if name == "0.8m" else {}
        with torch.device("meta"):
            model = GPT(model_config(name, **changes))
        assert model.parameter_count() == pytest.approx(count, rel=0.06), name
    assert set(SIZES) >= {"45m", "51m", "124m", "355m"}


def test_tpa_caches_less():
    plain, tpa = small(width=64), small(width=64, projection="tpa")
    ids = torch.randint(61, (1, 10))
    kept = []
    for model in (plain, tpa):
        cache = model.new_cache(10)
        model(ids, cache)
        kept.append(sum(x.numel() for layer in cache.layers for x in layer.tensors))
    heads, size = 4, 16
    assert kept[0] == 2 * 10 * 2 * heads * size
    assert kept[1] == 2 * 10 * (2 + 2) * (heads + size)


def test_generation():
    model = small()
    ids = torch.randint(61, (2, 6))
    greedy = torch.stack(list(model.generate(ids, 8, temperature=0)), 1)
    full = ids
    for _ in range(8):
        full = torch.cat([full, model(full)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(greedy, full[:, 6:])
    draws = [
        torch.stack(list(model.generate(ids, 5, generator=torch.Generator().manual_seed(s))), 1) for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.stack(list(model.generate(ids, 5, top_k=1)), 1), greedy[:, :5])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_config_to_plain_values_and_back(changes):
    import json

    config = small(**changes).config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"width": 30}, "multiple of heads"),
        ({"heads": 0}, "heads must be an integer >= 1"),
        ({"position": "learned"}, "position must be"),
        ({"width": 12, "heads": 4}, "even head size"),
        ({"key_heads": 3}, "multiple of key_heads"),
        ({"attention": (lssar.spec("lssar"),)}, "one mechanism a layer means 2"),
        ({"position": "alibi"}, "alibi needs a dot-product softmax"),
        ({"projection": "tpa", "key_heads": 2}, "key_heads must equal heads"),
    ],
)
def test_bad_configs(fields, words):
    with pytest.raises(ValueError, match=words):
        small(**fields)
    with pytest.raises(ValueError, match="unknown field 'depth'"):
        ModelConfig.from_dict({"depth": 3})
    with pytest.raises(ValueError, match="unknown model size"):
        model_config("7b")


@pytest.mark.parametrize("ntk", ["off", "length"])
def test_compiled_training_computes_sines_once(ntk):
    """Left to itself, the compiler computes them for every element of q and k in every layer."""
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    model = small().float()
    model.ntk = ntk
    ids = torch.randint(61, (2, 24))
    compiled = torch.compile(model, backend=keep, fullgraph=True)(ids, targets=ids)
    torch.testing.assert_close(compiled, model(ids, targets=ids))
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert called.count("lssar.cos_sin.default") == 1
    assert not {"cos", "sin"} & set(called)


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ["softmax", "cosine_softmax", "ssmax", "lssa", "lssar", "sigmoid"])
def test_gpu_compiles_without_breaks(mechanism):
    """A step of training as one graph: what chooses a kernel, and where the kernel comes from, must be traceable."""
    torch.compiler.reset()
    model = small(attention=lssar.spec(mechanism), width=64).float().cuda()
    ids = torch.randint(0, 61, (2, 64), device="cuda")
    step = lambda: model(ids, targets=ids)  # noqa: E731
    with torch.autocast("cuda", torch.bfloat16):
        compiled, plain = torch.compile(step, fullgraph=True)(), step()
    torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-2)
    compiled.backward()
