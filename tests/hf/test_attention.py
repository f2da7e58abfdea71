"""Any transformers model with our mechanisms: caches, padding, packs, names, refusals, saving."""

import copy
import json

import pytest
import torch

import lssar

transformers = pytest.importorskip("transformers")
from lssar import hf  # noqa: E402
from lssar.hf import attention as attention_module  # noqa: E402
from lssar.hf import masks  # noqa: E402
from tests.hf.families import CACHES, FAMILIES, VOCAB, greedy, make, padded, python, tokens  # noqa: E402

close = torch.testing.assert_close


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
