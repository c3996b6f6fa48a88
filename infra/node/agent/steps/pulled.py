"""`pulled`: record what has been pulled."""

from __future__ import annotations

import os
from pathlib import Path

from agent.files import records
from agent.node import store
from cloudddp.agent.protocol.checkpoints import writer_of
from cloudddp.agent.protocol.results import MAX_LEFT, PulledReply, PulledRequest

REQUEST = PulledRequest
MAX_RECORDED = 1000  # paths; the latest are kept


def step(request: PulledRequest) -> PulledReply:
    project = store.project_folder(request.project)
    names = [os.path.normpath(name) for name in request.names]
    with store.locked("pulled"):
        record = records.pulled(project)
        left = {name: why for name, why in record.left.items() if not _is_below(name, names)}
        left.update({one.name: one.reason for one in request.left})
        times = {**record.times, **dict.fromkeys(names, request.time_ns)}
        if len(left) > MAX_LEFT:
            times, left = {}, {}  # nothing counts as pulled
        latest = sorted(times.items(), key=lambda item: -item[1])[:MAX_RECORDED]
        records.write_pulled(project, records.Pulled(dict(latest), left))
        if request.put_back:
            _record_put_back(project, request)
    return PulledReply(len(names))


def _record_put_back(project: Path, request: PulledRequest) -> None:
    origins = {
        name: records.Origin(records.PUT_BACK, *writer_of(name, request.checkpoints))
        for name in request.names
    }
    records.add_received(project, records.as_written(project, origins))


def _is_below(name: str, roots: list[str]) -> bool:
    return any(root == "." or name == root or name.startswith(root + "/") for root in roots)
