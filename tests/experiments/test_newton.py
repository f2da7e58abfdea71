"""Newton's law: the model, how laws are read, and the sweep as users run it."""

import copy
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

import numpy as np
import pytest
import torch

import lssar
from lssar.cli import main
from lssar.experiments.newton import law
from lssar.experiments.newton.arms import run_job
from lssar.experiments.newton.families import SCALES, Family, Job, claim, families_in, jobs_of, test_points
from lssar.experiments.newton.law import Points, exponents, nearest_neighbours, newton_form, parse, symbolic_laws
from lssar.experiments.newton.model import OrbitModel, orbit_model_config
from lssar.experiments.newton.orbits import WORLDS, draw, shown
from lssar.experiments.newton.probe import _calibration, inductive_bias
from lssar.experiments.newton.report import TABLES, filled, source
from lssar.experiments.newton.results import collect, oracles
from lssar.experiments.newton.sweep import Schedule, effort, run_all
from lssar.experiments.newton.training import Optimisation, finetune, labelled_systems, predict, random_stream

ROOT = Path(__file__).parent.parent.parent
test_points.__test__ = False  # not a test, for all its name

FEW_BINS = dataclasses.replace(WORLDS["wellposed-bins"], bins=50)


def tiny(world, attention="lssar", tokens=14):
    return OrbitModel(orbit_model_config("ci", lssar.spec(attention), world, tokens), world)


# The model.


@pytest.mark.parametrize("world", [WORLDS["wellposed"], FEW_BINS], ids=["numbers", "bins"])
@pytest.mark.parametrize("attention", ["softmax", "lssa", "lssar", "cosine_softmax", "ssmax"])
def test_what_is_told_depends_on_the_past_alone(world, attention):
    model = tiny(world, attention).eval()
    systems = draw(world, 3, np.random.default_rng(0), planets=1)
    tokens = shown(systems, 13)
    later = tokens.clone()
    later[:, 9:] = shown(draw(world, 3, np.random.default_rng(1), planets=1), 13)[:, 9:]
    at = torch.arange(13)
    for tell in (model.next_shown, lambda i, s: model.force(i, s, at)):
        one, other = tell(systems.interval, tokens), tell(systems.interval, later)
        torch.testing.assert_close(one[:, :9], other[:, :9])
    assert not torch.equal(model.force(systems.interval, tokens, at), model.force(systems.interval, later, at))
    model.next_loss(systems.interval, tokens).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("force_head"))


def test_a_new_model_knows_nothing():
    batch = shown(draw(FEW_BINS, 64, np.random.default_rng(0), planets=1), 13)
    loss = tiny(FEW_BINS).next_loss(torch.zeros(64, dtype=torch.long), batch)
    assert float(loss.detach()) == pytest.approx(math.log(50), rel=0.02)


@pytest.mark.parametrize(
    ("size", "world", "millions"), [("60k", "wellposed", 0.057), ("10m", "wellposed", 10.6), ("109m", "original", 108)]
)
def test_sizes(size, world, millions):
    with torch.device("meta"):
        model = OrbitModel(orbit_model_config(size, lssar.spec("lssar"), WORLDS[world], 64), WORLDS[world])
    assert model.parameter_count() / 1e6 == pytest.approx(millions, rel=0.02)


def test_finetuning_learns_its_labels_and_leaves_others_alone():
    data = labelled_systems(WORLDS["wellposed"], 20, 14, 6, random_stream("labels", 0))
    model = tiny(WORLDS["wellposed"])
    settings = Optimisation(steps=80, batch=8, lr=5e-3, warmup=5)
    scale = finetune(model, data, data.log_force[:8], settings, seed=0)
    told = predict(model, data, *scale)
    error = (told - data.log_force).square().mean(1)
    assert error[:8].mean() < 0.2 * data.log_force.var()
    assert scale == (pytest.approx(float(data.log_force[:8].mean())), pytest.approx(float(data.log_force[:8].std())))

    hidden = dataclasses.replace(data, log_force=data.log_force.clone().index_fill_(0, torch.arange(8, 20), 1e9))
    again = tiny(WORLDS["wellposed"])
    again.load_state_dict(_initial(again))
    other = tiny(WORLDS["wellposed"])
    other.load_state_dict(_initial(again))
    for net, labels in ((again, data), (other, hidden)):  # labels of systems that are not given change nothing
        finetune(net, labels, labels.log_force[:8], dataclasses.replace(settings, steps=3), seed=0)
    for a, b in zip(again.parameters(), other.parameters()):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="21 labelled systems asked for; there are 20"):
        finetune(model, data, torch.zeros(21, len(data.at)), settings, seed=0)


