"""The docs against the code: mechanisms, examples, links, results, and the site."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lssar

ROOT = Path(__file__).parent.parent


def test_the_map_of_the_paper_names_every_mechanism():
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \|", (ROOT / "docs/mechanism.md").read_text(), re.M)
    assert sorted(rows) == sorted(lssar.specs())


@pytest.mark.parametrize("page", ["README.md", "docs/long-reader.md"])
def test_python_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    namespace = {"torch": torch}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tables_come_from_the_committed_results():
    check = subprocess.run(
        [sys.executable, "benchmarks/report.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_numbers_in_sentences_follow_the_results():
    from benchmarks.statements import Statement, filled

    one = Statement("a.md", "It finds {share} of them, {other} more.", {"share": "94%", "other": "two or three"})
    assert filled("So. It finds\n88% of them, one\nmore. End", "a.md", [one]) == (
        "So. It finds\n94% of them, two or three\nmore. End", [],
    )  # fmt: skip
    same = "It finds 94% of them, two or\nthree more."
    assert filled(same, "a.md", [one]) == (same, [])
    assert "0 sentences" in filled("It found 94% of them.", "a.md", [one])[1][0]
    wrong = Statement("a.md", "It finds {share}.", {"share": "94%"}, supported=False)
    assert "no longer support" in filled("It finds 94%.", "a.md", [wrong])[1][0]
    assert filled("Another page.", "b.md", [one]) == ("Another page.", [])


def test_switches_are_read_in_one_module_and_documented():
    named = {path: set(re.findall(r"""["'](LSSAR_\w+)""", path.read_text())) for path in (ROOT / "src").rglob("*.py")}
    switches = named.pop(ROOT / "src/lssar/switches.py")
    assert not any(named.values()), "environment switches belong in switches.py"
    assert switches == set(re.findall(r"^\| `(LSSAR_\w+)` \|", (ROOT / "docs/switches.md").read_text(), re.M))


def test_newtons_page_is_what_its_results_say():
    from lssar.experiments.newton.report import filled

    page = ROOT / "docs/newton.md"
    assert filled(page) == page.read_text(), "run `lssar newton report`"


def test_the_site_builds_without_warnings(tmp_path):
    """Dead links and anchors, pages outside the navigation and unknown API names are warnings."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000


def test_the_diagram_shows_the_imports():
    check = subprocess.run([sys.executable, "docs/development/diagram.py", "--check"], cwd=ROOT)
    assert check.returncode == 0, "run python docs/development/diagram.py"
