"""What `pack` sends, as the laptop decodes it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

from support.agentnode import Node

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.file_steps import LeftOut, PackRequest
from cloudddp.agent.protocol.manifest import LINK
from cloudddp.agent.protocol.transfer import UNSEALED, Frames, Record, Wants
from cloudddp.agent.replies import decode


@dataclass
class Sent:
    """Kinds, and contents or targets, by name; what was left out; `notes` are the lines for the user."""

    entries: dict[str, tuple[str, str | bytes]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lost(self) -> list[str]:
        return sorted(one.name for one in self.out if one.counts)

    @property
    def files(self) -> dict[str, str]:
        """Contents, or `-> target`, of files and links."""
        return {
            name: f"-> {found}" if isinstance(found, str) else found.decode()
            for name, (kind, found) in self.entries.items()
            if kind != "folder"
        }


def sent(node: Node, request: PackRequest, wants: Wants | None = None) -> Sent:
    """Ask for all files, or `wants`."""
    answer = (wants or Wants(everything=True)).frame(UNSEALED)
    done = node.run(request, [answer])
    assert done.returncode == 0, done.stderr
    return _decoded(done)


def _decoded(done: subprocess.CompletedProcess[bytes]) -> Sent:
    found, frames = Sent(), Frames(UNSEALED)
    names: list[str] = []
    for frame in frames.feed(done.stdout):
        if frame.kind == transfer.LISTING:
            listing = transfer.read_listing(frame)
            found.entries.update(dict.fromkeys(listing.modes, ("folder", b"")))
            for path, entry in listing.entries():
                names.append(path)
                if entry.kind == LINK:
                    found.entries[path] = ("link", entry.target)
        elif frame.kind == transfer.BATCH:
            for record, contents in transfer.read_batch(frame):
                if not record.missing:
                    found.entries[names[record.number]] = ("file", bytes(contents))
        elif frame.kind == transfer.PART:
            number, _, data = transfer.read_part(frame)
            _, before = found.entries.get(names[number], ("file", b""))
            assert isinstance(before, bytes)
            found.entries[names[number]] = ("file", before + data)
        elif frame.kind == transfer.END:
            record = transfer.read_end(frame)
            found.records[names[record.number]] = record
        elif frame.kind == transfer.LEFT_OUT:
            found.out.append(decode(frame.head, LeftOut))
    assert not frames.is_cut
    notes = [f"left out {one.name}: {one.reason}" for one in found.out]
    found.notes = [*done.stderr.decode().splitlines(), *notes]
    return found
