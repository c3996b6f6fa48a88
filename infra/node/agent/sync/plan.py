"""What a sync changes on this node: the laptop's listing, compared with what is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from agent.files.sync_record import Synced
from cloudddp.agent.protocol.manifest import LINK, Entry, Manifest
from cloudddp.agent.protocol.transfer import Listing


@dataclass
class SyncPlan:
    """`files` are those of the listing, by index. Of these, `wanted` are regular files whose contents may be
    needed, `modes` have another mode only."""

    files: list[tuple[str, Entry]]
    old: Manifest  # what syncs have written here, and nobody has changed
    wanted: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)

    @property
    def changed(self) -> Manifest:
        """The files that will be written."""
        return dict(self.files[at] for at in (*self.wanted, *self.links, *self.modes))


def plan(listing: Listing, synced: Optional[Synced]) -> SyncPlan:
    """Return what to do; without what was `synced`, all is written and nothing deleted. Names were checked
    when the listing was decoded."""
    made = SyncPlan(listing.entries(), synced.current() if synced else {})
    # What another project has sent may have the same size and time, and other contents.
    old = {} if synced and synced.is_foreign else made.old
    for index, (name, entry) in enumerate(made.files):
        known = old.get(name)
        if known == entry:
            continue
        if entry.kind == LINK:
            made.links.append(index)
        elif known is not None and known._replace(mode=entry.mode) == entry:
            made.modes.append(index)
        else:
            made.wanted.append(index)
    made.delete = sorted(made.old.keys() - dict(made.files).keys()) if synced else []
    return made
