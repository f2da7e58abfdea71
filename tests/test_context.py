"""Sequences divided over processes: attention layers exchange the right heads and keys, to the last gradient."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from lssar.context import exchange_of, share_heads
from lssar.layouts import parse_layout
from lssar.model import GPT, model_config
from tests.training.ranks import ROOT, run_jobs

PACK = [0, 3, 5, 5, 6, 19, 22, 23, 24]
"""Bounds of documents that begin and end in the middle of shards, one of them empty, one in all shards."""


def layers(text: str, **others) -> dict:
    return {"pattern": [layer.to_dict() for layer in parse_layout(text)], **others}


CASES = {  # config, processes, processes of a context, further arguments
    "heads divided between mechanisms, window, pack": (layers("softmax@8 lssa+lssar/none"), 2, 2, {"pack": PACK}),
    "a learned number that some processes do not use": (layers("ssmax+lssar softmax@1"), 4, 4, {"parallel": "fsdp"}),
    "fewer heads than processes, pack": ({"heads": 1}, 2, 2, {"pack": PACK}),
    "fewer key heads than processes": (layers("lssa:1+lssar,head_scale=1:1+cosine_softmax:2", key_heads=2), 4, 4, {}),
    "window over three neighbours, alibi, fsdp": (
        layers("softmax@20/alibi lssar@7", key_heads=1), 4, 4, {"parallel": "fsdp"},
    ),
    "learned thresholds, two heads a process": (
        layers("lssar,p=3,learned_threshold=true+softmax lssa@3", heads=8), 4, 4, {},
    ),
}  # fmt: skip
MORE = {
    "lssar": ({}, 4, 4, {}),
    "softmax, alibi": ({"attention": "softmax", "position": "alibi"}, 4, 2, {}),
    "re-centred softmax": ({"attention": "softmax_recentred"}, 2, 2, {"pack": PACK}),
    "three processes": ({"key_heads": 1}, 3, 3, {"pack": PACK}),
    "fewer heads than processes": ({"heads": 2, "attention": "ssmax"}, 4, 4, {"parallel": "fsdp"}),
    "one key head, pack": ({"key_heads": 1}, 4, 4, {"pack": PACK}),
    "grouped queries": ({"key_heads": 2}, 4, 2, {"parallel": "fsdp"}),
    "grouped queries of several mechanisms": (
        layers("lssa:1+lssar,head_scale=1:1+cosine_softmax:2", key_heads=2), 2, 2, {},
    ),
    "heads divided, four processes": (layers("softmax@8 lssa+lssar/none"), 4, 4, {"pack": PACK}),
    "window and pack": (layers("softmax@20/alibi lssar@7", key_heads=1), 4, 4, {"pack": PACK}),
    "tensor products": ({"projection": "tpa"}, 2, 2, {}),
    "layers computed again": (layers("softmax@8 lssa+lssar/none", checkpoint_layers=True), 4, 2, {"parallel": "fsdp"}),
    "compiled": (layers("softmax@8 lssa+lssar/none"), 2, 2, {"compile": True}),
    "compiled, gathered, pack": (layers("softmax@8 lssar", heads=1), 2, 2, {"compile": True, "pack": PACK}),
    "ddp": (layers("ssmax lssar"), 4, 1, {}),
    "fsdp": (layers("ssmax lssar"), 4, 1, {"parallel": "fsdp"}),
}  # fmt: skip


def check_gradients(folder, cases: dict) -> None:
    """Gradients differ by less than 1e-9 of the parameter's largest; rounding alone gives 1e-16 to 1e-11."""
    jobs = {}
    for name, (config, size, context, others) in cases.items():
        whole = {key: value for key, value in others.items() if key == "pack"}
        jobs[f"{name}: one"] = {"do": "gradients", "size": 1, "config": config, **whole}
        jobs[name] = {"do": "gradients", "size": size, "config": config, "context": context, **others}
    results = run_jobs(folder, jobs)
    for name in cases:
        one, several = results[f"{name}: one"], results[name]
        for result in (one, several):
            assert isinstance(result, dict), f"{name}: {result}"
        assert one.keys() == several.keys()
        for key in one:
            a, b = (torch.tensor(x[key], dtype=torch.float64) for x in (one, several))
            error = float((a - b).abs().max() / a.abs().max())
            assert error < 1e-9, f"{name}: {key} differs by {error:.2g} of its largest entry"


