import pytest
import torch
from torch._dynamo.testing import CompileCounter

import lssar
from lssar.layouts import parse_layout
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
    "llama": {"bias": False, "norm": "rms", "mlp": "swiglu", "key_heads": 2},
    "mixed": {"pattern": parse_layout("softmax@5 softmax/alibi lssa+lssar/none"), "layers": 3},
    "divided heads": {"pattern": parse_layout("softmax:1+ssmax:1+lssar:2@7"), "key_heads": 4},
    "divided heads, one key head": {"pattern": parse_layout("lssa:1+lssar,p=3:3"), "key_heads": 1},
    "tpa, divided heads": {"pattern": parse_layout("softmax@5/alibi lssa+lssar/none"), "projection": "tpa"},
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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_cache_returns_to_its_snapshot(changes, window):
    """Questions about one context: each sees the context and nothing of the others."""
    model = small(**changes)
    model.window = window
    ids, questions = torch.randint(61, (2, 13)), torch.randint(61, (3, 2, 7))
    cache = model.new_cache(20)
    model.prefill(ids, cache, chunk=5)
    kept = cache.snapshot()
    for question in questions:
        steps = torch.cat([model(part, cache) for part in question.split([2, 1, 1, 3], 1)], 1)
        torch.testing.assert_close(steps, model(torch.cat([ids, question], 1))[:, 13:], rtol=1e-6, atol=1e-8)
        cache.restore(kept)
    assert cache.length == 13


def test_a_snapshot_is_void_once_its_tokens_are_overwritten():
    model = small(pattern=parse_layout("softmax@5 lssar/none"))
    ids = torch.randint(61, (1, 8))
    cache = model.new_cache(10)
    model(ids[:, :4], cache)
    early = cache.snapshot()
    model(ids[:, 4:], cache)
    late = cache.snapshot()
    cache.restore(late)
    cache.restore(early)
    model(ids[:, :4], cache)  # other tokens in the place of the late ones
    with pytest.raises(ValueError, match="went below 8 since"):
        cache.restore(late)
    cache.restore(early)
    torch.testing.assert_close(model(ids[:, 4:], cache), model(ids)[:, 4:], rtol=1e-6, atol=1e-8)


def test_caches_of_windows_wind_back_only_while_nothing_is_lost():
    model = small(pattern=parse_layout("softmax@5 lssar/none"))
    ids = torch.randint(61, (1, 8))
    cache = model.new_cache(10)
    model(ids[:, :5], cache)
    cache.rewind(2)
    torch.testing.assert_close(model(ids[:, 2:], cache), model(ids)[:, 2:], rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="keeps only the last 5 of 8 tokens and cannot be rewound to 7"):
        cache.rewind(7)
    assert [layer.length for layer in cache.layers] == [8, 8]  # not one of them
    with pytest.raises(ValueError, match="holds 8 tokens"):
        cache.rewind(9)


def test_a_window_is_all_that_a_local_layer_keeps():
    model = small(layers=4, pattern=parse_layout("softmax@5*3 lssar/none"))
    cache = model.new_cache(100)
    model.prefill(torch.randint(61, (1, 50)), cache, chunk=7)
    assert [layer.tensors[0].shape[2] for layer in cache.layers] == [5, 5, 5, 100]
    uniform = small(layers=4)
    whole = uniform.new_cache(100)
    uniform.prefill(torch.randint(61, (1, 50)), whole)
    assert cache.bytes == whole.bytes * (100 + 3 * 5) // 400


