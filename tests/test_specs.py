import json
import math

import numpy as np
import pytest

import lssar
from lssar import AttentionSpec
from lssar.specs import parse_spec

CONTRACT = """softmax softmax_inverse softmax_recentred softmax_recentred_l1 raw exp raw_l1 l1_relu l1_relu2 l1_relu6
l1_gelu l1_sigmoid l1_softplus l1_mish sigmoid sigmoid_n sigmoid_n_l1 relu_wortsman relu_shen lssa lssar cosine_softmax
ssmax"""


def test_every_name_of_the_contract_is_there():
    assert set(lssar.specs()) == set(CONTRACT.split())
    assert all(lssar.spec(name).name == name for name in lssar.specs())


def test_paper_choices():
    lssa = lssar.spec("lssa")
    assert lssar.spec("lssar") == lssa.replace(name="lssar", p=15)
    assert (lssa.cosine, lssa.scale, lssa.log_n, lssa.activation, lssa.divisor) == (
        True,
        "log_d",
        True,
        "softplus",
        "l1",
    )
    mean_log_n = sum(math.log(n) for n in range(1, 1025)) / 1024
    assert lssar.spec("ssmax").head_scale == pytest.approx(1 / mean_log_n, rel=5e-3)


@pytest.mark.parametrize("name", CONTRACT.split())
def test_plain_dict_and_back(name):
    spec = lssar.spec(name)
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert eval(repr(spec).replace("AttentionSpec('", "AttentionSpec(name='")) == spec
    assert hash(spec) == hash(lssar.spec(name))


def test_repr_shows_what_differs_from_softmax():
    assert repr(lssar.spec("lssar", p=3)) == (
        "AttentionSpec('lssar', cosine=True, scale='log_d', log_n=True, activation='softplus', p=3)"
    )


def test_numpy_numbers_become_plain():
    for p in (np.float64(3), np.float32(3), np.int64(3)):
        made = lssar.spec("lssar", p=p)
        assert type(made.p) in (int, float) and made == lssar.spec("lssar", p=3)
        assert AttentionSpec.from_literal(made.literal) == made


def test_a_mechanism_on_the_command_line():
    changed = parse_spec("lssar,p=3,threshold=0.5,learned_threshold=true")
    assert changed == lssar.spec("lssar", p=3, threshold=0.5, learned_threshold=True)
    with pytest.raises(ValueError, match="expected NAME or NAME,FIELD=NUMBER"):
        parse_spec("lssar,p=many")


def test_changes_make_new_values():
    assert lssar.spec("lssar", p=3).p == 3
    assert lssar.spec("lssar").p == 15
    assert lssar.spec("softmax").reweighted(p=3).p == 3
    assert lssar.spec(lssar.spec("lssa"), name="mine", activation="exp").name == "mine"
    with pytest.raises(AttributeError):
        lssar.spec("lssar").p = 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lssar.spec("softmaxx"), "unknown attention spec 'softmaxx'"),
        (lambda: lssar.spec(3), "unknown attention spec 3"),
        (lambda: lssar.spec("lssar", q=3), "unknown field 'q'"),
        (lambda: lssar.spec("lssar", p=0.5), "p must be a finite number >= 1"),
        (lambda: lssar.spec("lssar", p=float("nan")), "p must be a finite number >= 1"),
        (lambda: lssar.spec("lssar", p=float("inf")), "p must be a finite number >= 1"),
        (lambda: lssar.spec("lssar", p="15"), "p must be a finite number >= 1"),
        (lambda: lssar.spec("lssar", p=True), "p must be a finite number >= 1"),
        (lambda: lssar.spec("sigmoid").reweighted(3), "normalised mechanism"),
        (lambda: lssar.spec("softmax_inverse").reweighted(3), "normalised mechanism"),
        (lambda: lssar.spec("softmax_recentred").reweighted(3), "normalised mechanism"),
        (lambda: lssar.spec("lssa", activation="tanh"), "activation must be one of"),
        (lambda: lssar.spec("lssa", cosine="yes"), "cosine must be True or False"),
        (lambda: lssar.spec("lssar", p=10**5000), "p must be a finite number >= 1 .* an integer too large"),
        (lambda: lssar.spec("lssar", p=np.True_), "p must be a finite number >= 1"),
        (lambda: lssar.spec("lssar", head_scale=np.inf), "head_scale must be a finite number"),
        (lambda: lssar.spec("lssar", p=1e30), "at most 16777216"),
        (lambda: lssar.spec("lssar", threshold=1e300), "threshold must be a finite number >= 0"),
        (lambda: lssar.spec("lssar", threshold=-0.5), "threshold must be a finite number >= 0"),
        (lambda: lssar.spec("lssa", threshold=0.5), "a threshold is part of the re-weighting"),
        (lambda: lssar.spec("softmax", learned_threshold=True), "a threshold is part of the re-weighting"),
        (lambda: lssar.spec("lssar", learned_threshold=1), "learned_threshold must be True or False"),
        (lambda: lssar.spec("ssmax", head_scale="big"), "head_scale must be a finite number"),
        (lambda: lssar.spec("relu_shen", gamma=0), "gamma must be a finite number > 0"),
        (lambda: lssar.spec("sigmoid", train_length=0), "train_length must be an integer >= 1"),
        (lambda: lssar.spec("sigmoid", name=""), "name must be a non-empty string"),
        (lambda: AttentionSpec.from_dict({"p": 3}), "needs a name"),
        (lambda: AttentionSpec.from_dict({"name": "x", "colour": 1}), "unknown field 'colour'"),
    ],
)
def test_bad_specs(make, words):
    with pytest.raises(ValueError, match=words):
        make()
