"""Checkpoints of models that are divided over processes: gloo on the CPU, processes forked from this one.

Training is in float64, so that the order of summation does not hide a difference.
"""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lssar.records import read_json
from lssar.runs import Run
from lssar.training import checkpoints, sharded, train
from lssar.training.recipes import Recipe
from tests.attack.children import fork_ranks, kill, wait
from tests.training.counting import losses, tiny, write_counting


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_counting(tmp_path_factory.mktemp("shards"))


TOLERANCE = 1e-9


def recipe_of(shards: Path, **changes) -> Recipe:
    return tiny(shards, **{"lr": 3e-4, "parallel": "fsdp", "micro_batch": 2} | changes)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def in_processes(
    size: int, recipe: Recipe, run: Path, stop_at: int | None = None, first: Callable[[], None] = lambda: None
) -> tuple[list[int], str]:
    """Exit statuses and output of `size` processes that train; `first` is called in each before it begins."""

    def report(row):
        if row["step"] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def act():
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        first()
        try:
            train(recipe, run, report)
        except (OSError, ValueError) as error:
            raise SystemExit(print(f"error: {error}") or 1) from None

    log = run.with_suffix(".log")
    log.unlink(missing_ok=True)
    pids = fork_ranks(act, log, size)
    ends = wait(pids, 60)
    if ends is None:
        kill(pids)
        raise AssertionError(f"processes did not end within a minute: {log.read_text()}")
    return ends, log.read_text()


def trained(size: int, recipe: Recipe, run: Path, **how) -> Path:
    ends, output = in_processes(size, recipe, run, **how)
    assert ends == [0] * size, output
    return run


