"""benchmarks/gpu.py: its jobs are the commands that made the committed figures, and it goes on where it ended."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import pytest
import tyro
from benchmarks import gpu

ROOT = Path(__file__).parent.parent


def words_of(command: str) -> list[str]:
    """Of `lssar bench`, without where the result goes."""
    words = [word for word in shlex.split(command) if word != "--overwrite"]
    at = words.index("--out")
    return words[:at] + words[at + 2 :]


def test_tables_are_made_by_the_commands_that_made_the_committed_ones():
    found = 0
    for job in gpu.JOBS:
        words = shlex.split(job.words)
        if words[:3] == ["-m", "lssar.cli", "bench"]:
            committed = ROOT / f"benchmarks/results/h200-{job.name}.json"
            command = json.loads(committed.read_text())["command"].removeprefix("lssar ")
            assert words_of(shlex.join(words[2:])) == words_of(command), job.name
            found += 1
        else:
            files = [word for word in words if word.startswith(("benchmarks/", "tests/"))]
            assert files and all((ROOT / file).exists() for file in files), job.name
    assert found == len(list(ROOT.glob("benchmarks/results/h200-*.json")))
    assert len({job.name for job in gpu.JOBS}) == len(gpu.JOBS)


def test_every_test_that_wants_a_gpu_is_asked():
    asked = [word for job in gpu.JOBS for word in shlex.split(job.words) if word.startswith("tests/")]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu\n" in path.read_text()]
    for path in marked:
        assert any(path.relative_to(ROOT).is_relative_to(word) for word in asked), path
    assert len(marked) > 5


def test_jobs_of_tables_are_understood():
    from lssar.commands.bench import Bench

    for job in gpu.JOBS:
        if "lssar.cli bench" in job.words:
            parsed = tyro.cli(Bench, args=shlex.split(job.words)[3:])
            assert parsed.device == "cuda" and parsed.overwrite


def test_what_is_done_is_not_run_again(tmp_path, monkeypatch, capsys):
    good = gpu.Job(
        "good", "-c \"import os; open('OUT/CARD-' + os.environ['X'], 'a').write('x'); print('said')\"", 60, {"X": "y"}
    )
    bad = gpu.Job("bad", "-c 'raise SystemExit(3)'", 60)
    slow = gpu.Job("slow", "-c 'import time; time.sleep(60)'", 1)
    large = gpu.Job("large", "-c 'pass'", 1000)
    monkeypatch.setattr(gpu, "card", lambda: "abacus")
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--limit", "500"])
    assert gpu.main((good, bad, slow, large)) == 1
    said = capsys.readouterr().out
    assert "good: done" in said and "bad: FAILED with 3, see bad.txt" in said and "slow: cut off after 1 s" in said
    assert "large: not begun, may take 1000 s" in said
    assert (tmp_path / "good.txt").read_text() == "said\n"
    assert gpu.main((good, dataclasses.replace(bad, words="-c pass"))) == 0
    assert (tmp_path / "abacus-y").read_text() == "x"  # once
    assert "good" not in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main()
    assert not (tmp_path / "out").exists()
