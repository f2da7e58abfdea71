"""Tables as Markdown and as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; line breaks in cells become spaces, and `|` is escaped."""
    head = list(head)
    return "".join([_line(head), "|" + "---|" * len(head) + "\n", *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    plain = (cell.replace("\n", " ").replace("|", "\\|") for cell in cells)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in plain) + "\n"


def terminal_table(
    head: Iterable[str], rows: Iterable[Iterable[str]], width: int = 80, title: str = "", keys: int = 1
) -> str:
    """The table as lines of text, in which no cell is cut or broken.

    Columns that do not fit into `width` follow in another block below. The first `keys` columns, which name the rows,
    are in every block. Columns of numbers are aligned right.
    """
    lines = [[cell.replace("\n", " ") for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [i >= keys and all(_numeric(line[i]) for line in lines[1:]) for i in range(len(widths))]

    def text(line: Sequence[str], columns: Sequence[int]) -> str:
        return "  ".join(line[i].rjust(widths[i]) if right[i] else line[i].ljust(widths[i]) for i in columns).rstrip()

    blocks = []
    for columns in _blocks(widths, width, keys):
        rule = "  ".join("─" * widths[i] for i in columns)
        blocks.append("\n".join([text(lines[0], columns), rule, *(text(line, columns) for line in lines[1:])]))
    return "\n\n".join([*(["\n".join(textwrap.wrap(title, max(40, width)))] if title else []), *blocks]) + "\n"


def _blocks(widths: Sequence[int], width: int, keys: int) -> list[list[int]]:
    """Columns of each block: the keys and as many others as fit, at least one."""
    names = list(range(min(keys, len(widths))))
    start = sum(widths[i] + 2 for i in names) - 2
    blocks, used = [[*names]], start
    for i in range(len(names), len(widths)):
        if used + 2 + widths[i] > width and len(blocks[-1]) > len(names):
            blocks.append([*names])
            used = start
        blocks[-1].append(i)
        used += 2 + widths[i]
    return blocks


def _numeric(cell: str) -> bool:
    return not cell or cell[0] in "-+±<>~0123456789"


def terminal_text(markdown: str, width: int = 80) -> str:
    """Markdown with its tables laid out for a terminal."""
    made: list[str] = []
    table: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            table.append([cell.strip().replace("\\|", "|").replace("**", "").replace("`", "") for cell in cells])
            continue
        if table:
            made.append(terminal_table(table[0], table[2:], width))
            table = []
        made.append(line)
    return "\n".join(made).rstrip("\n") + "\n"
