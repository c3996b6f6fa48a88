"""The decoders of what a node sends: junk is refused, anything at all is decoded or refused, and what is decoded fits."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import pytest
from badanswers import BAD_FRAMES, BAD_JOBS, BAD_PROBES, JOB, PROBE, RANK
from hypothesis import given
from hypothesis import strategies as st

from cloudddp import protocol, sync, text
from cloudddp.frames import MAX_LINE, Frames, Lines
from cloudddp.protocol import (
    JobState,
    KillReply,
    Log,
    ProbeReply,
    ProtocolError,
    SetupReply,
    StartReply,
    decode,
)

JOBS = tuple[JobState, ...]
KINDS = [ProbeReply, JOBS, KillReply, SetupReply, StartReply, protocol.ApplyReply]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def as_bytes(answer: str | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.encode()


@pytest.mark.parametrize("answer", BAD_PROBES.values(), ids=BAD_PROBES.keys())
def test_probe_that_does_not_fit_is_refused(answer: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(as_bytes(answer), ProbeReply)


@pytest.mark.parametrize("answer", BAD_JOBS.values(), ids=BAD_JOBS.keys())
def test_list_of_jobs_that_does_not_fit_is_refused(answer: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(as_bytes(answer), JOBS)


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_frames_that_do_not_fit_are_refused(frames: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Frames().feed(frames))


def test_answers_that_the_refused_ones_were_made_from_are_accepted() -> None:
    assert asdict(decode(json.dumps(PROBE).encode(), ProbeReply)) == {**PROBE, "running": ()}
    (job,) = decode(json.dumps([{**JOB, "ranks": [RANK], "unknown key": 1}]).encode(), JOBS)
    assert job.ranks[0].rank == 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_decoded_or_refused(kind: Any, data: bytes) -> None:
    try:
        decode(data, kind)
    except ProtocolError as error:
        assert text.one_line(str(error)) == str(error)


@given(key=st.sampled_from(sorted(PROBE)), value=JSON)
def test_probe_with_any_value_is_refused_or_holds_it_in_range(key: str, value: Any) -> None:
    try:
        reply = decode(json.dumps({**PROBE, key: value}).encode(), ProbeReply)
    except ProtocolError:
        return
    assert 0 <= reply.gpus <= 256
    assert 1 <= reply.free_port < 65536
    assert not reply.interface or protocol.INTERFACE.match(reply.interface)
    assert all(protocol.JOB_ID.match(job) for job in reply.running)


@given(
    key=st.sampled_from(["job", "node", "state", "exit_code", "started", "error", "ranks", "standing"]),
    value=JSON,
)
def test_job_with_any_value_is_refused_or_has_an_id_that_is_no_path(key: str, value: Any) -> None:
    try:
        (job,) = decode(json.dumps([{**JOB, key: value}]).encode(), JOBS)
    except ProtocolError:
        return
    assert "/" not in job.job
    assert job.job not in ("", ".", "..")
    assert job.exit_code is None or 0 <= job.exit_code <= 255


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_any_stream_is_cut_into_frames_or_refused_wherever_it_is_cut(data: bytes, cuts: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> tuple[list[Any], bool]:
        frames, found = Frames(), []
        try:
            for piece in pieces:
                found.extend(frames.feed(piece))
        except ProtocolError:
            return found, False
        return found, True

    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert outcome(pieces) == outcome([data])


@given(
    logs=st.lists(st.tuples(st.integers(-1, 200), st.integers(0, 1 << 40), st.binary(max_size=100))),
    size=st.integers(1, 64),
)
def test_logs_arrive_as_they_were_sent(logs: list[tuple[int, int, bytes]], size: int) -> None:
    wire = b"".join(b"log %d %d %d\n%b" % (rank, offset, len(body), body) for rank, offset, body in logs)
    frames = Frames()
    found = [frame for at in range(0, len(wire), size) for frame in frames.feed(wire[at : at + size])]
    assert found == [Log(*log) for log in logs]


@given(st.binary(), st.integers(1, 50))
def test_lines_are_the_same_wherever_they_are_cut(data: bytes, size: int) -> None:
    whole, pieces = Lines(), Lines()
    once = [*whole.feed(data), *whole.feed(b"", last=True)]
    cut = [line for at in range(0, len(data), size) for line in pieces.feed(data[at : at + size])]
    assert [*cut, *pieces.feed(b"", last=True)] == once
    assert all(len(line) <= MAX_LINE for line in once)


@given(st.text())
def test_visible_text_holds_nothing_that_a_terminal_obeys(words: str) -> None:
    for shown in (text.visible(words), text.one_line(words), text.without_colours(words)):
        assert "\x1b" not in shown
        assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F]
        assert text.visible(shown) == shown
        shown.encode()  # no lone surrogate
    assert not set("\n\t") & set(text.one_line(words))


@given(st.text(alphabet="\x1b[;0138m4Ja\r\x07]"))
def test_nothing_but_colours_passes_to_a_terminal(words: str) -> None:
    shown = text.with_colours(words)
    rest = shown
    for number in range(200):
        rest = rest.replace(f"\x1b[{number}m", "")
    for part in rest.split("\x1b")[1:]:
        assert part.startswith("[")
        assert set(part[1 : part.index("m")]) <= set("0123456789;")


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name), st.integers(0, 1 << 40)
    )
)
def test_paths_that_are_not_utf8_survive_the_wire(names: dict[bytes, int]) -> None:
    wire = {name.decode("latin-1"): ["f", 0o644, size, 0, ""] for name, size in names.items()}
    reply = decode(json.dumps({**PROBE, "manifest": wire}).encode(), ProbeReply)
    assert reply.manifest is not None
    found = sync.from_wire(reply.manifest)
    assert {name.encode("utf-8", "surrogateescape"): entry[2] for name, entry in found.items()} == names
