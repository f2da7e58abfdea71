"""The queue of arms: shared, interrupted and resumed, within a time limit, through failures."""

import contextlib
import dataclasses
import json
import re
import time
from types import SimpleNamespace

import torch

from lssar.experiments import EXPERIMENTS, SCALES, arms_of, queue, runner
from lssar.experiments.evaluations import Length
from lssar.experiments.published import LOSSES
from lssar.locks import hold
from lssar.records import write_json
from lssar.training.loop import TrainingDiverged
from tests.experiments.reproduce import reproduce


def scale_in(folder):
    return dataclasses.replace(SCALES["smoke"], results=folder / "results", runs=folder / "runs")


def queue_of(arms, scale, **how):
    required = {arm.key: ("length-16x",) for arm in arms}
    return runner.ArmQueue(jobs=tuple(arms), scale=scale, data=scale.runs, command="", required=required, **how)


def let_arms_take_100_seconds(monkeypatch):
    """By the clock that times them; nearly none by that of the deadline."""
    clock = iter(range(0, 10_000, 100))
    slow = SimpleNamespace(monotonic=lambda: next(clock), time=time.time, sleep=time.sleep)
    monkeypatch.setattr(queue, "time", slow)


def test_table4_interrupted_and_resumed(small, capsys):
    arguments = ("table4", "--scale", "smoke", "--out", str(small))
    assert reproduce(*arguments, "--time-limit", "0") == 0
    assert "15 of 15 arms are not finished; the same command resumes" in capsys.readouterr().out
    assert reproduce(*arguments, "--time-limit", "0.2") == 0  # within an arm
    said = capsys.readouterr().out
    assert "the same command resumes" in said
    assert reproduce(*arguments) == 0
    said = capsys.readouterr().out
    assert "not finished" not in said
    assert "LSSAR, p = 15  " in said and "|" not in said
    assert said.index("too small to decide anything") < said.index("LSSAR, p = 15  ")
    assert "3.3171" in said  # the paper's number beside ours
    results = sorted((small / "results").glob("*.json"))
    assert len(results) == 15
    table = json.loads((small / "results/tables/table4.json").read_text())
    assert [row["label"] for row in table["rows"] if row["main"]] == list(LOSSES["table4"])
    assert {row["evaluation"] for row in table["rows"]} == {"length-16x", "length-16x-ntk", "length-16x-posthoc-p15"}
    assert all(0 < row["loss"]["16"]["mean"] < 20 for row in table["rows"])
    assert (small / "results/tables/table4.png").stat().st_size > 10_000

    record = json.loads(results[0].read_text())
    assert {"recipe", "data", "seed", "environment", "training", "evaluations", "command"} <= set(record)
    assert record["recipe"]["data"] == "stdlib"  # a name, not a place
    before = {path: path.stat().st_mtime_ns for path in results}
    assert reproduce(*arguments) == 0  # finished arms are not touched
    assert {path: path.stat().st_mtime_ns for path in results} == before
    assert "15 of them finished before" in capsys.readouterr().out


def test_two_workers_share_the_arms(small, tmp_path, capfd):
    """Spawned processes do not see the fixture's smaller scale, but the queue that is sent to them."""
    assert reproduce("table1", "--scale", "smoke", "--out", str(small), "--workers", "2") == 0
    said = capfd.readouterr().out
    assert len(list((small / "results").glob("*.json"))) == 4
    assert sorted(re.findall(r"^arm (\d) of 4", said, re.M)) == ["1", "2", "3", "4"]  # each once, by one of the two


def test_an_arm_that_another_process_holds_is_left_to_it(small, capsys):
    scale = scale_in(small)
    held = arms_of([EXPERIMENTS["table1"]], scale)[0]
    with hold(scale.runs / held.key, "working on an arm", queue.LOCK):
        assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 0
        assert "1 of 4 arms are not finished" in capsys.readouterr().out
        assert not (scale.results / f"{held.key}.json").exists()
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 0  # whoever held it is gone
    assert (scale.results / f"{held.key}.json").exists()


