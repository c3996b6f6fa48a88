"""The transfer of files as a stream of frames: project files from the laptop to a node and from there to the
others, results from a node to the laptop.

A receiver first gets the listing, answers with the files that it lacks, and then gets those. All three are
frames, equal on SSH and on the connections between nodes, so that a node passes on what it gets as it is.
Whoever sends a file first seals the frames: an HMAC under the secret of this sync covers the head of a frame,
and the heads hold the SHA-256 of the contents. Results have no secret (UNSEALED): SSH says who sends them.
"""

from __future__ import annotations

import functools
import hmac
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import field
from hashlib import sha256
from typing import Annotated, Any, Callable, NamedTuple, Optional, TypeVar

from cloudddp.agent.protocol.codec import Count, JobId, ProtocolError, Size, at_most, decode, encode, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import FILE, MAX_LISTED, Entry, Folder, WirePath, check_folders

T = TypeVar("T")

# Kinds of frames.
LISTING, WANTS, BATCH, PART, END, DONE, ALIVE, SOURCE, CLOSE, LEFT_OUT = range(1, 11)
UNSEALED = b""

SMALL = 1 << 20  # bytes; several files up to this size are in one BATCH, larger ones in PARTs
PART_SIZE = 1 << 20  # bytes
MAX_HEAD = 1 << 20  # bytes; MAX_BATCH records of 37 bytes are 303 kB
MAX_BATCH = 8192  # files
MAX_BODY = 2 * SMALL
MAX_LISTING = 64 << 20  # bytes, before and after decompression
MAX_ENTRIES = 1_000_000  # of all listings of a transfer
MAX_KNOWN = 500_000  # files of which a receiver may have the beginning: a WANTS is up to 63 MB

SEAL = 16  # bytes of an HMAC-SHA-256
DIGEST = 16  # bytes of a SHA-256: nobody can find another file with the same ones
PLAIN, ZLIB = range(2)  # codecs

_PREFIX = struct.Struct(">BIQ")  # kind, bytes of the head, bytes of the body
_RECORD = struct.Struct(">IQqB16s")  # index, size, mtime in ns, flags, digest
_PART = struct.Struct(">IQBI")  # index, offset, codec, bytes before compression
_BATCH = struct.Struct(">BI")  # codec, bytes before compression
_EXECUTABLE, _MISSING, _DELETED, _UNSETTLED, _CHANGED = 1, 2, 4, 8, 16  # flags


class Record(NamedTuple):
    """A file as it was read: `number` is its index in the listing, its size in bytes. `missing`: the sender
    does not have it, and there are no contents; `deleted`: likewise, and the sender is the laptop, which had
    it when it was listed. Not `settled`: a further change need not show in its time. `changed`: while it was
    read."""

    number: int
    size: int
    mtime_ns: int
    executable: bool
    digest: bytes
    missing: bool = False
    deleted: bool = False
    settled: bool = True
    changed: bool = False

    @property
    def mode(self) -> int:
        return 0o755 if self.executable else 0o644


Encoded = tuple[int, bytes]  # the codec of some data, and the data in it


def plain(data: bytes) -> Encoded:
    return PLAIN, data


class Frame(NamedTuple):
    """`raw` is the whole frame, for those to which it is passed on."""

    kind: int
    head: bytes
    body: bytes
    raw: bytes


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


def read_frame(read: Callable[[int], bytes], secret: bytes) -> Frame:
    """Return the next frame. `read(n)` returns n bytes, fewer only at the end. Raises EOFError at the end,
    ProtocolError."""
    opening = read(_OPENING)
    if len(opening) < _OPENING:
        raise EOFError("the stream ended")
    kind, head_size, body_size = _sizes(opening)
    head = read(head_size) if head_size else b""
    if not hmac.compare_digest(opening[_PREFIX.size :], seal(secret, kind, head)):
        raise ProtocolError("a frame has no valid seal")
    body = read(body_size) if body_size else b""
    if len(head) < head_size or len(body) < body_size:
        raise EOFError("the stream ended within a frame")
    return Frame(kind, head, body, b"".join((opening, head, body)))