def _initial(model):
    return copy.deepcopy(model.state_dict())


# Reading laws.


def some_points(count=2000, noise=0.0, powers=(1.0, 1.0, -2.0), seed=0):
    rng = np.random.default_rng(seed)
    m1, m2, r = np.exp(rng.uniform(-1, 1, (3, count)))
    log_force = np.log(7.0) + powers[0] * np.log(m1) + powers[1] * np.log(m2) + powers[2] * np.log(r)
    return Points(m1, m2, r, log_force + noise * rng.standard_normal(count))


def test_exponents_of_a_known_law():
    fit = exponents(some_points())
    assert [fit[name] for name in ("m1", "m2", "r")] == pytest.approx([1, 1, -2])
    assert fit["constant"] == pytest.approx(7)
    assert fit["error"] < 1e-9
    assert fit["power_law_r2"] == pytest.approx(1)
    wrong = exponents(some_points(powers=(1.0, 0.0, -2.0)))  # the law that the paper reports, F ~ m1 / r^2
    assert wrong["error"] == pytest.approx(1)


def test_standard_errors_cover_the_truth():
    fits = [exponents(some_points(400, noise=0.3, seed=seed)) for seed in range(200)]
    for name, true in (("m1", 1), ("r", -2)):
        away = np.array([(fit[name] - true) / fit["standard_errors"][name] for fit in fits])
        assert 0.9 < np.mean(np.abs(away) < 1.96) < 0.99


def test_nearest_neighbours():
    rng = np.random.default_rng(0)
    known, values = rng.standard_normal((500, 3)) * [1, 100, 0.01], rng.standard_normal(500)
    assert nearest_neighbours(known, values, known, k=1) == pytest.approx(values)
    two = nearest_neighbours(known, values, known[:7], k=2)
    scaled = (known - known.mean(0)) / known.std(0)
    for i in range(7):
        near = np.argsort(((scaled - scaled[i]) ** 2).sum(1))[:2]
        assert two[i] == pytest.approx(values[near].mean())


@pytest.mark.parametrize(
    ("text", "newton"),
    [
        ("m1*m2/r**2", True),
        ("((0.9154 * m2) / (0.8422 * r)) / ((1.3293 * r) / (1.2164 * m1))", True),
        ("(0.0076 + (0.9986 * (((-0.5 * m1) / (0.93 * r)) * ((-0.8 * m2) / (1.2 * r)))))", True),
        ("m1/(r*r/m2)", True),
        ("m1/r**2", False),
        ("m1*m2/(r*(r + 0.001))", False),
        ("-1.0*m1*m2/r**2", False),
        ("m1*m2/r**2 + 0.1*m1", False),
        ("sin(m1*m2/r**2)", False),
        ("2.5", False),
    ],
)  # fmt: skip
def test_is_it_newtons_law(text, newton):
    pytest.importorskip("sympy")
    assert newton_form(parse(text))[0] == newton


def test_symbolic_regression_finds_a_clean_law_in_any_units():
    pytest.importorskip("pyoperon")
    points = some_points(600, noise=0.01)
    found = symbolic_laws(Points(1e-5 * points.m1, points.m2, 30 * points.r, points.log_force - 12), draws=1, size=400)[
        0
    ]
    assert found["newton"], found
    assert found["r2"] > 0.99
    assert abs(found["offset"]) < 0.05
    assert {"law", "found", "size", "draw", "operators"} <= set(found)


def test_pysr_is_asked_as_in_the_original(monkeypatch):
    """PySR downloads a Julia runtime, so a stand-in takes its place: what it is given, what is made of its answer."""
    pytest.importorskip("sympy")
    asked = {}

    class Stub:
        def __init__(self, **settings):
            asked.update(settings)

        def fit(self, X, F, variable_names):
            asked["names"] = variable_names

        def get_best(self):
            return {"sympy_format": "1.0*m1*m2/r**2", "complexity": 9}

    module = type(sys)("pysr")
    module.PySRRegressor = Stub
    monkeypatch.setitem(sys.modules, "pysr", module)
    found = symbolic_laws(some_points(200), draws=2, size=100, engine="pysr")
    assert [(row["operators"], row["newton"]) for row in found] == [("arithmetic", True)] * 2 + [("original", True)] * 2
    assert asked["unary_operators"] == ["sin", "cos", "exp", "inv(x) = 1/x"]
    assert (asked["maxsize"], asked["binary_operators"], asked["names"]) == (20, ["+", "*"], ["m1", "m2", "r"])
    monkeypatch.setitem(sys.modules, "pysr", None)
    with pytest.raises(ImportError, match="needs PySR and a Julia"):
        symbolic_laws(some_points(200), draws=1, size=100, engine="pysr")


