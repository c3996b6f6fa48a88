"""The transfer of files as a stream of frames: project files from the laptop to a node, files between nodes,
results from a node to the laptop.

A sender offers what it has (LISTING), the receiver answers with what it lacks, and from which byte (WANTS),
and the sender sends that (sending.py, receiving.py). Frames are sealed: an HMAC under the secret of a sync or
a job covers the head of a frame. The head of LISTING and WANTS has the SHA-256 of their body, that of
FILE_END the one of the whole file. Results have no secret (UNSEALED): SSH says who sends them.
"""

from __future__ import annotations

import functools
import hmac
import io
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from hashlib import sha256
from typing import Annotated, Callable, NamedTuple, TypeVar

from cloudddp.agent.protocol.codec import (
    Count,
    OptionalJobId,
    ProtocolError,
    at_most,
    decode,
    encode,
    within,
)
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import (
    FILE,
    MAX_FILES,
    Entry,
    Manifest,
    WirePath,
    check_files,
    path_from_wire,
)

T = TypeVar("T")

# Kinds of frames.
LISTING, WANTS, PART, FILE_END, DONE, ALIVE, FETCH, CLOSE, LEFT_OUT = range(1, 10)
LOG, STATE, READING, HEARTBEAT, STREAM_END = range(10, 15)  # of a job (frames.py)
UNSEALED = b""

PART_SIZE = 1 << 20  # bytes of a file in a frame
MAX_HEAD = 1 << 20  # bytes
MAX_BODY = 2 * PART_SIZE
MAX_LISTING = 64 << 20  # bytes, before and after decompression
MAX_ENTRIES = 1_000_000  # of all listings of a transfer
MAX_KNOWN = 500_000  # files of which a receiver may have the beginning: a WANTS is up to 63 MB

SEAL = 16  # bytes of an HMAC-SHA-256
DIGEST = 16  # bytes of a SHA-256: nobody can find another file with the same ones
PLAIN, ZLIB = range(2)  # codecs
# The longest body of each kind in a transfer. A receiver refuses other kinds, and keeps no more than that.
LIMITS = {
    kind: MAX_LISTING if kind in (LISTING, WANTS) else MAX_BODY for kind in range(LISTING, LEFT_OUT + 1)
}

_PREFIX = struct.Struct(">BIQ")  # kind, bytes of the head, bytes of the body
_FILE_HEAD = struct.Struct(">IQqB16sBI")  # index, size, mtime in ns, flags, digest; as in _PART
_PART = struct.Struct(">IQBI")  # index, offset, codec, bytes before compression
_FLAGS = ("executable", "missing", "deleted", "unsettled", "changed")  # bit by bit


class FileHead(NamedTuple):
    """A file as it was read: `number` is its index in the listing, its size in bytes. `missing`: the sender
    does not have it, and there are no contents; `deleted`: likewise, and the sender is the laptop, which had
    it when it was listed. `unsettled`: a further change need not show in its time. `changed`: while it was
    read."""

    number: int
    size: int
    mtime_ns: int
    executable: bool
    digest: bytes
    missing: bool = False
    deleted: bool = False
    unsettled: bool = False
    changed: bool = False

    @property
    def mode(self) -> int:
        return 0o755 if self.executable else 0o644


Encoded = tuple[int, bytes]  # the codec of some data, and the data in it


def plain(data: bytes) -> Encoded:
    return PLAIN, data


class Frame(NamedTuple):
    kind: int
    head: bytes
    body: bytes


def _checked(decode_frame: Callable[[Frame], T]) -> Callable[[Frame], T]:
    """Make a function that decodes a frame raise ProtocolError, whatever is wrong with the frame: a node may
    seal anything."""

    @functools.wraps(decode_frame)
    def checked(found: Frame) -> T:
        try:
            return decode_frame(found)
        except ProtocolError:
            raise
        except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"a frame cannot be decoded: {str(error)[:200]}") from None

    return checked


# -- frames ------------------------------------------------------------------------------------------------


