"""Any transformers model with our mechanisms: caches, padding, packs, training, saving, refusals."""

import copy
import json

import pytest
import torch

import lssar
from tests.hf.families import FAMILIES, SHAPE, VOCAB, make, no_network, padded, python, tokens

transformers = pytest.importorskip("transformers")
from lssar import hf  # noqa: E402
from lssar.hf import attention as attention_module  # noqa: E402
from lssar.hf import masks  # noqa: E402
from lssar.hf.attention import masked_attention  # noqa: E402

__all__ = ["no_network"]
CACHES = {"none": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}
close = torch.testing.assert_close


@pytest.fixture(params=[False, True], ids=["tiled codes", "fused codes"])
def codes(request, monkeypatch):
    """Masks as they are made on a CPU, and as they are made for the fused kernels of a GPU."""
    monkeypatch.setattr(masks, "fused_on", lambda device: request.param)


def greedy(model, batch, **settings):
    batch = {key: value for key, value in batch.items() if key != "position_ids"}
    return model.generate(**batch, max_new_tokens=7, min_new_tokens=7, do_sample=False, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_the_same_with_every_cache(family, codes):
    model = make(family)
    rows = [tokens(9, seed=1), tokens(5, seed=2)]
    batch = padded(rows, "left")
    made = {name: greedy(model, batch, **settings)[:, 9:] for name, settings in CACHES.items()}
    alone = torch.cat([greedy(model, padded([row], "left"))[:, len(row) :] for row in rows])
    for name, out in made.items():
        assert out.tolist() == alone.tolist(), f"{name} cache, left-padded batch against single prompts"
    assert len(set(alone.flatten().tolist())) > 3  # it does not just repeat itself


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_equals_alone(family, side, codes):
    model = make(family)
    rows = [tokens(12, seed=1), tokens(7, seed=2), tokens(3, seed=3)]
    logits = model(**padded(rows, side)).logits
    for i, row in enumerate(rows):
        place = slice(12 - len(row), None) if side == "left" else slice(0, len(row))
        close(logits[i, place], model(row[None]).logits[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family, codes):
    model = make(family)
    documents = [tokens(n, seed=n) for n in (5, 9, 1, 8)]
    ids, positions = torch.cat(documents)[None], torch.cat([torch.arange(len(d)) for d in documents])[None]
    apart = torch.cat([model(document[None], use_cache=False).logits for document in documents], 1)
    close(model(ids, position_ids=positions, use_cache=False).logits, apart)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 14, 15, 23]
    del batch["labels"]
    close(model(**batch, use_cache=False).logits, apart)
    if family == "llama":  # transformers would silently let documents see each other here
        for ignored in (dict(use_cache=True), dict(use_cache=False, attention_mask=torch.ones_like(ids))):
            with pytest.raises(ValueError, match="position_ids restart"):
                model(ids, position_ids=positions, **ignored)


def test_chunks_of_a_prompt_equal_the_whole(codes):
    model = make("llama")
    ids = tokens(2, 14)
    whole = model(ids).logits
    for cache in (transformers.DynamicCache(), transformers.StaticCache(config=model.config, max_cache_len=20)):
        parts = [model(part, past_key_values=cache).logits for part in ids.split([6, 5, 1, 2], 1)]
        close(torch.cat(parts, 1), whole)


def test_the_layers_run_the_mechanism():
    """Against lssar.attention on the very q, k, v of a layer, GQA included; and other mechanisms give other numbers."""
    seen = {}
    model = make("llama", lssar={"p": 3})
    layer = model.model.layers[0].self_attn
    ids = tokens(2, 11)
    layer.o_proj.register_forward_pre_hook(lambda module, inputs: seen.update(o=inputs[0]))
    layer.q_proj.register_forward_hook(lambda module, inputs, out: seen.update(x=inputs[0]))
    logits = model(ids).logits
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = (f(seen["x"]).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(seen["x"], torch.arange(11)[None]))
    assert (q.shape[1], k.shape[1]) == (4, 2)
    expected = lssar.attention(q, k, v, lssar.spec("lssar", p=3), impl="reference").transpose(1, 2).flatten(2)
    close(seen["o"], expected)
    others = [make("llama", name)(ids).logits for name in ("lssar", "lssa", "lssar_cosine_softmax", "sdpa")]
    for other in others:
        assert (other - logits).abs().max() > 1e-3
    close(make("llama", "lssar_softmax")(ids).logits, others[-1])  # our softmax is theirs


def test_output_attentions_are_the_weights():
    model = make("llama")
    attentions = model(tokens(1, 9), output_attentions=True).attentions
    assert len(attentions) == 2
    close(attentions[0].sum(-1), torch.ones(1, 4, 9, dtype=torch.float64))
    assert attentions[0][0, :, 2, 3:].abs().max() == 0


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("mechanism", ["lssar", "lssar_cosine_softmax"])
def test_loss_falls(family, mechanism):
    model = make(family, mechanism, torch.float32).train()
    torch.manual_seed(0)
    model.apply(model._init_weights)
    if family == "llama":
        model.gradient_checkpointing_enable()
    batch = padded([tokens(24, seed=1), tokens(17, seed=2)], "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_checkpointing_changes_nothing():
    batch = padded([tokens(13, seed=1), tokens(8, seed=2)], "left")
    gradients = []
    for checkpointing in (False, True):
        model = make("llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    close(gradients[0], gradients[1])


def test_bfloat16_weights_and_autocast():
    model = make("llama", dtype=torch.float32)
    batch = padded([tokens(13, seed=1), tokens(8, seed=2)], "left")
    real = batch["attention_mask"].bool()
    exact = model(**batch).logits[real]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**batch).logits[real]
    low = model.bfloat16()(**batch).logits[real]
    for got in (mixed, low):
        assert got.dtype == torch.bfloat16
        error = (got.float() - exact).norm() / exact.norm()
        assert 0 < error < 0.15


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py does this on a GPU")
@pytest.mark.parametrize("cache", [pytest.param("dynamic", marks=pytest.mark.slow), "static"])
def test_generation_by_the_fused_kernels_is_the_same(cache, monkeypatch):
    """In the interpreter, as on a GPU: with a static cache the number of keys is one for the whole batch, expanded."""
    pytest.importorskip("triton")
    exact = make("llama", hidden_size=64, head_dim=16)
    model = copy.deepcopy(exact).float()
    batch = padded([tokens(9, seed=1), tokens(9, seed=2)], "left")
    expected = greedy(exact, batch)
    plain, rows = attention_module.attention, []

    def fused(q, *rest, **view):
        rows.append(q.shape[2])
        return plain(q, *rest, impl="fused", **view)

    monkeypatch.setattr(attention_module, "attention", fused)
    monkeypatch.setattr(masks, "fused_on", lambda device: True)
    assert greedy(model, batch, **CACHES[cache]).tolist() == expected.tolist()
    assert set(rows) == {1, 9}


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


def test_what_is_not_supported_is_refused(monkeypatch):
    model = make("gpt2", dtype=torch.float32).train()
    for layer in model.transformer.h:
        layer.attn.attn_dropout.p = 0.1
    with pytest.raises(ValueError, match=r"'lssar' attention has no dropout; got 0\.1.*attn_pdrop"):
        model(tokens(1, 5))
    f = attention_module.attention_function("lssar", "lssar")
    layer = make("llama").model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 8)
    for argument, words in {"softcap": "soft cap", "s_aux": "sinks", "position_bias": "bias", "cache": "paged"}.items():
        with pytest.raises(ValueError, match=words):
            f(layer, q, q[:, :2], q[:, :2], None, **{argument: torch.ones(4)})
    with pytest.raises(ValueError, match="unknown field 'power'"):
        make("llama", lssar={"power": 3})(tokens(1, 5))
    from transformers.masking_utils import AttentionMaskInterface

    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "lssar")
    with pytest.raises(RuntimeError, match="no mask function, so padding would be visible"):
        make("llama")(**padded([tokens(6), tokens(4)], "left"))


