"""What the syncs of a project have written on this node, and what of it is still there.

There are two records: the manifest of the last sync; and, while a sync writes or after one was interrupted,
the files that it writes, which it writes before the first of them, and deletes last. Until then each of these
files may be as it was or as it will be. So a sync that changes few of many files writes the manifest once, at
its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from agent.files import paths, project_lock
from agent.node import kernel, store
from cloudddp.agent.protocol.codec import MAX_ORIGIN, MAX_REQUEST, MIXED, check_origin
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.manifest import Entry, Manifest


@frozen
class _Pending:
    """The files that a sync writes, since this `boot` of the node: after a crash, a file may have the size
    and the time, and other contents."""

    boot: str = ""
    files: dict[str, Entry] = field(default_factory=dict)


class Synced:
    """The files of a project that syncs have written, as they are recorded. Jobs may have changed or deleted
    any of them."""

    def __init__(self, folder: Path, origin: str = "") -> None:
        self._folder, self._origin = folder, origin
        # Read before the manifest: record() replaces the manifest, and then deletes this.
        self._pending = store.read(_record(folder, "pending"), _Pending, MAX_REQUEST) or _Pending()
        self._manifest = store.read(_record(folder, "manifest"), dict[str, Entry], MAX_REQUEST) or {}

    @property
    def is_interrupted(self) -> bool:
        """Whether a sync writes, or was interrupted."""
        return bool(self._pending.files)

    @property
    def is_foreign(self) -> bool:
        """Whether another project than `origin` has sent them."""
        return bool(self._origin) and origin_of(self._folder) not in ("", self._origin)

    @property
    def recorded(self) -> Manifest:
        """What the last sync wrote, and of what an interrupted one may have written, what is there."""
        return {**self._manifest, **self._unchanged(self._pending.files)}

    def current(self) -> Manifest:
        """Return the recorded files that are still there, unchanged in size, time and mode."""
        return self._unchanged({**self._manifest, **self._pending.files})

    def _unchanged(self, names: Iterable[str]) -> Manifest:
        root = f"{self._folder}/"  # to join Paths takes longer than to look at the files
        known = self._manifest
        written = self._pending.files if self._pending.boot == kernel.boot() else {}
        found = {}
        for name in names:
            there = paths.describe(root + name)
            if there is not None and there in (known.get(name), written.get(name)):
                found[name] = there
        return found

    def begin(self, changed: Manifest) -> None:
        """Record the files that are about to be written. For those that are only deleted nothing is recorded,
        so that the disk may be full."""
        if self.is_foreign:
            store.replace(_origin_path(self._folder), MIXED.encode())
        if changed:
            pending = _Pending(kernel.boot(), {**self._pending.files, **changed})
            store.write(_record(self._folder, "pending"), pending)

    def record(self, manifest: Manifest) -> None:
        store.write(_record(self._folder, "manifest"), manifest)
        _record(self._folder, "pending").unlink(missing_ok=True)
        self.take_over()

    def take_over(self) -> None:
        """Record whose files these are, once all of them are."""
        if self._origin and origin_of(self._folder) != self._origin:
            store.replace(_origin_path(self._folder), self._origin.encode())

    def settle(self, present: Manifest) -> None:
        """Record what is `present` if that differs from what is recorded: a later file of the same name, size
        and time as one that is gone is no file of a sync."""
        if self.is_interrupted or len(present) < len(self._manifest):
            self.record(present)


def origin_of(folder: Path) -> str:
    """Return the id of the project that has sent the files, '' if it is not known."""
    try:
        found = store.read_bytes(_origin_path(folder), MAX_ORIGIN + 1).decode("ascii").strip()
        check_origin("origin", found)
    except (OSError, ValueError):
        return ""
    return found


def _origin_path(folder: Path) -> Path:
    return store.ROOT / f"origin-{folder.name}"


def settled(folder: Path) -> tuple[Manifest, int]:
    """Return what is there of what syncs have written, and its version; and record it, unless the disk is
    full. Raises SystemExit while another sync writes."""
    with contextlib.suppress(OSError), project_lock.held(folder) as lock:
        synced = Synced(folder)
        present = synced.current()
        with contextlib.suppress(OSError):
            synced.settle(present)
        return present, lock.version
    return Synced(folder).current(), 0


def _record(folder: Path, name: str) -> Path:
    return store.ROOT / f"{name}-{folder.name}.json"