# The probe.


def test_the_diagonal_is_an_oracle():
    rng = np.random.default_rng(0)
    oracle = rng.random(5000)
    same, blind = _calibration(oracle, oracle, 20), _calibration(oracle, rng.random(5000), 20)
    assert same["error"] == pytest.approx(0)
    assert (same["slope"], same["correlation"]) == (pytest.approx(1), pytest.approx(1))
    assert abs(blind["slope"]) < 0.1
    assert blind["error"] > 0.3


def test_probe():
    settings = Optimisation(steps=3, batch=16, lr=1e-3)
    model = tiny(WORLDS["wellposed"])
    before = _initial(model)
    result = inductive_bias(model, 14, 6, settings, functions=2, examples=40, asked=30)
    assert result["oracle_r2"] == pytest.approx(1, abs=1e-6)  # a linear function of the state, with the state given
    assert result["model_r2"] < 0.9
    assert result["points"]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# The sweep.

SMALL = Family(
    world="wellposed", size="ci", tokens=14, first=6, mechanisms=("lssar", "softmax"), seeds=(0, 1), labels=(4, 16),
    pretrain=Optimisation(steps=6, batch=8, lr=1e-3, warmup=2),
    finetune=Optimisation(steps=3, batch=8, lr=1e-3, warmup=2),
    probe=Optimisation(steps=2, batch=8, lr=1e-3, warmup=2), probe_functions=1, tests=60,
)  # fmt: skip


