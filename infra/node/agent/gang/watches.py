"""What accompanies the ranks of one attempt on a node, besides their exit codes: before they start it copies
files between the nodes, then it watches for stalls, stragglers and isolated ranks."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Callable, Optional

from agent.files import records
from agent.files.checkpoints import Files
from agent.jobs import job_record
from agent.node import store
from agent.share.spread import PeerCopy
from agent.sync.replaced import set_aside
from agent.watch.gpus import Gpus
from agent.watch.isolation import IsolationWatch
from agent.watch.stall import Stall
from agent.watch.stragglers import StragglerWatch
from agent.watch.written import WrittenWatch
from cloudddp.agent.protocol.checkpoints import listed
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.gang import Kind, PeerMessage
from cloudddp.agent.protocol.start import StartRequest

COPIES_SECONDS = 1.0  # between two looks at the copies of checkpoints


class Watches:
    """The watches of one attempt. What the other nodes have to know, they `send`."""

    def __init__(
        self,
        request: StartRequest,
        folder: Path,
        attempt: int,
        gpus: Gpus,
        send: Callable[[PeerMessage], None],
    ) -> None:
        self._request, self._send = request, send
        self._folder, self._gpus = folder, gpus
        self._project = store.project_folder(request.project)
        # It copies the newest snapshot, or shared files, to the nodes that lack them before the ranks start.
        self.spread: Optional[PeerCopy] = None
        search = request.snapshots
        if search is not None and (attempt or not search.restarts_only):
            self.spread = PeerCopy(request, search, attempt, send)
        self._clocks = job_record.Clocks(folder, attempt)
        self._copies_at = 0.0
        self.pace = StragglerWatch(request.node, folder, request.watch.straggler_seconds, send)
        self.begin()

    def begin(self) -> None:
        """The ranks start now: until then they could not do anything."""
        request = self._request
        self._files = Files(self._project) if records.results(self._project).copies else None
        self.stalls = Stall(request.node, self._folder, request.watch.stall_minutes, self._gpus, self._send)
        self._isolation = IsolationWatch(request.node, request.gang.peers, request.watch.alone_seconds)
        self.written = WrittenWatch(request, self._folder, self._send)

    def take(self, node: int, message: PeerMessage) -> None:
        """Take a message of another node."""
        if message.clock is not None:
            self._clocks.heard(node, round(message.clock * 1e9), time.time_ns())
        if message.kind is Kind.HEARTBEAT:
            self.stalls.heard_idle(node, message.idle)
            self.pace.heard(node, message.paces)
        elif message.kind is Kind.STALLED:
            self.stalls.gather()
        elif message.kind is Kind.STACKS:
            self.stalls.add_stacks(node, message)
        elif message.kind is Kind.LEFT and message.stall is not None:
            job_record.keep(self._folder / job_record.STALL_FILE, message.stall)
        elif message.kind is Kind.WROTE and message.wrote is not None:
            job_record.keep(self._folder / f"wrote-{node}.json", message.wrote)
        elif message.kind is Kind.STRAGGLERS:
            if self.pace.keep(message.stragglers):
                self.stalls.activity.forget_output()
        elif message.kind in (Kind.SNAPSHOT, Kind.COPIED) and self.spread is not None:
            self.spread.act(node, message)

    def note(self, text: str) -> None:
        """Write into the logs of the ranks, which is no output of theirs."""
        job_record.note(self._folder, text)
        self.stalls.activity.forget_output()

    def turn(self, running: Callable[[], Collection[int]], *, is_first: bool) -> None:
        """Look once at ranks that run; `running` returns their processes. The first node compares them."""
        if is_first and self.pace.compare():
            self.stalls.activity.forget_output()
        self.written.report()
        if text := self._isolation.found(running):
            self.note(text)
        self._set_stale_copies_aside()

    def _set_stale_copies_aside(self) -> None:
        """Move copies of an older save away once ranks write a new one into the same folder."""
        if self._files is None or time.monotonic() < self._copies_at:
            return
        self._copies_at = time.monotonic() + COPIES_SECONDS
        try:
            if names := set_aside(self._project, self._files.stale_copies()):
                self.note(f"moved to {REPLACED}, since another checkpoint is written there: {listed(names)}")
        except OSError as error:
            self.note(f"copies of an older checkpoint cannot be moved away from a new one: {error}")
            self._files = None
