"""Writes the diagram of docs/architecture.md from the imports: `python docs/development/diagram.py [--check]`."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE, PAGE = ROOT / "src/lssar", ROOT / "docs/architecture.md"
BLOCK = re.compile(r"(<!-- diagram -->\n).*?(<!-- end -->)", re.S)
EVERYWHERE = {
    "configs",
    "records",
    "locks",
    "switches",
    "tables",
    "visibility",
    "__init__",
    "__main__",
    "cli",
    "testing",
}
"""Small modules that many parts use, and the entry points: arrows to them would hide the rest."""


def parts() -> dict[str, set[str]]:
    """Each module or folder under `lssar`, and the others that its files import."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    found: dict[str, set[str]] = {name: set() for name in names - EVERYWHERE}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in found:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for words in (module.split(".") for module in modules):
                if words[0] == "lssar" and len(words) > 1 and words[1] in found and words[1] != part:
                    found[part].add(words[1])
    return found


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that a longer path already implies."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += edges[name]
        return seen

    return {
        name: {to for to in uses if not any(to in reachable(o) for o in uses - {to})} for name, uses in edges.items()
    }


def diagram() -> str:
    arrows = [f"  {name} --> {to}" for name, uses in sorted(reduced(parts()).items()) for to in sorted(uses)]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```", ""])


def main() -> int:
    old = PAGE.read_text()
    new = BLOCK.sub(lambda found: found[1] + diagram() + found[2], old)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