def seal(secret: bytes, kind: int, head: bytes) -> bytes:
    return hmac.digest(secret, bytes((kind,)) + head, "sha256")[:SEAL]


def frame(secret: bytes, kind: int, head: bytes = b"", body: bytes = b"") -> bytes:
    return b"".join((_PREFIX.pack(kind, len(head), len(body)), seal(secret, kind, head), head, body))


def read_frame(read: Callable[[int], bytes], secret: bytes, limits: Mapping[int, int] = LIMITS) -> Frame:
    """Return the next frame. `read(n)` returns n bytes, fewer only at the end; `limits`: the longest body of
    each kind that may come. Raises EOFError at the end, ProtocolError."""
    opening = read(_OPENING)
    if len(opening) < _OPENING:
        raise EOFError("the stream ended")
    kind, head_size, body_size = _sizes(opening, limits)
    head = read(head_size) if head_size else b""
    if not hmac.compare_digest(opening[_PREFIX.size :], seal(secret, kind, head)):
        raise ProtocolError("a frame has no valid seal")
    body = read(body_size) if body_size else b""
    if len(head) < head_size or len(body) < body_size:
        raise EOFError("the stream ended within a frame")
    return Frame(kind, head, body)


_OPENING = _PREFIX.size + SEAL  # bytes


def _sizes(opening: bytes, limits: Mapping[int, int]) -> tuple[int, int, int]:
    """Return the kind of a frame, and the bytes of its head and body. Raises ProtocolError."""
    kind, head_size, body_size = _PREFIX.unpack_from(opening)
    if kind not in limits or head_size > MAX_HEAD:
        raise ProtocolError("not a frame of this step")
    if body_size > limits[kind]:
        raise ProtocolError("a frame is too long")
    return kind, head_size, body_size


