"""The agent's stream as frames, however the network splits it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import End, Frame, Heartbeat, Log, encode_frame
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.replies import FrameDecoder

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
    assert list(frames.feed(b"log 0 0 4\nab\n")) == []
    assert list(frames.feed(b"c")) == [Log(0, 0, b"ab\nc")]


@pytest.mark.parametrize("line", [b"log 0 0 -1", b"log 0 9999999999999999 0", b"log 70000 0 1", b"log x 0 1"])
def test_log_out_of_range_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(line + b"\n"))


def test_logs_of_too_many_ranks_are_refused() -> None:
    lines = b"".join(b"log %d 0 0\n" % rank for rank in range(MAX_RANKS + 3))
    with pytest.raises(ProtocolError, match="logs of more than"):
        list(FrameDecoder().feed(lines))
