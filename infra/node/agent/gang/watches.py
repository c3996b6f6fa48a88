"""What accompanies the ranks of one attempt on a node, besides their exit codes: before they start it copies
files between the nodes, then it watches for stalls, stragglers and isolated ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Callable, Optional

from agent.files import records
from agent.files.checkpoints import Files
from agent.jobs import job_record
from agent.jobs.clocks import Clocks
from agent.node import store
from agent.share.spread import Spread
from agent.sync.replaced import set_aside
from agent.watch.gpus import Gpus
from agent.watch.isolation import IsolationWatch
from agent.watch.stall import Stall
from agent.watch.stragglers import StragglerWatch
from agent.watch.written import WrittenWatch
from cloudddp.agent.protocol.checkpoints import listed
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.gang import Kind, Message
from cloudddp.agent.protocol.progress import LeftStall, Straggler
from cloudddp.agent.protocol.start import StartRequest

COPIES_SECONDS = 1.0  # between two looks at the copies of checkpoints


class Watches:
    """The watches of one attempt. What they yield is sent to the other nodes."""

    def __init__(self, request: StartRequest, folder: Path, attempt: int, gpus: Gpus) -> None:
        self._request = request
        self._folder, self._gpus = folder, gpus
        self._project = store.project_folder(request.project)
        self.spread = _spread(request, attempt)  # what copies files before the ranks start, if anything does
        self._clocks = Clocks(folder, attempt)
        self._copies_at = 0.0
        self.pace = StragglerWatch(request.node, folder, request.straggler_seconds)
        self.begin()

    def begin(self) -> None:
        """The ranks start now: until then they could not do anything."""
        request = self._request
        self._files = Files(self._project) if records.received(self._project).files else None
        self.stalls = Stall(request.node, self._folder, request.stall_minutes, self._gpus)
        self._isolation = IsolationWatch(request.node, request.gang.peers, request.alone_seconds)
        self._written = WrittenWatch(request, self._folder)

    def take(self, node: int, message: Message) -> None:
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
            job_record.keep_stall(self._folder, message.stall)
        elif message.kind is Kind.WROTE and message.wrote is not None:
            job_record.keep_wrote(self._folder, node, message.wrote)
        elif message.kind is Kind.STRAGGLERS:
            self._keep_stragglers(message.stragglers)
        elif message.kind in (Kind.SNAPSHOT, Kind.COPIED) and self.spread is not None:
            self.spread.act(node, message)

    # -- while the ranks run ---------------------------------------------------------------------------------

    def stall(self, *, is_first: bool, others: Optional[Collection[int]]) -> Iterator[Message]:
        """Notice that no rank of any node does anything. The first node declares it. `others`: the other
        nodes that are left; None if all ranks have finished."""
        if is_first and others is not None and self.stalls.is_due(set(others)):
            self.stalls.gather()
            yield Message(Kind.STALLED)
        found = self.stalls.gathered()
        if found is not None:
            yield found
        if (over := self.stalls.over()) is not None:
            yield self._left(over)

    def leave_stall(self, detail: str) -> Message:
        """Keep that a stall is left alone."""
        return self._left(self.stalls.leave(detail))

    def _left(self, left: LeftStall) -> Message:
        job_record.keep_stall(self._folder, left)
        return Message(Kind.LEFT, stall=left)

    def stragglers(self, *, is_first: bool) -> Iterator[Message]:
        """Notice ranks that are slower than the others. The first node compares them."""
        changed = self.pace.changed() if is_first else None
        if changed is not None:
            self._keep_stragglers(changed)
            yield Message(Kind.STRAGGLERS, stragglers=changed)

    def written(self, *, last: bool = False) -> Iterator[Message]:
        """Yield what the others have to know of files that the job wrote here. `last`: its ranks have
        ended."""
        if (found := self._written.changed(last=last)) is not None:
            yield Message(Kind.WROTE, wrote=found)

    def _keep_stragglers(self, known: tuple[Straggler, ...]) -> None:
        if self.pace.keep(known):
            self.stalls.noted()

    def set_stale_copies_aside(self) -> None:
        """Move copies of an older save away once ranks write a new one into the same folder."""
        if self._files is None or time.monotonic() < self._copies_at:
            return
        self._copies_at = time.monotonic() + COPIES_SECONDS
        try:
            if names := set_aside(self._project, self._files.stale_copies()):
                text = f"moved to {REPLACED}, since another checkpoint is written there: {listed(names)}"
                job_record.note(self._folder, text)
                self.stalls.noted()
        except OSError as error:
            text = f"copies of an older checkpoint cannot be moved away from a new one: {error}"
            job_record.note(self._folder, text)
            self.stalls.noted()
            self._files = None

    def note_isolated_ranks(self, running: Callable[[], Collection[int]]) -> None:
        """Note in the logs that no rank of this node is connected to another node, where that is so for
        long."""
        if text := self._isolation.found(running):
            job_record.note(self._folder, text)


def _spread(request: StartRequest, attempt: int) -> Optional[Spread]:
    """Return what copies the newest snapshot, or the shared files, to the nodes that lack it."""
    search = request.snapshots
    if search is None or (search.restarts_only and not attempt):
        return None
    return Spread(request, search, attempt)