def test_generic_names_are_registered_with_a_prefix():
    """transformers has one namespace for all; a spec with learned weights does not fit other models."""
    names = hf.mechanisms()
    assert {"lssar", "lssa", "lssar_cosine_softmax", "lssar_softmax", "lssar_sigmoid"} <= set(names)
    assert not {"softmax", "sigmoid", "exp", "raw", "lssar_ssmax"} & set(names)
    registered = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert set(names) <= set(registered) and not {"softmax", "sigmoid", "exp", "raw"} & set(registered)


def test_import_lssar_changes_nothing_in_transformers():
    code = """
import sys
import transformers
from transformers.configuration_utils import PreTrainedConfig
before = PreTrainedConfig.to_dict
import lssar
assert PreTrainedConfig.to_dict is before
assert not any(type(finder).__module__.startswith("lssar") for finder in sys.meta_path)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert "lssar" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
"""
    done = python(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_models_that_share_a_config_object_are_told_so():
    config = FAMILIES["llama"]()
    one, two = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name) for name in ("lssar", "lssa")
    )
    one(tokens(1, 5))
    with pytest.warns(UserWarning, match="two models share one config object, so both run 'lssa'"):
        two(tokens(1, 5))


MIXED = {
    "cohere2": lambda: transformers.Cohere2Config(**SHAPE, sliding_window=6, layer_types=LAYER_TYPES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6, layer_types=LAYER_TYPES),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, layer_types=LAYER_TYPES, no_rope_layers=[1, 0]
    ),
    "olmo3": lambda: transformers.Olmo3Config(**SHAPE, sliding_window=6, layer_types=LAYER_TYPES),
}
LAYER_TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("family", MIXED)
def test_a_mechanism_for_each_layer_type(family):
    """Softmax in the sliding layers and LSSAR in the full ones: each layer runs its own, and generation agrees."""
    config = MIXED[family]()
    config.lssar = {"full_attention": "lssar,p=3", "sliding_attention": "softmax"}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lssar").double().eval()
    layers = [module for module in model.modules() if getattr(module, "layer_idx", None) in (0, 1)]
    layers = [module for module in layers if hasattr(module, "q_proj")]
    assert [attention_module.mechanism_of("lssar", layer) for layer in layers] == [
        lssar.spec("softmax"), lssar.spec("lssar", p=3),
    ]  # fmt: skip
    ids = tokens(2, 17)
    mixed = model(ids).logits
    for other in ({"full_attention": "softmax"}, {"sliding_attention": "lssar"}):
        model.config.lssar = config.lssar | other
        assert (model(ids).logits - mixed).abs().max() > 1e-6
    model.config.lssar = {"full_attention": "lssar,p=3", "sliding_attention": "softmax"}
    made = [model.generate(ids, max_new_tokens=5, do_sample=False, **kind) for kind in CACHES.values()]
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ful_attention": "softmax", "sliding_attention": "softmax"}, "'ful_attention'; the layers of this model are"),
        ({"full_attention": "ssmax"}, "'ssmax', which learns numbers for each head"),
        ({"full_attention": "lssar,learned_threshold=true"}, "learns numbers for each head"),
        ({"head_scale": 2.0}, "learns numbers for each head"),
        ({"learned_threshold": True}, "learns numbers for each head"),
        ({"full_attention": 3}, "needs a mechanism for each layer type, such as 'lssar,p=3'; got 3"),
        ({"full_attention": {"p": 3}}, "needs a mechanism for each layer type"),
        ({"full_attention": "lssar", "p": 3}, "unknown field 'full_attention'"),
        ({3: 3}, "must be a dict"),
        ("lssar", "must be a dict"),
        (["lssar"], "must be a dict"),
    ],
    ids=str,
)
def test_mistakes_in_what_a_config_changes(changes, words):
    config = MIXED["cohere2"]()
    config.lssar = changes
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
    with pytest.raises(ValueError, match=words):
        model(tokens(1, 5))


