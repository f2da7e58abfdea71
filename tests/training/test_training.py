"""Runs as users have them: they learn, survive being killed, and do the same on one process and on two."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lssar.model import GPT
from lssar.runs import Run
from lssar.training import recipe, train
from lssar.training.checkpoints import checkpoints, latest
from lssar.training.metrics import SpikeDetector, read_metrics
from lssar.training.recipes import RECIPES, Recipe, learning_rate
from tests.training.counting import losses, tiny, write_counting

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_counting(tmp_path_factory.mktemp("shards"))


def test_a_run_learns_and_records(shards, tmp_path):
    rows = []
    last = train(tiny(shards, steps=60), tmp_path / "run", report=rows.append)
    assert last["step"] == 60
    assert rows[0]["loss"] > 3.9
    assert last["val_loss"] < 0.6 * rows[0]["loss"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, 61))
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_s", "spike", "finite"} <= set(rows[3])
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert Recipe.from_dict(config["recipe"]) == tiny(shards, steps=60)
    assert config["environment"]["torch"] == torch.__version__
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-0000056", "step-0000060"]
    opened = Run.open(tmp_path / "run", "cpu")
    assert opened.step == 60
    assert not opened.model().training


def test_resumed_is_the_same_to_the_bit(shards, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(shards), whole)
    stop_at_5 = lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == 5 else None  # noqa: E731
    assert train(tiny(shards), parts, report=stop_at_5)["step"] == 5  # SIGTERM saves and ends
    assert latest(parts).name == "step-0000005"
    train(tiny(shards), parts)
    assert losses(parts) == losses(whole)
    a, b = (Run.open(run, "cpu").model().state_dict() for run in (whole, parts))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("where", ["step", "checkpoint"])
def test_killed_and_resumed(shards, tmp_path, where):
    """kill -9 in the middle of a step, and between the files of a checkpoint and its name."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(shards), whole)
    script = f"""
import os, signal, sys
from pathlib import Path
import lssar.training.checkpoints as c
from lssar.training import train, Recipe
if {where!r} == "checkpoint":
    replace, saves = c.os.replace, []
    def dies(a, b):
        saves.extend([b] if "step-" in str(b) else [])
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(a, b)
    c.os.replace = dies
report = lambda row: os.kill(os.getpid(), signal.SIGKILL) if {where!r} == "step" and row["step"] == 7 else None
import torch; torch.set_num_threads({torch.get_num_threads()})
train(Recipe.from_dict({tiny(shards).to_dict()!r}), Path({str(parts)!r}), report=report)
"""
    done = subprocess.run([sys.executable, "-c", script], env=_environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert latest(parts).name == "step-0000004"
    train(tiny(shards), parts)
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one(shards, tmp_path, parallel):
    mixed = {"layout": "softmax@8 lssa+lssar/none", "p_schedule": "3:0.5,15"} if parallel == "fsdp" else {}
    train(tiny(shards, lr=3e-4, steps=6, **mixed), tmp_path / "one")
    settings = tiny(shards, lr=3e-4, steps=6, parallel=parallel, **mixed).to_dict()
    script = tmp_path / "run.py"
    script.write_text(
        "from pathlib import Path\nimport torch\nfrom lssar.training import Recipe, train\ntorch.set_num_threads(1)\n"
        f"train(Recipe.from_dict({settings!r}), Path({str(tmp_path / 'two')!r}))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    two = Run.open(tmp_path / "two", "cpu")  # the checkpoint is complete, however many processes shared it
    assert two.step == 6
    one = Run.open(tmp_path / "one", "cpu").model().state_dict()
    for key, value in two.model().state_dict().items():
        torch.testing.assert_close(value, one[key], atol=2e-3, rtol=0)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def test_accumulation_changes_nothing(shards, tmp_path):
    train(tiny(shards, lr=3e-4, steps=6, micro_batch=8), tmp_path / "at once")
    train(tiny(shards, lr=3e-4, steps=6, micro_batch=2), tmp_path / "in four")
    np.testing.assert_allclose(losses(tmp_path / "at once"), losses(tmp_path / "in four"), atol=1e-5)


@pytest.mark.parametrize("changes", [{"optimiser": "muon"}, {"schedule": "wsd"}, {"pack": True}, {"dtype": "bfloat16"},
                                     {"checkpoint_layers": True}, {"attention": "ssmax"}], ids=str)  # fmt: skip
def test_other_settings_train_and_resume(shards, tmp_path, changes):
    r = tiny(shards, **changes)
    first = train(r, tmp_path, stop_after=0.0)
    assert first["step"] == 1
    last = train(r, tmp_path)
    assert last["step"] == 12
    assert last["loss"] < first["loss"]


def test_a_folder_holds_one_run(shards, tmp_path):
    train(tiny(shards, steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"lr is 0\.003 there and 0\.001 here.*--out"):
        train(tiny(shards, steps=1, lr=1e-3), tmp_path)


def test_errors_a_user_sees(tmp_path):
    with pytest.raises(FileNotFoundError, match="no training shards"):
        train(tiny(tmp_path / "nowhere"), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        Run.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="unknown recipe"):
        recipe("gpt5")
    with pytest.raises(ValueError, match="unknown field 'learning_rate'"):
        recipe("tiny-cpu", learning_rate=1)
    with pytest.raises(ValueError, match="unknown attention spec"):
        recipe("tiny-cpu", attention="lsar")
    with pytest.raises(ValueError, match="multiple of length"):
        recipe("tiny-cpu", batch_tokens=1000)
    for name, value, words in [
        ("lr", float("inf"), "lr must be finite"), ("clip", float("nan"), "clip must be finite"),
        ("weight_decay", float("nan"), "weight_decay must be finite"), ("rope_base", float("nan"), "rope_base must be"),
        ("rope_base", -3.0, "rope_base must be positive"), ("weight_decay", -1.0, "must be 0 or more"),
        ("warmup", -5, "must be 0 or more"), ("seed", 10**23, r"below 2\*\*63"), ("seed", -1, "0 or more"),
        ("betas", (0.9, 1.0), "betas must be"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            recipe("tiny-cpu", **{name: value})
    with pytest.raises(ValueError, match="does not divide into 3 processes"):
        recipe("tiny-cpu").micro_steps(3)


def test_the_papers_recipe():
    paper = recipe("gpt2-124m-fineweb")
    assert (paper.steps, paper.batch_tokens, paper.length) == (18_865, 524_288, 1024)
    assert paper.steps * paper.batch_tokens == pytest.approx(9.9e9, rel=0.01)
    assert (paper.lr, paper.betas, paper.weight_decay, paper.warmup, paper.clip) == (6e-4, (0.9, 0.95), 0.1, 700, 1.0)
    assert paper.micro_steps(8) == 2
    assert paper.model().layer_specs[0].p == 15
    assert {"gpt2-124m-fineweb", "books-51m", "books-124m", "tiny-cpu"} < set(RECIPES)


def test_schedules():
    base = dict(steps=100, warmup=10, lr=1.0)
    cosine, wsd = Recipe(**base), Recipe(**base, schedule="wsd", decay_share=0.2)
    assert learning_rate(cosine, 0) == pytest.approx(0.1)
    assert learning_rate(cosine, 10) == pytest.approx(1.0)
    assert learning_rate(cosine, 55) == pytest.approx(0.5)
    assert learning_rate(cosine, 99) < 0.001
    assert [learning_rate(wsd, s) for s in (10, 79, 90)] == pytest.approx([1.0, 1.0, 0.5])


def test_spikes_are_marked():
    detect = SpikeDetector()
    rng = np.random.default_rng(0)
    assert not any(detect(3.0 + 0.05 * rng.standard_normal()) for _ in range(200))
    assert detect(4.0)
    assert detect(float("nan"))
    assert not detect(3.0)


def test_stopping_takes_no_longer_than_a_step(shards, tmp_path):
    start = time.monotonic()
    assert train(tiny(shards, steps=100_000), tmp_path, stop_after=0.5)["step"] < 100_000
    assert time.monotonic() - start < 30


def test_validation_compiles_nothing_more(shards, tmp_path, monkeypatch):
    """Compiling takes longer than many a short run: the graph of training reads the held-out text, too."""
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(GPT, "compile", lambda self: torch.nn.Module.compile(self, backend=count))
    torch.compiler.reset()
    plain = train(tiny(shards), tmp_path / "plain")
    row = train(tiny(shards, compile=True), tmp_path / "compiled")
    assert row["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)
    assert len(compiled) == 1


def test_metrics_go_to_tensorboard_if_asked(shards, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(shards, steps=6), tmp_path, stop_after=0.0, log=["tensorboard"])
    train(tiny(shards, steps=6), tmp_path, log=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 7))
    assert [point.value for point in events.Scalars("loss")] == pytest.approx(losses(tmp_path))


def test_a_missing_logger_is_reported_before_training(shards, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"lssar\[wandb\]"):
        train(tiny(shards), tmp_path, log=["wandb"])
    assert checkpoints(tmp_path) == []
