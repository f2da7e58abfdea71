"""The corruption matrix: every file of a run and of its data, damaged in every way, under every command that reads it.

Outcomes:
  recovered   the command succeeds and a message on stderr says what was passed over
  refused     one line of error, exit status 1 or 2
  unaffected  the command succeeds without a message, and its result is the one from undamaged files
A traceback, or another result without a message, is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lssar.data.prepare import Settings, prepare
from lssar.data.tokenizers import load_tokenizer
from lssar.records import write_sealed_json
from lssar.training import checkpoints, train
from lssar.training.metrics import read_metrics
from tests.attack.children import fork_ranks, kill, run_and_read, wait
from tests.training.counting import tiny

STEPS, STOP_AT = 12, 8


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 2
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def wrong_type(path: Path) -> None:
    path.write_text("[1, 2, 3]\n" if path.suffix.startswith(".json") else '{"not": "a tensor"}')


def remove(path: Path) -> None:
    path.unlink()


def link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate, "bit flipped": flip_bit, "empty": empty, "wrong type": wrong_type, "missing": remove,
    "broken link": link_to_nowhere,
}  # fmt: skip


def make(folder: Path, processes: int = 1) -> Path:
    """A folder with data and a run that was stopped between two checkpoints and its end.

    Trained on several processes, its checkpoints are sharded; the commands under attack run on one.
    """
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for i in range(40):
        (sources / f"{i:02d}.txt").write_text(f"document {i}: " + "abc " * (20 + i))
    settings = Settings(name="x", sources=[str(sources)], val_share=0.1)
    prepare(settings, load_tokenizer("bytes"), folder / "data")
    recipe = tiny(folder / "data", steps=STEPS, parallel="fsdp", micro_batch=2)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == STOP_AT + 2:
            while not checkpoints.folder(folder / "run", STOP_AT).exists():  # it is written in the background
                time.sleep(0.01)
            os._exit(0)

    pids = fork_ranks(lambda: train(recipe, folder / "run", report=stop) and None, folder / "log", processes)
    if wait(pids, 60) is None:
        kill(pids)
        raise AssertionError(f"the run to damage did not end: {(folder / 'log').read_text()[-2000:]}")
    (folder / "run" / ".lock").unlink()  # what a killed process leaves is the kill loop's subject
    return folder


def commands(folder: Path) -> dict[str, list[str]]:
    run, data, out = str(folder / "run"), str(folder / "data"), str(folder / "out" / "length")
    device = ["--device", "cpu"]
    return {
        "train": ["train", run],
        "eval length": ["eval", "length", run, "--multiples", "1", "2", "--out", out, *device],
        "generate": ["generate", run, "--tokens", "8", "--temperature", "0", *device],
        "data show": ["data", "show", data],
    }


def result(folder: Path, command: str, output: str) -> Any:
    """What a command produced, without what differs from one time to the next."""
    if command == "train":
        return [row["loss"] for row in read_metrics(folder / "run")]
    if command == "eval length":
        curves = json.loads((folder / "out" / "length.json").read_text())["curves"]
        return [[row["loss"] for row in curve["by_length"]] for curve in curves]
    return output.replace(str(folder), "")


def preload() -> None:
    """Import what the commands import, so that every forked process need not."""
    from lssar.commands import data, eval_length, generate
    from lssar.commands import train as train_command
    from lssar.evaluation import length
    from lssar.plots import plot_length

    assert all((data, eval_length, generate, train_command, length, plot_length))


def execute(folder: Path, command: str) -> tuple[int, str]:
    def act() -> None:
        import torch

        from lssar.cli import main

        torch.set_num_threads(1)
        main(commands(folder)[command])

    return run_and_read(act)


def files(folder: Path) -> list[Path]:
    """Every file that training and preparation wrote, relative to the folder."""
    found = [*(folder / "run").rglob("*"), *(folder / "data").rglob("*")]
    return sorted(path.relative_to(folder) for path in found if path.is_file())


def judge(code: int, output: str, same: Callable[[], bool]) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("error:", "warning:"))]
    if "Traceback" in output or code not in (0, 1, 2):
        return "traceback"
    if code:
        return "refused" if sum(line.startswith("error:") for line in lines) >= 1 else "failed without a message"
    if lines:
        return "recovered"
    return "unaffected" if same() else "silent"


def newest_checkpoint(file: Path, damage: str, command: str) -> bool:
    """For `only`: no other files are read that depend on the number of processes."""
    return f"step-{STOP_AT:07d}" in file.parts


GOOD = ("recovered", "refused", "unaffected")


def matrix(
    folder: Path, only: Callable[[Path, str, str], bool] = lambda file, damage, command: True, processes: int = 1
) -> Iterator[dict]:
    """One row for each file, damage and command; `only` selects some of them."""
    preload()
    original = make(folder / "original", processes)
    expected: dict[str, Any] = {}
    work = folder / "work"

    def fresh() -> Path:
        """A copy at the same path every time, since a run knows where its data lies."""
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(original, work)
        config = work / "run" / "config.json"
        record = json.loads(config.read_text())
        assert record.pop("checksum")
        record["recipe"]["data"] = str(work / "data")
        write_sealed_json(config, record, overwrite=True)
        return work

    def undamaged(command: str) -> Any:
        if command not in expected:
            code, output = execute(fresh(), command)
            if code or "warning:" in output:
                raise AssertionError(f"{command} fails with undamaged files: {output[-2000:]}")
            expected[command] = result(work, command, output)
        return expected[command]

    for file in files(original):
        for damage, act in DAMAGES.items():
            for command in commands(work):
                if not only(file, damage, command) or (command == "data show" and file.parts[0] != "data"):
                    continue
                usual = undamaged(command)
                act(fresh() / file)
                code, output = execute(work, command)
                outcome = judge(code, output, lambda: result(work, command, output) == usual)  # noqa: B023
                row = {"file": file.as_posix(), "damage": damage, "command": command, "outcome": outcome}
                yield row if outcome in GOOD else row | {"output": output[-1500:]}
