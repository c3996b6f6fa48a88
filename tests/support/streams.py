"""Hostile streams: each tries to write, or to read, where `pull` must not.

A stream is an iterable of pieces, so that an endless one takes no memory here. The functions make frames
without the checks of the agent.
"""

from __future__ import annotations

import functools
import json
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.manifest import FILE, LINK, path_to_wire
from cloudddp.agent.protocol.transfer import DIGEST, UNSEALED, Record
from cloudddp.job.results.unpack import FOLDER

NOON_NS = 1_700_000_000_123_456_789


def frame(kind: int, head: bytes = b"", body: bytes = b"") -> bytes:
    return transfer.frame(UNSEALED, kind, head, body)


FINISH = frame(transfer.DONE)


@dataclass(frozen=True)
class Item:
    """What a node lists; `contents` are sent, unless they are None."""

    name: str
    kind: str = FILE
    size: Any = 0
    mode: int = 0o644
    mtime_ns: int = NOON_NS
    target: str = ""
    contents: bytes | None = None

    def listing(self) -> bytes:
        path = path_to_wire(self.name)
        if self.kind == FOLDER and not self.size:
            return listing({"folders": {}, "modes": {path: self.mode}})
        folder, _, name = path.rpartition("/")
        entry = [self.kind, self.mode, self.size, self.mtime_ns, path_to_wire(self.target)]
        return listing({"folders": {folder: {name: entry}}})

    def frames(self, number: int) -> Iterator[bytes]:
        data = self.contents
        if data is None:
            return
        if len(data) <= transfer.SMALL:
            yield transfer.batch(UNSEALED, [record(number, data, mtime_ns=self.mtime_ns)], data)
            return
        for at in range(0, len(data), transfer.PART_SIZE):
            yield part(number, at, data[at : at + transfer.PART_SIZE])
        yield end(number, data)


def listing(value: Any) -> bytes:
    body = zlib.compress(json.dumps(value).encode(), 1)
    return frame(transfer.LISTING, sha256(body).digest(), body)


def listed(name: str, **more: Any) -> Item:
    """Return something that is listed, and not sent."""
    return Item(name, **more)


def file(name: str, data: bytes = b"from the node\n", **more: Any) -> Item:
    return Item(name, size=len(data), contents=data, **more)


def folder(name: str) -> Item:
    return Item(name, kind=FOLDER, mode=0o755)


def link(name: str, target: str) -> Item:
    return Item(name, kind=LINK, target=target)


def record(number: int, data: bytes = b"", **more: Any) -> Record:
    fields = {"mtime_ns": NOON_NS, "executable": False, "digest": sha256(data).digest()[:DIGEST], **more}
    return Record(number, more.pop("size", len(data)), **{k: v for k, v in fields.items() if k != "size"})


def part(number: int, offset: int, data: bytes) -> bytes:
    return transfer.part(UNSEALED, number, offset, data)


def end(number: int, data: bytes = b"", **more: Any) -> bytes:
    return transfer.end(UNSEALED, record(number, data, **more))


def batch(*records: Record, data: bytes = b"") -> bytes:
    return transfer.batch(UNSEALED, list(records), data)


def missing(number: int) -> bytes:
    return batch(Record(number, 0, 0, False, bytes(DIGEST), missing=True))


def _chain(up: str) -> Iterator[Item]:
    """CVE-2025-4517: a path of links grows past PATH_MAX when it is resolved, so that realpath() stops
    looking."""
    long = "d" * 247
    path = "runs/"
    steps = "abcdefghijklmnop"
    for step in steps:
        yield folder(path + long)
        yield link(path + step, long)
        path += long + "/"
    short = "runs/" + "/".join(steps) + "/" + "l" * 254
    yield link(short, "../" * len(steps))
    yield link("runs/escape", f"{short.removeprefix('runs/')}/../../{up}")
    yield file("runs/flag")
    yield file("runs/escape/planted")


