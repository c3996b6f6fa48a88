"""Which files of the project are copies that this node got from another one before ranks started
(share/spread.py).

A copy is no result of this node, as long as it is unchanged and the node that wrote it is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agent.node import store
from cloudddp.agent.protocol.codec import MAX_REQUEST


class Origin(NamedTuple):
    """The instance that wrote a file (or that sent it, if the writer had left the job), and the mtime and
    size of the copy, which are those of the original."""

    id: str
    mtime_ns: int
    size: int


@dataclass(frozen=True)
class Received:
    files: dict[str, Origin] = field(default_factory=dict)

    def origin(self, name: str, info: os.stat_result) -> str:
        """Return the instance that wrote a file; '' for one that is no copy, or was changed here since."""
        found = self.files.get(name)
        is_same = found is not None and (found.mtime_ns, found.size) == (info.st_mtime_ns, info.st_size)
        return found.id if found is not None and is_same else ""


def read(project: Path) -> Received:
    """Return which files were received; none if there is no record, or it cannot be decoded."""
    return store.read(_file(project), Received, MAX_REQUEST) or Received()


def add(project: Path, copies: Mapping[str, Origin]) -> None:
    """Record copies before they are written. Raises OSError."""
    known = read(project).files
    kept = {name: origin for name, origin in known.items() if os.path.lexists(project / name)}
    store.write(_file(project), Received({**kept, **copies}))


def _file(project: Path) -> Path:
    return store.ROOT / f"received-{project.name}.json"
