"""`pulled`: record what has been pulled and what a pull has left out, for every laptop with the key."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from agent import store
from cloudddp.agent.protocol.codec import ProtocolError, decode
from cloudddp.agent.protocol.results import MAX_LEFT, PulledReply, PulledRequest

REQUEST = PulledRequest
MAX_RECORDED = 1000  # paths; the latest are kept


@dataclass(frozen=True)
class Record:
    """`times`: path -> when it was pulled with all below it, by the file system's clock (ns). `left`: paths below these that were
    not copied -> why."""

    times: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def is_pulled(self, name: str, written: int) -> bool:
        """Return whether a file that was `written` at a time (ns) has been copied as it is."""
        parts = (name, *map(str, Path(name).parents))  # the last is "."
        return not any(part in self.left for part in parts) and any(
            written < self.times.get(part, 0) for part in parts
        )


def read_record(folder: Path) -> Record:
    try:
        return decode(store.read_bytes(_file(folder)), Record)
    except (OSError, ProtocolError):
        return Record()


def _file(folder: Path) -> Path:
    return store.ROOT / f"pulled-{folder.name}.json"


def step(request: PulledRequest) -> PulledReply:
    folder = store.project_folder(request.project)
    names = [os.path.normpath(name) for name in request.names]
    with store.locked("pulled"):
        record = read_record(folder)
        left = {name: why for name, why in record.left.items() if not _is_below(name, names)}
        left.update({one.name: one.reason for one in request.left})
        times = {**record.times, **dict.fromkeys(names, request.time_ns)}
        if len(left) > MAX_LEFT:
            times, left = {}, {}  # nothing counts as pulled
        latest = sorted(times.items(), key=lambda item: -item[1])[:MAX_RECORDED]
        store.write(_file(folder), Record(dict(latest), left))
    return PulledReply(len(names))


def _is_below(name: str, roots: list[str]) -> bool:
    return any(root == "." or name == root or name.startswith(root + "/") for root in roots)