@pytest.mark.parametrize(
    "changes", [{"p": 3}, {"full_attention": "lssar,p=3", "sliding_attention": "softmax"}], ids=str
)
def test_a_composite_config_changes_its_text_layers(changes, tmp_path):
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=4)
    config = transformers.Gemma3Config(
        text_config=MIXED["gemma3"]().to_dict(), vision_config=vision | {"patch_size": 2}, image_token_index=96,
        boi_token_index=95, eoi_token_index=94, mm_tokens_per_image=1,
    )  # fmt: skip
    config.lssar = changes
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lssar").eval()
    ids = tokens(1, 17).clamp(max=90)
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.lssar == again.config.text_config.lssar == changes
    close(again(ids).logits, logits)
    model.config.lssar = {}
    assert (model(ids).logits - logits).abs().max() > 1e-6
    assert not hasattr(MIXED["gemma3"](), "lssar")
    several = transformers.MusicgenConfig(
        text_encoder={"model_type": "t5"}, audio_encoder={"model_type": "encodec"}, decoder={}
    )
    assert not hasattr(several, "lssar")
    with pytest.raises(ValueError, match="Multiple valid text configs"):
        several.lssar = changes


def test_layer_types_need_a_model_that_has_them():
    with pytest.raises(ValueError, match=r"GPT2Config has none \(no layer_types\)"):
        make("gpt2", lssar={"full_attention": "lssar"})(tokens(1, 5))


