"""Which of the project's files are no new results of this node: what was pulled from it or left out by a
pull, for every laptop with the key, and the copies that it got from another node before ranks started
(share/spread.py) or, by `sync --results`, from a laptop.

A copy is no result of this node, as long as it is unchanged and the node that wrote it is there; the laptop
has what it has put back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from agent.node import store
from cloudddp.agent.protocol.codec import MAX_REQUEST
from cloudddp.agent.protocol.frozen import frozen


@frozen
class Pulled:
    """`times`: path -> when it was pulled with all below it, by the file system's clock (ns). `left`: paths
    below these that were not copied -> why."""

    times: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def is_pulled(self, name: str, written: int) -> bool:
        """Return whether a file that was `written` at a time (ns) has been copied as it is."""
        parts = (name, *map(str, Path(name).parents))  # the last is "."
        return not any(part in self.left for part in parts) and any(
            written < self.times.get(part, 0) for part in parts
        )


class Origin(NamedTuple):
    """The instance that wrote a file (or that sent it, if the writer had left the job), and the mtime and
    size of the copy, which are those of the original."""

    id: str
    mtime_ns: int
    size: int


PUT_BACK = "put back"  # instead of an instance: pulled results that a laptop has sent


@frozen
class Received:
    files: dict[str, Origin] = field(default_factory=dict)

    def origin(self, name: str, info: os.stat_result) -> str:
        """Return the instance that wrote a file; '' for one that is no copy, or was changed here since."""
        found = self.files.get(name)
        is_same = found is not None and (found.mtime_ns, found.size) == (info.st_mtime_ns, info.st_size)
        return found.id if found is not None and is_same else ""


def pulled(project: Path) -> Pulled:
    return store.read(_file("pulled", project), Pulled, MAX_REQUEST) or Pulled()


def write_pulled(project: Path, record: Pulled) -> None:
    store.write(_file("pulled", project), record)


def received(project: Path) -> Received:
    """Return which files were received; none if there is no record, or it cannot be decoded."""
    return store.read(_file("received", project), Received, MAX_REQUEST) or Received()


def add_received(project: Path, copies: Mapping[str, Origin]) -> None:
    """Record copies before they are written. Raises OSError."""
    known = received(project).files
    kept = {name: origin for name, origin in known.items() if os.path.lexists(project / name)}
    store.write(_file("received", project), Received({**kept, **copies}))


def add_put_back(project: Path, names: Iterable[str]) -> None:
    """Record results that a laptop has put back. Raises OSError."""
    found = {name: os.lstat(project / name) for name in names}
    add_received(
        project, {name: Origin(PUT_BACK, info.st_mtime_ns, info.st_size) for name, info in found.items()}
    )


def _file(kind: str, project: Path) -> Path:
    return store.ROOT / f"{kind}-{project.name}.json"
