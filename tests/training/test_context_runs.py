"""Runs whose sequences are divided over processes: same losses, resumed on any number, longer than one could hold."""

import sys

import numpy as np
import pytest

from lssar.training import train
from tests.training.counting import losses, tiny, write_counting
from tests.training.ranks import run_jobs

MODELS = {
    "softmax": {"attention": "softmax"},
    "lssar": {},
    "mixed": {"layout": "softmax@8 lssa+lssar/none", "p_schedule": "3:0.5,15"},
}
WAYS = {  # processes, parallel, processes of a context
    "ddp, 2": (2, "ddp", 1),
    "ddp, 4": (4, "ddp", 1),
    "fsdp, 2": (2, "fsdp", 1),
    "fsdp, 4": (4, "fsdp", 1),
    "context, 2": (2, "ddp", 2),
    "context, 4": (4, "ddp", 4),
    "fsdp x context, 2": (2, "fsdp", 2),
    "fsdp x context, 4": (4, "fsdp", 2),
}
SHORT = [("softmax", "context, 2"), ("lssar", "context, 4"), ("mixed", "fsdp x context, 4")]


def check_losses(folder, pairs) -> None:
    """20 steps in float32, which the order of summation changes by a few roundings a step."""
    shards = write_counting(folder / "shards")
    jobs = {}
    for model, way in pairs:
        size, parallel, context = WAYS[way]
        settings = dict(steps=20, lr=3e-4, micro_batch=2, eval_every=50, save_every=20, **MODELS[model])
        one = tiny(shards, **settings)
        several = tiny(shards, parallel=parallel, context_parallel=context, **settings)
        jobs[f"{model} one"] = dict(do="training", size=1, recipe=one.to_dict(), run=str(folder / f"{model} one"))
        jobs[f"{model} {way}"] = dict(
            do="training", size=size, recipe=several.to_dict(), run=str(folder / f"{model} {way}")
        )
    results = run_jobs(folder, jobs)
    for name in jobs:
        assert isinstance(results[name], dict), results[name]
        assert results[name]["step"] == 20
    for model, way in pairs:
        one, several = losses(folder / f"{model} one"), losses(folder / f"{model} {way}")
        np.testing.assert_allclose(several, one, atol=1e-5, err_msg=f"{model} {way}")


def test_losses_are_those_of_one_process(tmp_path):
    check_losses(tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_one_process_in_every_way(tmp_path, model):
    check_losses(tmp_path, [(model, way) for way in WAYS])


def test_a_run_resumes_on_another_number_of_processes(tmp_path):
    shards = write_counting(tmp_path / "shards")
    run, whole = str(tmp_path / "run"), str(tmp_path / "whole")

    def recipe(context: int, parallel: str = "ddp") -> dict:
        settings = dict(lr=3e-4, steps=6, pack=True, context_parallel=context, parallel=parallel)
        return tiny(shards, **settings).to_dict()

    jobs = {
        "whole": dict(do="training", size=1, recipe=recipe(1), run=whole),
        "two": dict(do="training", size=2, recipe=recipe(2), run=run, stop_after=0.0),  # a plain checkpoint
        "four": dict(do="training", size=4, recipe=recipe(2, "fsdp"), run=run, stop_after=0.0),  # a sharded one
        "one": dict(do="training", size=1, recipe=recipe(1), run=run, stop_after=0.0),
        "two again": dict(do="training", size=2, recipe=recipe(2), run=run),
    }
    results = run_jobs(tmp_path, jobs)
    for name, step in zip(jobs, (6, 1, 2, 3, 6)):
        assert isinstance(results[name], dict) and results[name]["step"] == step, f"{name}: {results[name]}"
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux counts it")
def test_a_sequence_too_long_for_one_process_trains_on_two(tmp_path):
    """Of the memory that one process needs, most is for logits: 256 MiB, and as much for each of two gradients."""
    job = dict(do="two_steps", config={"vocab_size": 16384}, length=4096, megabytes=700)
    results = run_jobs(tmp_path, {"one": {**job, "size": 1}, "two": {**job, "size": 2, "context": 2}})
    assert "can't allocate memory" in str(results["one"])
    assert results["two"] == pytest.approx(np.log(16384), rel=0.02)  # tokens are random


def test_mistakes_are_reported_before_anything_is_written(tmp_path):
    shards = write_counting(tmp_path / "shards")
    with pytest.raises(ValueError, match="4 key heads do not divide over 3"):
        tiny(shards, length=33, batch_tokens=33 * 8, context_parallel=3)
    with pytest.raises(ValueError, match="32 tokens does not divide over 5"):
        tiny(shards, context_parallel=5)
    with pytest.raises(ValueError, match="context_parallel must be at least 1"):
        tiny(shards, context_parallel=0)
    with pytest.raises(ValueError, match=r"needs a multiple of 2 processes; there are 1.*torchrun --nproc-per-node 2"):
        train(tiny(shards, context_parallel=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="4 sequences does not divide into 1 groups of 2 processes x 3"):
        tiny(shards, batch_tokens=128, micro_batch=3, context_parallel=2).micro_steps(2)
