"""Reports to the other nodes what a job has written on this one: if it is lost, they name those files."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Callable, Optional

from agent.files import shared
from agent.files.scan import SCAN_SECONDS, Scan
from agent.files.selection import is_checkpoint
from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol.checkpoints import checkpoint_of, is_shard
from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.agent.protocol.gang import MAX_WROTE, Kind, PeerMessage, Wrote
from cloudddp.agent.protocol.start import StartRequest

INTERVAL = 5.0  # seconds between two looks; or so many times as long as one takes:
PAUSES = 50
LAST = 1.0  # seconds for the last look, for which the end of the job waits


class WrittenWatch:
    """Looks for what the job wrote on this node, in a thread: it may take seconds."""

    def __init__(self, request: StartRequest, folder: Path, send: Callable[[PeerMessage], None]) -> None:
        self._request, self._folder, self._send = request, folder, send
        self._found: Optional[Wrote] = None
        self._reported = Wrote()
        self._at = time.monotonic() + INTERVAL if len(request.gang.peers) > 1 else float("inf")

    def report(self, *, last: bool = False) -> None:
        """Send the newest files, checkpoints first, if they have changed. `last`: the ranks have ended."""
        if last and len(self._request.gang.peers) > 1:
            self._found = Wrote(tuple(self._names(LAST)))
        elif time.monotonic() > self._at:
            self._at = float("inf")
            threading.Thread(target=self._look, daemon=True).start()
        found, self._found = self._found, None
        if found is not None and found != self._reported:
            self._reported = found
            self._send(PeerMessage(Kind.WROTE, wrote=found))

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self._found = Wrote(tuple(self._names(SCAN_SECONDS)))
        finally:
            self._at = time.monotonic() + max(INTERVAL, PAUSES * (time.monotonic() - began))

    def _names(self, seconds: float) -> list[str]:
        search, ids = self._request.snapshots, [peer.id for peer in self._request.gang.peers]
        scratch = (*(search.scratch if search else ()), *shared.places().paths)
        project, since = store.project_folder(self._request.project), phases.began_at(self._folder)
        new = Scan(project, (), scratch, since, again=0, seconds=seconds, present=ids)
        found = [(is_checkpoint(one.found.name), one.ctime, one.found.name) for one in new]
        chosen: dict[str, str] = {}  # of the shards of a checkpoint, one
        for *_, name in sorted(found, reverse=True):
            if name.isprintable() and len(name) <= MAX_PATH:
                chosen.setdefault(checkpoint_of(os.path.dirname(name)) if is_shard(name) else name, name)
        return list(chosen.values())[:MAX_WROTE]
