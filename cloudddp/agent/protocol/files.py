"""The files of a node that go to the laptop: the request `pack`, and the stream that answers it.

The stream is MAGIC and then frames: a kind (1 byte), the length of the payload (4 bytes), the payload.
Numbers are in network byte order.

    same    numbers of PackRequest.have (4 bytes each): these files are on the node as they are on the laptop
    total   a Total: what is left to send, by a first look; before the first entry
    entry   an Entry: a folder, a link, or a file, whose contents follow
    data    a piece of the file's contents, from Entry.offset on
    end     an End: the file is complete, or was given up
    out     a LeftOut: what is not sent, and why; after the entries
    wait    a Work: the agent is reading and has nothing to send yet
    finish  the last frame
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Optional

from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    MAX_REASON,
    MAX_SIZE,
    ProtocolError,
    check_job_id,
    check_length,
    check_project,
    check_range,
)

MAGIC = b"cloudddp files 1\n"
SAME, TOTAL, ENTRY, DATA, END, OUT, WAIT, FINISH = b"s", b"t", b"e", b"d", b"x", b"o", b"w", b"f"
FILE, FOLDER, LINK = b"f", b"d", b"l"  # kinds of an entry
SETTLED, RECENT, CHANGED, GIVEN_UP = range(4)  # states of a file at its end

MAX_HAVE = 200_000  # files of which the laptop describes what it has
MAX_ENTRIES = 1_000_000  # files, folders and links in one stream
MAX_DATA = 1 << 20  # bytes of contents in one frame
MAX_NUMBERS = 4096  # in one frame
MAX_LEFT_OUT = 1000  # that are named

PREFIX = struct.Struct("!cI")
_ENTRY = struct.Struct("!cHQqQHH")
_TOTAL = struct.Struct("!QQ")
_WORK = struct.Struct("!QQ")
_END = struct.Struct("!B32s")
_OUT = struct.Struct("!BHH")
LONGEST = {
    SAME: 4 * MAX_NUMBERS,
    TOTAL: _TOTAL.size,
    ENTRY: _ENTRY.size + 2 * MAX_PATH,
    DATA: MAX_DATA,
    END: _END.size,
    OUT: _OUT.size + MAX_PATH + 4 * MAX_REASON,
    WAIT: _WORK.size,
    FINISH: 0,
}  # bytes of a payload, by the kind of its frame


class Have(NamedTuple):
    """The beginning of a file that the laptop has, or all of it. With a `digest` (SHA-256 of these `size`
    bytes) the node compares the contents and continues the file from there; without one, the file is the same
    if it has that size and time."""

    path: str
    size: int  # bytes
    mtime_ns: int
    digest: str = ""


@dataclass(frozen=True)
class Selection:
    """Of the whole project, what jobs wrote: what was not pulled yet, up to `limit` bytes, and what was
    written since `job` began. `scratch` are paths that are left out; `present` as in
    results.NewFilesRequest."""

    job: str
    scratch: tuple[str, ...]
    limit: int
    present: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("limit", self.limit, 0, MAX_SIZE)


@dataclass(frozen=True)
class PackRequest:
    """Files and folders of the project, or with `job` of that job's own folder (its logs), by their paths
    there. The answer is the stream above; stderr names what is missing."""

    project: str
    paths: tuple[str, ...]
    job: str = ""
    have: tuple[Have, ...] = ()
    all: bool = False  # also files behind links that no job wrote
    selection: Optional[Selection] = None

    STEP = "pack"

    def __post_init__(self) -> None:
        check_project(self.project)
        if self.job:
            check_job_id("job", self.job)
        for path in self.paths:
            check_length("a path", path, MAX_PATH)
        check_length("have", self.have, MAX_HAVE)
        for path, size, _, digest in self.have:
            check_length("a path", path, MAX_PATH)
            check_range("a size", size, 0, MAX_SIZE)
            check_length("a digest", digest, 64)


class Entry(NamedTuple):
    """One entry of the stream. Bytes of a name that are not UTF-8 are lone surrogates, as in os.fsdecode."""

    name: str
    kind: bytes  # FILE, FOLDER or LINK
    size: int = 0  # bytes of the whole file; 0 except for files
    mode: int = 0o644
    mtime_ns: int = 0  # since the epoch; may be negative
    target: str = ""  # of a link
    offset: int = 0  # bytes that are not sent, because the laptop has them (of a Have with a digest)


class LeftOut(NamedTuple):
    """A path that was not copied, and why. `counts`: a result may be missing because of it (which a pipe is
    not). Without a name: there are more."""

    name: str
    reason: str
    counts: bool = True


@dataclass(frozen=True)
class Total:
    """How many files are left to send, and their bytes. For the display of progress only."""

    files: int
    size: int


@dataclass(frozen=True)
class Work:
    """What the agent has done so far without sending it: files that it has looked at, bytes that it has
    hashed."""

    files: int
    size: int


class End(NamedTuple):
    """The end of a file: SETTLED; RECENT, written so shortly before that a further change need not show in
    its time; CHANGED while it was read; or GIVEN_UP, because it became shorter. `digest`: SHA-256 of the
    whole file as it was read, if it is a continued one (SSH verifies what arrives at once)."""

    state: int
    digest: bytes = b""


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return PREFIX.pack(kind, len(payload)) + payload


def encode_entry(entry: Entry) -> bytes:
    name, target = (text.encode("utf-8", "surrogateescape") for text in (entry.name, entry.target))
    head = _ENTRY.pack(
        entry.kind, entry.mode & 0o7777, entry.size, entry.mtime_ns, entry.offset, len(name), len(target)
    )
    return frame(ENTRY, head + name + target)


def encode_total(total: Total) -> bytes:
    return frame(TOTAL, _TOTAL.pack(total.files, total.size))


def encode_wait(work: Work) -> bytes:
    return frame(WAIT, _WORK.pack(work.files, work.size))


def encode_end(end: End) -> bytes:
    return frame(END, _END.pack(end.state, end.digest))


def encode_left_out(one: LeftOut) -> bytes:
    name, reason = (text.encode("utf-8", "surrogateescape") for text in (one.name, one.reason))
    return frame(OUT, _OUT.pack(one.counts, len(name), len(reason)) + name + reason)


def encode_same(numbers: list[int]) -> bytes:
    pieces = (numbers[at : at + MAX_NUMBERS] for at in range(0, len(numbers), MAX_NUMBERS))
    return b"".join(frame(SAME, struct.pack(f"!{len(piece)}I", *piece)) for piece in pieces)


def decode_entry(data: bytes) -> Entry:
    """Raises ProtocolError, as the functions below."""
    if len(data) < _ENTRY.size:
        raise ProtocolError("an entry is too short")
    kind, mode, size, mtime_ns, offset, name_size, target_size = _ENTRY.unpack_from(data)
    if len(data) != _ENTRY.size + name_size + target_size:
        raise ProtocolError("an entry has another length than it says")
    if max(name_size, target_size) > MAX_PATH:
        raise ProtocolError("the length of a name or of a link's target is out of range")
    name = data[_ENTRY.size : _ENTRY.size + name_size].decode("utf-8", "surrogateescape")
    target = data[_ENTRY.size + name_size :].decode("utf-8", "surrogateescape")
    if kind not in (FILE, FOLDER, LINK):
        raise ProtocolError(f"{name!r} is of an unknown kind")
    if kind != FILE and size:
        raise ProtocolError(f"{name!r} has contents and is no file")
    if kind != LINK and target:
        raise ProtocolError(f"{name!r} has a target and is no link")
    if size > MAX_SIZE or offset > size:
        raise ProtocolError("a size or an offset is out of range")
    return Entry(name, kind, size, mode & 0o7777, mtime_ns, target, offset)


def decode_total(data: bytes) -> Total:
    if len(data) != _TOTAL.size:
        raise ProtocolError("a total has another length")
    files, size = _TOTAL.unpack(data)
    check_range("a total", files, 0, MAX_SIZE)
    check_range("a total", size, 0, MAX_SIZE)
    return Total(files, size)


def decode_wait(data: bytes) -> Work:
    if len(data) != _WORK.size:
        raise ProtocolError("a report of work has another length")
    return Work(*_WORK.unpack(data))


def decode_end(data: bytes) -> End:
    if len(data) != _END.size:
        raise ProtocolError("the end of a file has another length")
    state, digest = _END.unpack(data)
    check_range("the state of a file", state, SETTLED, GIVEN_UP)
    return End(state, digest)


def decode_left_out(data: bytes) -> LeftOut:
    if len(data) < _OUT.size:
        raise ProtocolError("an entry that was left out is too short")
    counts, name_size, reason_size = _OUT.unpack_from(data)
    if len(data) != _OUT.size + name_size + reason_size or name_size > MAX_PATH:
        raise ProtocolError("an entry that was left out has another length than it says")
    texts = data[_OUT.size : _OUT.size + name_size], data[_OUT.size + name_size :]
    name, reason = (text.decode("utf-8", "surrogateescape") for text in texts)
    return LeftOut(name, reason, bool(counts))


def decode_same(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise ProtocolError("a list of numbers is cut")
    return struct.unpack(f"!{len(data) // 4}I", data)