@dataclass(frozen=True)
class Corpus:
    """`outside` is a folder beside the project that contains a file `bait`; `up` is the path to it from the
    target."""

    outside: Path
    up: str

    def attacks(self) -> dict[str, Iterable[bytes]]:
        """Return the streams that are refused as a whole, by what they try. Each begins with a harmless
        file."""
        b, c = listed("runs/b", size=3), listed("runs/c", size=3)
        whole: dict[str, list[Item | bytes]] = {
            "dot-dot": [file(f"runs/{self.up}/planted")],
            "dot-dot-first": [file(f"{self.up}/planted")],
            "dot-dot-inside": [file("runs/a/../b")],
            "dot": [file("runs/./b")],
            "empty-name": [file("")],
            "left-out-without-end": [file_steps.left_out("a", "b")] * 1100,
            "left-out-cut": [frame(transfer.LEFT_OUT, b'{"name": "a"')],
            "left-out-that-is-no-path": [frame(transfer.LEFT_OUT, b'{"name": "\\u2020", "reason": "x"}')],
            "empty-component": [file("runs//b")],
            "absolute": [file(f"{self.outside}/planted")],
            "zero-byte": [file("runs/a\0b")],
            "not-requested": [file("cloudddp.toml")],
            "not-requested-git-hook": [file(".git/hooks/pre-commit", mode=0o755)],
            "not-requested-sibling": [file("runs2/x")],
            "not-requested-folder": [folder("src")],
            "requested-root-dot": [folder(".")],
            "link-absolute": [link("runs/l", str(self.outside)), file("runs/l/planted")],
            "link-out": [link("runs/l", f"../{self.up}"), file("runs/l/planted")],
            "link-to-parent": [link("runs/l", "..")],
            "link-to-not-requested": [link("runs/l", "../train.py")],
            "link-named-as-requested": [link("runs", self.up), file("runs/planted")],
            "link-empty": [link("runs/l", "")],
            "link-up-after-down": [
                *(folder("runs/a"), folder("runs/a/b"), link("runs/a/b/up", "../..")),
                *(link("runs/l", "a/b/up/../../elsewhere"), file("runs/l/planted")),
            ],
            "link-chain-CVE-2025-4517": [*_chain(self.up)],
            "link-with-contents": [link("runs/l", "good"), batch(record(1, b"x"), data=b"x")],
            "file-with-target": [listed("runs/l", target="good")],
            "folder-with-contents": [folder("runs/a"), batch(record(1, b"x"), data=b"x")],
            "contents-of-nothing": [part(1, 0, b"x")],
            "contents-of-a-high-number": [part(0xFFFFFFFF, 0, b"x")],
            "contents-twice": [file("runs/b", b"x"), batch(record(1, b"x"), data=b"x")],
            "contents-of-a-file-that-is-left-out": [file("runs/.git", b"x")],
            "contents-that-are-empty": [b, part(1, 0, b"")],
            "batch-of-nothing": [batch()],
            "batch-cut": [b, frame(transfer.BATCH, b"\0\0\0\0\3ab", b"abc")],
            "batch-with-a-wrong-hash": [listed("runs/b", size=4), batch(record(1, b"good"), data=b"evil")],
            "shorter-than-announced": [b, part(1, 0, b"ab"), end(1, b"abc")],
            "longer-than-announced": [b, part(1, 0, b"four"), end(1, b"fou")],
            "part-is-missing": [b, part(1, 0, b"a"), part(1, 2, b"c")],
            "part-twice": [b, part(1, 0, b"a"), part(1, 0, b"a")],
            "end-of-nothing": [end(1)],
            "end-of-another-file": [b, c, part(1, 0, b"abc"), end(2, b"abc")],
            "end-that-is-short": [listed("runs/b"), frame(transfer.END, b"\0")],
            "file-in-a-file": [b, c, part(1, 0, b"a"), part(2, 0, b"a")],
            "batch-in-a-file": [
                b,
                listed("runs/c", size=1),
                part(1, 0, b"a"),
                batch(record(2, b"x"), data=b"x"),
            ],
            "finish-in-a-file": [b, part(1, 0, b"a")],
            "file-that-is-not-sent": [b],
            "offset-of-a-file-that-is-not-here": [listed("runs/b", size=5), part(1, 2, b"abc")],
            "size-too-large": [listed("runs/a", size=(1 << 64) - 1)],
            "size-that-is-no-number": [listed("runs/a", size="7")],
            "kind-unknown": [listed("runs/special", kind="~")],
            "kind-of-frame-unknown": [struct.pack(">BIQ", 77, 0, 0) + bytes(16)],
            "kind-of-frame-of-a-sync": [frame(transfer.SOURCE, b"0")],
            "name-too-long": [file("runs/" + "x/" * 2046 + "yyyyy")],
            "more-after-the-end": [file("runs/b"), FINISH],
        }
        unfinished: dict[str, list[Item | bytes]] = {
            "contents-in-an-unknown-codec": [
                listed("runs/b", size=1),
                frame(transfer.PART, struct.pack(">IQBI", 1, 0, 9, 1), b"x"),
            ],
            "not-sealed": [struct.pack(">BIQ", transfer.DONE, 0, 0) + bytes(16)],
            "frame-of-4-GiB": [*_flood(transfer.PART)],
            "head-of-4-GiB": [struct.pack(">BIQ", transfer.LEFT_OUT, 0xFFFFFFFF, 0), *_zeros(300)],
            "file-of-an-exbibyte": [listed("runs/a", size=1 << 60), part(1, 0, bytes(1 << 20))],
            "cut-in-a-frame": [part(1, 0, b"x" * 100)[:20]],
            "cut-in-a-file": [listed("runs/b", size=2 << 20), part(1, 0, bytes(1 << 20))],
            "no-end": [file("runs/b")],
            "empty": [],
            "zeros-without-end": [file("runs/b"), FINISH, *_zeros(300)],
        }
        kinds = {**{name: [*pieces, FINISH] for name, pieces in whole.items()}, **unfinished}
        escapes: dict[str, Iterable[bytes]] = {
            name: stream(file("runs/good"), *pieces) for name, pieces in kinds.items()
        }
        return {
            **escapes,
            "noise": [bytes(range(256)) * 40],
            "text": [b"Welcome to node 0!\n" * 400],
            "listing-of-4-GiB": _flood(transfer.LISTING),
            "listing-that-inflates": (make() for make in (_bomb,)),  # not before it is used
            "listing-that-is-no-object": [listing([1])],
            "listing-of-many-objects": (make() for make in (_many,)),
            "listing-after-its-end": [FINISH, file("runs/b").listing()],
            "contents-before-the-listing-ends": [file("runs/b").listing(), part(0, 0, b"x")],
        }


