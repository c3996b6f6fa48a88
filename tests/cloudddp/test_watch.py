"""The agent's stream, cut into frames and lines, however the network cuts it into pieces."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

from cloudddp.errors import NodeError
from cloudddp.frames import MAX_LINE, Frame, Frames, Lines
from cloudddp.protocol import End, JobState, Log
from cloudddp.ssh.connection import Result
from cloudddp.ssh.fleet import each
from cloudddp.watch import Watch

STATE = {"job": "j", "state": "running", "script": "a b\\n c", "ranks": []}
BODIES = [b"plain\n", b"two\nlines\n", b"end\nlog 1 2 3\nstate {}\n", b"", b"\x00\xff\n\n\r", b"no newline"]


def wire() -> tuple[bytes, list[Frame]]:
    """A stream, and the frames in it."""
    data: bytes = b""
    frames: list[Frame] = []
    for number, body in enumerate(BODIES):
        data += f"log {number - 1} {number * 1000} {len(body)}\n".encode() + body + b"beat\n"
        frames.append(Log(number - 1, number * 1000, body))
    data += b"state " + json.dumps(STATE).encode() + b"\nend\n"
    return data, [*frames, JobState(job="j", state="running", script="a b\\n c"), End()]


def test_frames_come_out_as_they_went_in() -> None:
    data, expected = wire()
    assert list(Frames().feed(data)) == expected


def test_frames_survive_being_fed_byte_by_byte() -> None:
    data, expected = wire()
    frames = Frames()
    assert [frame for k in range(len(data)) for frame in frames.feed(data[k : k + 1])] == expected


@pytest.mark.parametrize("seed", range(10))
def test_frames_survive_any_cut(seed: int) -> None:
    data, expected = wire()
    cuts = sorted(random.Random(seed).choices(range(len(data) + 1), k=8))
    frames, found = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += list(frames.feed(data[start:end]))
    assert found == expected


def test_a_frame_is_given_as_soon_as_its_last_byte_is_there() -> None:
    frames = Frames()
    assert list(frames.feed(b"log 0 0 4\nab\n")) == []
    assert list(frames.feed(b"c")) == [Log(0, 0, b"ab\nc")]


def test_a_beat_is_no_frame() -> None:
    assert list(Frames().feed(b"beat\nbeat\n")) == []


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
def test_lines_are_what_a_terminal_would_show(data: bytes, lines: list[str]) -> None:
    assert list(Lines().feed(data, last=True)) == lines


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 16])
def test_long_line_comes_in_pieces_that_split_no_character(size: int) -> None:
    data = "\u20ac".encode() * 100_000 + b"\nnext\n"
    lines = Lines()
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]
    assert "".join(found) == "\u20ac" * 100_000 + "next"
    assert all(len(line.encode()) <= MAX_LINE * 3 for line in found)


class TwoNodes:
    """Carries the agent's steps to two nodes that are threads: rank 0 has failed, and node 1 hears nothing at first."""

    def __init__(self, *, deaf: int) -> None:
        self.deaf = deaf  # how many times node 1 cannot be told to stop
        self.told = threading.Event()

    def run(self, node: int, command: str, *, on_stdout: Any = None, **_: Any) -> Result:
        if " kill " in command:
            if node == 1 and self.deaf:
                self.deaf -= 1
                raise NodeError("node 1: the SSH connection broke")
            if node == 1:
                self.told.set()
            return Result(0, b'{"known": true, "ended": 1, "left": 0}', b"")
        if node == 1:
            on_stdout(b"state " + json.dumps({**STATE, "node": 1}).encode() + b"\n")
            assert self.told.wait(60), "nobody tells it to stop"
        rank = {"rank": node, "exit_code": 7, "ended": 1.0 + node, "signal": None}
        ended = {**STATE, "state": "failed", "node": node, "exit_code": 7, "ranks": [rank]}
        on_stdout(b"state " + json.dumps(ended).encode() + b"\nend\n")
        return Result(0, b"", b"")

    def each(self, work: Any, *, fatal: Any = None) -> Any:
        return each({node: lambda node=node: work(node) for node in (0, 1)}, fatal=fatal)

    def reconnect(self, node: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_node_that_could_not_be_told_to_stop_is_told_again() -> None:
    finished = Watch(TwoNodes(deaf=2), "j", (0, 1), on_line=lambda *_: None).run(stop_on_failure=True)
    assert (finished.state, finished.exit_code, finished.survivors) == ("failed", 7, {})
