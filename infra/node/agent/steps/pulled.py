"""`pulled`: record what has been pulled."""

from __future__ import annotations

import os
from dataclasses import replace

from agent.files import records, shared
from agent.files.records import Results
from agent.node import store
from cloudddp.agent.protocol.phases import Done
from cloudddp.agent.protocol.results import MAX_LEFT, PulledRequest

REQUEST = PulledRequest
MAX_RECORDED = 1000  # paths; the latest are kept


def step(request: PulledRequest) -> Done:
    project = store.project_folder(request.project)
    names = [os.path.normpath(name) for name in request.names]

    def change(known: Results) -> Results:
        is_all = "." in names
        left = {n: why for n, why in known.left.items() if not is_all and not shared.is_below(n, names)}
        left.update({one.name: one.reason for one in request.left})
        pulled = {**known.pulled, **dict.fromkeys(names, request.time_ns)}
        if len(left) > MAX_LEFT:
            pulled, left = {}, {}  # nothing counts as pulled
        latest = sorted(pulled.items(), key=lambda item: -item[1])[:MAX_RECORDED]
        return replace(known, pulled=dict(latest), left=left)

    records.update(project, change)
    return Done()