_OPENING = _PREFIX.size + SEAL  # bytes


def _sizes(opening: bytes) -> tuple[int, int, int]:
    """Return the kind of a frame, and the bytes of its head and body. Raises ProtocolError."""
    kind, head_size, body_size = _PREFIX.unpack_from(opening)
    if not LISTING <= kind <= LEFT_OUT or head_size > MAX_HEAD:
        raise ProtocolError("not a frame of a transfer")
    if body_size > (MAX_LISTING if kind in (LISTING, WANTS) else MAX_BODY):
        raise ProtocolError("a frame is too long")
    return kind, head_size, body_size


class Frames:
    """Makes frames of bytes that arrive in pieces of any size."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._rest = bytearray()  # of a frame that has not arrived completely

    @property
    def is_cut(self) -> bool:
        """Whether a frame has begun to arrive."""
        return bool(self._rest)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises ProtocolError."""
        self._rest += data
        while (found := self._next()) is not None:
            yield found

    def _next(self) -> Optional[Frame]:
        if len(self._rest) < _OPENING:
            return None
        _, head_size, body_size = _sizes(bytes(self._rest[:_OPENING]))
        size = _OPENING + head_size + body_size
        if len(self._rest) < size:
            return None
        raw = io.BytesIO(self._rest[:size])
        del self._rest[:size]
        return read_frame(raw.read, self._secret)


# -- files ------------------------------------------------------------------------------------------------


def _pack(record: Record) -> bytes:
    flags = _EXECUTABLE * record.executable | _MISSING * record.missing | _DELETED * record.deleted
    flags |= _UNSETTLED * (not record.settled) | _CHANGED * record.changed
    return _RECORD.pack(record.number, record.size, record.mtime_ns, flags, record.digest)


def _unpack(fields: tuple[Any, ...]) -> Record:
    index, size, mtime_ns, flags, digest = fields
    return Record(
        index,
        size,
        mtime_ns,
        bool(flags & _EXECUTABLE),
        digest,
        bool(flags & _MISSING),
        bool(flags & _DELETED),
        not flags & _UNSETTLED,
        bool(flags & _CHANGED),
    )


def batch(
    secret: bytes, records: list[Record], contents: bytes, encode: Callable[[bytes], Encoded] = plain
) -> bytes:
    """Return the frame of several files."""
    codec, body = encode(contents)
    head = _BATCH.pack(codec, len(contents)) + b"".join(map(_pack, records))
    return frame(secret, BATCH, head, body)


@_checked
def read_batch(found: Frame) -> list[tuple[Record, memoryview]]:
    """Return the files of a BATCH with their contents, which have been verified. Raises ProtocolError."""
    codec, size = _BATCH.unpack_from(found.head)
    if (len(found.head) - _BATCH.size) % _RECORD.size:
        raise ProtocolError("a batch has half a record")
    contents = memoryview(_decoded(found.body, codec, size))
    files, at = [], 0
    for fields in _RECORD.iter_unpack(found.head[_BATCH.size :]):
        record = _unpack(fields)
        data = contents[at : at + record.size]
        if not (record.missing or record.deleted) and sha256(data).digest()[:DIGEST] != record.digest:
            raise ProtocolError("the contents of a file were changed on the way")
        at += record.size
        files.append((record, data))
    return files


@_checked
def indexes(found: Frame) -> list[int]:
    """Return which files a BATCH has."""
    return [fields[0] for fields in _RECORD.iter_unpack(found.head[_BATCH.size :])]


def part(
    secret: bytes, index: int, offset: int, data: bytes, encode: Callable[[bytes], Encoded] = plain
) -> bytes:
    codec, body = encode(data)
    return frame(secret, PART, _PART.pack(index, offset, codec, len(data)), body)


