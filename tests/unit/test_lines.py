"""A rank's log, cut into lines as a terminal would show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.job.follow.lines import MAX_LINE, LineSplitter, OpenLine, split


def lines_of(data: bytes, size: int) -> list[str]:
    """The lines of data that arrives in pieces of one size."""
    found: list[str] = []
    line = OpenLine()
    for at in range(0, len(data), size):
        complete, line = split(line, data[at : at + size])
        found += complete
    return found + split(line, b"", last=True)[0]


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
    assert split(OpenLine(), data, last=True) == (lines, OpenLine())


MESSY = st.lists(st.sampled_from([b"\n", b"\r", b"0", b"\xe2\x82\xac", b"\x82", b"\xff", b"text"])).map(
    b"".join
)


@given(MESSY, st.integers(1, 50))
def test_lines_do_not_depend_on_the_pieces(data: bytes, size: int) -> None:
    assert lines_of(data, size) == lines_of(data, len(data) or 1)


@pytest.mark.parametrize("size", [7, 1 << 16])
def test_long_line_is_cut_with_a_note(size: int) -> None:
    data = "\u20ac".encode() * 100_000 + b"\r\nnext\n"
    kept = MAX_LINE // 3
    assert lines_of(data, size) == [
        "\u20ac" * kept + f" [line cut: {(300_000 - 3 * kept) / 1024:.1f} KiB more]",
        "next",
    ]


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_text_after_an_overwritten_long_line_is_shown(size: int) -> None:
    assert lines_of(b"x" * 200_000 + b"\rshort\n" + b"y" * 200_000 + b"\r", size)[0] == "short"


def test_memory_of_an_endless_line_is_bounded() -> None:
    line = OpenLine()
    for _ in range(3000):
        found, line = split(line, b"\x00" * MAX_LINE)
        assert (found, len(line.data)) == ([], MAX_LINE)
    assert split(line, b"\n")[0][0].endswith(" [line cut: 187.4 MiB more]")


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_output_of_a_command_is_split_between_characters_but_not_cut(size: int) -> None:
    data = "\u20ac".encode() * 100_000 + b"\nnext"
    splitter = LineSplitter()
    found = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    found += splitter.feed(b"", last=True)
    assert "".join(found) == "\u20ac" * 100_000 + "next"
    assert all(len(line.encode()) <= MAX_LINE for line in found)