def test_models_with_soft_caps_and_sinks_are_refused():
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    gemma = transformers.Gemma2Config(**shape, num_key_value_heads=2, head_dim=8)
    sinks = transformers.GptOssConfig(**shape, num_key_value_heads=2, head_dim=8, num_local_experts=2)
    for config, words in ((gemma, "soft cap"), (sinks, "sinks")):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
        with pytest.raises(ValueError, match=words):
            model(tokens(1, 5))


LOAD = """
import torch
from transformers import AutoModelForCausalLM
{imports}
model = AutoModelForCausalLM.from_pretrained({folder!r}).eval()
torch.save({{"mechanism": model.config._attn_implementation, "changes": model.config.lssar,
            "logits": model(torch.load({ids!r})).logits}}, {out!r})
model.save_pretrained({folder!r} + "-again")
"""


def test_a_saved_model_keeps_its_mechanism(tmp_path):
    model = make("qwen3", dtype=torch.float32, lssar={"p": 3})
    folder, ids, out = (str(tmp_path / name) for name in ("model", "ids.pt", "out.pt"))
    model.save_pretrained(folder)
    torch.save(tokens(2, 9), ids)
    script = LOAD.format(imports="import lssar.hf", folder=folder, ids=ids, out=out)
    done = python(script)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = torch.load(out)
    assert (loaded["mechanism"], loaded["changes"]) == ("lssar", {"p": 3})
    assert torch.equal(loaded["logits"], model(tokens(2, 9)).logits)
    for name in (folder, folder + "-again"):
        kept = json.loads((tmp_path / name / "config.json").read_text())
        assert (kept["attn_implementation"], kept["lssar"]) == ("lssar", {"p": 3})

    done = python(script.replace("import lssar.hf", "import lssar"))  # not registered: an error, not softmax
    assert done.returncode != 0
    assert 'attn_implementation="lssar"` is not supported' in done.stderr


def test_other_models_are_saved_as_ever(tmp_path):
    make("llama", "sdpa").save_pretrained(tmp_path)
    assert "attn_implementation" not in json.loads((tmp_path / "config.json").read_text())


def test_trainer_drives_it(tmp_path, no_network):
    """transformers' own loop: padded batches, accumulation, evaluation, checkpoints, resumption."""
    pytest.importorskip("accelerate")
    rows = [tokens(int(n), seed=int(n)) for n in torch.randint(6, 20, (32,))]

    def collate(items):
        batch = padded([item["ids"] for item in items], "right")
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    def trainer(model, steps):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-2, lr_scheduler_type="constant", save_steps=10, logging_steps=5, report_to=[],
            use_cpu=True, remove_unused_columns=False, disable_tqdm=True, seed=0,
        )  # fmt: skip
        data = [{"ids": row} for row in rows]
        return transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data, data_collator=collate)

    model = make("llama", dtype=torch.float32)
    torch.manual_seed(0)
    model.apply(model._init_weights)
    first = trainer(model, 20)
    before = first.evaluate()["eval_loss"]
    first.train()
    after = first.evaluate()["eval_loss"]
    assert after < 0.8 * before
    resumed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    assert resumed.config._attn_implementation == "lssar"
    second = trainer(resumed, 24)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert second.state.global_step == 24
    assert second.evaluate()["eval_loss"] < before