def part_begin(secret: bytes, index: int, offset: int, size: int) -> bytes:
    """Return the beginning of a PART, which `size` bytes of the file have to follow."""
    head = _PART.pack(index, offset, PLAIN, size)
    return b"".join((_PREFIX.pack(PART, len(head), size), seal(secret, PART, head), head))


@_checked
def read_part(found: Frame) -> tuple[int, int, bytes]:
    """Return index, offset and the data, which is verified with the whole file. Raises ProtocolError."""
    index, offset, codec, size = _PART.unpack(found.head)
    return index, offset, _decoded(found.body, codec, size)


def end(secret: bytes, record: Record) -> bytes:
    """Return the frame that ends a file that was sent in parts."""
    return frame(secret, END, _pack(record))


@_checked
def read_end(found: Frame) -> Record:
    return _unpack(_RECORD.unpack(found.head))


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


# -- what is said about them ---------------------------------------------------------------------------------

Mode = Annotated[int, within(0, 0o7777)]


@frozen
class Listing:
    """The files of all folders that differ on some node, in wire form; a folder without files is one that is
    gone. `contents` is the SHA-256 (its beginning, in hex) of files that may be there with another time, by
    path.

    Of results there may be several, one after the other. `modes` are the permissions of folders, by path;
    `others` has the positions in this listing of files that other jobs wrote, by job.

    A file's index is its position in the folders, in order, of all listings.
    """

    folders: dict[str, Folder]
    contents: dict[str, str] = field(default_factory=dict)
    modes: Annotated[dict[WirePath, Mode], at_most(MAX_LISTED)] = field(default_factory=dict)
    others: Annotated[dict[JobId, Annotated[tuple[Count, ...], at_most(MAX_LISTED)]], at_most(MAX_LISTED)] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        check_folders(self.folders)

    def entries(self) -> list[tuple[str, Entry]]:
        """Return path and entry by index, in wire form."""
        return [
            (f"{folder}/{name}" if folder else name, entry)
            for folder, files in self.folders.items()
            for name, entry in files.items()
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


@frozen
class Wants:
    """What a receiver lacks: the indexes of files, and how many bytes of one it has already, with the SHA-256
    (hex) of these bytes in `digests`, as far as it says that. `everything`: all regular files of the listing.
    `size` is the number of bytes to send, `delete` how many files a node will delete."""

    everything: bool = False
    files: Annotated[tuple[Annotated[int, within(0, MAX_ENTRIES)], ...], at_most(MAX_ENTRIES)] = ()
    offsets: Annotated[dict[str, Size], at_most(MAX_KNOWN)] = field(default_factory=dict)
    size: Size = 0
    delete: Count = 0
    digests: Annotated[dict[str, str], at_most(MAX_KNOWN)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in self.offsets:
            if not (text.isascii() and text.isdigit() and len(text) < 8):
                raise ProtocolError("not an index")

    def of(self, entries: list[tuple[str, Entry]]) -> list[tuple[int, int]]:
        """Return index and offset of each file that is wanted. Raises ProtocolError for one that there is
        not."""
        chosen = range(len(entries)) if self.everything else sorted(self.files)
        offsets = {int(index): offset for index, offset in self.offsets.items()}
        if (chosen and chosen[-1] >= len(entries)) or not offsets.keys() <= set(chosen):
            raise ProtocolError("there is no such file")
        if len(set(chosen)) < len(chosen) or len(offsets) < len(self.offsets):
            raise ProtocolError("it asks for a file twice")
        return [(index, offsets.get(index, 0)) for index in chosen if entries[index][1].kind == FILE]

    def frame(self, secret: bytes) -> bytes:
        body = encode(self)
        return frame(secret, WANTS, sha256(body).digest(), body)


@_checked
def read_wants(found: Frame) -> Wants:
    """Raises ProtocolError."""
    if found.kind != WANTS or sha256(found.body).digest() != found.head:
        raise ProtocolError("not a list of wanted files")
    return decode(found.body, Wants, limit=MAX_LISTING)
