"""The manifest: the files of a project, on the laptop and on a node.

It maps each path of the project to its Entry. Both sides make it by the same rules, and compare its digest
before they send any of it. File names need not be UTF-8: in
memory Python escapes such bytes (os.fsdecode), and on the wire a path has one character for each of its bytes
(latin-1).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, NamedTuple, Optional

from cloudddp.agent.protocol.codec import MAX_PATH, MAX_SIZE, ProtocolError, at_most

FILE, LINK = "f", "l"  # kinds of an entry
MAX_FILES = 100_000  # of a project, links included
_LATEST_NS = MAX_SIZE // 10**9 * 10**9
_check_length = at_most(MAX_PATH)


class Entry(NamedTuple):
    """One file or symbolic link of a manifest. A link has only its target; a file has no target."""

    kind: str
    mode: int
    size: int  # bytes
    mtime_ns: int
    target: str


Manifest = dict[str, Entry]


def entry_of(info: os.stat_result, target: str = "") -> Optional[Entry]:
    """Return the entry of what os.lstat saw, or None for anything but a regular file or a link. Of a file's
    mode only the executable bit counts."""
    if stat.S_ISLNK(info.st_mode):
        return Entry(LINK, 0, 0, 0, target)
    if stat.S_ISREG(info.st_mode):
        return Entry(FILE, 0o755 if info.st_mode & 0o111 else 0o644, info.st_size, time_of(info), "")
    return None


def time_of(info: os.stat_result) -> int:
    """Return a file's mtime (ns), or the latest whole second that a frame may hold."""
    return info.st_mtime_ns if info.st_mtime_ns <= MAX_SIZE else _LATEST_NS


def manifest_digest(manifest: Mapping[str, Entry]) -> str:
    """Return the digest of a manifest in wire form."""
    return sha256(json.dumps(sorted(manifest.items())).encode()).hexdigest()


def path_to_wire(path: str) -> str:
    return path if path.isascii() else os.fsencode(path).decode("latin-1")


def path_from_wire(path: str) -> str:
    return path if path.isascii() else os.fsdecode(path.encode("latin-1"))


def manifest_to_wire(manifest: Mapping[str, Entry]) -> Manifest:
    """Return the manifest with wire paths. Texts in ASCII are shared, not copied."""
    return {
        path_to_wire(k): v if v.target.isascii() else v._replace(target=path_to_wire(v.target))
        for k, v in manifest.items()
    }


def check_files(_name: str, files: Mapping[str, Entry]) -> None:
    """Raise ProtocolError for a path or an entry in wire form that no manifest has, and for too many of
    them."""
    at_most(MAX_FILES)("a listing", files)
    _check_length("a path", max(files, key=len, default=""))
    if files:
        _check_parts("/".join(files))  # one by one takes three times as long
    for entry in files.values():
        _check_entry(entry)


def check_path(_name: str, path: str) -> None:
    """Raise ProtocolError for what is not a path in a project in wire form."""
    _check_length("a path", path)
    _check_parts(path)


WirePath = Annotated[str, check_path]


def _check_parts(path: str) -> None:
    if max(path, default="\0") > "\xff" or "\0" in path:
        raise ProtocolError("a path is not bytes")
    framed = f"/{path}/"
    if "//" in framed or "/./" in framed or "/../" in framed:
        raise ProtocolError("a path has an empty part, or leaves the folder")


def _check_entry(entry: Entry) -> None:
    kind, mode, size, mtime_ns, target = entry
    if kind not in (FILE, LINK):
        raise ProtocolError(f"an entry has the kind {kind[:20]!r}")
    if target:
        _check_length("a link's target", target)
        if kind == FILE:
            raise ProtocolError("a file has a target")
        if max(target) > "\xff" or "\0" in target:
            raise ProtocolError("a link's target is not bytes")
    if not (0 <= mode <= 0o7777 and 0 <= size <= MAX_SIZE and -MAX_SIZE <= mtime_ns <= MAX_SIZE):
        raise ProtocolError("a mode, a size or a time is out of range")


def link_end(link: tuple[str, ...], target: str) -> Optional[tuple[str, ...]]:
    """Return the path that a link in a folder points to, by its text alone, or None where it may leave that.

    `..` is allowed at the beginning only, where it applies to real folders. After the name of another link it
    would apply to that link's target, which is how chains of links escape.
    """
    if not target or target.startswith("/") or "\0" in target:
        return None
    words = [word for word in target.split("/") if word not in ("", ".")]
    up = 0
    while up < len(words) and words[up] == "..":
        up += 1
    if ".." in words[up:] or up >= len(link):
        return None
    return (*link[: len(link) - 1 - up], *words[up:])
