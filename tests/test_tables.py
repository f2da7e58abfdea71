"""Tables for the terminal: nothing is cut, at any width."""

import pytest

from lssar.tables import markdown_table, terminal_table, terminal_text

NAMES = ["softmax, window 1024, NTK, seed 0", "cosine_softmax, p=3, seed 1"]
HEAD = ["run", *(f"{2**i * 1024:,}" for i in range(9))]
ROWS = [[name, *(f"{i / 7:.3f} ±0.012" for i in range(9))] for name in NAMES]


@pytest.mark.parametrize("width", [20, 80, 120, 1000])
def test_nothing_is_cut(width):
    text = terminal_table(HEAD, ROWS, width, "loss by length")
    blocks = text.split("\n\n")[1:]
    assert all(name in block for block in blocks for name in NAMES)  # every block names its rows
    for cell in [*HEAD, *ROWS[0], *ROWS[1]]:
        assert cell in text
    if width >= 80:
        assert all(len(line) <= width for line in text.splitlines())
    assert len(blocks) == {20: 9, 80: 3, 120: 2, 1000: 1}[width]


def test_numbers_are_aligned_right_and_words_left():
    lines = terminal_table(["name", "n", "note"], [["a", "5", "good"], ["bcd", "1,000", "-"]]).splitlines()
    assert lines == [
        "name      n  note",
        "────  ─────  ────",
        "a         5  good",
        "bcd   1,000  -",
    ]


def test_markdown_becomes_text():
    table = markdown_table(["run", "1x"], [["**a|b**", "3.1"]])
    assert terminal_text(f"Losses:\n\n{table}\nEnd").splitlines() == [
        "Losses:", "", "run   1x", "───  ───", "a|b  3.1", "", "", "End",
    ]  # fmt: skip
