"""Newton's law: the sweep over arms, stopped, resumed, shared by workers and added to."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lssar.experiments import queue
from lssar.experiments.newton import sweep
from lssar.experiments.newton.arms import run_job
from lssar.experiments.newton.families import SCALES, Job, claim, families_in, jobs_of, test_points
from lssar.experiments.newton.orbits import WORLDS, draw, shown
from lssar.experiments.newton.results import collect, oracles
from lssar.experiments.newton.sweep import Sweep, run_all
from lssar.experiments.newton.training import random_stream
from tests.experiments.newton_sweep import SMALL

ROOT = Path(__file__).parent.parent.parent
test_points.__test__ = False  # not a test, for all its name


def arms_in(out):
    return {
        path.stem: {k: v for k, v in json.loads(path.read_text()).items() if k != "seconds"}
        for path in (out / "arms").glob("*.json")
    }


def test_every_arm_is_run_and_recorded(finished_sweep):
    arms = arms_in(finished_sweep)
    assert len(arms) == 2 * 2 * 2 * 2
    row = arms["wellposed-lssar-seed0-pretrained-16"]
    assert {"m1", "m2", "r", "standard_errors", "error", "r2", "labels", "start"} <= set(row)
    assert row != arms["wellposed-lssar-seed0-fresh-16"]
    assert len(list((finished_sweep / "probes").glob("*.json"))) == 2  # the first seed of each mechanism
    pretrained = json.loads((finished_sweep / "pretrained/wellposed-softmax-seed1.json").read_text())
    assert pretrained["environment"]["torch"] == torch.__version__
    assert not (finished_sweep / "work" / "wellposed-lssar-seed0").exists()
    assert families_in(finished_sweep) == (SMALL,)


def test_stopped_at_any_point_and_resumed_is_the_same(finished_sweep, tmp_path):
    """A clock that stops the sweep after ever more steps: in pre-training, between arms, in the probe."""
    family = dataclasses.replace(SMALL, mechanisms=("lssar",), seeds=(0,))
    job = jobs_of((family,))[0]
    claim((family,), tmp_path)
    done, starts = False, 0
    while not done:
        starts += 1
        left = [9]

        def stop(left=left):
            left[0] -= 1
            return left[0] <= 0

        done = run_job(job, tmp_path, "cpu", stop, say=lambda line: None)
        assert starts < 20
    assert starts > 2
    wanted = {name: row for name, row in arms_in(finished_sweep).items() if name.startswith("wellposed-lssar-seed0")}
    assert arms_in(tmp_path) == wanted
    probes = [json.loads((out / "probes" / f"{job.name}.json").read_text()) for out in (tmp_path, finished_sweep)]
    for key in ("slope", "error", "model_r2", "oracle_r2"):
        assert probes[0][key] == pytest.approx(probes[1][key], abs=1e-6)


def test_finished_arms_are_not_run_again(finished_sweep):
    before = {path: path.stat().st_mtime_ns for path in finished_sweep.rglob("*.json")}
    said = []
    assert run_all((SMALL,), finished_sweep, "cpu", say=said.append)
    assert said == []
    assert {path: path.stat().st_mtime_ns for path in finished_sweep.rglob("*.json")} == before


def test_on_a_bare_machine_only_what_is_missing_is_run(finished_sweep, tmp_path):
    """Results travel without OUT/work: an arm that is missing has its model pre-trained again, and no other has."""
    out = tmp_path / "copy"
    shutil.copytree(finished_sweep, out)
    shutil.rmtree(out / "work", ignore_errors=True)
    wanted = arms_in(out)
    (out / "arms/wellposed-lssar-seed0-pretrained-4.json").unlink()
    (out / "arms/wellposed-softmax-seed1-fresh-16.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*.json")}
    said = []
    assert run_all((SMALL,), out, "cpu", say=said.append)
    assert [line.split(":")[0] for line in said if "pre-training" in line] == ["wellposed-lssar-seed0"]
    assert arms_in(out) == wanted
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_effort_is_what_is_missing(finished_sweep, tmp_path):
    full = Job(SMALL, "lssar", 0)
    assert Sweep(jobs=(), out=finished_sweep, device="cpu").effort(full) == 0
    effort = Sweep(jobs=(), out=tmp_path, device="cpu").effort
    no_probe = effort(Job(SMALL, "lssar", 1))
    assert effort(full) > no_probe
    (tmp_path / "arms").mkdir()
    for arm, start, _ in full.arms():
        if start == "pretrained":
            (tmp_path / "arms" / f"{arm}.json").touch()
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / f"{full.name}.json").touch()
    assert 0 < 2 * effort(full) < no_probe  # fresh arms need no pre-training


def test_no_job_is_started_that_would_not_finish(tmp_path, monkeypatch):
    """By the clock a job takes 100 s for each unit of the first one's effort; 500 are left."""
    clock = iter([0, 100, 200, 10_000])
    slow = SimpleNamespace(monotonic=lambda: next(clock), time=time.time, sleep=time.sleep)
    monkeypatch.setattr(queue, "time", slow)
    started, said = [], []
    monkeypatch.setattr(sweep, "run_job", lambda job, *_: started.append(job) or True)
    assert not run_all((SMALL,), tmp_path, "cpu", time_limit=500, say=said.append)
    assert [job.seed for job in started] == [0, 0]  # the second took long: the others would not finish
    assert sum("not started" in line for line in said) == 2


