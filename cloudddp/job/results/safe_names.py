"""Which names in a stream of results may be written: one that was requested, or lies below one, and for a
link also its target, as components. Files that git or cloudddp would interpret are left out, in every
spelling that some file system treats as the same name. Pure."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Sequence

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import check_path, link_end, path_to_wire
from cloudddp.errors import UsageError

MAX_DEPTH = 64  # folders inside one another: each is held open, and macOS allows 256 open files
MAX_COMPONENT = 255  # bytes, on every usual file system
# Beside results: logs of the agents and the report, and incomplete checkpoints. No result gets these names.
LOGS, INCOMPLETE = "cloudddp-logs", "cloudddp-incomplete"

Parts = tuple[str, ...]

# Invisible characters, which HFS+ and ext4 ignore when they compare names.
_IGNORED_LETTERS = "\u115f\u1160\u17b4\u17b5\u3164\uffa0"
_IGNORED = ("Cc", "Cf", "Cn", "Mn", "Me")
_GUARDED = re.compile(rf"(\.git|git~[0-9]+|cloudddp\.toml|\.cloudddp.*|{LOGS}|{INCOMPLETE})\Z", re.DOTALL)
_BEGINNINGS = (".git", "git~", "cloudddp.toml", ".cloudddp", LOGS, INCOMPLETE)  # of what _GUARDED matches
_MAX_CHARACTERS = MAX_COMPONENT // 4  # that surely fit: UTF-8 has at most 4 bytes for each


def requested(names: Sequence[str]) -> tuple[Parts, ...]:
    """Return the paths of the names that a user requested, without those below another of them. Raises
    UsageError for one that leads out of the project."""
    found: list[Parts] = []
    for name in names:
        plain = posixpath.normpath(name)
        if not name or name.startswith(("/", "~")) or ".." in name.split("/") or "\0" in name:
            raise UsageError(
                f"{name!r} is not a path inside the project",
                hint="give a path relative to the project's folder",
            )
        found.append(() if plain == "." else tuple(plain.split("/")))
    chosen = sorted(set(found), key=len)
    return tuple(path for at, path in enumerate(chosen) if not covers(chosen[:at], path))


def covers(roots: Sequence[Parts], path: Parts) -> bool:
    """Return whether a path is one of `roots` or lies below one."""
    return any(path[: len(root)] == root for root in roots)


def checked(name: str, roots: Sequence[Parts], link: str | None = None) -> Parts:
    """Return the components of a name that is at or below one of `roots`, of a link with the target `link`.
    Raises ProtocolError for one that no agent sends."""
    check_path("", path_to_wire(name))
    path = tuple(name.split("/"))
    if not covers(roots, path):
        raise ProtocolError(f"{name!r} was not requested")
    end = path if link is None else link_end(path, link)
    if end is None or not covers(roots, end):
        raise ProtocolError(f"{name!r} is a link to {link!r}, which was not requested")
    return path


def too_long(path: Parts) -> bool:
    """Return whether a path is deeper, or a component longer, than this computer supports."""
    if len(path) > MAX_DEPTH:
        return True
    longest = max(path, key=len, default="")
    return len(longest) > _MAX_CHARACTERS and any(
        len(part.encode("utf-8", "surrogateescape")) > MAX_COMPONENT for part in path
    )


def guarded(part: str) -> bool:
    """Return whether git or cloudddp would take a component for a file of its own, on any file system: some
    ignore case, invisible characters and the normal form of a letter (ext4, APFS, HFS+), or accept short
    names, trailing dots and spaces, and streams (NTFS)."""
    # Of usual names without the tables of Unicode: the same, in a tenth of the time.
    shown = part.lower() if part.isascii() and part.isprintable() else _plain(part)
    if not shown.startswith(_BEGINNINGS):
        return False
    plain = re.split(r"[:\\]", shown, maxsplit=1)[0].rstrip(". ")
    return bool(_GUARDED.match(plain))


def _plain(part: str) -> str:
    """Return a component without its invisible characters, in its normal form and lower case."""
    return "".join(
        one
        for one in unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", part).casefold())
        if unicodedata.category(one) not in _IGNORED and one not in _IGNORED_LETTERS
    )