def arms_in(out):
    return {
        path.stem: {k: v for k, v in json.loads(path.read_text()).items() if k != "seconds"}
        for path in (out / "arms").glob("*.json")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    assert run_all((SMALL,), out, "cpu", say=lambda line: None)
    return out


def test_every_arm_is_run_and_recorded(whole):
    arms = arms_in(whole)
    assert len(arms) == 2 * 2 * 2 * 2
    row = arms["wellposed-lssar-seed0-pretrained-16"]
    assert {"m1", "m2", "r", "standard_errors", "error", "r2", "labels", "start"} <= set(row)
    assert row != arms["wellposed-lssar-seed0-fresh-16"]
    assert len(list((whole / "probes").glob("*.json"))) == 2  # the first seed of each mechanism
    pretrained = json.loads((whole / "pretrained/wellposed-softmax-seed1.json").read_text())
    assert pretrained["environment"]["torch"] == torch.__version__
    assert not (whole / "work" / "wellposed-lssar-seed0").exists()
    assert families_in(whole) == (SMALL,)


def test_stopped_at_any_point_and_gone_on_with_is_the_same(whole, tmp_path):
    """A clock that stops the sweep after ever more steps: in pre-training, between arms, in the probe."""
    sweep = dataclasses.replace(SMALL, mechanisms=("lssar",), seeds=(0,))
    job = jobs_of((sweep,))[0]
    claim((sweep,), tmp_path)
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
    wanted = {name: row for name, row in arms_in(whole).items() if name.startswith("wellposed-lssar-seed0")}
    assert arms_in(tmp_path) == wanted
    probes = [json.loads((out / "probes" / f"{job.name}.json").read_text()) for out in (tmp_path, whole)]
    for key in ("slope", "error", "model_r2", "oracle_r2"):
        assert probes[0][key] == pytest.approx(probes[1][key], abs=1e-6)


def test_finished_arms_are_not_run_again(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.json")}
    said = []
    assert run_all((SMALL,), whole, "cpu", say=said.append)
    assert said == []
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.json")} == before


def test_on_a_bare_machine_only_what_is_missing_is_run(whole, tmp_path):
    """Results travel without OUT/work: an arm that is missing has its model pre-trained again, and no other has."""
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
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


def test_effort_is_what_is_missing(whole, tmp_path):
    full = Job(SMALL, "lssar", 0)
    assert effort(full, whole) == 0
    no_probe = effort(Job(SMALL, "lssar", 1), tmp_path)
    assert effort(full, tmp_path) > no_probe
    (tmp_path / "arms").mkdir()
    for arm, start, _ in full.arms():
        if start == "pretrained":
            (tmp_path / "arms" / f"{arm}.json").touch()
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / f"{full.name}.json").touch()
    assert 0 < 2 * effort(full, tmp_path) < no_probe  # fresh arms need no pre-training


def test_no_job_is_begun_that_would_not_be_finished(tmp_path):
    jobs = jobs_of((SMALL,))
    schedule = Schedule(jobs, tmp_path, time.time() + 1000)
    first = schedule.take()
    assert first == jobs[0]
    second = schedule.take()  # with none finished there is nothing to go by
    schedule.finished(first, 10)
    assert schedule.take(first).seed == 1
    schedule.finished(second, 1500)
    schedule.finished(second, 1500)
    assert schedule.take() is None
    assert len(schedule.waiting) == 1
    schedule.until = None
    assert schedule.take() is not None
    assert schedule.take() is None


def test_a_worker_goes_on_with_the_mechanism_it_has_compiled(tmp_path):
    schedule = Schedule(jobs_of((SMALL,)), tmp_path, None)
    lssar_first, softmax_first = schedule.take(), schedule.take()
    assert (schedule.take(softmax_first).mechanism, schedule.take(softmax_first).mechanism) == ("softmax", "lssar")
    schedule = Schedule(jobs_of((SMALL,)), tmp_path, None)
    schedule.take()
    assert schedule.take(lssar_first) == softmax_first  # lower seeds first all the same


@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_others(tmp_path):
    out = tmp_path / "sweep"
    family = dataclasses.replace(SMALL, seeds=(0,), probe=None, labels=(4,))
    (out / "predictions").mkdir(parents=True)
    (out / "predictions/wellposed-lssar-seed0-pretrained-4.safetensors").mkdir()  # cannot be written
    said = []
    with pytest.raises(OSError, match="wellposed-lssar-seed0-pretrained-4"):
        run_all((family,), out, "cpu", workers=2, say=said.append)
    assert any(line.startswith("wellposed-lssar-seed0: failed: ") for line in said)
    assert set(arms_in(out)) == {f"wellposed-softmax-seed0-{start}-4" for start in ("pretrained", "fresh")}


def test_a_folder_holds_one_sweep(whole):
    with pytest.raises(ValueError, match="holds a sweep with other settings"):
        run_all((dataclasses.replace(SMALL, tests=61),), whole, "cpu")
    with pytest.raises(FileNotFoundError, match="holds no sweep"):
        families_in(whole / "nowhere")
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
def test_two_workers_do_the_same_and_stop_when_told(whole, tmp_path):
    settings = tmp_path / "run.py"
    settings.write_text(
        "import sys\nfrom pathlib import Path\nimport dataclasses\n"
        "from tests.experiments.test_newton import SMALL\nfrom lssar.experiments.newton.sweep import run_all\n"
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
    wanted = {name: row for name, row in arms_in(whole).items() if "-seed0-" in name}
    found = arms_in(tmp_path / "two")
    assert found.keys() == wanted.keys()
    for name, row in found.items():  # the number of threads may change the last digits
        assert row["m1"] == pytest.approx(wanted[name]["m1"], abs=1e-3)

    out = tmp_path / "stopped"
    process = subprocess.Popen([*command, str(out), "long"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert "pre-training" in process.stdout.readline()
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


def test_newton_in_short(tmp_path, capsys):
    """The smoke run in a shorter form: two minutes of training there, seconds here, so the masses are only begun."""
    pytest.importorskip("pyoperon")
    out = tmp_path / "ci"
    main(["newton", "--scale", "ci", "--out", str(out), "--workers", "1", "--no-laws"])
    result = json.loads((out / "newton.json").read_text())
    arm = result["arms"][0]
    assert arm["r"] == pytest.approx(-2, abs=0.2)
    assert 0.3 < arm["m1"] < 1.2
    assert 0.3 < arm["m2"] < 1.2
    assert arm["r2"] > 0.7
    for name in ("errors", "forces", "orbits"):
        assert (out / f"newton-{name}.png").stat().st_size > 10_000
    assert {"command", "environment", "settings", "identifiability", "oracles"} <= set(result)

    main(["newton", "read-law", str(out), "--draws", "1", "--operators", "arithmetic"])
    laws = json.loads((out / "newton.json").read_text())["laws"]
    assert [row["arm"] for row in laws] == ["wellposed-true-forces", arm["arm"]]
    assert laws[0]["laws"][0]["newton"]
    said = capsys.readouterr().out
    assert "wellposed-true-forces: m1 m2 / r^2 in 1 of 1 draws (arithmetic operators)" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pretrain-steps", "0"], "steps, batch and warmup must be at least 1"),
        (["--labels", "1"], "must be at least 2"),
        (["--mechanisms", "lsar"], "unknown attention spec 'lsar'"),
        (["--mechanisms", "lssar,p=many"], "wanted NAME or NAME,FIELD=NUMBER"),
        (["read-law", "NEW"], "holds no sweep"),
        (["publish", "NEW", "NEW"], "holds no sweep"),
        (["report", "NEW"], "does not exist"),
    ],
    ids=str,
)
def test_mistakes_get_one_line_and_leave_nothing(flags, words, tmp_path, capsys):
    flags = [str(tmp_path / "new") if word == "NEW" else word for word in flags]
    named = flags[0] in ("read-law", "publish", "report")
    with pytest.raises(SystemExit, match="2"):
        main(["newton", *flags, *([] if named else ["--scale", "ci", "--out", str(tmp_path / "new")])])
    assert words in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_flags_change_the_scale(tmp_path):
    out = tmp_path / "few"
    flags = ["newton", "--scale", "ci", "--out", str(out), "--pretrain-steps", "2", "--finetune-steps", "2",
             "--no-laws", "--labels", "4", "--mechanisms", "lssar,p=3", "--seeds", "5", "--workers", "1"]  # fmt: skip
    main(flags)
    (arm,) = json.loads((out / "newton.json").read_text())["arms"]
    assert (arm["mechanism"], arm["seed"], arm["labels"]) == ("lssar,p=3", 5, 4)
    about = (out / "run.json").read_text()
    main(flags)
    assert (out / "run.json").read_text() == about  # nothing was left to run: its origin stays
    (out / "arms" / f"{arm['arm']}.json").unlink()
    main(flags)
    result = json.loads((out / "newton.json").read_text())
    first = json.loads(about)
    assert result["earlier"] == [{"command": first["command"], "environment": first["environment"]}]
    assert "1 of 1 arms, in 2 sittings:\n\n- " in source(result)
    (family,) = families_in(out)
    assert (family.pretrain.steps, family.finetune.steps) == (2, 2)


def test_the_report_is_made_from_the_results(whole, tmp_path, capsys):
    from lssar.commands.newton import finish

    finish(whole)
    main(["newton", "publish", str(whole), str(tmp_path / "results/small")])
    assert json.loads((tmp_path / "results/small.json").read_text()) == json.loads((whole / "newton.json").read_text())
    names = {"small.json", *(f"small-{name}.png" for name in ("errors", "forces", "orbits", "probe"))}
    assert {path.name for path in (tmp_path / "results").iterdir()} == names
    with pytest.raises(SystemExit, match="2"):
        main(["newton", "publish", str(whole), str(tmp_path / "results/small")])
    page = tmp_path / "page.md"
    names = " ".join(name for name in TABLES if name != "source")
    page.write_text(f"# Page\n<!-- newton: {whole / 'newton.json'} {names} -->\nold\n<!-- end newton -->\nlast\n")
    main(["newton", "report", str(page)])
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- end newton -->\nlast\n")
    arm = json.loads((whole / "newton.json").read_text())["arms"]
    rows = [row["error"] for row in arm if (row["mechanism"], row["start"], row["labels"]) == ("lssar", "fresh", 4)]
    assert f"{np.mean(rows):.3f} ± {np.std(rows, ddof=1):.3f}" in text
    main(["newton", "report", str(page), "--check"])
    page.write_text(text.replace("0.", "1."))
    with pytest.raises(SystemExit, match="2"):
        main(["newton", "report", str(page), "--check"])
    assert "is not what the results say" in capsys.readouterr().out
    page.write_text("<!-- newton: nothing.json exponents -->\n<!-- end newton -->")
    assert "Not run yet" in filled(page)
    page.write_text(f"<!-- newton: {whole / 'newton.json'} weather -->\n<!-- end newton -->")
    with pytest.raises(ValueError, match="unknown table weather"):
        filled(page)


def test_without_the_extra_there_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyoperon.sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'lssar\[newton\]'"):
        law.symbolic_laws(some_points(100), draws=1, size=50)


@pytest.mark.gpu
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_on_a_gpu(world, tmp_path):
    """The same systems as on a CPU, and every stage of a job, in bfloat16 with the kernels that `attention` picks."""
    there, here = (
        shown(draw(WORLDS[world], 50, np.random.default_rng(0), device=device), 20) for device in ("cuda", "cpu")
    )
    if WORLDS[world].reading == "bins":
        assert (there.cpu() != here).float().mean() < 1e-3
    else:
        torch.testing.assert_close(there.cpu(), here, atol=1e-6, rtol=1e-6)
    family = dataclasses.replace(SMALL, world=world, size="10m", tokens=64, dtype="bfloat16", seeds=(0,))
    assert run_all((family,), tmp_path, "cuda")
    for arm in arms_in(tmp_path).values():
        assert math.isfinite(arm["error"])
