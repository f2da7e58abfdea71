import json

import pytest

import lssar
from lssar.layouts import LayerConfig, expand, format_layout, parse_layout, parse_mechanisms, shortest
from lssar.training.recipes import RECIPES, Recipe, recipe


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("lssar", [(["lssar"], [1], None, "rope")]),
        ("softmax@128/alibi", [(["softmax"], [1], 128, "alibi")]),
        ("lssa+lssar/none", [(["lssa", "lssar"], [1, 1], None, "none")]),
        ("lssa:1+lssar,p=3:3", [(["lssa", "lssar"], [1, 3], None, "rope")]),
        ("softmax@32*2 ssmax/none", [(["softmax"], [1], 32, "rope")] * 2 + [(["ssmax"], [1], None, "none")]),
    ],
)
def test_layouts_as_text_and_back(text, layers):
    pattern = parse_layout(text)
    assert [
        ([s.name for s in layer.specs], list(layer.shares), layer.window, layer.position) for layer in pattern
    ] == layers
    assert format_layout(pattern) == text
    assert tuple(LayerConfig.from_dict(json.loads(json.dumps(layer.to_dict()))) for layer in pattern) == pattern


def test_numbers_of_a_mechanism_survive():
    layer = parse_mechanisms("lssar,p=31+ssmax,head_scale=0.5")
    assert [s.p for s in layer.specs] == [31, None]
    assert layer.specs[1].head_scale == 0.5
    assert str(layer) == "lssar,p=31+ssmax,head_scale=0.5"
    assert str(parse_mechanisms("lssar,threshold=0.5,learned_threshold=true")) == (
        "lssar,threshold=0.5,learned_threshold=true"
    )
    assert str(LayerConfig((lssar.spec("softmax").reweighted(3),))) == "softmax,p=3"


@pytest.mark.parametrize("p", [2.123456789, 1_000_001, 1_000_000, 2**24, 31.5])
def test_numbers_survive_in_every_digit(p):
    pattern = (LayerConfig((lssar.spec("lssar", p=p), lssar.spec("ssmax", head_scale=-p * 1e30))),)
    assert parse_layout(format_layout(pattern)) == pattern


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uniform", "attention"),
        ("mixed", "softmax@128*3 attention/none"),
        ("mixed@64", "softmax@64*3 attention/none"),
        ("mixed@32*7", "softmax@32*7 attention/none"),
        (" mixed ", "softmax@128*3 attention/none"),
        ("softmax@9 lssar", "softmax@9 lssar"),
    ],
)
def test_named_layouts(name, text):
    assert expand(name) == text
    if "attention" in text:
        assert parse_layout(name, parse_mechanisms("lssa+lssar"))[-1].specs[1].name == "lssar"
        with pytest.raises(ValueError, match="leaves a mechanism open"):
            parse_layout(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one layer"),
        ("softmax@", "is no layer"),
        ("softmax/learned", "is no layer"),
        ("softmax*0", "repeats a layer 0 times"),
        ("softmaxx@3 lssar", "unknown attention spec 'softmaxx'"),
        ("lssa:half+lssar", "must be an integer; got 'half'"),
        ("lssa:0+lssar", "shares of the heads must be integers >= 1"),
        ("lssar@0", "window must be an integer >= 1"),
        ("lssar/alibi", "alibi needs a dot-product softmax"),
        ("mixed@*3", "is no layer"),
        ("lssar*3000000", "more than 10,000 layers"),
        ("softmax@9*6000 lssar*6000", "more than 10,000 layers"),
    ],
)
def test_wrong_layouts_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_layout(text)


def test_shortest_pattern():
    assert format_layout(shortest(parse_layout("softmax lssar softmax lssar softmax"))) == "softmax lssar"
    assert format_layout(shortest(parse_layout("lssar*4"))) == "lssar"


def recipe_with(**changes) -> Recipe:
    return Recipe(**{"size": "0.8m", "heads": 4, "vocab_size": 257, "length": 128, **changes})


def test_recipes_say_what_layers_are():
    assert recipe_with().model().layout == "lssar"
    assert recipe_with(position="none", window=9).model().layout == "lssar@9/none"
    mixed = recipe_with(layout="mixed", attention="lssa+lssar", p=7).model()
    assert mixed.layout == "softmax@128*3 lssa+lssar,p=7/none"
    assert all(s.train_length == 128 for layer in mixed.layer_configs for s in layer.specs)
    assert recipe_with(attention="lssa+lssar").model().layout == "lssa+lssar"
    own = recipe_with(layout="cosine_softmax@32 attention", attention="ssmax").model()
    assert own.layout == "cosine_softmax@32 ssmax"
    annealed = recipe_with(layout="mixed", p_schedule="3:0.5,31").model()
    assert annealed.layout == "softmax@128*3 lssar,p=31/none"
    for same in ({"attention": "lssar,p=31"}, {"p": 31}, {"layout": "softmax@128*3 lssar,p=31/none"}):
        assert recipe_with(**{"layout": "mixed", "p_schedule": "3:0.5,31", **same}).model() == annealed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "mixed", "window": 9}, "--window and --position do not apply"),
        ({"layout": "mixed", "position": "none"}, "--window and --position do not apply"),
        ({"layout": "softmax@9 lssar", "p": 3}, "--p does not apply"),
        ({"layout": "softmax@9*5"}, "more than the model's 4"),
        ({"attention": "softmax", "p_schedule": "3:0.5,15"}, "needs a mechanism that is re-weighted"),
        ({"p": 3, "p_schedule": "3:0.5,15"}, "contradicts p_schedule"),
        ({"p": 15, "p_schedule": "3:0.5,31"}, "p = 15 of 'lssar' contradicts p_schedule"),
        ({"layout": "softmax@9 lssar,p=15/none", "p_schedule": "3:0.5,31"}, "p = 15 of 'lssar' contradicts"),
        ({"layout": "lssar,p=15+lssar,p=31", "p_schedule": "3:0.5,31"}, "p = 15 of 'lssar' contradicts"),
        ({"attention": "lssar,p=15", "p_schedule": "3:0.5,31"}, "p = 15 of 'lssar' contradicts"),
        ({"attention": "lssa+lssar", "heads": 1}, "1 heads do not divide"),
    ],
)
def test_recipes_that_contradict_themselves(changes, words):
    with pytest.raises(ValueError, match=words):
        recipe_with(**changes)


def test_an_attention_that_the_layout_does_not_use_is_refused():
    """Given to a recipe; in one that is read from a file it may be the default."""
    with pytest.raises(ValueError, match="'softmax@9 ssmax/none' has its own mechanisms; --attention does not apply"):
        recipe("long-tiny", attention="lssar", layout="softmax@9 ssmax/none")
    own = recipe("long-tiny", layout="softmax@9 ssmax/none")
    assert (own.mechanism, Recipe.from_dict(own.to_dict())) == ("softmax@9 ssmax/none", own)
    assert recipe("long-tiny", attention="lssar", layout="softmax@9 attention").mechanism == "lssar"


def test_every_recipe_is_plain_values():
    for name, made in RECIPES.items():
        assert Recipe.from_dict(json.loads(json.dumps(made.to_dict()))) == made, name
