"""Makes the site from files that live outside docs/: the README is its home page, and results hold its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the README as index.md, and every figure under results/."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    for name in ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for figure in sorted((ROOT / "results").rglob("*.png")):
        uri = figure.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages refer to results/ from docs/ as it lies in the repository; in the site it is inside."""
    return markdown.replace("](../results/", "](results/").replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")
