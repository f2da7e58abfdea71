"""The wheel: built from the sdist, installed without a compiler, it works and says what is active."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def run(*words, **options):
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("build")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    environment = os.environ | {"LSSAR_REQUIRE_NATIVE": "1"}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder, env=environment)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """An environment with the wheel; torch and the other dependencies come from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    wheel = next(dist.glob("*.whl"))
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_wheel_without_a_compiler(installed, tmp_path):
    environment = {"PATH": str(installed), "CC": "/bin/false", "HOME": str(tmp_path)}
    doctor = json.loads(run(installed / "lssar", "doctor", "--json", cwd=tmp_path, env=environment))
    assert doctor["kernels"]["native"].startswith("active")
    assert doctor["versions"]["commit"] == "not a checkout"
    code = "import lssar, torch; x = torch.randn(1, 2, 9, 8); print(lssar.__file__, lssar.attention(x, x, x).shape)"
    said = run(installed / "python", "-c", code, cwd=tmp_path, env=environment)
    assert str(installed.parent) in said and "[1, 2, 9, 8]" in said
    train = ["train", "tiny-cpu", "--size", "tiny", "--steps", "2", "--length", "32", "--out", "run"]
    assert "finished" in run(installed / "lssar", *train, cwd=tmp_path, env=environment)
    assert "usage: lssar COMMAND" in run(installed / "lssar", "--help", cwd=tmp_path, env=environment)


@pytest.mark.slow
def test_everything_is_in_the_wheel(installed):
    packages = next((installed.parent / "lib").rglob("site-packages"))
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.suffix in (".py", ".js", ".css", ".html", ".typed")
    }
    assert sources <= {path.relative_to(packages).as_posix() for path in packages.rglob("*")}
