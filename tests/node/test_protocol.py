"""The decoders of both sides: what does not fit the protocol is refused, and what is decoded is in range."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
import time
import zlib
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.badanswers import BAD_FRAMES, BAD_JOBS, BAD_PROBES, JOB, PROBE, RANK

from cloudddp import text
from cloudddp.agent.protocol import codec, transfer
from cloudddp.agent.protocol.codec import MAX_PATH, MAX_TEXT, ProtocolError, encode, encode_utf8
from cloudddp.agent.protocol.file_steps import PackRequest, ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.frames import FollowRequest
from cloudddp.agent.protocol.gang import Gang, Kind, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.jobs import (
    MAX_LISTING,
    Cause,
    Failure,
    JobsReply,
    JobState,
    KillReply,
    KillRequest,
    RankRecord,
    Verdict,
)
from cloudddp.agent.protocol.machine import PowerOffReply, ProbeReply, ProbeRequest
from cloudddp.agent.protocol.manifest import FILE, LINK, Entry, manifest_digest, manifest_to_wire
from cloudddp.agent.protocol.phases import JobPhase, Peer, VersionConflict
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.agent.protocol.results import JobFiles, NewFiles, NewFilesReply, NewFilesRequest, NewPath
from cloudddp.agent.protocol.start import Process, SetupReply, SetupRequest, StartReply, StartRequest
from cloudddp.agent.protocol.transfer import ZLIB, Known, Listing, Wants, read_frame, read_listing
from cloudddp.agent.replies import FrameDecoder, decode

KINDS = [
    ProbeReply,
    PowerOffReply,
    JobsReply,
    KillReply,
    SetupReply,
    StartReply,
    ReceiveEvent,
    NewFilesReply,
    VersionConflict,
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
JOB_ID = "20260101-000000-abcd"
TRAINING = TrainingStatus(5.0, TrainingState.PREEMPTED, 3, 9, 0.5)
FAILURE = Failure(1, Cause.RANK, 300, 137, 9, "\u00e9\x1b", 0)
VERDICT = Verdict(JobPhase.FAILED, 137, 0, FAILURE, ("a", ""))
GANG = Gang((Peer(0, "10.0.0.1", 1), Peer(1, "10.0.0.2", 65535)), "0" * 64, silence=2.5, join=0.5)
STATE = JobState(
    JOB_ID,
    JobPhase.FAILED,
    node=1,
    exit_code=7,
    started=1.0,
    ended=2.5,
    error="\u00e9\x1b\n",
    script="a b",
    expected=2,
    max_restarts=3,
    stopping=True,
    ranks=(RankRecord(0, 7, 2.0, signal=9, pid=5, at=1.5, asked=True, error="x"), RankRecord(1, None, None)),
    training=TRAINING,
    cancelled=2.25,
    verdict=VERDICT,
)
MESSAGES: list[Any] = [
    ProbeRequest(
        "p",
        "10.0.0.1",
        python="~/x",
        manifest_digest="0" * 64,
        boot_seconds=1.5,
        gpus=8,
        gpu_seconds=60.0,
        torch_seconds=9.0,
    ),
    Listing({"caf\xe9": Entry(FILE, 0o644, 5, -1, ""), "a/b/l": Entry(LINK, 0, 0, 0, "../x")}, {"a": 0o755}),
    Wants((0, 2), {2: Known(7, "0" * 32)}, 1),
    ReceiveRequest("p", "0" * 64, "10.0.0.1"),
    ReceiveEvent(Wants(), lost="x", port=5, note="x", done=ReceiveReply(1)),
    PackRequest("p", ("./a", "b c"), all=True),
    SetupRequest(
        JOB_ID, 0, "p", "s", ("pip install x",), ("requirements.txt",), {"A": "b"}, "/opt/x/bin/python"
    ),
    StartRequest(
        JOB_ID, 0, "p", "s", {"A": "b"}, (Process(("torchrun",), ("x",), {"B": ""}),), 2, 1, 30.0, GANG
    ),
    FollowRequest(JOB_ID, wait=True, heartbeat=5.0, offsets={-1: 7, 300: 1 << 40}),
    KillRequest(JOB_ID, 1.5, "a1"),
    NewFilesRequest("p", ("runs",), ("data",), JOB_ID),
    NewFilesReply(
        1 << 60,
        True,
        False,
        (JOB_ID,),
        (JobFiles(JOB_ID, NewFiles(1, 2, (NewPath("a/", 1, 2),)), NewFiles(0, 0, ())),),
    ),
    KillReply(3, 0, 1, JobPhase.CANCELLED, TRAINING),
    JobsReply((STATE,)),
    StartReply(Unreachable({1: "refused"}, (1,), "x"), "linux-x86_64", "", {"mesh": 0.5}),
    Message(Kind.ENDED, report=Report(False, (Observed(FAILURE, 0.5, ("x",)),), 1.5, 143)),
    Message(Kind.VERDICT, verdict=VERDICT),
    Message(Kind.HEARTBEAT, finished=True),
    VersionConflict(1, 2, (JOB_ID,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_both_decoders(message: Any) -> None:
    for data in (encode(message), encode_utf8(message)):
        assert codec.decode(data, type(message)) == message
        assert decode(data, type(message)) == message
        assert b"\n" not in data


@settings(max_examples=600)
@given(kind=st.sampled_from(KINDS), data=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_decoded_or_refused_by_both_decoders(kind: Any, data: bytes) -> None:
    """The laptop uses msgspec, the agent the standard library: one schema, two readers."""
    assert_agreement(data, kind)


@given(message=st.sampled_from(MESSAGES), key=st.integers(0, 30), value=JSON)
def test_both_decoders_agree_on_almost_valid_messages(message: Any, key: int, value: Any) -> None:
    fields = json.loads(encode(message))
    names = sorted(fields)
    fields[names[key % len(names)]] = value
    assert_agreement(json.dumps(fields).encode(), type(message))


def assert_agreement(data: bytes, kind: Any) -> None:
    def outcome(decoder: Any) -> Any:
        try:
            return decoder(data, kind)
        except ProtocolError as error:
            assert decoder is codec.decode or text.one_line(str(error)) == str(error)
            return None

    assert outcome(decode) == outcome(codec.decode)


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        *(pytest.param(ProbeReply, reply, id=f"probe: {name}") for name, reply in BAD_PROBES.items()),
        *(pytest.param(JobsReply, reply, id=f"jobs: {name}") for name, reply in BAD_JOBS.items()),
    ],
)
def test_invalid_reply_is_refused_by_both_decoders(kind: Any, reply: str | bytes) -> None:
    data = reply if isinstance(reply, bytes) else reply.encode()
    for decoder in (decode, codec.decode):
        with pytest.raises(ProtocolError):
            decoder(data, kind)


@pytest.mark.parametrize(
    "request_text",
    [
        '{"job": "j", "wait": 1, "heartbeat": 5}',
        '{"job": "j", "wait": true, "heartbeat": NaN}',
        '{"job": "j", "wait": true, "heartbeat": -1}',
        '{"job": "j", "wait": true, "heartbeat": 1e999}',
        '{"job": "j", "wait": true, "heartbeat": true}',
        '{"job": "j", "wait": true, "heartbeat": 5, "offsets": {"x": 1}}',
        '{"job": "j", "wait": true, "heartbeat": 5, "offsets": {"-3": 1}}',
        '{"job": "j", "wait": true, "heartbeat": 5, "offsets": {1: -1}}',
        '{"job": "j", "wait": true, "heartbeat": 5, "offsets": [1]}',
        '{"job": "../j", "wait": true, "heartbeat": 5}',
        '{"wait": true, "heartbeat": 5}',
        '{"job": "j", "wait": true, "heartbeat": 1' + "0" * 400 + "}",
    ],
)
def test_invalid_request_is_refused(request_text: str) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(request_text.encode(), FollowRequest)


def test_message_that_is_too_long_is_refused() -> None:
    for decoder in (decode, codec.decode):
        with pytest.raises(ProtocolError, match="more than 10"):
            decoder(b'{"pid": 1234}', StartReply, limit=10)


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_invalid_frame_is_refused_wherever_the_stream_is_cut(frames: bytes) -> None:
    for size in (1, 7, len(frames)):
        decoder = FrameDecoder()
        with pytest.raises(ProtocolError):
            for at in range(0, len(frames), size):
                list(decoder.feed(frames[at : at + size]))


def test_replies_that_the_invalid_ones_derive_from_are_accepted() -> None:
    assert not decode(json.dumps(PROBE).encode(), ProbeReply).differs
    assert asdict(decode(json.dumps(PROBE).encode(), ProbeReply)) == {
        **PROBE,
        "running": (),
        "origin": "",
        "version": 0,
        "wrote": False,
    }
    reply = {"jobs": [{**JOB, "ranks": [RANK], "unknown key": 1}]}
    (job,) = decode(json.dumps(reply).encode(), JobsReply).jobs
    assert job.ranks[0].rank == 0


@given(st.text())
def test_visible_text_has_no_control_characters(words: str) -> None:
    for shown in (text.visible(words), text.one_line(words), text.without_colours(words)):
        assert "\x1b" not in shown
        assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F]
        assert text.visible(shown) == shown
        shown.encode()  # no lone surrogate
    assert not set("\n\t") & set(text.one_line(words))


@given(st.text(alphabet="\x1b[;0138m4Ja\r\x07]"))
def test_only_colours_reach_a_terminal(words: str) -> None:
    shown = text.with_colours(words)
    rest = shown
    for number in range(200):
        rest = rest.replace(f"\x1b[{number}m", "")
    for part in rest.split("\x1b")[1:]:
        assert part.startswith("[")
        assert set(part[1 : part.index("m")]) <= set("0123456789;")


@pytest.mark.parametrize("piece", ['"[{', '\\\\"', "\\\\\\", "x", '"', "\\u0022["])
def test_brackets_in_texts_are_not_counted(piece: str) -> None:
    state = json.dumps({**JOB, "script": piece * (MAX_TEXT // len(piece))})
    data = f'{{"jobs": [{", ".join([state] * 20)}]}}'.encode()
    assert len(decode(data, JobsReply, limit=MAX_LISTING).jobs) == 20


@pytest.mark.parametrize("text", ['"' + '\\"' * (1 << 21), "\\" * (1 << 22), "[" * (1 << 22), '"\\'])
def test_text_that_never_ends_is_refused_at_once(text: str) -> None:
    data = b"[" * 200_000 + text.encode()
    begin = time.process_time()
    with pytest.raises(ProtocolError):
        decode(data, JobsReply, limit=MAX_LISTING)
    assert time.process_time() - begin < 20


# -- the frames of a transfer: what no node sends is refused ------------------------------------------------


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=20).filter(
            lambda name: b"\0" not in name and b"/" not in name and name not in (b".", b"..")
        ),
        st.integers(0, 1 << 40),
    )
)
def test_paths_that_are_not_utf8_survive_both_decoders(names: dict[bytes, int]) -> None:
    manifest = {
        name.decode("utf-8", "surrogateescape"): Entry(FILE, 0o644, size, 0, "")
        for name, size in names.items()
    }
    wire = manifest_to_wire(manifest)
    listing = Listing(wire)
    frame = read_frame(io.BytesIO(listing.frame(b"k")).read, b"k")
    found = read_listing(frame)
    assert dict(found.entries()) == manifest
    assert manifest_digest(found.files) == manifest_digest(wire)


@pytest.mark.parametrize("at", [0, 5, 14, 29, 40, -1])
def test_frame_that_was_changed_is_refused(at: int) -> None:
    raw = bytearray(Listing({"a": Entry(FILE, 0o644, 1, 0, "")}).frame(b"k"))
    raw[at] ^= 0x40
    with pytest.raises((ProtocolError, EOFError)):
        read_listing(read_frame(io.BytesIO(raw).read, b"k"))


@pytest.mark.parametrize(
    ("named", "size", "why"),
    [
        (ZLIB, 5, "longer than it says"),
        (ZLIB, 2 << 20, "the length that it names"),
        (9, 1 << 20, "unknown codec"),
    ],
)
def test_contents_are_bounded_by_what_they_name(named: int, size: int, why: str) -> None:
    raw = transfer.part(b"k", 0, 0, b"\0" * (1 << 20), lambda data: (ZLIB, zlib.compress(data, 1)))
    found = read_frame(io.BytesIO(raw).read, b"k")
    head = found.head[:12] + named.to_bytes(1, "big") + size.to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=why):
        transfer.read_part(found._replace(head=head))


@pytest.mark.parametrize(
    "name",
    ["\u0100", "/a", "a//b", "a/", "./a", "a/.", "a/../b", "..", "", ".", "b/", "a\0b", (MAX_PATH + 1) * "x"],
    ids=itertools.count(),
)
def test_path_that_no_manifest_has_is_refused(name: str) -> None:
    """Nor does one hide behind another one."""
    entry = Entry(FILE, 0o644, 1, 1, "")
    for names in ([name], ["a", name], [name, "a"]):
        with pytest.raises(ProtocolError):
            Listing(dict.fromkeys(names, entry))


def test_entry_of_a_listing_has_no_value_that_a_file_cannot_have() -> None:
    file, link = Entry(FILE, 0o644, 1, 1, ""), Entry(LINK, 0, 0, 0, "\u0100")
    changes = [{"mode": 0o10000}, {"size": -1}, {"size": 1 << 64}]
    for changed in (*changes, {"mtime_ns": 1 << 63}, {"kind": "d"}, {"target": "x"}):
        with pytest.raises(ProtocolError):
            Listing({"f": file._replace(**changed)})
    with pytest.raises(ProtocolError):
        Listing({"l": link})


@settings(max_examples=300)
@given(kind=st.integers(1, 8), head=st.binary(max_size=80), body=st.binary(max_size=80))
def test_frame_of_any_contents_is_decoded_or_refused(kind: int, head: bytes, body: bytes) -> None:
    found = transfer.Frame(kind, head, body)
    for decode_frame in (transfer.read_part, transfer.read_end, read_listing, transfer.read_wants):
        with contextlib.suppress(ProtocolError):
            decode_frame(found)


# -- replies of many nodes are decoded at the same time ------------------------------------------------------


# Nested types: while msgspec reads them, Python code runs, and another thread can look at the unfinished
# outer type.
_PROGRAM = """
import dataclasses, sys, threading
from cloudddp.agent.replies import decode

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = [dataclasses.make_dataclass("Inner", [("number", int, 0)]) for _ in range(20)]
    kind = dataclasses.make_dataclass("Reply", [*((f"field{n}", one, None) for n, one in enumerate(inner)), ("last", int, 0)])
    together = threading.Barrier(4)
    found = []

    def work():
        together.wait()
        found.append(decode(b'{"last": 7}', kind).last)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 4, found
"""  # noqa: E501


def test_first_replies_of_a_type_are_decoded_by_several_threads() -> None:
    """msgspec's information about a dataclass is visible to other threads before it is complete
    (msgspec/_core.c, DataclassInfo_Convert of 0.22): a second thread that decoded the same type ended the
    process with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
