"""The stream of a job that is followed: frames, the bounded queue of events, and lines of a rank's log."""

from __future__ import annotations

import itertools
import threading
from dataclasses import FrozenInstanceError, field, fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.harness import wait_for

from cloudddp.agent.protocol.frames import End, Frame, Heartbeat, Log, encode_frame
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.replies import FrameDecoder
from cloudddp.job.follow.events import EventQueue, NodeQuiet
from cloudddp.job.follow.lines import MAX_LINE, LineSplitter, OpenLine, split

BODIES = [b"plain\n", b"two\nlines\n", b"end\nlog 1 2 3\nstate {}\n", b"", b"\x00\xff\n\n\r", b"no newline"]


def stream() -> tuple[bytes, list[Frame]]:
    """Return a stream, and the frames in it."""
    frames: list[Frame] = []
    for number, body in enumerate(BODIES):
        frames += [Log(number - 1, number * 1000, body), Heartbeat(), Log(number - 1, 1 << 50, b"")]
    frames += [JobState(job="j", phase=JobPhase.RUNNING, script="a b\\n c"), End()]
    return b"".join(map(encode_frame, frames)), frames


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5))
@example([1])
@example([1 << 20])
def test_frames_are_decoded_from_any_pieces(sizes: list[int]) -> None:
    (data, expected), frames, found = stream(), FrameDecoder(), []
    at = 0
    for size in itertools.cycle(sizes):
        found += list(frames.feed(data[at : at + size]))
        at += size
        if at >= len(data):
            break
    assert found == expected


def test_frame_is_decoded_as_soon_as_it_is_complete() -> None:
    frames = FrameDecoder()
    data = encode_frame(Log(0, 0, b"ab\nc"))
    assert list(frames.feed(data[:-1])) == []
    assert list(frames.feed(data[-1:])) == [Log(0, 0, b"ab\nc")]


# -- the queue between the nodes' threads and the follower ---------------------------------------------------


def test_full_queue_blocks_the_writer() -> None:
    queue = EventQueue(capacity=4)
    written: list[int] = []

    def write() -> None:
        for number in range(50):
            queue.put(NodeQuiet(number))
            written.append(number)

    threading.Thread(target=write, daemon=True).start()
    wait_for(lambda: len(written) == 4, "the queue is full")
    assert queue.backlogged
    for number in range(50):
        while (event := queue.get(1.0)) is None:
            pass
        assert event == NodeQuiet(number)
        assert len(written) <= number + 5
    assert queue.get(0.0) is None
    assert not queue.backlogged


def test_closed_queue_holds_up_no_writer() -> None:
    """The thread that reads from all nodes puts events: it must go on when nobody reads them any more."""
    events = EventQueue(capacity=1)
    events.put(NodeQuiet(0))
    blocked = threading.Thread(
        target=lambda: [events.put(NodeQuiet(number)) for number in range(1, 5)], daemon=True
    )
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    events.close()
    blocked.join(60)
    assert not blocked.is_alive()


# -- lines, as a terminal would show them --------------------------------------------------------------------


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
        (b"\n", [""]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"10%\r50%\r100%\n", ["100%"]),
        (b"10%\r50%\r", ["50%"]),
        (b"\rstart\n", ["start"]),
        (b"form\x0cfeed and\xe2\x80\xa8separator\n", ["form\x0cfeed and\u2028separator"]),
        (b"caf\xc3\xa9\n", ["caf\u00e9"]),
        (b"bad \xff byte\n", ["bad \ufffd byte"]),
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


# -- messages are frozen dataclasses that share their methods ------------------------------------------------


@frozen
class Point:
    x: int
    y: int = 2


@frozen
class Other:
    x: int
    y: int = 2


@frozen
class Timed:
    name: str
    at: float = field(default=0.0, compare=False)


def test_frozen_class_behaves_as_a_frozen_dataclass() -> None:
    point = Point(1)
    assert (point.x, point.y, repr(point)) == (1, 2, "Point(x=1, y=2)")
    assert point == Point(1, 2) == replace(Point(5), x=1)
    assert point not in (Point(1, 3), Other(1))
    assert Timed("a", 1.0) == Timed("a", 2.0) != Timed("b", 1.0)
    assert len({point, Point(1, 2), Point(1, 3)}) == 2
    assert [field.name for field in fields(Point)] == ["x", "y"]
    for change in (
        lambda: setattr(point, "x", 3),
        lambda: setattr(point, "z", 3),
        lambda: delattr(point, "x"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
