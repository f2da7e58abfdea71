"""docs/huggingface.md, run from top to bottom in one process, offline."""

import re
import shlex
from pathlib import Path

import pytest

from lssar.cli import main

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
PAGE = Path(__file__).parent.parent.parent / "docs/huggingface.md"


def test_the_page_runs(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    kinds = []
    page = re.sub(r"^<!-- not run: .*?-->\n```.*?^```", "", PAGE.read_text(), flags=re.S | re.M)
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M):
        kinds.append(kind)
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), namespace)
        else:
            for line in block.splitlines():
                main(shlex.split(line.removeprefix("lssar "), comments=True))
    assert kinds.count("python") == 6
    assert (tmp_path / "trained/last/model.safetensors").exists()
