"""Hostile tar streams: each tries to write, or to read, where `pull` must not.

A stream is an iterable of pieces, so that an endless one takes no memory here. The functions make members
without tarfile's own checks.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
END = bytes(2 * BLOCK)
Stream = list[bytes]


def header(
    name: str | bytes,
    *,
    kind: bytes = tarfile.REGTYPE,
    size: int | bytes = 0,
    link: str = "",
    mode: int = 0o644,
    mtime: int | bytes = 1_700_000_000,
    prefix: bytes = b"",
    checksum: bytes | None = None,
) -> bytes:
    """Return one header block, valid except for the given values."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    block = bytearray(BLOCK)

    def put(at: int, data: bytes) -> None:
        block[at : at + len(data)] = data

    put(0, raw[:100])
    put(100, b"%07o\0" % mode)
    put(108, b"0000000\0" * 2)
    put(124, size if isinstance(size, bytes) else b"%011o\0" % size)
    put(136, mtime if isinstance(mtime, bytes) else b"%011o\0" % mtime)
    put(148, b" " * 8)
    put(156, kind)
    put(157, link.encode("utf-8", "surrogateescape")[:100])
    put(257, b"ustar  \0")
    put(345, prefix)
    put(148, checksum if checksum is not None else b"%06o\0 " % sum(block))
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def file(name: str | bytes, data: bytes = b"from the node\n", **more: object) -> bytes:
    return header(name, size=len(data), **more) + padded(data)  # type: ignore[arg-type]


def folder(name: str) -> bytes:
    return header(name, kind=tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str) -> bytes:
    if len(target) > 100 or len(name) > 100:
        return _long(b"K", target) + _long(b"L", name) + header(name, kind=tarfile.SYMTYPE, link=target)
    return header(name, kind=tarfile.SYMTYPE, link=target)