def test_a_worker_continues_with_the_mechanism_it_has_compiled(tmp_path):
    jobs = jobs_of((SMALL,))
    order = Sweep(jobs=tuple(jobs), out=tmp_path, device="cpu").choose
    lssar_first, softmax_first, lssar_second, softmax_second = jobs
    assert order([lssar_second, softmax_second], softmax_first) == softmax_second
    assert order([lssar_second, softmax_second], None) == lssar_second
    assert order([softmax_first, lssar_second], lssar_first) == softmax_first  # lower seeds first all the same


@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_others(tmp_path, capfd):
    out = tmp_path / "sweep"
    family = dataclasses.replace(SMALL, seeds=(0,), probe=None, labels=(4,))
    (out / "predictions").mkdir(parents=True)
    (out / "predictions/wellposed-lssar-seed0-pretrained-4.safetensors").mkdir()  # cannot be written
    with pytest.raises(RuntimeError, match="wellposed-lssar-seed0"):
        run_all((family,), out, "cpu", workers=2)
    assert "wellposed-lssar-seed0 failed; continuing with the next job" in capfd.readouterr().out
    assert set(arms_in(out)) == {f"wellposed-softmax-seed0-{start}-4" for start in ("pretrained", "fresh")}


def test_a_folder_holds_one_sweep(finished_sweep):
    with pytest.raises(ValueError, match="holds a sweep with other settings"):
        run_all((dataclasses.replace(SMALL, tests=61),), finished_sweep, "cpu")
    with pytest.raises(FileNotFoundError, match="holds no sweep"):
        families_in(finished_sweep / "nowhere")
    with pytest.raises(ValueError, match="unknown world"):
        dataclasses.replace(SMALL, world="flat")
    with pytest.raises(ValueError, match="unknown attention spec 'lsar'"):
        dataclasses.replace(SMALL, mechanisms=("lsar",))


def test_arms_may_be_added_to_a_folder(tmp_path):
    few = dataclasses.replace(SMALL, seeds=(0,), mechanisms=("softmax",), probe=None)
    claim((few,), tmp_path)
    assert len({row.get("seed") for row in collect(tmp_path)["oracles"]} - {None}) == 1
    more = dataclasses.replace(few, seeds=(1,), mechanisms=("lssar",))
    claim((more, dataclasses.replace(few, world="wellposed-bins", tokens=20)), tmp_path)
    first, second = families_in(tmp_path)
    assert (first.seeds, first.mechanisms, second.world) == ((0, 1), ("softmax", "lssar"), "wellposed-bins")
    assert len({row.get("seed") for row in collect(tmp_path)["oracles"]} - {None}) == 2
    with pytest.raises(ValueError, match="other settings"):
        claim((dataclasses.replace(few, labels=(4, 17)),), tmp_path)
    assert families_in(tmp_path) == (first, second)


