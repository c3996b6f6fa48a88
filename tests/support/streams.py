"""Hostile streams: each tries to write, or to read, where `pull` must not.

A stream is an iterable of pieces, so that an endless one takes no memory here. The functions make frames
without the checks of the agent.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.files import MAGIC, frame

FINISH = frame(files.FINISH)
NOON_NS = 1_700_000_000_123_456_789
Stream = list[bytes]


def header(
    name: str | bytes,
    *,
    kind: bytes = files.FILE,
    size: int = 0,
    link: str = "",
    mode: int = 0o644,
    mtime_ns: int = NOON_NS,
    offset: int = 0,
) -> bytes:
    """Return the frame of one entry."""
    raw, target = (
        one if isinstance(one, bytes) else one.encode("utf-8", "surrogateescape") for one in (name, link)
    )
    head = struct.pack("!cHQqQHH", kind, mode, size, mtime_ns, offset, len(raw), len(target))
    return frame(files.ENTRY, head + raw + target)


def end(data: bytes = b"", state: int = files.SETTLED) -> bytes:
    return frame(files.END, bytes([state]) + hashlib.sha256(data).digest())


def file(name: str | bytes, data: bytes = b"from the node\n", **more: int) -> bytes:
    pieces = [data[at : at + files.MAX_DATA] for at in range(0, len(data), files.MAX_DATA)]
    contents = [frame(files.DATA, piece) for piece in pieces]
    return b"".join([header(name, size=len(data), **more), *contents, end(data)])


def folder(name: str) -> bytes:
    return header(name, kind=files.FOLDER, mode=0o755)


def link(name: str, target: str) -> bytes:
    return header(name, kind=files.LINK, link=target)


def total(count: int, size: int) -> bytes:
    return frame(files.TOTAL, struct.pack("!QQ", count, size))


def same(*numbers: int) -> bytes:
    return frame(files.SAME, struct.pack(f"!{len(numbers)}I", *numbers))


def _chain(up: str) -> Iterator[bytes]:
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
        escapes: dict[str, Iterable[bytes]] = {
            "dot-dot": [file(f"runs/{self.up}/planted"), FINISH],
            "dot-dot-first": [file(f"{self.up}/planted"), FINISH],
            "dot-dot-inside": [file("runs/a/../b"), FINISH],
            "dot": [file("runs/./b"), FINISH],
            "empty-name": [file(""), FINISH],
            "left-out-without-end": [*[files.encode_left_out(files.LeftOut("a", "b"))] * 1100, FINISH],
            "left-out-cut": [frame(files.OUT, b"\1\0\5\0\5ab"), FINISH],
            "empty-component": [file("runs//b"), FINISH],
            "absolute": [file(f"{self.outside}/planted"), FINISH],
            "zero-byte": [file("runs/a\0b"), FINISH],
            "not-requested": [file("cloudddp.toml"), FINISH],
            "not-requested-git-hook": [file(".git/hooks/pre-commit", mode=0o755), FINISH],
            "not-requested-sibling": [file("runs2/x"), FINISH],
            "not-requested-folder": [folder("src"), FINISH],
            "requested-root-dot": [folder("."), FINISH],
            "link-absolute": [link("runs/l", str(self.outside)), file("runs/l/planted"), FINISH],
            "link-out": [link("runs/l", f"../{self.up}"), file("runs/l/planted"), FINISH],
            "link-to-parent": [link("runs/l", ".."), FINISH],
            "link-to-not-requested": [link("runs/l", "../train.py"), FINISH],
            "link-named-as-requested": [link("runs", self.up), file("runs/planted"), FINISH],
            "link-empty": [link("runs/l", ""), FINISH],
            "link-up-after-down": [
                folder("runs/a"),
                folder("runs/a/b"),
                link("runs/a/b/up", "../.."),
                link("runs/l", "a/b/up/../../elsewhere"),
                file("runs/l/planted"),
                FINISH,
            ],
            "link-chain-CVE-2025-4517": [*_chain(self.up), FINISH],
            "link-with-size": [header("runs/l", kind=files.LINK, size=5, link="good"), FINISH],
            "file-with-target": [header("runs/l", link="good"), end(), FINISH],
            "folder-with-contents": [header("runs/a", kind=files.FOLDER, size=512), FINISH],
            "contents-of-a-folder": [folder("runs/a"), frame(files.DATA, b"x"), FINISH],
            "contents-of-nothing": [frame(files.DATA, b"x"), FINISH],
            "contents-after-the-end": [file("runs/b"), frame(files.DATA, b"x"), FINISH],
            "longer-than-announced": [header("runs/b", size=3), frame(files.DATA, b"four"), FINISH],
            "longer-in-two-pieces": [
                header("runs/b", size=3),
                frame(files.DATA, b"ab"),
                frame(files.DATA, b"cd"),
                FINISH,
            ],
            "shorter-than-announced": [
                header("runs/b", size=3),
                frame(files.DATA, b"ab"),
                end(b"ab"),
                FINISH,
            ],
            "end-of-nothing": [end(), FINISH],
            "end-of-a-folder": [folder("runs/a"), end(), FINISH],
            "end-of-a-bad-state": [header("runs/b"), end(state=9), FINISH],
            "end-that-is-short": [header("runs/b"), frame(files.END, b"\0"), FINISH],
            "file-in-a-file": [header("runs/b", size=3), file("runs/c"), FINISH],
            "finish-in-a-file": [header("runs/b", size=3), FINISH],
            "offset-of-a-file-that-is-not-here": [header("runs/b", size=5, offset=2), FINISH],
            "offset-after-the-end": [header("runs/b", size=5, offset=6), FINISH],
            "same-that-is-not-here": [same(0), FINISH],
            "same-of-a-high-number": [same(0xFFFFFFFF), FINISH],
            "same-cut": [frame(files.SAME, b"\0\0\0"), FINISH],
            "total-cut": [frame(files.TOTAL, b"\0\0\0"), FINISH],
            "size-too-large": [header("runs/a", size=(1 << 64) - 1), FINISH],
            "kind-unknown": [header("runs/special", kind=b"~"), FINISH],
            "kind-of-frame-unknown": [frame(b"~"), FINISH],
            "name-longer-than-its-frame": [
                frame(files.ENTRY, struct.pack("!cHQqQHH", b"f", 0, 0, 0, 0, 9, 0) + b"runs/b"),
                FINISH,
            ],
            "entry-cut": [frame(files.ENTRY, b"f"), FINISH],
            "name-too-long": [file("runs/" + "x/" * 2046 + "yyyyy"), FINISH],
            "entry-of-4-GiB": _flood(files.ENTRY),
            "same-of-4-GiB": _flood(files.SAME),
            "contents-of-4-GiB": [header("runs/big", size=1 << 33), *_flood(files.DATA)],
            "noise": [bytes(range(256)) * 40],
            "text": [b"Welcome to node 0!\n" * 400],
            "empty": [],
            "no-end": [file("runs/b")],
            "cut-in-a-header": [header("runs/b")[:20]],
            "cut-in-a-file": [header("runs/b", size=100_000), frame(files.DATA, bytes(50_000))],
            "file-of-an-exbibyte": [header("runs/a", size=1 << 60), frame(files.DATA, bytes(1 << 20))],
            "more-after-the-end": [file("runs/b"), FINISH, file("runs/c"), FINISH],
            "zeros-without-end": [file("runs/b"), FINISH, *[bytes(1 << 20)] * 300],
        }
        return {name: stream(file("runs/good"), *pieces) for name, pieces in escapes.items()}


def _flood(kind: bytes) -> Stream:
    """A frame that is announced much longer than any, and much of it."""
    return [struct.pack("!cI", kind, 0xFFFFFFFF), *[b"7" * (1 << 20)] * 300]


def stream(*pieces: bytes) -> Iterator[bytes]:
    yield MAGIC
    yield from pieces


# Broken off, and not hostile: what had arrived is kept for the next pull.
TRUNCATED = ("no-end", "cut-in-a-header", "cut-in-a-file")

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

COLLISIONS: dict[str, Stream] = {
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
