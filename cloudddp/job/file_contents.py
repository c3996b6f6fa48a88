"""What is known about the contents of a project's files from the last sync.

A file that has only another time (after `git checkout`, or in a new clone) or another name is not sent again:
the nodes compare its SHA-256 with those of what they have. Only a file with another time is read for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudddp.agent.protocol.manifest import FILE, MAX_FILES, Manifest
from cloudddp.agent.protocol.transfer import DIGEST, Record
from cloudddp.errors import UsageError
from cloudddp.files import state_home, write_atomic

_MAX_BYTES = 32 << 20


class _Known(NamedTuple):
    inode: int
    size: int
    mtime_ns: int
    digest: str


class Contents:
    """The contents of the files below `root`, in memory. `locate`: as for Sender."""

    def __init__(self, root: Path, locate: Callable[[str], str] = str) -> None:
        self._root, self._locate = root, locate
        name = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._path = state_home() / "contents" / f"{name}.json"
        self._known: dict[str, _Known] | None = None
        self._digests: dict[tuple[int, int, int], str] = {}  # by inode, size and time
        self._changed = False
        self.unstable: list[str] = []  # files that were changing while they were sent

    def of_known(self, manifest: Manifest, paths: Iterable[str]) -> Mapping[str, str]:
        """Return the SHA-256 of the files that are known, under any name, and of those that have the size
        that they had under this name, and another time."""
        known = self._load()
        found: dict[str, str] = {}
        for path in paths:
            entry = manifest[path]
            if entry.kind != FILE:
                continue
            with contextlib.suppress(OSError):
                inode = os.lstat(self._root / self._locate(path)).st_ino
                digest = self._digests.get((inode, entry.size, entry.mtime_ns))
                if digest is None and (before := known.get(path)) is not None and before.size == entry.size:
                    with (self._root / self._locate(path)).open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").digest()[:DIGEST].hex()
                if digest is not None:
                    found[path] = digest
                    self._set(path, _Known(inode, entry.size, entry.mtime_ns, digest))
        return found

    def sent(self, path: str, record: Record, inode: int | None) -> None:
        """Remember the SHA-256 of a file as it was sent; `inode`: None if it was changing meanwhile."""
        if inode is None:
            self.unstable.append(path)
        else:
            self._set(path, _Known(inode, record.size, record.mtime_ns, record.digest.hex()))

    def _set(self, path: str, known: _Known) -> None:
        if self._load().get(path) != known:
            self._load()[path] = known
            self._digests[known[:3]] = known.digest
            self._changed = True

    def save(self, manifest: Manifest) -> None:
        """Keep it for the next sync, as far as there are such files. Without it that sync sends more."""
        if not self._changed:
            return
        kept = {path: known for path, known in self._load().items() if path in manifest}
        with contextlib.suppress(OSError, UsageError):
            write_atomic(self._path, json.dumps(kept))

    def _load(self) -> dict[str, _Known]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                data = self._path.read_bytes() if self._path.stat().st_size <= _MAX_BYTES else b"{}"
                self._known = dict(_decoded(json.loads(data)))
            self._digests = {one[:3]: one.digest for one in self._known.values()}
        return self._known


def _decoded(found: object) -> Iterable[tuple[str, _Known]]:
    """Yield what fits in a record that another program may have changed. Raises ValueError, TypeError."""
    if not isinstance(found, dict) or len(found) > MAX_FILES:
        raise ValueError
    for path, (inode, size, mtime_ns, digest) in found.items():
        numbers = all(isinstance(one, int) for one in (inode, size, mtime_ns))
        if numbers and len(bytes.fromhex(digest)) == DIGEST:
            yield path, _Known(inode, size, mtime_ns, digest)