@pytest.mark.slow
def test_two_workers_do_the_same_and_stop_when_told(finished_sweep, tmp_path):
    settings = tmp_path / "run.py"
    settings.write_text(
        "import sys\nfrom pathlib import Path\nimport dataclasses\n"
        "from tests.experiments.newton_sweep import SMALL\nfrom lssar.experiments.newton.sweep import run_all\n"
        "from lssar.experiments.newton.training import Optimisation\n"
        "if __name__ == '__main__':\n"
        "    family = dataclasses.replace(SMALL, seeds=(0,), probe=None)\n"
        "    if sys.argv[2] == 'long':\n"
        "        family = dataclasses.replace(family, pretrain=Optimisation(steps=400, batch=8, lr=1e-3))\n"
        "    print(run_all((family,), Path(sys.argv[1]), 'cpu', workers=2), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(settings)]
    done = subprocess.run([*command, str(tmp_path / "two"), "short"], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("True\n"), done.stderr
    wanted = {name: row for name, row in arms_in(finished_sweep).items() if "-seed0-" in name}
    found = arms_in(tmp_path / "two")
    assert found.keys() == wanted.keys()
    for name, row in found.items():  # the number of threads may change the last digits
        assert row["m1"] == pytest.approx(wanted[name]["m1"], abs=1e-3)

    out = tmp_path / "stopped"
    process = subprocess.Popen([*command, str(out), "long"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert any("pre-training" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert said.endswith("False\n")
    assert len(list((out / "work").glob("*/checkpoints/step-*"))) == 2


def test_oracles_are_ceilings():
    rows = oracles(dataclasses.replace(SMALL, labels=(16, 1024), seeds=(0,), tests=300))
    truth, few, many = rows
    assert truth["error"] < 1e-6
    assert many["error"] < few["error"]
    assert many["r2"] > 0.9
    assert many["r2"] > few["r2"]


def test_test_systems_are_never_labelled():
    for family in (SMALL, *SCALES["h200"]):
        points = test_points(dataclasses.replace(family, tests=200))
        for seed in family.seeds:
            labelled = draw(WORLDS[family.world], 300, random_stream("labels", seed), planets=1)
            assert not set(points.m2.tolist()) & set(labelled.star_mass.tolist())


def test_the_sweep_of_the_gpu_covers_the_question():
    first = SCALES["h200"][0]
    assert set(first.mechanisms) == {"softmax", "lssa", "lssar", "lssar,p=3", "cosine_softmax"}
    assert (min(first.labels), max(first.labels), len(first.seeds)) == (8, 4096, 3)
    assert set(first.starts) == {"pretrained", "fresh"}
    assert {family.world for family in SCALES["h200"]} == {"wellposed", "original", "heavy", "wellposed-bins"}
    names = [arm for job in jobs_of(SCALES["h200"]) for arm, _, _ in job.arms()]
    assert len(names) == len(set(names))
    assert Job(first, "lssar,p=3", 0).name == "wellposed-lssar-p3-seed0"


@pytest.mark.gpu
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_on_a_gpu(world, tmp_path):
    """The same systems as on a CPU, and every stage of a job, in bfloat16 with the kernels that `attention` picks."""
    there, here = (
        shown(draw(WORLDS[world], 50, np.random.default_rng(0), device=device), 20) for device in ("cuda", "cpu")
    )
    if WORLDS[world].encoding == "bins":
        assert (there.cpu() != here).float().mean() < 1e-3
    else:
        torch.testing.assert_close(there.cpu(), here, atol=1e-6, rtol=1e-6)
    family = dataclasses.replace(SMALL, world=world, size="10m", tokens=64, dtype="bfloat16", seeds=(0,))
    assert run_all((family,), tmp_path, "cuda")
    for arm in arms_in(tmp_path).values():
        assert math.isfinite(arm["error"])