def _flood(kind: int) -> list[bytes]:
    """A frame that is announced much longer than any, and much of it."""
    return [struct.pack(">BIQ", kind, 0, 1 << 32) + bytes(16), *_zeros(300)]


def _zeros(count: int) -> list[bytes]:
    return [bytes(1 << 20)] * count


@functools.cache
def _many() -> bytes:
    return listing({"folders": {str(k): {} for k in range(150_000)}})


@functools.cache
def _bomb() -> bytes:
    body = zlib.compress(b'{"folders": {}' + b" " * (2 * file_steps.MAX_LEFT_OUT_TEXT) + b"}", 1)
    return frame(transfer.LISTING, sha256(body).digest(), body)


def stream(*pieces: Item | bytes) -> Iterator[bytes]:
    """Yield a listing of each item, the end of the listings, and then contents and frames in their order."""
    items = [piece for piece in pieces if isinstance(piece, Item)]
    yield from (item.listing() for item in items)
    yield frame(transfer.DONE)
    number = 0
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
        elif piece.kind != FOLDER or piece.size:
            yield from piece.frames(number)
            number += 1


# Broken off, and not hostile: what had arrived is kept for the next pull.
TRUNCATED = ("no-end", "cut-in-a-frame", "cut-in-a-file")

# These would take much memory, or space.
LARGE = (
    "file-of-an-exbibyte",
    "frame-of-4-GiB",
    "head-of-4-GiB",
    "listing-of-4-GiB",
    "listing-that-inflates",
    "listing-of-many-objects",
    "zeros-without-end",
)

GUARDED = (
    "runs/.git/config",
    "runs/.GIT/config",
    "runs/.git",
    "runs/a/.Git/hooks/post-checkout",
    "runs/.g\u200cit/config",
    "runs/.gi\u00adt/config",
    "runs/\ufeff.git/config",
    "runs/.git /config",
    "runs/.git.../config",
    "runs/.git::$INDEX_ALLOCATION/config",
    "runs/git~1/config",
    "runs/GIT~1/config",
    "runs/\uff0egit/config",
    "runs/.g\u0131t\u0307/config".replace("\u0131t\u0307", "it"),
    "runs/cloudddp.toml",
    "runs/CloudDDP.TOML",
    "runs/a/cloudddp.toml",
    "runs/.cloudddp/jobs/x",
    "runs/.cloudddp-anything",
)
WELCOME = (
    "runs/.gitignore",
    "runs/.github/x",
    "runs/git/x",
    "runs/a.git/x",
    "runs/cloudddp.toml.bak",
    "runs/.gi",
)

COLLISIONS: dict[str, list[Item]] = {
    "the-same-file-twice": [file("runs/a", b"first"), file("runs/a", b"second")],
    "a-file-for-a-link": [link("runs/a", "b"), file("runs/a", b"second"), file("runs/b", b"first")],
    "a-link-for-a-file": [file("runs/a", b"first"), link("runs/a", "b")],
    "a-link-for-a-folder": [folder("runs/a"), file("runs/a/x", b"first"), link("runs/a", "b")],
    "a-folder-for-a-link": [
        link("runs/a", "b"),
        folder("runs/b"),
        folder("runs/a"),
        file("runs/a/x", b"second"),
    ],
    "a-file-below-a-file": [file("runs/a", b"first"), file("runs/a/x", b"second")],
    "a-file-through-a-link": [folder("runs/b"), link("runs/a", "b"), file("runs/a/x", b"second")],
}


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything below a folder, by path: mode, mtime, contents or link target."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        info = path.lstat()
        data = b""
        if stat.S_ISREG(info.st_mode):
            data = path.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            data = str(path.readlink()).encode("utf-8", "surrogateescape")
        found[str(path.relative_to(root))] = (info.st_mode, 0 if path.is_dir() else info.st_mtime_ns, data)
    return found
