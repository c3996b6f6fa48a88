"""Characters that take two columns, or none, are counted as a terminal shows them."""

from __future__ import annotations

import io

import pytest
from support.jobstates import job, rank

from cloudddp.cli.views.jobs import jobs_table
from cloudddp.formats import table, wrapped
from cloudddp.job.status import record
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


def test_long_command_line_of_a_job_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [record("20261127-120000-abcd", {0: job("succeeded", rank(0, 0), script="x" * 5000)})]
    assert 100 < max(map(len, jobs_table(known).splitlines())) < 500
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, jobs_table(known).splitlines())) <= 80
