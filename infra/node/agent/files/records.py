"""Which of the project's files are no new results of this node: what was pulled from it or left out by a
pull, for every laptop with the key, and the copies that it got from another node before ranks started
(share/spread.py) or, by `sync --results`, from a laptop.

A copy is no result of this node, as long as it is unchanged and the node that wrote it is there; the laptop
has what it has put back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple, Optional

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
    """The instance that wrote a file (or that sent it, if the writer had left the job), the job ('': unknown)
    and its attempt, and the inode and ctime (ns) of the copy, which a script cannot choose; 0 while it is
    being written."""

    id: str
    job: str = ""
    attempt: int = 0
    inode: int = 0
    ctime_ns: int = 0


PUT_BACK = "put back"  # instead of an instance: pulled results that a laptop has sent


@frozen
class Received:
    """`damaged`: there was a record that could not be read."""

    files: dict[str, Origin] = field(default_factory=dict)
    damaged: bool = False

    def copy(self, name: str, info: os.stat_result) -> Optional[Origin]:
        """Return where a file comes from; None for one that is no copy, or was changed here since."""
        found = self.files.get(name)
        is_same = found is not None and (found.inode, found.ctime_ns) == (info.st_ino, info.st_ctime_ns)
        return found if is_same else None

    def origin(self, name: str, info: os.stat_result) -> str:
        """Return the instance that wrote a file; '' as in `copy`."""
        found = self.copy(name, info)
        return found.id if found is not None else ""

    def is_doubtful(self, name: str) -> bool:
        """Whether a file that is no known copy may be one."""
        return self.damaged or (name in self.files and not self.files[name].inode)


def pulled(project: Path) -> Pulled:
    return store.read(_file("pulled", project), Pulled, MAX_REQUEST) or Pulled()


def write_pulled(project: Path, record: Pulled) -> None:
    store.write(_file("pulled", project), record)


def received(project: Path) -> Received:
    """Return which files were received."""
    path = _file("received", project)
    found = store.read(path, Received, MAX_REQUEST)
    return Received(damaged=os.path.lexists(path)) if found is None else found


def add_received(project: Path, copies: Mapping[str, Origin]) -> None:
    """Record copies before they are written, and as `as_written` once they are. Raises OSError."""
    known = received(project)
    kept = {name: origin for name, origin in known.files.items() if os.path.lexists(project / name)}
    store.write(_file("received", project), replace(known, files={**kept, **copies}))


def settle(project: Path) -> None:
    """Forget copies that were never written; one that was written by an agent that was killed then is of
    unknown origin. Raises OSError."""
    begun = [name for name, origin in received(project).files.items() if not origin.inode]
    if begun:
        add_received(project, as_written(project, dict.fromkeys(begun, Origin(""))))


def as_written(project: Path, copies: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return these copies with what identifies each file that is there."""
    found = {}
    for name, origin in copies.items():
        with contextlib.suppress(OSError):
            info = os.lstat(project / name)
            found[name] = origin._replace(inode=info.st_ino, ctime_ns=info.st_ctime_ns)
    return found


def _file(kind: str, project: Path) -> Path:
    return store.ROOT / f"{kind}-{project.name}.json"
