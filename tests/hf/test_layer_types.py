"""Transformers models with windows in some layers and a mechanism for each type of layer."""

import pytest
import torch

import lssar

transformers = pytest.importorskip("transformers")
from lssar.hf import attention as attention_module  # noqa: E402
from tests.hf.families import CACHES, SHAPE, make, tokens  # noqa: E402

close = torch.testing.assert_close

LAYER_TYPES = ["sliding_attention", "full_attention"]
MIXED = {
    "cohere2": lambda: transformers.Cohere2Config(**SHAPE, sliding_window=6, layer_types=LAYER_TYPES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6, layer_types=LAYER_TYPES),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, layer_types=LAYER_TYPES, no_rope_layers=[1, 0]
    ),
    "olmo3": lambda: transformers.Olmo3Config(**SHAPE, sliding_window=6, layer_types=LAYER_TYPES),
}


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
