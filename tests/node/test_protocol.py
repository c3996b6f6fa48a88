"""The decoders of both sides: what does not fit the protocol is refused, and what is decoded is in range."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import corpus

from cloudddp import text
from cloudddp.agent.protocol import codec, transfer
from cloudddp.agent.protocol.codec import MAX_PATH, MAX_TEXT, ProtocolError, encode, encode_utf8
from cloudddp.agent.protocol.file_steps import PackRequest, ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.frames import FollowRequest
from cloudddp.agent.protocol.gang import Gang, Kind, Observed, PeerMessage, Report, Unreachable
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
from cloudddp.agent.protocol.readings import Reading
from cloudddp.agent.protocol.results import JobFiles, NewFiles, NewFilesReply, NewFilesRequest, NewPath
from cloudddp.agent.protocol.start import Process, SetupReply, SetupRequest, StartReply, StartRequest, Work
from cloudddp.agent.protocol.transfer import (
    ZLIB,
    Listing,
    PartialFile,
    Wants,
    read_frame,
    read_listing,
)
from cloudddp.agent.replies import FrameDecoder, decode

KINDS = [ProbeReply, PowerOffReply, JobsReply, KillReply, SetupReply, StartReply, ReceiveEvent]
KINDS += [NewFilesReply, VersionConflict]
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
        "p", "10.0.0.1", "~/x", "0" * 64, boot_seconds=1.5, gpus=8, gpu_seconds=60.0, torch_seconds=9.0
    ),
    Listing({"caf\xe9": Entry(FILE, 0o644, 5, -1, ""), "a/b/l": Entry(LINK, 0, 0, 0, "../x")}, {"a": 0o755}),
    Wants((0, 2), {2: PartialFile(7, "0" * 32)}, 1),
    ReceiveRequest("p", "0" * 64, "10.0.0.1"),
    ReceiveEvent(Wants(), lost="x", port=5, note="x", done=ReceiveReply(1)),
    PackRequest("p", ("./a", "b c"), all=True),
    SetupRequest(
        JOB_ID, 0, "p", "s", ("pip install x",), ("requirements.txt",), {"A": "b"}, "/opt/x/bin/python"
    ),
    StartRequest(
        JOB_ID, 0, "p", GANG, Work("s", {"A": "b"}, (Process(("torchrun",), ("x",), {"B": ""}),), 2, 1, 30.0)
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
    PeerMessage(Kind.ENDED, report=Report(False, (Observed(FAILURE, 0.5, ("x",)),), 1.5, 143)),
    PeerMessage(Kind.VERDICT, verdict=VERDICT),
    PeerMessage(Kind.HEARTBEAT, finished=True),
    VersionConflict(1, 2, (JOB_ID,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_both_decoders(message: Any) -> None:
    for data in (encode(message), encode_utf8(message)):
        assert codec.decode(data, type(message)) == message
        assert decode(data, type(message)) == message
        assert b"\n" not in data


@settings(max_examples=200)
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


def test_message_with_one_wrong_value_is_refused_by_both_decoders() -> None:
    for kind in corpus.kinds():
        for decoder in (decode, codec.decode):
            assert decoder(json.dumps(corpus.example(kind)).encode(), kind)
            for why, value in corpus.wrong(kind):
                with pytest.raises(ProtocolError):
                    decoder(json.dumps(value).encode(), kind)
                    pytest.fail(f"{kind.__name__}: {why}: {json.dumps(value)[:500]}")


# Fields whose limits are checked with others, or that only the length of the message limits.
OTHERWISE_LIMITED = {
    *(f"Entry.{name}" for name in ("kind", "mode", "size", "mtime_ns", "target")),
    *("Listing.files", "Wants.known", "PartialFile.size", "PartialFile.digest", "Reading.metrics"),
    *("Part.shards", "Part.metadata", "Part.ahead"),
    *("PeerMessage.attempt", "PeerMessage.clock", "Unreachable.to", "Unreachable.by"),
}


def test_what_a_node_may_send_has_limits() -> None:
    """The wrong values above are beyond the limits that a type has: without a limit there is none."""
    kinds = [one for one in corpus.kinds() if not one.__name__.endswith(("Request", "File"))]
    assert len(kinds) > 50
    sent = [one for one in kinds if one.__name__.endswith("Reply")]
    sent += [JobState, Reading, Listing, Wants, ReceiveEvent, PeerMessage, VersionConflict]
    assert {name for kind in sent for name in corpus.unlimited(kind)} == OTHERWISE_LIMITED


STATE_OF_A_JOB: dict[str, Any] = corpus.example(JobState)
NO_MESSAGE = [
    *("", "hello\n", "null", "[]", "7", '"x"', "[" * 100_000, '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    *("\0" * 1000, '{"\x1b]0;owned\x07": 1}', '{"interface": "lo", '),
]
# What the types of single fields do not show.
CONTRADICTIONS = [
    *((ProbeReply, {"interface": text}) for text in ("lo\nX=1", "\x1b[2J", "x" * 16)),
    (ProbeReply, {"python": "\0"}),
    *((JobsReply, {"jobs": [{**STATE_OF_A_JOB, "job": job}]}) for job in ("zzz", "20260101-000000-abcd-x")),
    (RankRecord, {"exit_code": None}),
    (RankRecord, {"ended": None}),
    *((Verdict, changed) for changed in ({"phase": "running"}, {"exit_code": 0}, {"phase": "succeeded"})),
    (Gang, {"secret": "0" * 31}),
    (Gang, {"peers": [corpus.example(Peer)] * 2}),
    (StartRequest, {"node": 2}),
    (Process, {"launcher": [], "rank": []}),
]


def test_what_is_no_message_or_contradicts_itself_is_refused_by_both_decoders() -> None:
    wrong: list[Any] = [(kind, text.encode()) for kind in (ProbeReply, JobsReply) for text in NO_MESSAGE]
    wrong += [(kind, json.dumps(corpus.example(kind) | changed).encode()) for kind, changed in CONTRADICTIONS]
    for kind, data in [*wrong, (ProbeReply, b'{"interface": "\xff\xfe"}')]:
        for decoder in (decode, codec.decode):
            with pytest.raises(ProtocolError):
                decoder(data, kind)
                pytest.fail(f"{kind.__name__}: {data[:500]!r}")


def test_message_that_is_too_long_is_refused() -> None:
    for decoder in (decode, codec.decode):
        with pytest.raises(ProtocolError, match="more than 10"):
            decoder(b'{"pid": 1234}', StartReply, limit=10)


def log(rank: int, offset: int = 0, data: bytes = b"abc") -> bytes:
    return transfer.frame(transfer.UNSEALED, transfer.LOG, struct.pack(">iQ", rank, offset), data)


STATES = (b"[]", b'{"x":' + b"[" * 9000, b'{"job": "../x", "phase": "running"}')
BAD_FRAMES = [
    *(log(0, 0, b"x" * 70_000), log(0, 1 << 63), log(-3), log(999_999), b"\x1b]0;owned\x07\n" * 9),
    *(transfer.frame(transfer.UNSEALED, kind, b"0") for kind in (transfer.LOG, transfer.ALIVE)),
    *(transfer.frame(transfer.UNSEALED, transfer.STATE, body=text) for text in STATES),
    transfer.frame(b"x", transfer.HEARTBEAT),
    transfer.frame(transfer.UNSEALED, transfer.DONE),
    # The beginning of a frame is refused, before its body is kept.
    struct.pack(">BIQ", transfer.LISTING, 0, 64 << 20) + bytes(16),
    struct.pack(">BIQ", transfer.STATE, 0, 100 << 30) + bytes(16),
    b"".join(map(log, range(1000))),
]


@pytest.mark.parametrize("frames", BAD_FRAMES, ids=itertools.count())
def test_invalid_frame_is_refused_wherever_the_stream_is_cut(frames: bytes) -> None:
    for size in (1, 7, len(frames)):
        decoder = FrameDecoder()
        with pytest.raises(ProtocolError):
            for at in range(0, len(frames), size):
                list(decoder.feed(frames[at : at + size]))


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
    state = json.dumps({**STATE_OF_A_JOB, "script": piece * (MAX_TEXT // len(piece))})
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
    manifest = {os.fsdecode(name): Entry(FILE, 0o644, size, 0, "") for name, size in names.items()}
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
    changes = [{"mode": 0o10000}, {"size": -1}, {"size": 1 << 64}, {"mtime_ns": 1 << 63}, {"kind": "d"}]
    for entry in (link, *(file._replace(**changed) for changed in (*changes, {"target": "x"}))):
        with pytest.raises(ProtocolError):
            Listing({"f": entry})


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
