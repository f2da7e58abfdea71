"""Imports go one way: which part of the package may import which, as one table."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lssar"

BASE = {"configs", "layouts", "locks", "records", "specs", "switches", "tables", "visibility"}
OPERATOR = BASE | {"ops", "attention"}
MODEL = OPERATOR | {"context", "nn", "model"}
DATA = BASE | {"data"}
EVALUATION = MODEL | DATA | {"evaluation"}
TRAINING = MODEL | DATA | {"training"}
EXPERIMENTS = EVALUATION | TRAINING | {"runs", "experiments", "plots"}

MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "records": set(),
    "locks": {"records"},
    "switches": set(),
    "tables": set(),
    "visibility": set(),
    "specs": {"configs"},
    "layouts": {"configs", "specs"},
    "context": BASE,
    "ops": BASE,
    "attention": OPERATOR,
    "functional": OPERATOR,
    "testing": OPERATOR,
    "nn": OPERATOR | {"context"},
    "model": OPERATOR | {"context", "nn"},
    "data": DATA,
    "training": TRAINING,
    "runs": TRAINING,
    "evaluation": EVALUATION,
    "plots": BASE,
    "experiments": EXPERIMENTS,
    "report": EVALUATION | TRAINING | {"runs", "plots"},
    "benchmark": MODEL,
    "hf": EVALUATION | TRAINING | {"runs"},
    "commands": EXPERIMENTS | {"report", "benchmark", "hf"},
    "cli": set(),  # lssar_cli, outside the package, imports commands by name
    "__main__": set(),
    "__init__": MODEL | {"functional"},
}
"""For each module or folder directly under `lssar`, the others that it may import."""


def imports(source: str, package: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Modules of lssar that a file imports, anywhere in it, without the leading `lssar`.

    `package` is the package of the file, for relative imports.
    """
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ("lssar", *package)[: len(package) + 2 - node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found |= {(*module, alias.name) for alias in node.names}
    return {name[1:] for name in found if name[0] == "lssar" and len(name) > 1}


def forbidden(part: str, imported: set[tuple[str, ...]]) -> list[str]:
    """Imports that the table does not allow; a name of `lssar` itself (`from lssar import spec`) counts as public."""
    modules = set(MAY_IMPORT) - {"__init__"}
    return sorted(".".join(name) for name in imported if name[0] in modules - MAY_IMPORT[part] - {part})


FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_part_is_in_the_table():
    assert {part_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("part", sorted({part_of(path) for path in FILES}))
def test_imports_go_one_way(part):
    wrong = {}
    for path in FILES:
        if part_of(path) == part:
            package = path.relative_to(PACKAGE).parts[:-1]
            if found := forbidden(part, imports(path.read_text(), package)):
                wrong[str(path.relative_to(PACKAGE))] = found
    assert not wrong, f"{part} may import {sorted(MAY_IMPORT[part])}, but: {wrong}"


RUNS_OTHERS = {"report": {"diagnose", "eval_length", "eval_retrieval"}}
"""`lssar report --compute` runs the evaluation commands whose results are missing."""


def test_commands_do_not_import_each_other():
    for path in sorted((PACKAGE / "commands").glob("*.py")):
        for name in imports(path.read_text(), ("commands",)):
            if name[0] == "commands" and len(name) > 1:
                allowed = {"common"} | RUNS_OTHERS.get(path.stem, set())
                assert name[1] in allowed, f"{path.name} imports lssar.{'.'.join(name)}"


@pytest.mark.parametrize(
    "part, source",
    [
        ("data", "from lssar.ops.loss import IGNORE"),
        ("evaluation", "def f():\n    from lssar.training.sources import open_data"),
        ("model", "import lssar.training.loop"),
        ("training", "from lssar import runs"),
        ("data", "from ..ops import loss"),
    ],
)
def test_an_upward_import_is_found(part, source):
    assert forbidden(part, imports(source, ("data",)))
