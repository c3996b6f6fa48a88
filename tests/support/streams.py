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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.manifest import FILE, LINK, path_to_wire
from cloudddp.agent.protocol.transfer import DIGEST, UNSEALED, FileHead, Frames, Wants
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import ConnectionLost
from cloudddp.ssh.running import CommandSpec, Result

FOLDER = "folder"  # as the kind of an item, besides FILE and LINK
NOON_NS = 1_700_000_000_123_456_789


frame = functools.partial(transfer.frame, UNSEALED)
part = functools.partial(transfer.part, UNSEALED)
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
        if self.kind == FOLDER:
            return listing({"files": {}, "modes": {path: self.mode}})
        entry = [self.kind, self.mode, self.size, self.mtime_ns, path_to_wire(self.target)]
        return listing({"files": {path: entry}})

    def frames(self, number: int) -> Iterator[bytes]:
        data = self.contents
        if data is None:
            return
        for at in range(0, len(data), transfer.PART_SIZE):
            yield part(number, at, data[at : at + transfer.PART_SIZE])
        yield end(number, data, mtime_ns=self.mtime_ns)


def listing(value: Any) -> bytes:
    body = zlib.compress(json.dumps(value).encode(), 1)
    return frame(transfer.LISTING, sha256(body).digest(), body)


listed = Item  # it is not sent


def file(name: str, data: bytes = b"from the node\n", **more: Any) -> Item:
    return Item(name, size=len(data), contents=data, **more)


def folder(name: str) -> Item:
    return Item(name, kind=FOLDER, mode=0o755)


def link(name: str, target: str) -> Item:
    return Item(name, kind=LINK, target=target)


def record(number: int, data: bytes = b"", **changes: Any) -> FileHead:
    found = FileHead(number, len(data), NOON_NS, executable=False, digest=sha256(data).digest()[:DIGEST])
    return found._replace(**changes)


def end(number: int, data: bytes = b"", **more: Any) -> bytes:
    return transfer.end(UNSEALED, record(number, data, **more))


def whole(number: int, data: bytes, sent: bytes | None = None) -> bytes:
    """Return a file in one frame, with other contents than its hash is of if these are `sent`."""
    return transfer.end(UNSEALED, record(number, data), data if sent is None else sent)


UP = "../../../elsewhere"  # from the results to a folder that is not theirs
# Results that are here before: a node gets the hash of the first, whose time is a whole second.
HASHED, TIMED, HERE = "runs/hashed", "runs/timed", b"here before"
_A = listed("runs/a", size=3)
_B = listed(HASHED, size=len(HERE) + 4, mtime_ns=5)
_ESCAPE, _UNKNOWN = "leaves the folder", "was not requested"
_NOT_ASKED = "was not asked for, or has come before"
# What a stream tries -> why it is refused as a whole, and what it sends after a harmless file (index 0).
# tests/node/test_protocol.py has frames and names, tests/node/test_receiving.py their order.
ATTACKS: dict[str, tuple[str, list[Item | bytes]]] = {
    "dot-dot": (_ESCAPE, [file(f"runs/{UP}/planted")]),
    "dot-dot-first": (_ESCAPE, [file(f"{UP}/planted")]),
    "requested-root-dot": (_ESCAPE, [folder(".")]),
    "left-out-without-end": ("1,000 files are left out", [file_steps.left_out("a", "b")] * 1100),
    "left-out-cut": ("truncated", [frame(transfer.LEFT_OUT, b'{"name": "a"')]),
    "left-out-no-path": ("is not bytes", [frame(transfer.LEFT_OUT, b'{"name": "\\u2020", "reason": "x"}')]),
    "not-requested": (_UNKNOWN, [file(".git/hooks/pre-commit", mode=0o755)]),
    "not-requested-sibling": (_UNKNOWN, [file("runs2/x")]),
    "not-requested-folder": (_UNKNOWN, [folder("src")]),
    "link-out": (_UNKNOWN, [link("runs/l", f"../{UP}"), file("runs/l/planted")]),
    "link-to-not-requested": (_UNKNOWN, [link("runs/l", "../train.py")]),
    "link-named-as-requested": (_UNKNOWN, [link("runs", UP), file("runs/planted")]),
    "link-with-contents": (_NOT_ASKED, [link("runs/l", "good"), whole(1, b"x")]),
    "contents-of-a-file-that-is-left-out": (_NOT_ASKED, [file("runs/.git", b"x")]),
    "other-contents": ("differs", [_A, whole(1, b"abc", b"evi")]),
    "file-that-is-not-sent": ("1 files were not sent", [_A]),
    "offset-of-a-file-that-is-not-here": ("a file that is not here", [_A, part(1, 2, b"abc")]),
    "more-after-the-end": ("continues after its end", [FINISH]),
    "continues-with-a-wrong-hash": ("differs", [_B, part(1, len(HERE), b"evil"), end(1, HERE + b"good")]),
    "continues-elsewhere": ("that is not here", [_B, part(1, 5, bytes(9))]),
    "continues-what-was-not-hashed": ("that is not here", [listed(TIMED, size=99), part(1, 11, bytes(88))]),
    "is-the-same-with-a-wrong-hash": ("differs", [_B, end(1, b"other bytes")]),
    "sends-what-was-not-asked-for": ("was not asked for", [file(TIMED, b"-" * len(HERE))]),
}
# The same, of whole streams; some would take much memory, or space.
STREAMS: dict[str, tuple[str, Callable[[], Iterable[bytes]]]] = {
    "no-end": ("truncated", lambda: [_A.listing(), FINISH, whole(0, b"abc")]),
    "text": ("not a frame", lambda: [b"Welcome to node 0!\n" * 400]),
    "listing-after-its-end": ("does not belong here", lambda: [FINISH, _A.listing()]),
    "contents-before-the-listing-ends": ("not a listing", lambda: [_A.listing(), part(0, 0, b"x")]),
    "file-of-an-exbibyte": ("MiB are free", lambda: stream(listed("runs/a", size=1 << 60))),
    "frame-of-4-GiB": ("a frame is too long", lambda: [FINISH, _PART_OF_4_GIB, *_zeros(300)]),
    "listing-that-inflates": ("longer than it says", lambda: [_bomb()]),
    "listing-of-many-objects": ("too long|truncated", lambda: [_many()]),
    "zeros-without-end": ("not a frame", lambda: [*stream(file("runs/b"), FINISH), *_zeros(300)]),
}
_PART_OF_4_GIB = struct.pack(">BIQ", transfer.PART, 0, 1 << 32) + bytes(16)


