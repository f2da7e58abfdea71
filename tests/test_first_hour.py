"""Every command of README and docs. All are parsed by default; `-m slow` runs them, page by page, in empty folders.

A fenced block is run as it stands, unless a comment above it says why it cannot be:

    <!-- not run: needs eight GPUs -->

What a reader is expected to have, a comment makes first:

    <!-- before: mkdir notes && seq 99 > notes/a.txt -->
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lssar.training.recipes import RECIPES
from lssar_cli import find, parse

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"((?:^<!-- .*? -->\n)*)^```(\w*)\n(.*?)^```$", re.S | re.M)
SHELL = ("", "sh", "bash", "text", "console")
COMMAND = re.compile(r"^(lssar|make|pip|python|torchrun|lm_eval) ", re.M)


@dataclass
class Block:
    kind: str
    text: str
    not_run: str | None
    before: list[str]


def blocks(page: str) -> list[Block]:
    """Blocks with commands or Python, in order."""
    found = []
    for comments, kind, text in BLOCK.findall((ROOT / page).read_text()):
        if kind == "python" or (kind in SHELL and COMMAND.search(text)):
            reasons = re.findall(r"^<!-- not run: (.+?) -->$", comments, re.M)
            before = re.findall(r"^<!-- before: (.+?) -->$", comments, re.M | re.S)
            found.append(Block(kind, text, reasons[0] if reasons else None, before))
    return found


def commands(block: Block) -> list[list[str]]:
    """Words of the `lssar` commands of a block, without that first word."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"(lssar|torchrun .*lssar) ", line)]
    return [line[line.index("train") :] if line[0] == "torchrun" else line[1:] for line in words]


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.kind != "python" for block in blocks(page))])
def test_commands_parse(page):
    """A command or a flag that is gone is noticed, also where a block is not run."""
    shown = [words for block in blocks(page) if block.kind != "python" for words in commands(block)]
    for words in shown:
        if words[0] == "train" and words[1] not in RECIPES:
            continue  # a run folder that is not here
        prog, command, rest = find(words)
        try:
            assert parse(command, prog, rest)
        except SystemExit as error:
            pytest.fail(f"{page}: lssar {shlex.join(words)}: exit code {error.code}")


def test_blocks_are_found_and_marks_have_reasons():
    block = BLOCK.findall("<!-- before: a -->\n<!-- not run: b -->\n```sh\nlssar specs\n```\n")
    assert block == [("<!-- before: a -->\n<!-- not run: b -->\n", "sh", "lssar specs\n")]
    assert any(block.not_run is None and block.kind != "python" for page in PAGES for block in blocks(page))
    for page in PAGES:
        text = (ROOT / page).read_text()
        marks = len(re.findall(r"^<!-- not run:", text, re.M))
        assert marks == sum(block.not_run is not None for block in blocks(page)), f"{page}: a mark without its block"


@pytest.fixture
def environment(tmp_path_factory):
    """PATH with an `lssar` of this checkout; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in {"lssar": "-m lssar_cli", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(not block.not_run for block in blocks(page))])
def test_the_first_hour(page, tmp_path, environment, monkeypatch):
    """Blocks share a folder and, where they are Python, their variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace: dict = {}
    for block in blocks(page):
        for script in block.before:
            run(script, environment, tmp_path, page)
        if block.not_run:
            continue
        if block.kind == "python":
            exec(compile(block.text, page, "exec"), namespace)
        else:
            run(block.text, environment, tmp_path, page)


def run(script: str, environment: dict, folder: Path, page: str) -> None:
    made = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, f"{page}:\n{script}\n{made.stdout[-2000:]}\n{made.stderr[-3000:]}"
