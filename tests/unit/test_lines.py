"""A rank's log, cut into lines as a terminal would show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.job.follow.lines import MAX_LINE, split


def lines_of(data: bytes, size: int) -> list[str]:
    """The lines of data that arrives in pieces of one size."""
    found: list[str] = []
    partial = b""
    for at in range(0, len(data), size):
        complete, partial = split(partial, data[at : at + size])
        found += complete
    return found + split(partial, b"", last=True)[0]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n", ["a"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"10%\r50%\r100%\n", ["100%"]),
        (b"10%\r50%\r", ["50%"]),
        (b"\rstart\n", ["start"]),
        (b"caf\xc3\xa9\n", ["caf\u00e9"]),
        (b"bad \xff byte\n", ["bad \ufffd byte"]),
        (b"form\x0cfeed and\xe2\x80\xa8separator\n", ["form\x0cfeed and\u2028separator"]),
    ],
)
def test_lines_as_a_terminal_shows_them(data: bytes, lines: list[str]) -> None:
    assert split(b"", data, last=True) == (lines, b"")


@given(st.binary(max_size=200).map(lambda data: data.replace(b"0", b"\n")), st.integers(1, 50))
def test_lines_do_not_depend_on_the_pieces(data: bytes, size: int) -> None:
    assert lines_of(data, size) == lines_of(data, len(data) or 1)


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 16])
def test_long_line_is_split_between_characters(size: int) -> None:
    data = "\u20ac".encode() * 100_000 + b"\nnext\n"
    found = lines_of(data, size)
    assert "".join(found) == "\u20ac" * 100_000 + "next"
    assert all(len(line.encode()) <= MAX_LINE * 3 for line in found)