def test_no_arm_is_started_that_would_not_finish(small, monkeypatch, capsys):
    let_arms_take_100_seconds(monkeypatch)
    monkeypatch.setattr(runner, "run_arm", lambda arms, arm, say: None)
    arguments = ("table1", "--scale", "smoke", "--out", str(small), "--time-limit", "90")
    assert reproduce(*arguments, "--whole-arms") == 0
    said = capsys.readouterr().out
    assert re.findall(r"arm (\d) of 4", said) == ["1"]
    assert said.count("would take 100 s") == 3
    assert reproduce(*arguments) == 0
    assert re.findall(r"arm (\d) of 4", capsys.readouterr().out) == ["1", "2", "3", "4"]


def test_other_seeds_tell_how_long_an_arm_takes(small):
    scale = scale_in(small)
    arm = next(a for a in arms_of([EXPERIMENTS["controls"]], scale) if a.name == "lssar")
    arms = runner.ArmQueue(jobs=(arm,), scale=scale, data=small, command="", required={arm.key: ()})
    assert arms.expected_seconds(arm) is None
    record = {
        "training": {"tokens": 1000, "tokens_per_s": 50.0}, "evaluations": {"length-16x": {"seconds": 2.5}},
        "environment": runner.environment(), "content": arm.content | {"seed": 1},
    }  # fmt: skip
    write_json(scale.results / "lssar-seed1-0123.json", record)
    shorter = record | {"content": record["content"] | {"steps": 1}, "evaluations": {"other": {"seconds": 1e9}}}
    write_json(scale.results / "lssar-seed1-4567.json", shorter)  # another arm with the same name
    assert arms.expected_seconds(arm) == 22.5
    write_json(scale.results / "lssar-p3-seed1-0123.json", record | {"evaluations": {"other": {"seconds": 1e9}}})
    elsewhere = record["environment"] | {"cpu": "another"}
    write_json(scale.results / "lssar-seed2-0123.json", record | {"environment": elsewhere, "evaluations": {}})
    assert arms.expected_seconds(arm) == 22.5


def test_when_fewer_are_at_work_an_arm_takes_less(small, monkeypatch):
    """By the clock every arm takes 100 s with two at work; 90 are left, enough for one that has the machine alone."""
    scale = scale_in(small)
    scale.runs.mkdir(parents=True)
    arms = arms_of([EXPERIMENTS["table1"]], scale)
    both = queue_of(arms, scale, deadline=time.time() + 90, whole_jobs=True)
    let_arms_take_100_seconds(monkeypatch)
    started = []
    monkeypatch.setattr(runner, "run_arm", lambda arms, arm, say: started.append(arm))
    queue._work(both, print, workers=2)
    assert len(started) == 4
    started.clear()
    with hold(scale.runs / arms[-1].key, "working on an arm", queue.LOCK):
        queue._work(both, print, workers=2)
    assert started == [arms[0]]


def test_a_failing_arm_is_reported_and_the_others_continue(small, monkeypatch, capsys):
    def breaks(self, model, held_out):
        if model.config.layer_specs[0].negate:
            raise RuntimeError("the card fell off")
        return evaluate(self, model, held_out)

    evaluate, smaller = Length.evaluate, SCALES["smoke"]
    monkeypatch.setattr(Length, "evaluate", breaks)
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 1
    said = capsys.readouterr().out
    assert "the card fell off" in said
    assert "failed: softmax_inverse" in said
    results = {path.name: json.loads(path.read_text()) for path in (small / "results").glob("*.json")}
    assert sorted(bool(result["evaluations"]) for result in results.values()) == [False, True, True, True]
    monkeypatch.undo()
    monkeypatch.setitem(SCALES, "smoke", smaller)
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 0  # the training was not lost
    assert "2/2" not in capsys.readouterr().out


