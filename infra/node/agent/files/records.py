"""The record of results on a node, of all files that jobs wrote: what was pulled or left out by a pull, for
every laptop with the key, and the copies that the node got from another one before ranks started
(share/spread.py) or, by `sync --results`, from a laptop.

A copy is no result of this node, as long as it is unchanged and the node that wrote it is there; the laptop
has what it has put back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from agent.node import store
from cloudddp.agent.protocol.codec import MAX_REQUEST
from cloudddp.agent.protocol.frozen import frozen


class Writer(NamedTuple):
    """The instance that wrote a file (or that sent it, if the writer had left the job), the job ('': unknown)
    and its attempt; and the size and mtime (ns) of the copy."""

    id: str
    job: str = ""
    attempt: int = 0
    size: int = 0
    mtime_ns: int = 0


PUT_BACK = "put back"  # instead of an instance: pulled results that a laptop has sent


@frozen
class Results:
    """`pulled`: path -> when it was pulled with all below it, by the file system's clock (ns). `left`: paths
    below these that were not copied -> why. `copies`: path -> where it comes from. `damaged`: there was a
    record that could not be read."""

    pulled: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Writer] = field(default_factory=dict)
    damaged: bool = False

    def is_pulled(self, name: str, written: int) -> bool:
        """Return whether a file that was `written` at a time (ns) has been copied as it is."""
        parts = (name, *map(str, Path(name).parents))  # the last is "."
        return not any(part in self.left for part in parts) and any(
            written < self.pulled.get(part, 0) for part in parts
        )

    def copy(self, name: str, info: os.stat_result) -> Optional[Writer]:
        """Return where a file comes from; None for one that is no copy, or was changed here since."""
        found = self.copies.get(name)
        is_same = found is not None and (found.size, found.mtime_ns) == (info.st_size, info.st_mtime_ns)
        return found if is_same else None

    def moved(self, name: str, folder: str) -> dict[str, Writer]:
        """Return the copies at or below a path, by their names once it was moved into the folder."""
        copies = self.copies.items()
        return {f"{folder}/{one}": origin for one, origin in copies if f"{one}/".startswith(f"{name}/")}

    def origin(self, name: str, info: os.stat_result) -> str:
        """Return the instance that wrote a file; '' as in `copy`."""
        found = self.copy(name, info)
        return found.id if found is not None else ""


def results(project: Path) -> Results:
    path = _file(project)
    found = store.read(path, Results, MAX_REQUEST)
    return Results(damaged=os.path.lexists(path)) if found is None else found


def update(project: Path, change: Callable[[Results], Results]) -> None:
    """Record what `change` returns for what is recorded. Raises OSError."""
    with store.locked("results"):
        store.write(_file(project), change(results(project)))


def keep_copies(project: Path, copies: Mapping[str, Optional[Writer]]) -> None:
    """Record where files come from, before they are written, and forget those that were deleted. None: a file
    is no copy. Raises OSError."""

    def change(known: Results) -> Results:
        there = {name: one for name, one in known.copies.items() if os.path.lexists(project / name)}
        kept = {name: one for name, one in {**there, **copies}.items() if one is not None}
        return replace(known, copies=kept)

    update(project, change)


def _file(project: Path) -> Path:
    return store.ROOT / f"results-{project.name}.json"