def test_gradients_are_those_of_one_process(tmp_path):
    check_gradients(tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_gradients_are_those_of_one_process_in_more_cases(tmp_path, part):
    check_gradients(tmp_path, dict(itertools.islice(MORE.items(), part * 4, part * 4 + 4)))


def test_the_cheapest_exchange_is_chosen():
    """Received numbers, counted by hand: 1024 rows over 4 processes, 8 query heads, head size 64."""
    shape = dict(size=4, length=1024, heads=8, head_size=64)
    rows, others = 256, 3
    heads = exchange_of(key_heads=4, window=None, **shape)
    assert heads.kind == "heads"
    sent = rows * 64 * (8 + 2 * 4) * others // 4  # of q, k, v, all but the part that stays
    assert heads.received == sent + rows * 64 * 8 * others // 4  # and of the output
    copies = exchange_of(key_heads=2, window=None, **shape)  # each process gets one of two key heads
    assert copies.kind == "heads"
    assert copies.received == 2 * rows * 64 * 8 * others // 4 + others * rows * 2 * 64
    keys = exchange_of(4, 1024, 2, 2, 64, None)
    assert (keys.kind, keys.received) == ("keys", others * rows * 2 * 2 * 64 + 2 * (rows // 2) * 2 * 64)
    near = exchange_of(key_heads=4, window=128, **shape)
    assert (near.kind, near.received) == ("window", 127 * 2 * 4 * 64)
    assert exchange_of(key_heads=4, window=1000, **shape) == heads
    assert (
        exchange_of(key_heads=3, window=1000, **shape).kind == "window"
    )  # heads do not divide; a window needs no such
    assert exchange_of(key_heads=4, window=1, **shape).received == 0


def test_what_does_not_divide_is_reported():
    shape = dict(heads=12, key_heads=12, head_size=64, window=None)
    with pytest.raises(ValueError, match=r"12 key heads do not divide over 8 processes .* from 2, 3, 4, 6, 12, or"):
        exchange_of(8, 1024, **shape)
    with pytest.raises(ValueError, match="1000 tokens does not divide over 3"):
        exchange_of(3, 1000, **shape)


@pytest.mark.parametrize("text, key_heads, size", [
    ("lssa+lssar", 8, 2), ("lssa+lssar", 8, 8), ("lssa:1+lssar:3", 8, 4), ("lssa:1+lssar:1+softmax:2", 2, 2),
    ("ssmax", 4, 4),
])  # fmt: skip
def test_heads_are_shared_out_once_and_with_their_keys(text, key_heads, size):
    groups = parse_layout(text)[0].groups(8, key_heads)
    shares = share_heads(groups, 8, key_heads, size)
    mechanism = {head: group.spec for group in groups for head in range(8)[group.heads]}
    key_of = {head: head // (8 // key_heads) for head in range(8)}
    every_head = []
    for share in shares:
        heads = [head for part in share.heads for head in range(8)[part]]
        keys = [key for part in share.key_heads for key in range(key_heads)[part]]
        assert len(heads) == 8 // size and len(keys) == key_heads // size
        seen = []
        for group in share.groups:
            local, own_keys = range(len(heads))[group.heads], range(len(keys))[group.key_heads]
            assert [heads[i] for i in local] == list(range(8)[group.learned])
            assert {mechanism[heads[i]] for i in local} == {group.spec}
            assert len(local) % len(own_keys) == 0
            for place, i in enumerate(local):  # consecutive query heads share a key head
                assert keys[own_keys[place // (len(local) // len(own_keys))]] == key_of[heads[i]]
            seen += local
        assert seen == list(range(len(heads)))
        every_head += heads
    assert sorted(every_head) == list(range(8))


def test_mechanisms_are_shared_out_evenly():
    groups = parse_layout("lssa+lssar")[0].groups(8, 8)
    for share in share_heads(groups, 8, 8, 4):
        assert [group.spec.name for group in share.groups] == ["lssa", "lssar"]


def test_the_docs_show_the_cost_model():
    script = subprocess.run(
        [sys.executable, "benchmarks/context_cost.py"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    page = (ROOT / "docs/scale.md").read_text()
    shown = page.split("<!-- context cost -->\n")[1].split("<!-- end -->")[0]
    assert shown == script.stdout, "copy the output of benchmarks/context_cost.py to docs/scale.md"


class Alone:
    rank, size = 0, 1


def test_a_context_has_no_cache():
    model = GPT(model_config("tiny", vocab_size=64))
    model.context = Alone()
    with pytest.raises(ValueError, match="no cache"):
        model.prefill(torch.zeros(1, 4, dtype=torch.int64), model.new_cache(4))