@pytest.mark.parametrize(
    ("layout", "length", "chunk"),
    [("softmax@16*3 lssa+lssar/none", 1500, 257), ("softmax@9/alibi cosine_softmax@33 ssmax/none", 400, 8)],
)
def test_prefill_in_chunks_is_one_pass(layout, length, chunk):
    model = small(layers=4 if "*3" in layout else 3, width=16, heads=2, pattern=parse_layout(layout))
    ids = torch.randint(61, (2, length))
    with torch.no_grad():
        whole = model.hidden(ids)
        cache = model.new_cache(length)
        parts = torch.cat([model.hidden(part, cache) for part in ids.split(chunk, 1)], 1)
        last = model.prefill(ids, model.new_cache(length), chunk)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(last, whole[:, -1], rtol=0, atol=1e-9)
    losses = [model.token_losses(ids[:, :-1], ids[:, 1:], chunk=size) for size in (chunk, length)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_prefill_of_65536_tokens_is_one_pass():
    model = small(layers=4, width=16, heads=2, pattern=parse_layout("softmax@128*3 lssa+lssar/none"))
    ids = torch.randint(61, (1, 65_536))
    with torch.no_grad():
        last = model.prefill(ids, model.new_cache(65_536))
        torch.testing.assert_close(last, model.hidden(ids)[:, -1], rtol=0, atol=1e-9)


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
    sizes = {"33m": 33e6, "45m": 45e6, "51m": 51e6, "124m": 124e6, "355m": 355e6, "774m": 774e6, "1b": 1.04e9,
             "1.5b": 1.5e9, "0.8m": 0.8e6}  # fmt: skip
    for name, count in sizes.items():
        changes = {"vocab_size": 257} if name == "0.8m" else {}
        with torch.device("meta"):
            model = GPT(model_config(name, **changes))
        assert model.parameter_count() == pytest.approx(count, rel=0.06), name
    assert set(SIZES) >= {"45m", "51m", "124m", "355m"}


def test_llamas_shape_is_stored_and_has_no_biases():
    model = GPT(model_config("1b", layers=1, width=32, heads=4, key_heads=2, vocab_size=61))
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "embed.weight": (128, 32), "norm.weight": (32,), "blocks.0.norm1.weight": (32,), "blocks.0.norm2.weight": (32,),
        "blocks.0.attention.project.qkv.weight": (32 + 2 * 16, 32), "blocks.0.attention.out.weight": (32, 32),
        "blocks.0.up.weight": (2 * 128, 32), "blocks.0.down.weight": (32, 128),
    }  # fmt: skip


def test_llamas_block_is_its_formula():
    block = small(norm="rms", mlp="swiglu", bias=False, layers=1).layers()[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    block.attention.forward = lambda x, *_: torch.zeros_like(x)
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.norm2.weight
    gate, up = (unit @ weight.T for weight in block.up.weight.chunk(2))
    expected = x + (gate * gate.sigmoid() * up) @ block.down.weight.T
    torch.testing.assert_close(block(x, None), expected)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": float("nan")}, {"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": 0}, {"tokens": -5}],
    ids=str,
)
def test_bad_settings_of_generation(settings):
    with pytest.raises(ValueError, match="must be"):
        small().generate(torch.zeros(1, 2, dtype=torch.int64), **({"tokens": 3} | settings))


def test_a_temperature_near_0_takes_the_most_likely_token():
    model, ids = small(), torch.randint(61, (1, 4))
    cold, greedy = (list(model.generate(ids, 3, temperature=t, top_k=50)) for t in (1e-320, 0.0))
    assert cold == greedy


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
        ({"key_heads": -1}, "multiple of key_heads"),
        ({"rope_base": 0.0}, "rope_base must be positive"),
        ({"rope_base": float("nan")}, "rope_base must be positive"),
        ({"attention": (lssar.spec("lssar"),)}, "one mechanism a layer means 2"),
        ({"position": "alibi"}, "alibi needs a dot-product softmax"),
        ({"projection": "tpa", "key_heads": 2}, "key_heads must equal heads"),
        ({"pattern": parse_layout("softmax@8*3 lssar/none")}, "has 4 layers, more than the model's 2"),
        ({"pattern": parse_layout("lssar"), "window": 3}, "window cannot be given with it"),
        ({"pattern": parse_layout("lssa:1+lssar:2")}, "4 heads do not divide into the 3 parts of 'lssa:1.lssar:2'"),
        ({"pattern": parse_layout("lssa:1+lssar:3"), "key_heads": 2}, "divides a group of 2 query heads"),
    ],
)
def test_bad_configs(fields, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"layers": 2, "width": 32, "heads": 4, **fields})
    with pytest.raises(ValueError, match="unknown field 'depth'"):
        ModelConfig.from_dict({"depth": 3})
    with pytest.raises(ValueError, match="unknown model size"):
        model_config("7b")


