"""Characters that take two columns, or none, are counted as a terminal shows them."""

from __future__ import annotations

import io

import pytest

from cloudddp.formats import table, wrapped
from cloudddp.text import columns


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("\u65e5\u672c", 4), ("e\u0301", 1), ("\U0001f600", 2), ("", 0)]
)
def test_columns_of_a_text(text: str, width: int) -> None:
    assert columns(text) == width


def test_columns_of_a_table_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    lines = table(("NAME", "STATE"), [("\u65e5\u672c\u8a9e", "up"), ("abc", "down")]).splitlines()
    at = [
        columns(line[: line.index(word)]) for line, word in zip(lines, ("STATE", "up", "down"), strict=True)
    ]
    assert at == [8, 8, 8]


@pytest.mark.parametrize("width", [20, 33, 80])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    words = "\u65e5\u672c\u8a9e and other words " * 9
    assert max(map(columns, wrapped(words, Terminal()).splitlines())) <= width
    shown = table(("JOB", "STATE", "SCRIPT"), [("20261127", "up", words)], elastic=("SCRIPT",))
    assert max(map(columns, shown.splitlines())) <= max(width, 8 + 2 + 5 + 2 + 8)