class Frames:
    """Makes frames of bytes that arrive in pieces of any size."""

    def __init__(self, secret: bytes, limits: Mapping[int, int] = LIMITS) -> None:
        self._secret, self._limits = secret, limits
        self.rest = bytearray()  # of a frame that has not arrived completely

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError."""
        self.rest += data
        while len(self.rest) >= _OPENING:
            _, head_size, body_size = _sizes(bytes(self.rest[:_OPENING]), self._limits)
            size = _OPENING + head_size + body_size
            if len(self.rest) < size:
                return
            raw = io.BytesIO(self.rest[:size])
            del self.rest[:size]
            yield read_frame(raw.read, self._secret, self._limits)


# -- files ------------------------------------------------------------------------------------------------


def part(
    secret: bytes, index: int, offset: int, data: bytes, encode: Callable[[bytes], Encoded] = plain
) -> bytes:
    codec, body = encode(data)
    return frame(secret, PART, _PART.pack(index, offset, codec, len(data)), body)


@_checked
def read_part(found: Frame) -> tuple[int, int, bytes]:
    """Return index, offset and the data, which is verified with the whole file. Raises ProtocolError."""
    index, offset, codec, size = _PART.unpack(found.head)
    return index, offset, _decoded(found.body, codec, size)


def end(
    secret: bytes, head: FileHead, data: bytes = b"", encode: Callable[[bytes], Encoded] = plain
) -> bytes:
    """Return the frame that ends a file, with its last bytes."""
    flags = sum(getattr(head, name) << bit for bit, name in enumerate(_FLAGS))
    codec, body = encode(data)
    found = head.number, head.size, head.mtime_ns, flags, head.digest
    return frame(secret, FILE_END, _FILE_HEAD.pack(*found, codec, len(data)), body)


@_checked
def read_end(found: Frame) -> tuple[FileHead, bytes]:
    """Return a file and its last bytes, which are verified with the whole file. Raises ProtocolError."""
    index, size, mtime_ns, flags, digest, codec, last = _FILE_HEAD.unpack(found.head)
    bits = {name: bool(flags >> bit & 1) for bit, name in enumerate(_FLAGS)}
    return FileHead(index, size, mtime_ns, digest=digest, **bits), _decoded(found.body, codec, last)


def _decoded(data: bytes, codec: int, size: int) -> bytes:
    if size > MAX_BODY:
        raise ProtocolError("a frame is too long")
    if codec == ZLIB:
        data = _inflated(data, size)
    elif codec != PLAIN:
        raise ProtocolError("data has an unknown codec")
    if len(data) != size:
        raise ProtocolError("a frame does not have the length that it names")
    return data


def _inflated(data: bytes, limit: int) -> bytes:
    try:
        inflate = zlib.decompressobj()
        found = inflate.decompress(data, limit + 1)
    except zlib.error as error:
        raise ProtocolError(f"not compressed data: {error}") from None
    if len(found) > limit or not inflate.eof:
        raise ProtocolError("compressed data is longer than it says")
    return found


# -- listings and requests -------------------------------------------------------------------------------

Mode = Annotated[int, within(0, 0o7777)]


@frozen
class Listing:
    """The files that a sender has, by path, in wire form. Of results there may be several listings, one after
    the other. `modes` are the permissions of folders, by path; `job`: another one than the requested, which
    wrote the files.

    A file's index is its position in `files`, in order, of all listings.
    """

    files: Annotated[Manifest, check_files]
    modes: Annotated[dict[WirePath, Mode], at_most(MAX_FILES)] = field(default_factory=dict)
    job: OptionalJobId = ""

    def entries(self) -> list[tuple[str, Entry]]:
        """Return path and entry by index, as the operating system has them."""
        return [
            (path_from_wire(path), entry._replace(target=path_from_wire(entry.target)))
            for path, entry in self.files.items()
        ]

    def frame(self, secret: bytes) -> bytes:
        body = zlib.compress(encode(self), 1)
        return frame(secret, LISTING, sha256(body).digest(), body)


@_checked
def read_listing(found: Frame) -> Listing:
    """Raises ProtocolError."""
    return decode(read_listing_text(found, MAX_LISTING), Listing, limit=MAX_LISTING)


def read_listing_text(found: Frame, limit: int) -> bytes:
    """Return the JSON of a listing, up to `limit` bytes. Raises ProtocolError."""
    if found.kind != LISTING or sha256(found.body).digest() != found.head:
        raise ProtocolError("not a listing")
    return _inflated(found.body, limit)


class PartialFile(NamedTuple):
    """What a receiver has of a file: its first bytes, and their SHA-256 (hex, the first 2 * DIGEST
    characters)."""

    size: int
    digest: str


NOTHING = PartialFile(0, "")


@frozen
class Wants:
    """What a receiver lacks: the indexes of files, and what it has of some of them; and how many files
    a node will delete."""

    files: Annotated[tuple[Annotated[int, within(0, MAX_ENTRIES)], ...], at_most(MAX_ENTRIES)] = ()
    known: Annotated[dict[int, PartialFile], at_most(MAX_KNOWN)] = field(default_factory=dict)
    delete: Count = 0

    def of(self, files: Sequence[tuple[str, Entry]]) -> list[tuple[int, PartialFile]]:
        """Return the index of each file that is wanted, and what is known of it. Raises ProtocolError for one
        that is none of these `files`, path and entry."""
        chosen = sorted(set(self.files))
        if len(chosen) < len(self.files):
            raise ProtocolError("it asks for a file twice")
        if chosen and (chosen[-1] >= len(files) or any(files[index][1].kind != FILE for index in chosen)):
            raise ProtocolError("there is no such file")
        return [(index, self.known.get(index, NOTHING)) for index in chosen]

    def frame(self, secret: bytes) -> bytes:
        body = encode(self)
        return frame(secret, WANTS, sha256(body).digest(), body)


@_checked
def read_wants(found: Frame) -> Wants:
    """Raises ProtocolError."""
    if found.kind != WANTS or sha256(found.body).digest() != found.head:
        raise ProtocolError("not a list of wanted files")
    return decode(found.body, Wants, limit=MAX_LISTING)