def test_a_config_without_a_layout_loads():
    """A config.json that was written before `pattern` existed."""
    kept = {
        "layers": 2, "width": 32, "heads": 4, "key_heads": None, "vocab_size": 61, "pad_vocab_to": 128,
        "train_length": 16, "attention": lssar.spec("lssar", train_length=16).to_dict(), "position": "rope",
        "rope_base": 10000.0, "window": 5, "projection": "plain", "tpa_ranks": [6, 2, 2], "mlp_ratio": 4, "bias": True,
        "checkpoint_layers": False,
    }  # fmt: skip
    config = ModelConfig.from_dict(kept)
    assert config.to_dict() == kept
    assert config.layout == "lssar@5"
    assert set(GPT(config).state_dict()) == {
        "embed.weight", "norm.weight", "norm.bias",
        *(f"blocks.{i}.{part}.{kind}" for i in range(2) for kind in ("weight", "bias")
          for part in ("norm1", "norm2", "attention.project.qkv", "attention.out", "up", "down")),
    }  # fmt: skip


def test_a_model_shows_its_layout():
    model = small(layers=4, pattern=parse_layout("softmax@5*3 lssa+lssar/none"))
    assert "layout='softmax@5*3 lssa+lssar/none'" in repr(model)
    assert "layout='softmax@5*3 lssa+lssar/none'" in repr(model.config)
    assert "attention" not in repr(model.config)


def test_divided_heads_are_two_mechanisms():
    """Each half of the heads as in a model where all heads are of that mechanism."""
    ids = torch.randint(61, (2, 24))
    models = {name: small(layers=1, pattern=parse_layout(name)) for name in ("lssa", "lssar", "lssa+lssar")}
    outs = {}
    for name, model in models.items():
        layer = model.layers()[0].attention
        layer.out = torch.nn.Identity()
        outs[name] = layer(model.embed(ids))
    assert torch.equal(outs["lssa+lssar"], torch.cat([outs["lssa"][..., :16], outs["lssar"][..., 16:]], -1))


def test_a_window_at_test_time_narrows_what_layers_see():
    ids = torch.randint(61, (1, 24))
    mixed, narrow = (
        small(layers=2, pattern=parse_layout(text)) for text in ("softmax@5 lssar/none", "softmax@5 lssar@9/none")
    )
    mixed.window = 9
    torch.testing.assert_close(mixed(ids), narrow(ids))
    mixed.window = None
    assert not torch.allclose(mixed(ids), narrow(ids))


def test_power_is_set_in_every_layer_and_taken_back():
    ids = torch.randint(61, (1, 24))
    model, other = (small(pattern=parse_layout(text)) for text in ("lssa+lssar", "lssa+lssar,p=3"))
    plain = model(ids)
    model.set_power(3)
    assert torch.equal(model(ids), other(ids))
    assert model.layers()[0].attention.power.device.type == "cpu"
    assert not any("power" in key for key in model.state_dict())
    model.set_power(None)
    assert torch.equal(model(ids), plain)


def test_learned_numbers_of_divided_heads():
    """Only the heads of a mechanism that has such a number get a gradient for it."""
    model = small(pattern=parse_layout("lssar,head_scale=1+lssar,learned_threshold=true"))
    ids = torch.randint(61, (2, 24))
    assert torch.equal(model(ids), small(pattern=parse_layout("lssar+lssar"))(ids))
    model(ids, targets=ids).backward()
    layer = model.layers()[0].attention
    assert (layer.head_scale.grad != 0).tolist() == [True, True, False, False]
    assert (layer.threshold.grad != 0).tolist() == [False, False, True, True]


def test_a_change_of_power_does_not_compile_again():
    counter = CompileCounter()
    torch.compiler.reset()
    model = small(pattern=parse_layout("softmax@5 lssa+lssar/none")).float()
    model.set_power(3)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ids = torch.randint(61, (2, 24))
    for p in (3, 7, 9.5, 15):
        model.set_power(p)
        torch.testing.assert_close(compiled(ids, targets=ids), model(ids, targets=ids))
    assert counter.frame_count == 1


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
@pytest.mark.parametrize(
    "layout", ["softmax", "cosine_softmax", "ssmax", "lssa", "lssar", "sigmoid", "softmax@16 lssa+lssar/none"]
)
def test_gpu_compiles_without_breaks(layout):
    """A step of training as one graph: what chooses a kernel, and where the kernel comes from, must be traceable."""
    torch.compiler.reset()
    model = small(pattern=parse_layout(layout), width=64).float().cuda()
    model.set_power(7)
    ids = torch.randint(0, 61, (2, 64), device="cuda")
    step = lambda: model(ids, targets=ids)  # noqa: E731
    with torch.autocast("cuda", torch.bfloat16):
        compiled, plain = torch.compile(step, fullgraph=True)(), step()
    torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-2)
    compiled.backward()
