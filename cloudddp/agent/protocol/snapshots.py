"""`snapshot` and `restore`: the newest snapshot of a node, and writing one that another node holds."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cloudddp.agent.protocol.codec import (
    MAX_PATH,
    ProtocolError,
    check_length,
    check_project,
    check_range,
)

MAX_PATTERNS = 100
MAX_SNAPSHOT = 1 << 44  # bytes
MAX_EXCLUDED = 100_000  # paths, as many as a project may have
MAX_NS = 1 << 63


def _check_path(text: str) -> None:
    parts = text.split("/")
    check_length("a path", text, MAX_PATH)
    if text.startswith(("/", "~")) or ".." in parts or "\0" in text:
        raise ProtocolError("a path leaves the project")


@dataclass(frozen=True)
class SnapshotReply:
    """The newest snapshot by mtime, as a path in the project, with its SHA-256; '' where there is none. `skipped` are newer
    ones that are damaged, the newest first."""

    path: str = ""
    mtime_ns: int = 0
    size: int = 0
    digest: str = ""
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_path(self.path)
        check_range("mtime_ns", self.mtime_ns, 0, MAX_NS)
        check_range("size", self.size, 0, MAX_SNAPSHOT)
        check_length("digest", self.digest, 64)
        check_length("skipped", self.skipped, MAX_PATTERNS)
        for one in self.skipped:
            check_length("a path", one, MAX_PATH)


@dataclass(frozen=True)
class SnapshotRequest:
    """Look for files that match one of the `patterns`, which are relative to the project, but for those in `exclude`: files of
    the project itself. A file whose name ends in .pt has to be a valid zip archive, as torch.save writes it."""

    project: str
    patterns: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    STEP = "snapshot"
    REPLY = SnapshotReply

    def __post_init__(self) -> None:
        check_project(self.project)
        check_length("patterns", self.patterns, MAX_PATTERNS)
        check_length("exclude", self.exclude, MAX_EXCLUDED)
        for one in self.patterns:
            _check_path(one)


@dataclass(frozen=True)
class RestoreReply:
    """The SHA-256 of what was written."""

    digest: str

    def __post_init__(self) -> None:
        check_length("digest", self.digest, 64)


@dataclass(frozen=True)
class RestoreRequest:
    """Followed on stdin by `size` bytes: write them to a file of the project, which gets that mtime."""

    project: str
    path: str
    mtime_ns: int
    size: int

    STEP = "restore"
    REPLY = RestoreReply

    def __post_init__(self) -> None:
        check_project(self.project)
        _check_path(self.path)
        check_range("mtime_ns", self.mtime_ns, 0, MAX_NS)
        check_range("size", self.size, 0, MAX_SNAPSHOT)
        if not self.path:
            raise ProtocolError("path is empty")


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path in the project matches one of the patterns, as pathlib's glob does. Pure."""
    return any(_matches(path.split("/"), pattern) for pattern in patterns)


def _matches(parts: Sequence[str], pattern: str) -> bool:
    words = [word for word in pattern.split("/") if word not in ("", ".")]

    def closed(reached: Iterable[int]) -> set[int]:
        """Return the positions in the pattern that are reached without another part of the path."""
        found = set(reached)
        for at, word in enumerate(words):
            if at in found and word == "**":
                found.add(at + 1)
        return found

    reached = closed([0])
    for part in parts:
        stay = [at for at in reached if at < len(words) and words[at] == "**"]
        go = [at + 1 for at in reached if at < len(words) and fnmatch.fnmatchcase(part, words[at])]
        reached = closed([*stay, *go])
    return len(words) in reached
