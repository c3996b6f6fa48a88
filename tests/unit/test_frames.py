"""The agent's stream as frames, however the network splits it."""

from __future__ import annotations

import random

import pytest

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import Dropped, End, Frame, Heartbeat, Log, encode_frame
from cloudddp.agent.protocol.jobs import MAX_RANKS, JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.steps import FrameDecoder

BODIES = [b"plain\n", b"two\nlines\n", b"end\nlog 1 2 3\nstate {}\n", b"", b"\x00\xff\n\n\r", b"no newline"]


def stream() -> tuple[bytes, list[Frame]]:
    """Return a stream, and the frames in it."""
    frames: list[Frame] = []
    for number, body in enumerate(BODIES):
        frames += [Log(number - 1, number * 1000, body), Heartbeat(), Dropped(number - 1, 5, 1 << 50)]
    frames += [JobState(job="j", phase=JobPhase.RUNNING, script="a b\\n c"), End()]
    return b"".join(map(encode_frame, frames)), frames


def test_frames_are_decoded_as_they_were_encoded() -> None:
    data, expected = stream()
    assert list(FrameDecoder().feed(data)) == expected


def test_frames_are_decoded_byte_by_byte() -> None:
    data, expected = stream()
    frames = FrameDecoder()
    assert [frame for k in range(len(data)) for frame in frames.feed(data[k : k + 1])] == expected


@pytest.mark.parametrize("seed", range(10))
def test_frames_are_decoded_from_any_pieces(seed: int) -> None:
    data, expected = stream()
    cuts = sorted(random.Random(seed).choices(range(len(data) + 1), k=8))
    frames, found = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += list(frames.feed(data[start:end]))
    assert found == expected


def test_frame_is_decoded_as_soon_as_it_is_complete() -> None:
    frames = FrameDecoder()
    assert list(frames.feed(b"log 0 0 4\nab\n")) == []
    assert list(frames.feed(b"c")) == [Log(0, 0, b"ab\nc")]


@pytest.mark.parametrize(
    "line",
    [
        b"dropped 0 0",
        b"dropped 0 0 -1",
        b"dropped 0 0 9999999999999999",
        b"dropped 70000 0 1",
        b"dropped x 0 1",
    ],
)
def test_dropped_part_out_of_range_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(line + b"\n"))


def test_dropped_parts_of_too_many_ranks_are_refused() -> None:
    lines = b"".join(b"dropped %d 0 1\n" % rank for rank in range(MAX_RANKS + 3))
    with pytest.raises(ProtocolError, match="logs of more than"):
        list(FrameDecoder().feed(lines))
