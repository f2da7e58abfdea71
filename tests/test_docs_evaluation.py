"""docs/evaluation.md: what it shows runs, in small; what it only names is read by the commands' own parsers."""

import re
import shlex
from pathlib import Path

import pytest

from lssar_cli import find, main, parse
from tests.evaluation.test_benchmarks import write_examples

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/evaluation.md").read_text()
SMALL = {"train": ["--steps", "2"], "retrieval": ["--samples", "1"], "downstream": []}


def lines(kind: str) -> list[list[str]]:
    blocks = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines() if line.startswith("lssar ")]


def test_commands_run_at_a_small_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "bench")
    shown = lines("sh")
    assert len(shown) >= 4
    for words in shown:
        main([*words, *SMALL[words[1] if words[0] == "eval" else words[0]]])
    assert {"tiny.json", "tiny.png", "tiny.svg", "downstream.json"} <= {path.name for path in Path("out").iterdir()}


def test_commands_that_are_not_run_parse():
    for words in lines("text"):
        prog, command, rest = find(words)
        match words[0]:
            case "eval":
                assert parse(command, prog, rest)
            case "train":
                assert parse(command, prog, rest).recipe.retrieval_share > 0
            case "plot":
                assert all((ROOT / file).exists() for file in words[1:])
            case other:
                assert other == "export"


@pytest.mark.parametrize("number", [0, 1])
def test_python_blocks_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    block = re.findall(r"```python\n(.*?)```", PAGE, re.S)[number]
    if "lm_eval" in block:
        pytest.importorskip("lm_eval")
    exec(compile(block, "docs/evaluation.md", "exec"), {})
