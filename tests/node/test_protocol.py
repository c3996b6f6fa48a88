"""The decoders of both sides: what does not fit the protocol is refused, and what is decoded is in range."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import time
import zlib
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.badanswers import BAD_FRAMES, BAD_JOBS, BAD_PROBES, JOB, PROBE, RANK

from cloudddp import text
from cloudddp.agent.protocol import codec, transfer
from cloudddp.agent.protocol.codec import MAX_PATH, MAX_TEXT, ProtocolError, encode, encode_utf8
from cloudddp.agent.protocol.file_steps import PackRequest, ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.frames import End, FollowRequest, Frame, Heartbeat, Log, encode_frame
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
from cloudddp.agent.protocol.machine import MAX_FOLDERS, PowerOffReply, ProbeReply, ProbeRequest, is_interface
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
    MAX_FILES,
    Entry,
    folder_digests,
    manifest_digest,
    manifest_to_wire,
    nested,
    path_from_wire,
)
from cloudddp.agent.protocol.phases import JobPhase, Peer, VersionConflict
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.agent.protocol.results import JobFiles, NewFiles, NewFilesReply, NewFilesRequest, NewPath
from cloudddp.agent.protocol.start import Process, SetupReply, SetupRequest, StartReply, StartRequest
from cloudddp.agent.protocol.transfer import (
    BATCH,
    ZLIB,
    Listing,
    Record,
    Wants,
    batch,
    read_batch,
    read_frame,
    read_listing,
)
from cloudddp.agent.protocol.transfer import Frame as TransferFrame
from cloudddp.agent.protocol.transfer import frame as transfer_frame
from cloudddp.agent.steps import FrameDecoder, decode

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
    Listing(
        {"": {"caf\xe9": Entry(FILE, 0o644, 5, -1, "")}, "a/b": {"l": Entry(LINK, 0, 0, 0, "../x")}},
        {"caf\xe9": "0" * 32},
    ),
    Wants(False, (0, 2), {"2": 7}, 9, 1),
    ReceiveRequest("p", "0" * 64, 1, Peer(0, "10.0.0.1", 65535), 2),
    ReceiveEvent(received=5, note="x", done=ReceiveReply(1, 2, 3, 4)),
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
    StartReply(1, Unreachable({1: "refused"}, (1,), "x"), "linux-x86_64", "", {"mesh": 0.5}),
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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=JSON)
def test_both_decoders_agree(kind: Any, data: Any) -> None:
    """The laptop uses msgspec, the agent the standard library: one schema, two readers."""
    assert_agreement(json.dumps(data), kind)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_default_values_need_not_be_sent(message: Any) -> None:
    short = encode(message, omit_defaults=True)
    assert decode(short, type(message)) == message
    assert len(short) <= len(encode(message))


def test_message_without_defaults_is_short_and_keeps_zeros_that_are_none() -> None:
    assert encode(Message(Kind.HEARTBEAT), omit_defaults=True) == b'{"kind": "heartbeat"}'
    report = Report(True, cancelled=0.0, exit_code=0, step=0)
    assert decode(encode(report, omit_defaults=True), Report) == report


@given(message=st.sampled_from(MESSAGES), key=st.integers(0, 30), value=JSON)
def test_both_decoders_agree_on_almost_valid_messages(message: Any, key: int, value: Any) -> None:
    fields = json.loads(encode(message))
    names = sorted(fields)
    fields[names[key % len(names)]] = value
    assert_agreement(json.dumps(fields), type(message))


def assert_agreement(data: str, kind: Any) -> None:
    def outcome(decoder: Any) -> Any:
        try:
            return decoder(data.encode(), kind)
        except ProtocolError:
            return None

    assert outcome(decode) == outcome(codec.decode)


@pytest.mark.parametrize("reply", BAD_PROBES.values(), ids=BAD_PROBES.keys())
@pytest.mark.parametrize("decoder", [decode, codec.decode], ids=["laptop", "agent"])
def test_invalid_probe_reply_is_refused(decoder: Any, reply: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decoder(as_bytes(reply), ProbeReply)


@pytest.mark.parametrize("reply", BAD_JOBS.values(), ids=BAD_JOBS.keys())
@pytest.mark.parametrize("decoder", [decode, codec.decode], ids=["laptop", "agent"])
def test_invalid_list_of_jobs_is_refused(decoder: Any, reply: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decoder(as_bytes(reply), JobsReply)


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
        '{"job": "j", "wait": true, "heartbeat": 5, "offsets": {"1": -1}}',
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


def as_bytes(reply: str | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.encode()


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_invalid_frame_is_refused(frames: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(frames))


def test_replies_that_the_invalid_ones_derive_from_are_accepted() -> None:
    assert asdict(decode(json.dumps(PROBE).encode(), ProbeReply)) == {
        **PROBE,
        "running": (),
        "poweroff": None,
        "origin": "",
        "version": 0,
        "wrote": False,
    }
    reply = {"jobs": [{**JOB, "ranks": [RANK], "unknown key": 1}]}
    (job,) = decode(json.dumps(reply).encode(), JobsReply).jobs
    assert job.ranks[0].rank == 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_decoded_or_refused(kind: Any, data: bytes) -> None:
    try:
        decode(data, kind)
    except ProtocolError as error:
        assert text.one_line(str(error)) == str(error)


@given(key=st.sampled_from(sorted(PROBE)), value=JSON)
def test_any_value_of_a_probe_reply_is_refused_or_in_range(key: str, value: Any) -> None:
    try:
        reply = decode(json.dumps({**PROBE, key: value}).encode(), ProbeReply)
    except ProtocolError:
        return
    assert 0 <= reply.gpus <= 256
    assert 1 <= reply.free_port < 65536
    assert not reply.interface or is_interface(reply.interface)
    assert all(job not in ("", ".", "..") and "/" not in job for job in reply.running)


@given(
    key=st.sampled_from(["job", "node", "phase", "exit_code", "started", "error", "ranks", "training"]),
    value=JSON,
)
def test_any_job_id_that_is_accepted_is_no_path(key: str, value: Any) -> None:
    try:
        (job,) = decode(json.dumps({"jobs": [{**JOB, key: value}]}).encode(), JobsReply).jobs
    except ProtocolError:
        return
    assert "/" not in job.job
    assert job.job not in ("", ".", "..")
    assert job.exit_code is None or 0 <= job.exit_code <= 255


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_any_stream_gives_the_same_frames_wherever_it_is_cut(data: bytes, cuts: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> tuple[list[Any], bool]:
        frames, found = FrameDecoder(), []
        try:
            for piece in pieces:
                found.extend(frames.feed(piece))
        except ProtocolError:
            return found, False
        return found, True

    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert outcome(pieces) == outcome([data])


LOGS = st.builds(Log, st.integers(-1, 200), st.integers(0, 1 << 40), st.binary(max_size=100))
FRAMES: st.SearchStrategy[Frame] = LOGS | st.sampled_from([Heartbeat(), End(), STATE])


@given(sent=st.lists(FRAMES), size=st.integers(1, 64))
def test_frames_arrive_as_they_were_sent(sent: list[Frame], size: int) -> None:
    data = b"".join(map(encode_frame, sent))
    frames = FrameDecoder()
    assert [one for at in range(0, len(data), size) for one in frames.feed(data[at : at + size])] == sent


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
    listing = Listing(nested(wire))
    frame = read_frame(io.BytesIO(listing.frame(b"k")).read, b"k")
    found = read_listing(frame)
    assert {
        path_from_wire(path): entry._replace(target=path_from_wire(entry.target))
        for path, entry in found.entries()
    } == manifest
    digests = folder_digests(nested(wire))
    reply = decode(json.dumps({**PROBE, "folders": digests}).encode(), ProbeReply)
    assert reply.folders == digests == folder_digests(found.folders)
    assert manifest_digest(reply.folders) == manifest_digest(digests)


def test_project_of_the_most_files_is_accepted() -> None:
    manifest = {f"pages/[id]{number}/x": Entry(FILE, 0o644, 1, 0, "") for number in range(MAX_FILES)}
    digests = folder_digests(nested(manifest))
    reply = decode(json.dumps({**PROBE, "folders": digests}).encode(), ProbeReply, limit=MAX_FOLDERS)
    assert reply.folders == digests
    frame = read_frame(io.BytesIO(Listing(nested(manifest)).frame(b"k")).read, b"k")
    assert len(read_listing(frame).entries()) == MAX_FILES
    wants = Wants(files=tuple(range(MAX_FILES)))
    assert decode(encode(ReceiveEvent(wants=wants)), ReceiveEvent) == ReceiveEvent(wants=wants)


@pytest.mark.parametrize("at", [0, 5, 14, 29, 40, -1])
def test_frame_that_was_changed_is_refused(at: int) -> None:
    raw = bytearray(Listing({"": {"a": Entry(FILE, 0o644, 1, 0, "")}}).frame(b"k"))
    raw[at] ^= 0x40
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_listing(read_frame(io.BytesIO(raw).read, b"k"))


def test_compressed_contents_are_bounded_by_what_they_name() -> None:
    bomb = batch(
        b"k",
        [Record(0, 5, 0, False, b"x" * 16)],
        b"\0" * (1 << 20),
        lambda data: (ZLIB, zlib.compress(data, 1)),
    )
    small = bytearray(bomb)
    opening = len(bomb) - len(read_frame(io.BytesIO(bomb).read, b"k").body)
    head = (ZLIB).to_bytes(1, "big") + (5).to_bytes(4, "big") + bomb[29 + 5 : opening]
    lying = transfer_frame(b"k", BATCH, head, bytes(small[opening:]))
    with pytest.raises(codec.ProtocolError, match="longer than it says"):
        read_batch(read_frame(io.BytesIO(lying).read, b"k"))


@given(st.binary(max_size=200))
def test_any_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_frame(io.BytesIO(data).read, b"k")


@pytest.mark.parametrize("piece", ['"[{', '\\\\"', "\\\\\\", "x", '"', "\\u0022["])
def test_brackets_in_texts_are_not_counted(piece: str) -> None:
    state = json.dumps({**JOB, "script": piece * (MAX_TEXT // len(piece))})
    data = f'{{"jobs": [{", ".join([state] * 20)}]}}'.encode()
    assert len(decode(data, JobsReply, limit=MAX_LISTING).jobs) == 20


@pytest.mark.parametrize(
    "text", ['"' * (1 << 22), '"' + '\\"' * (1 << 21), "\\" * (1 << 22), "[" * (1 << 22), '"\\']
)
def test_text_that_never_ends_is_refused_at_once(text: str) -> None:
    data = b"[" * 200_000 + text.encode()
    begin = time.process_time()
    with pytest.raises(ProtocolError):
        decode(data, JobsReply, limit=MAX_LISTING)
    assert time.process_time() - begin < 20


def test_unknown_codec_is_refused() -> None:
    raw = batch(b"k", [Record(0, 3, 0, False, b"x" * 16)], b"new", lambda data: (9, data))
    with pytest.raises(codec.ProtocolError, match="unknown codec"):
        read_batch(read_frame(io.BytesIO(raw).read, b"k"))


@pytest.mark.parametrize("name", ["\u0100", "/a", "a//b", "a/", "./a", "a/.", "a/../b", "..", "a\0b"])
def test_path_that_no_manifest_has_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(json.dumps({**PROBE, "folders": {name: "0" * 16}}).encode(), ProbeReply)
    entry = Entry(FILE, 0o644, 1, 1, "")
    for folders in ({name: {"f": entry}}, {"d": {name: entry}}, {"d": {"l": Entry(LINK, 0, 0, 0, "\u0100")}}):
        with pytest.raises(ProtocolError):
            Listing(folders)


@pytest.mark.parametrize(
    "names",
    [
        ["a", ".."],
        ["a", ""],
        ["", "a"],
        ["a/b", "c"],
        ["a", "b/"],
        ["/a", "b"],
        ["a\0", "b"],
        ["a", "."],
        ["a", MAX_PATH * "x"],
    ],
    ids=lambda names: repr(names)[:20],
)
def test_no_name_of_a_folder_hides_behind_another_one(names: list[str]) -> None:
    entry = Entry(FILE, 0o644, 1, 1, "")
    with pytest.raises(ProtocolError):
        Listing({"d": dict.fromkeys(names, entry)})


def test_entry_of_a_listing_has_no_value_that_a_file_cannot_have() -> None:
    for changed in ({"mode": 0o10000}, {"size": -1}, {"mtime_ns": 1 << 63}, {"kind": "d"}, {"target": "x"}):
        with pytest.raises(ProtocolError):
            Listing({"d": {"f": Entry(FILE, 0o644, 1, 1, "")._replace(**changed)}})


@pytest.mark.parametrize("kind", range(1, 9))
@given(head=st.binary(max_size=80), body=st.binary(max_size=80))
def test_frame_of_any_contents_is_decoded_or_refused(kind: int, head: bytes, body: bytes) -> None:
    found = TransferFrame(kind, head, body, b"")
    for decode_frame in (
        read_batch,
        transfer.indexes,
        transfer.read_part,
        transfer.read_end,
        read_listing,
        transfer.read_wants,
    ):
        with contextlib.suppress(ProtocolError):
            decode_frame(found)
