"""Which files of the project are copies that this node got from another one before ranks started (spread.py).

A copy is no result of this node, as long as it is unchanged and the node that wrote it is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agent import store
from cloudddp.agent.protocol.codec import ProtocolError, decode


class Origin(NamedTuple):
    """The instance that wrote a file (or that sent it, if the writer had left the job), and the ctime of the copy: unlike its
    mtime, which is that of the original, every later change sets it."""

    id: str
    ctime_ns: int


@dataclass(frozen=True)
class Received:
    files: dict[str, Origin] = field(default_factory=dict)

    def origin(self, name: str, info: os.stat_result) -> str:
        """Return the instance that wrote a file; '' for one that is no copy, or was changed here since."""
        found = self.files.get(name)
        return found.id if found is not None and found.ctime_ns == info.st_ctime_ns else ""


def read(project: Path) -> Received:
    """Return which files were received; none if there is no record, or it cannot be decoded."""
    try:
        return decode(store.read_bytes(_file(project)), Received)
    except (OSError, ProtocolError):
        return Received()


def add(project: Path, copied: Mapping[str, str]) -> None:
    """Record which instances wrote these files, which are complete. Raises OSError."""
    known = read(project).files
    kept = {
        name: origin
        for name, origin in known.items()
        if name not in copied and os.path.lexists(project / name)
    }
    for name, origin in copied.items():
        kept[name] = Origin(origin, os.lstat(project / name).st_ctime_ns)
    store.write(_file(project), Received(kept))


def _file(project: Path) -> Path:
    return store.ROOT / f"received-{project.name}.json"