def attack(name: str) -> Iterable[bytes]:
    """Return a hostile stream."""
    return STREAMS[name][1]() if name in STREAMS else stream(file("runs/good"), *ATTACKS[name][1], FINISH)


def _zeros(count: int) -> list[bytes]:
    return [bytes(1 << 20)] * count


def _many() -> bytes:
    return listing({"files": {str(k): ["f", 0, 0, 0, ""] for k in range(101_000)}})


def _bomb() -> bytes:
    body = zlib.compress(b'{"files": {}' + b" " * (2 * file_steps.MAX_LISTING_TEXT) + b"}", 1)
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
        elif piece.kind != FOLDER:
            yield from piece.frames(number)
            number += 1


GUARDED = (
    *("runs/.git/config", "runs/.git", "runs/a/.Git/hooks/post-checkout", "runs/\ufeff.git/config"),
    *("runs/.git /config", "runs/.git.../config", "runs/.git::$INDEX_ALLOCATION/config", "runs/git~1/config"),
    *("runs/GIT~1/config", "runs/\uff0egit/config", "runs/cloudddp.toml", "runs/CloudDDP.TOML"),
    *("runs/a/cloudddp.toml", "runs/.cloudddp/jobs/x", "runs/.cloudddp-anything"),
)
WELCOME = tuple(f"runs/{name}" for name in ".gitignore .github/x git/x a.git/x cloudddp.toml.bak .gi".split())

COLLISIONS: dict[str, list[Item]] = {
    "the-same-file-twice": [file("runs/a", b"first"), file("runs/a", b"second")],
    "a-file-for-a-link": [link("runs/a", "b"), file("runs/a", b"second"), file("runs/b", b"first")],
    "a-link-for-a-folder": [folder("runs/a"), file("runs/a/x", b"first"), link("runs/a", "b")],
    "a-folder-for-a-link": [
        link("runs/a", "b"),
        *map(folder, ("runs/b", "runs/a")),
        file("runs/a/x", b"second"),
    ],
    "a-file-below-a-file": [file("runs/a", b"first"), file("runs/a/x", b"second")],
    "a-file-through-a-link": [folder("runs/b"), link("runs/a", "b"), file("runs/a/x", b"second")],
}


def runs(*names: str) -> PackRequest:
    """Return the request for these names of the project, or for `runs`."""
    return PackRequest(PROJECT, names or ("runs",))


class StreamRunner:
    """A node whose `pack` sends these pieces, over a connection that this process plays, and that `breaks`
    then. `wants`: what it was asked for."""

    def __init__(self, stdout: Iterable[bytes], *, breaks: bool = False) -> None:
        self.wants = Wants()
        self.stdout, self._breaks = stdout, breaks

    def connection(self, _node: int) -> None:
        """There is none."""

    def host_key(self, _node: int) -> str:
        return "ssh-ed25519 AAAA"

    def run(self, _node: int, spec: CommandSpec) -> Result:
        assert spec.on_stdout is not None
        stdin = iter(spec.stdin)
        next(stdin)  # the request
        for piece in self.stdout:
            spec.on_stdout(piece)
            for answer in Frames(UNSEALED).feed(next(stdin, b"")):
                self.wants = transfer.read_wants(answer)
        if self._breaks:
            raise ConnectionLost("it broke")
        return Result(0, b"", b"")


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