def test_a_training_that_diverges_is_a_result(small, monkeypatch, capsys):
    """Recorded without evaluations, shown as diverged, and not repeated."""

    def diverges(recipe, run, **how):
        last = train(recipe, run, **how)
        if recipe.attention == "softmax_inverse":
            raise TrainingDiverged("training diverged: loss not finite")
        return last

    train = runner.train
    monkeypatch.setattr(runner, "train", diverges)
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 0
    said = capsys.readouterr().out
    assert "training diverged" in said
    table = json.loads((small / "results/tables/table1.json").read_text())
    assert {row["label"]: row["loss"]["1"]["mean"] is None for row in table["rows"]}["inverse"]
    assert sum(row["loss"]["1"]["mean"] is None for row in table["rows"]) == 1
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 0
    assert "4 of them finished before" in capsys.readouterr().out


def test_a_lost_device_ends_the_queue(small, monkeypatch, capsys):
    """Otherwise every remaining arm would be started and fail."""

    def breaks(self, model, held_out):
        raise RuntimeError("device(s) busy or unavailable")

    for module in (queue, runner):
        monkeypatch.setattr(module, "device_is_lost", lambda: True)
    monkeypatch.setattr(Length, "evaluate", breaks)
    assert reproduce("table1", "--scale", "smoke", "--out", str(small)) == 1
    said = capsys.readouterr().out
    assert "the GPU no longer responds" in said
    assert "arm 1 of" in said
    assert "arm 2 of" not in said


def test_a_worker_without_memory_leaves_its_arm_to_the_others(small, monkeypatch):
    """Beside other arms, running out of GPU memory says nothing about the arm, and more arms would fail too."""
    scale = scale_in(small)
    arms = arms_of([EXPERIMENTS["table1"]], scale)
    finished, said = set(), []

    def train(arms_queue, arm, say):
        if held_by_another:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finished.add(arm.key)

    monkeypatch.setattr(runner, "run_arm", train)
    monkeypatch.setattr(runner.ArmQueue, "finished", lambda self, job: job.key in finished)
    arms_queue = queue_of(arms, scale)
    held_by_another = True
    with hold(scale.runs / arms[0].key, "working on an arm", queue.LOCK):
        assert queue._work(arms_queue, said.append, workers=2) == []
    assert not finished and "this worker ends" in said[-1] and len(said) == 2
    assert len(queue._work(arms_queue, said.append, workers=2)) == len(arms)  # alone: the arm is too large
    held_by_another = False
    assert queue._work(arms_queue, said.append) == [] and len(finished) == len(arms)


def test_an_arm_that_another_worker_gave_up_is_done_at_the_end(small, monkeypatch):
    scale = scale_in(small)
    arms = arms_of([EXPERIMENTS["table1"]], scale)
    done = []
    other = contextlib.ExitStack()
    other.enter_context(hold(scale.runs / arms[0].key, "working on an arm", queue.LOCK))

    def train(arms_queue, arm, say):
        done.append(arm)
        other.close()  # the other worker ends

    monkeypatch.setattr(runner, "run_arm", train)
    assert queue._work(queue_of(arms, scale), print, workers=2) == []
    assert done == [*arms[1:], arms[0]]


def test_evaluations_are_recorded_at_once_and_never_replaced_by_fewer(tmp_path):
    path = tmp_path / "arm.json"

    def record(*keys, commit="1"):
        runner._record(path, {"arm": "a", "evaluations": dict.fromkeys(keys, 0), "environment": {"commit": commit}})

    kept = lambda: set(json.loads(path.read_text())["evaluations"])  # noqa: E731
    record("one")
    assert kept() == {"one"}
    record("one", "two")
    assert kept() == {"one", "two"}
    record("three", commit="2")  # trained again elsewhere, and not yet evaluated in full
    assert kept() == {"one", "two"}
    assert not (tmp_path / "earlier").exists()
    for _ in range(2):  # what the first training gave is put aside, once
        record("one", "two", "three", commit="2")
        assert kept() == {"one", "two", "three"}
        (before,) = (tmp_path / "earlier").iterdir()
    assert before.name == "arm-1.json"
    assert json.loads(before.read_text())["environment"] == {"commit": "1"}
    record("one", "two", "three", commit="3")
    assert {p.name for p in (tmp_path / "earlier").iterdir()} == {"arm-1.json", "arm-2.json"}