def _long(kind: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape") + b"\0"
    return header("././@LongLink", kind=kind, size=len(data)) + padded(data)


def long_file(name: str, data: bytes = b"from the node\n") -> bytes:
    return _long(b"L", name) + file(name, data)


def base256(value: int, width: int = 12) -> bytes:
    """Return a number in GNU's form for what octal digits cannot represent, also negative ones."""
    if value < 0:
        return ((1 << (8 * width)) + value).to_bytes(width, "big")
    return b"\x80" + value.to_bytes(width - 1, "big")


def _chain(up: str) -> Iterator[bytes]:
    """CVE-2025-4517: a path of links grows past PATH_MAX when it is resolved, so that realpath() stops looking."""
    long = "d" * 247
    path = "runs/"
    steps = "abcdefghijklmnop"
    for step in steps:
        yield long_folder(path + long)
        yield link(path + step, long)
        path += long + "/"
    short = "runs/" + "/".join(steps) + "/" + "l" * 254
    yield link(short, "../" * len(steps))
    yield link("runs/escape", f"{short.removeprefix('runs/')}/../../{up}")
    yield header("runs/flag", kind=tarfile.LNKTYPE, link="runs/escape/bait")
    yield file("runs/flag")
    yield file("runs/escape/planted")


def long_folder(name: str) -> bytes:
    return _long(b"L", name) + folder(name)


def _pax(kind: bytes, announced: int, sent: int) -> Iterator[bytes]:
    yield header("PaxHeader", kind=kind, size=base256(announced))
    for _ in range(sent >> 20):
        yield b"7" * (1 << 20)


@dataclass(frozen=True)
class Corpus:
    """`outside` is a folder beside the project that contains a file `bait`; `up` is the path to it from the target."""

    outside: Path
    up: str

    def attacks(self) -> dict[str, Iterable[bytes]]:
        """Return the streams that are refused as a whole, by what they try. Each begins with a harmless file."""
        escapes: dict[str, Iterable[bytes]] = {
            "dot-dot": [file(f"runs/{self.up}/planted"), END],
            "dot-dot-first": [file(f"{self.up}/planted"), END],
            "dot-dot-inside": [file("runs/a/../b"), END],
            "dot": [file("runs/./b"), END],
            "empty-name": [file(""), END],
            "empty-component": [file("runs//b"), END],
            "absolute": [file(f"{self.outside}/planted"), END],
            "absolute-by-prefix": [file("planted", prefix=str(self.outside).encode()), END],
            "absolute-long": [long_file(f"{self.outside}/{'x' * 120}"), END],
            "not-requested": [file("cloudddp.toml"), END],
            "not-requested-git-hook": [file(".git/hooks/pre-commit", mode=0o755), END],
            "not-requested-sibling": [file("runs2/x"), END],
            "not-requested-folder": [folder("src"), END],
            "requested-root-dot": [folder("."), END],
            "link-absolute": [link("runs/l", str(self.outside)), file("runs/l/planted"), END],
            "link-out": [link("runs/l", f"../{self.up}"), file("runs/l/planted"), END],
            "link-to-parent": [link("runs/l", ".."), END],
            "link-to-not-requested": [link("runs/l", "../train.py"), END],
            "link-named-as-requested": [link("runs", self.up), file("runs/planted"), END],
            "link-empty": [link("runs/l", ""), END],
            "link-up-after-down": [
                folder("runs/a"),
                folder("runs/a/b"),
                link("runs/a/b/up", "../.."),
                link("runs/l", "a/b/up/../../elsewhere"),
                file("runs/l/planted"),
                END,
            ],
            "link-chain-CVE-2025-4517": [*_chain(self.up), END],
            "hard-link-out": [header("runs/h", kind=tarfile.LNKTYPE, link=f"{self.outside}/bait"), END],
            "hard-link-inside": [file("runs/a"), header("runs/h", kind=tarfile.LNKTYPE, link="runs/a"), END],
            "size-negative": [header("runs/a", size=base256(-512)), END],
            "size-not-a-number": [header("runs/a", size=b"many\0"), END],
            "folder-with-contents": [header("runs/a", kind=tarfile.DIRTYPE, size=512), bytes(BLOCK), END],
            "checksum": [header("runs/a", checksum=b"000000\0 "), END],
            "noise": [bytes(range(256)) * 40],
            "text": [b"Welcome to node 0!\n" * 400],
            "empty": [],
            "no-end": [file("runs/b")],
            "cut-in-a-header": [header("runs/b")[:100]],
            "cut-in-a-file": [header("runs/b", size=100_000), bytes(50_000)],
            "cut-in-a-long-name": [_long(b"L", "runs/" + "x" * 200)[:BLOCK]],
            "long-name-and-nothing": [_long(b"L", "runs/x"), END],
            "long-name-twice": [_long(b"L", "runs/x"), _long(b"L", "runs/y"), file("runs/z"), END],
            "long-name-too-long": [_long(b"L", "runs/" + "x/" * 4096), file("runs/z"), END],
            "long-name-of-8-GiB": _pax(b"L", 8 << 30, 300 << 20),
            "long-link-of-8-GiB": _pax(b"K", 8 << 30, 300 << 20),
            "pax-of-8-GiB": _pax(b"x", 8 << 30, 300 << 20),
            "pax-global-of-8-GiB": _pax(b"g", 8 << 30, 300 << 20),
            "pax-path": [
                header("PaxHeader", kind=b"x", size=len(b"30 path=../../planted-by-a-pax\n")),
                padded(b"30 path=../../planted-by-a-pax\n"),
                file("runs/a"),
                END,
            ],
            "file-of-an-exbibyte": [header("runs/a", size=base256(1 << 60)), bytes(1 << 20)],
            "more-after-the-end": [file("runs/b"), END, file("runs/c"), END],
            "zeros-without-end": [file("runs/b"), *[bytes(1 << 20)] * 300],
        }
        for name, kind in (
            ("character-device", tarfile.CHRTYPE),
            ("block-device", tarfile.BLKTYPE),
            ("fifo", tarfile.FIFOTYPE),
            ("contiguous", tarfile.CONTTYPE),
            ("sparse", tarfile.GNUTYPE_SPARSE),
            ("volume-label", b"V"),
            ("continued", b"M"),
            ("dump-folder", b"D"),
            ("unknown-kind", b"~"),
        ):
            escapes[f"kind-{name}"] = [header("runs/special", kind=kind), END]
        return {name: _after(file("runs/good"), pieces) for name, pieces in escapes.items()}


def _after(first: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from pieces


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
