"""`pulled`: record what has been pulled, for every laptop with the key."""

from __future__ import annotations

import os
from pathlib import Path

from agent import store
from cloudddp.agent.protocol.codec import ProtocolError, decode_mapping
from cloudddp.agent.protocol.results import PulledReply, PulledRequest

REQUEST = PulledRequest
MAX_RECORDED = 1000  # paths; the latest are kept


def pulled_times(folder: Path) -> dict[str, int]:
    """Return path -> when it was pulled, by the file system's clock (ns)."""
    try:
        return decode_mapping(store.read_bytes(_file(folder)), int)
    except (OSError, ProtocolError):
        return {}


def _file(folder: Path) -> Path:
    return store.ROOT / f"pulled-{folder.name}.json"


def step(request: PulledRequest) -> PulledReply:
    folder = store.project_folder(request.project)
    with store.locked("pulled"):
        times = pulled_times(folder)
        times.update({os.path.normpath(name): request.time_ns for name in request.names})
        latest = sorted(times.items(), key=lambda item: -item[1])[:MAX_RECORDED]
        store.write(_file(folder), dict(latest))
    return PulledReply(len(request.names))
