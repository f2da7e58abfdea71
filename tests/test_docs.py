"""The docs against the code: lines that they name, code that they show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lssar

ROOT = Path(__file__).parent.parent
SPECS = (ROOT / "src/lssar/specs.py").read_text().splitlines()


def test_the_map_of_the_paper_names_the_right_lines():
    rows = re.findall(
        r"\| `(\w+)` \| \[specs\.py:(\d+)\]\(\.\./src/lssar/specs\.py#L(\d+)\)",
        (ROOT / "docs/mechanism.md").read_text(),
    )
    assert {name for name, _, _ in rows} == set(lssar.specs())
    for name, line, anchor in rows:
        here = next(i for i, text in enumerate(SPECS, 1) if f'name="{name}"' in text)
        assert int(line) == int(anchor) == here, f"docs/mechanism.md: {name} is on line {here} of specs.py"


@pytest.mark.parametrize("page", ["README.md"])
def test_python_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    namespace = {"torch": torch}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_figures_come_from_the_committed_results():
    check = subprocess.run(
        [sys.executable, "benchmarks/report.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_switches_are_read_in_one_module_and_documented():
    named = {path: set(re.findall(r"""["'](LSSAR_\w+)""", path.read_text())) for path in (ROOT / "src").rglob("*.py")}
    switches = named.pop(ROOT / "src/lssar/switches.py")
    assert not any(named.values()), "environment switches belong in switches.py"
    assert switches == set(re.findall(r"^\| `(LSSAR_\w+)` \|", (ROOT / "docs/switches.md").read_text(), re.M))


def test_newtons_page_is_what_its_results_say():
    from lssar.experiments.newton.report import filled

    page = ROOT / "docs/newton.md"
    assert filled(page) == page.read_text(), "run `lssar newton report`"
