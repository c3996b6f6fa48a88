"""What a sync changes on this node: the laptop's listing, compared with what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from agent.files.sync_record import Synced
from cloudddp.agent.protocol.manifest import LINK, Entry, Manifest, path_from_wire
from cloudddp.agent.protocol.transfer import SMALL, Listing, Record


@dataclass
class SyncPlan:
    """`names` and `entries` are by index. `wanted` are the regular files whose contents are needed, `large`
    those that come in parts, `touch` those that only have another time or mode, `move` those that only have
    another name."""

    names: list[str]
    entries: list[Entry]
    old: Manifest  # what was recorded and, in the folders of the listing, is unchanged
    new: Manifest  # what it will be
    wanted: dict[int, None] = field(default_factory=dict)
    large: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    touch: list[int] = field(default_factory=list)
    # Files that are here under a name that is no longer wanted.
    move: dict[int, str] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)
    regular: int = 0  # files of the listing
    size: int = 0  # bytes of those that are wanted
    digests: dict[str, str] = field(default_factory=dict)  # of the contents of files that are unchanged

    @property
    def is_change(self) -> bool:
        return bool(self.wanted or self.links or self.touch or self.move or self.delete)

    @property
    def changed(self) -> Manifest:
        """The files that will be written, renamed or touched."""
        indexes = (*self.wanted, *self.links, *self.touch, *self.move)
        return {self.names[index]: self.entries[index] for index in indexes}

    def take(self, records: Mapping[int, Record]) -> None:
        """Note the files that were written. One may have changed on the laptop since it was listed: it is as
        it was sent."""
        for index, record in records.items():
            name, entry = self.names[index], self.entries[index]
            if (record.mode, record.size, record.mtime_ns) != (entry.mode, entry.size, entry.mtime_ns):
                self.new[name] = entry._replace(mode=record.mode, size=record.size, mtime_ns=record.mtime_ns)
            self.digests[name] = record.digest.hex()


def plan(folder: Path, synced: Optional[Synced], listing: Listing) -> SyncPlan:
    """Return what to do; without what was `synced`, all is written and nothing deleted. Names were checked
    when the listing was decoded."""
    listed = [(path_from_wire(path), entry) for path, entry in listing.entries()]
    names = [name for name, _ in listed]
    entries = [
        entry._replace(target=path_from_wire(entry.target)) if entry.target else entry for _, entry in listed
    ]
    folders = {path_from_wire(name) for name in listing.folders}
    old = synced.current(folders) if synced else {}
    if synced and synced.is_foreign:  # a file with the same size and time may have other contents
        old = {name: entry._replace(mtime_ns=-1) for name, entry in old.items()}
    here = dict(zip(names, entries))
    delete = [name for name in old if name.rpartition("/")[0] in folders and name not in here]
    new = {name: entry for name, entry in old.items() if name.rpartition("/")[0] not in folders}
    new.update(here)
    made = SyncPlan(names, entries, old, new, delete=delete, digests=synced.digests(old) if synced else {})
    contents = {path_from_wire(name): digest for name, digest in listing.contents.items()}
    moved = _Moved(folder, made)
    for index, (name, entry) in enumerate(zip(names, entries)):
        made.regular += entry.kind != LINK
        known = old.get(name)
        if known == entry:
            continue
        if entry.kind == LINK:
            made.links.append(index)
        elif known is not None and _has_contents(known, entry, made.digests.get(name), contents.get(name)):
            made.touch.append(index)
        elif (source := moved.take(name, entry, contents.get(name))) is not None:
            made.move[index] = source
        else:
            made.wanted[index] = None
            made.size += entry.size
            if entry.size > SMALL:
                made.large.append(index)
    gone = set(made.move.values())
    made.delete = [name for name in delete if name not in gone]
    made.digests.update({names[index]: contents[names[index]] for index in made.move})
    return made


class _Moved:
    """The files that are no longer wanted under their name, by their contents: each can get one other
    name."""

    def __init__(self, folder: Path, made: SyncPlan) -> None:
        self._folder, self._old = folder, made.old
        self._names: dict[str, list[str]] = {}
        for name in made.delete:
            digest = made.digests.get(name)
            if digest is not None and made.old[name].kind != LINK:
                self._names.setdefault(digest, []).append(name)
        self._folders = {parent for name in made.old for parent in _parents(name)} if self._names else set()
        self._links: dict[str, bool] = {}

    def take(self, name: str, entry: Entry, digest: object) -> Optional[str]:
        """Return the present name of a file with these contents, None where there is none that can simply be
        renamed: what is in the way of the new name could be another such file."""
        names = self._names.get(str(digest))
        if not names or name in self._folders or any(parent in self._old for parent in _parents(name)):
            return None
        if self._old[names[-1]].size != entry.size or self._is_behind_a_link(names[-1]):
            return None
        return names.pop()

    def _is_behind_a_link(self, name: str) -> bool:
        for parent in _parents(name):
            if parent not in self._links:
                self._links[parent] = (self._folder / parent).is_symlink()
            if self._links[parent]:
                return True
        return False


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _has_contents(known: Entry, entry: Entry, there: object, wanted: object) -> bool:
    if (known.kind, known.size) != (entry.kind, entry.size):
        return False
    return known.mtime_ns == entry.mtime_ns or (bool(wanted) and there == wanted)
