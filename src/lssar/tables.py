"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; line breaks in cells become spaces, and `|` is escaped."""
    head = list(head)
    return "".join([_line(head), "|" + "---|" * len(head) + "\n", *map(_line, rows)])


def _line(cells: Iterable[str]) -> str:
    plain = (cell.replace("\n", " ").replace("|", "\\|") for cell in cells)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in plain) + "\n"