@pytest.fixture(scope="module")
def uninterrupted(shards, tmp_path_factory) -> Path:
    """A run of 12 steps on two processes with checkpoints of steps 4, 8 and 12."""
    return trained(2, recipe_of(shards, keep=9), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(uninterrupted, tmp_path) -> Path:
    return Path(shutil.copytree(uninterrupted, tmp_path / "run"))


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


# saved on N processes, loaded on M


def test_a_run_moves_between_numbers_of_processes(shards, tmp_path):
    """And between kinds of checkpoints; the losses are those of one process. SSMax has two numbers a layer."""
    whole = trained(1, recipe_of(shards, attention="ssmax", heads=2), tmp_path / "whole")
    run = tmp_path / "run"
    for size, changes, plain in (
        (1, {}, True),
        (2, {}, False),
        (4, {"context_parallel": 2, "micro_batch": 1}, False),
        (2, {"parallel": "ddp"}, True),
        (2, {}, False),
        (1, {}, True),
    ):
        step = len(losses(run)) + 2 if run.exists() else 2
        trained(size, recipe_of(shards, attention="ssmax", heads=2, **changes), run, stop_at=step)
        newest = checkpoints.latest(run)
        assert checkpoints.step_of(newest) == step
        assert (checkpoints.MODEL in names(newest)) == plain
    np.testing.assert_allclose(losses(run), losses(whole), rtol=0, atol=TOLERANCE)


def test_muons_state_is_kept_to_the_bit(shards, tmp_path):
    """On the same number of processes; Muon computes in bfloat16, which enlarges differences between numbers."""
    recipe = recipe_of(shards, optimiser="muon", steps=4)
    whole = trained(2, recipe, tmp_path / "whole")
    trained(2, recipe, tmp_path / "run", stop_at=2)
    trained(2, recipe, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)
    one, other = (checkpoints.load_all(checkpoints.latest(run)) for run in (whole, tmp_path / "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(key.endswith("/momentum_buffer") for key in one)
    shutil.rmtree(tmp_path / "run/checkpoints/step-0000004")
    trained(1, recipe, tmp_path / "run")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(whole), rtol=0, atol=1e-2)


def test_every_process_writes_its_part_and_all_parts_make_the_whole(uninterrupted):
    path = checkpoints.latest(uninterrupted)
    files = [name for name in names(path) if name.endswith(".safetensors")]
    assert files == [f"shard-{r:05d}-model-{k:05d}-of-00002.safetensors" for r in (1, 2) for k in (1, 2)]
    assert {*names(path)} == {*files, "state.json", "checksums.json"}
    for kind in (1, 2):
        one, other = (os.path.getsize(path / f"shard-{r:05d}-model-{kind:05d}-of-00002.safetensors") for r in (1, 2))
        assert 0.8 < one / other < 1.25
    model = Run.open(uninterrupted, "cpu").model()
    whole = checkpoints.load_all(path)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, whole[name].to(weight.dtype))
        assert whole[f"{name}/exp_avg"].shape == weight.shape


class NothingWhole(TorchDispatchMode):
    """Fails if an operation gives a local tensor as large as the largest weight, views of files left out."""

    def __init__(self, largest: int):
        super().__init__()
        self.largest = largest
        """Bytes."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in tree_leaves((args, kwargs)) if self.counts(x)}
        for x in tree_leaves(result):
            if self.counts(x) and x.data_ptr() not in given:
                assert x.nbytes < self.largest, f"{operation} gives {tuple(x.shape)}"
        return result

    def counts(self, x: object) -> bool:
        return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


def test_no_tensor_is_ever_whole_on_one_process(shards, run):
    """Neither when it is saved nor when it is loaded, from a sharded checkpoint or from a plain one."""

    def watch():
        for name in ("save", "restore"):
            real = getattr(checkpoints.Saver, name)

            def watched(self, *args, real=real):
                with NothingWhole(max(p.numel() * p.element_size() for p in self.model.parameters())):
                    return real(self, *args)

            setattr(checkpoints.Saver, name, watched)

    shutil.rmtree(run / "checkpoints/step-0000012")
    trained(2, recipe_of(shards), run, stop_at=10, first=watch)
    trained(1, recipe_of(shards), run, stop_at=11)
    trained(2, recipe_of(shards), run, first=watch)


# in the background


def test_training_continues_while_a_checkpoint_is_written(shards, uninterrupted, tmp_path):
    """The save of step 4 ends only after step 6; what it holds is step 4."""
    reached = threading.Event()
    real_complete, real_any = checkpoints._complete, checkpoints.Processes.any

    def first():
        def complete(path, state, sums):
            if state["step"] == 4:
                assert reached.wait(30), "training waits for the checkpoint"
            real_complete(path, state, sums)

        def seen(self, flag):
            if rank() == 0 and (calls := calls_so_far.append(0) or len(calls_so_far)) and calls >= 6:
                reached.set()
            return real_any(self, flag)

        calls_so_far: list[int] = []
        checkpoints._complete, checkpoints.Processes.any = complete, seen

    slow = trained(2, recipe_of(shards, keep=9), tmp_path / "run", first=first)
    for step in (4, 8, 12):
        one, other = (checkpoints.load_all(checkpoints.folder(run, step)) for run in (slow, uninterrupted))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


# killed in the middle of a save


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(moment: str, victim: int, step: int = 8) -> Callable[[], None]:
    """Makes process `victim` kill itself while it saves `step`."""

    def first():
        if rank() != victim:
            return
        at_this_step = f"step-{step:07d}"
        if moment == "half written":
            real = sharded.dcp.HuggingFaceStorageWriter.write_data

            def write_data(self, plan, planner):
                done = real(self, plan, planner)
                if at_this_step in str(self.path):
                    file = next(Path(self.path).glob(f"shard-{victim + 1:05d}-*"))
                    os.truncate(file, file.stat().st_size // 2)
                    die()
                return done

            sharded.dcp.HuggingFaceStorageWriter.write_data = write_data
        elif moment == "written":
            real_sum = sharded.checksum
            sharded.checksum = lambda path: die() if at_this_step in str(path) else real_sum(path)
        else:
            target = {"complete": "_complete", "named": "_remove_old"}[moment]
            real_function = getattr(checkpoints, target)

            def function(path, *rest):
                if checkpoints.folder(path, step).exists() if moment == "named" else at_this_step in str(path):
                    die()
                return real_function(path, *rest)

            setattr(checkpoints, target, function)

    return first


def check_kill(shards: Path, uninterrupted: Path, run: Path, moment: str, victim: int, sizes: tuple[int, int]) -> None:
    began = time.monotonic()
    ends, output = in_processes(sizes[0], recipe_of(shards), run, first=kill_at(moment, victim))
    assert time.monotonic() - began < 60
    assert ends[victim] == -signal.SIGKILL
    assert all(end == 1 for number, end in enumerate(ends) if number != victim), output
    assert "Traceback" not in output
    for number in {*range(sizes[0])} - {victim}:
        assert f"error: process {number} lost the connection to another process" in output
    found = checkpoints.checkpoints(run)
    assert [checkpoints.step_of(path) for path in found] == ([4, 8] if moment == "named" else [4])
    assert all(checkpoints.damage(path, whole=True) is None for path in found)
    trained(sizes[1], recipe_of(shards), run)
    assert not list((run / "checkpoints").glob(".*"))
    if sizes == (2, 2):
        assert losses(run) == losses(uninterrupted)
    np.testing.assert_allclose(losses(run), losses(uninterrupted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("moment, victim, sizes", [("half written", 2, (4, 1)), ("complete", 0, (2, 2))])
def test_one_process_is_killed_in_a_save(shards, uninterrupted, tmp_path, moment, victim, sizes):
    """The others say so and end; the run resumes on any number of processes, with nothing lost."""
    check_kill(shards, uninterrupted, tmp_path / "run", moment, victim, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize(
    "moment, victim",
    [("half written", 0), ("half written", 1), ("written", 0), ("written", 1), ("complete", 0), ("named", 0)],
)
def test_one_process_is_killed_in_a_save_at_length(shards, uninterrupted, tmp_path, moment, victim, sizes):
    check_kill(shards, uninterrupted, tmp_path / "run", moment, victim, sizes)


def test_a_save_that_cannot_end_holds_up_no_process(shards, tmp_path):
    """Only neighbours of a dead process notice; the others do when those end, which must not wait for their save."""

    def first():
        real = sharded.dcp.save

        def save(*args, storage_writer, **kwargs):
            if "step-0000008" in str(storage_writer.path):
                die() if rank() == 2 else threading.Event().wait()
            return real(*args, storage_writer=storage_writer, **kwargs)

        sharded.dcp.save = save

    ends, output = in_processes(4, recipe_of(shards), tmp_path / "run", first=first)
    assert ends == [1, 1, -signal.SIGKILL, 1]
    assert output.count("lost the connection to another process") == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_ends_when_one_process_is_killed(shards, uninterrupted, tmp_path, victim):
    run, script = tmp_path / "run", tmp_path / "run.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nimport torch\nfrom lssar.training import Recipe, train\n"
        "torch.set_num_threads(1)\ntorch.set_default_dtype(torch.float64)\n"
        f"recipe = Recipe.from_dict({recipe_of(shards).to_dict()!r})\n"
        f"try:\n    train(recipe, Path({str(run)!r}), report=lambda row: time.sleep(0.5))\n"
        "except OSError as error:\n    sys.exit(f'error: {error}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    limit = time.monotonic() + 60
    while not checkpoints.folder(run, 4).exists() and time.monotonic() < limit:
        time.sleep(0.05)
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(workers[victim]), signal.SIGKILL)
    assert agent.wait(60) == 1
    said = (tmp_path / "log").read_text()
    assert f"error: process {1 - victim} lost the connection to another process" in said
    assert "Signal 9 (SIGKILL)" in said  # torchrun's own summary
    trained(1, recipe_of(shards), run)
    np.testing.assert_allclose(losses(run), losses(uninterrupted), rtol=0, atol=TOLERANCE)


def test_a_process_that_ends_after_a_save_does_not_abort():
    """It aborts if the thread that saved is still freeing its tensors while Python ends."""
    script = """
import torch
from lssar.training.sharded import BackgroundSave
def write():
    tensors = [torch.randn(300, 300) for _ in range(200)]
BackgroundSave(write).wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_not_shared_is_refused(shards, tmp_path):
    """Process 1 writes somewhere else, as on the local disk of another machine."""
    real = checkpoints.folder

    def first():
        if rank() == 1:
            checkpoints.folder = lambda run, step: real(tmp_path / "other machine", step)

    ends, output = in_processes(2, recipe_of(shards), tmp_path / "run", first=first)
    assert ends == [1, 1] and "Traceback" not in output
    assert output.count("must be on a file system that all processes share") == 2
    assert names(tmp_path / "run/checkpoints") == []


def test_a_full_disk_in_one_process_is_reported_by_all(shards, tmp_path):
    """A limit on the size of files stands for the disk."""
    run = tmp_path / "run"
    trained(2, recipe_of(shards), run, stop_at=4)

    def first():
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    ends, output = in_processes(2, recipe_of(shards), run, first=first)
    assert ends == [1, 1] and "Traceback" not in output
    assert output.count("process 1: [Errno 27] File too large; what was finished before is not lost") == 2
    assert names(run / "checkpoints") == ["step-0000004"]


def test_weights_that_are_not_finite_are_not_saved(shards, tmp_path):
    """In the part of one process only."""

    def first():
        real = checkpoints.Saver.save

        def save(self, step, state):
            if step == 8 and rank() == 1:
                next(self.model.parameters()).detach().to_local().view(-1)[0] = float("nan")
            return real(self, step, state)

        checkpoints.Saver.save = save

    ends, output = in_processes(2, recipe_of(shards), tmp_path / "run", first=first)
    assert ends == [1, 1], output
    assert "step 8: weights or optimiser state are not finite, so no checkpoint is saved" in output
    assert "the last finite checkpoint is" in output
    assert names(tmp_path / "run/checkpoints") == ["step-0000004"]


# damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


WEIGHTS, MOMENTS = (f"shard-00002-model-{k:05d}-of-00002.safetensors" for k in (1, 2))


@pytest.mark.parametrize("name", [WEIGHTS, MOMENTS, "state.json", "checksums.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over(run, name, how, capsys):
    file = run / "checkpoints/step-0000012" / name
    flip(file) if how == "flip" else file.unlink() if how == "remove" else os.truncate(file, file.stat().st_size // 2)
    assert checkpoints.newest(run, whole=True).name == "step-0000008"
    said = capsys.readouterr().err
    assert "step-0000012 is damaged and not used" in said and "using step-0000008" in said
    weights = name in (WEIGHTS, "checksums.json")  # evaluation needs no more
    assert Run.open(run, "cpu").step == (8 if weights else 12)
    Run.open(run, "cpu").model()


def test_any_bit_of_the_checksums_may_flip(run):
    """Names of files in it as well as their checksums."""
    file = run / "checkpoints/step-0000012/checksums.json"
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        same = _parsed(file.read_bytes()) == json.loads(content)
        assert (checkpoints.damage(file.parent, whole=True) is None) == same, place


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_file_that_was_not_saved_is_no_part_of_it(run):
    path = run / "checkpoints/step-0000012"
    shutil.copy(path / WEIGHTS, path / WEIGHTS.replace("00002-model", "00003-model"))
    assert "does not list shard-00003" in checkpoints.damage(path, whole=False)


def test_resumes_from_the_older_one_on_several_processes(shards, uninterrupted, run):
    flip(run / "checkpoints/step-0000012" / MOMENTS)
    ends, output = in_processes(2, recipe_of(shards), run)
    assert ends == [0, 0]
    assert "step-0000012 is damaged and not used" in output and "using step-0000008" in output
    assert losses(run) == losses(uninterrupted)
    assert names(run / "checkpoints") == ["step-0000008", "step-0000012"]


def test_loading_never_unpickles(run, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    path = checkpoints.latest(run)
    assert checkpoints.load_all(path)["rng"].dtype == torch.uint8
    assert {Path(name).suffix for name in names(path)} == {".safetensors", ".json"}


def test_a_checkpoint_of_another_model_is_refused(shards, run):
    config = run / "config.json"
    record = read_json(config)
    record.pop("checksum")
    record["recipe"]["attention"] = "ssmax"  # has a parameter more
    config.write_text(json.dumps(record))
    ends, output = in_processes(2, recipe_of(shards, attention="ssmax"), run)
    assert ends == [1, 1] and "Traceback" not in output
    assert "step-0000012 does not fit this model: process 0: " in output
