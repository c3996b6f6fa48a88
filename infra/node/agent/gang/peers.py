"""The other nodes of a job, as this one knows them: connected, ready, finished, lost, and how the job has
ended there.

What a message says about its node is kept here. Messages that ask this node for something are returned by
`poll`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from agent.gang.decision import Arrived
from agent.gang.mesh import Closed, Event, Mesh, Received
from agent.ranks.causes import Seen
from cloudddp.agent.protocol.gang import Facts, Kind, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.pace import Pace
from cloudddp.agent.protocol.start import StartRequest
from cloudddp.agent.protocol.verdict import Cause, Failure

HEARTBEATS = 10  # in the time after which a silent node is lost
MAX_EARLY = (
    32  # messages of one node about the next attempt: it sends a heartbeat, and how its ranks have ended
)
NEVER = float("inf")
STUCK = "it did not take part in the end of the job"


class Peers:
    """The other nodes, and the messages from and to them. `finished` and `reports` hold this node, too."""

    def __init__(self, request: StartRequest, mesh: Mesh) -> None:
        self._node = request.node
        self._silence = request.gang.silence
        self._mesh = mesh
        self.nodes = {peer.node for peer in request.gang.peers}
        self.others = self.nodes - {self._node}
        self.facts: dict[int, Facts] = {}
        self.skews: dict[int, float] = {}  # seconds by which the clock of another node is ahead
        self.ready: set[int] = set()  # nodes that are connected to all others
        self.lost: dict[int, Seen] = {}  # nodes whose agent has ended or is silent
        self._errors: dict[int, str] = {}  # of agents that are about to end because of them
        self._heartbeat_at = 0.0
        self._looked_at = 0.0  # for silent nodes
        self._events: deque[Event] = deque()
        self._early: list[Received] = []  # messages about an attempt that has not begun here
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Forget what is known of the last attempt, and receive what was early for this one."""
        self.attempt = attempt
        self.finished: set[int] = set()  # nodes whose ranks have all exited with 0
        self._all_finished_at: Optional[float] = None
        self.reports: dict[int, Arrived] = {}
        self._events.extendleft(reversed(self._early))
        self._early = []

    @property
    def is_connected(self) -> bool:
        """Whether this node is connected to every other one, in both directions."""
        return self._mesh.complete

    @property
    def missing(self) -> Unreachable:
        return self._mesh.missing

    @property
    def left(self) -> set[int]:
        """The nodes that are not lost. The first of them decides."""
        return self.nodes - self.lost.keys()

    @property
    def all_finished(self) -> bool:
        """Whether every rank of the job has exited with 0."""
        return self.nodes <= self.finished

    def all_finished_for(self) -> float:
        """Return for how many seconds this node has known that every rank of the job has exited with 0."""
        if not self.all_finished:
            return 0.0
        self._all_finished_at = self._all_finished_at or time.monotonic()
        return time.monotonic() - self._all_finished_at

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message about the attempt that runs."""
        self._mesh.send(replace(message, attempt=self.attempt))

    def send_restart(self, message: Message) -> None:
        """Send a message about the next attempt."""
        self._mesh.send(replace(message, attempt=self.attempt + 1))

    def flush(self, seconds: float) -> None:
        self._mesh.flush(seconds)

    @property
    def is_heartbeat_due(self) -> bool:
        return time.monotonic() > self._heartbeat_at

    def send_heartbeat(self, idle: float, paces: tuple[Pace, ...]) -> None:
        """Send a heartbeat. `idle`: for how many seconds the ranks of this node have done nothing; `paces`:
        how long their steps take."""
        self._heartbeat_at = time.monotonic() + self._silence / HEARTBEATS
        finished = self._node in self.finished
        self.send(Message(Kind.HEARTBEAT, finished=finished, idle=idle, paces=paces))

    def finish(self) -> None:
        """Every rank of this node has exited with 0. The next heartbeat, which says so, is due at once."""
        if self._node not in self.finished:
            self.finished.add(self._node)
            self._heartbeat_at = 0.0

    def report(self, report: Report) -> None:
        """Keep how the attempt has ended here, and send it to the others."""
        self.reports[self._node] = Arrived(time.monotonic(), report)
        self.send(Message(Kind.ENDED, report=report))

    def poll(self, seconds: float) -> Iterator[Event]:
        """Wait for up to `seconds`, and yield what this node may have to act on, one by one: messages, and
        Closed for a node without which the ranks cannot go on. `begin` may be called between two of them."""
        self._events.extend(self._mesh.poll(0.0 if self._events else seconds))
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Received) and event.message.kind is Kind.CRASHED:
                self._errors[event.node] = event.message.error
            elif isinstance(event, Closed):
                failure = Failure(event.node, Cause.AGENT, detail=self._errors.get(event.node, ""))
                if self._lose(event.node, Seen(time.monotonic(), Observed(failure, 0.0))):
                    yield event
            elif event.message.attempt > self.attempt and event.message.kind is not Kind.RESTART:
                self._keep_early(event)
            elif self._is_valid(event):
                self._keep(event.node, event.message)
                yield event

    def _keep_early(self, event: Received) -> None:
        """Keep a message about the next attempt. A node that works sends few of them before it begins
        here."""
        known = sum(one.node == event.node for one in self._early)
        if event.message.attempt == self.attempt + 1 and known < MAX_EARLY:
            self._early.append(event)

    def _is_valid(self, event: Received) -> bool:
        """Whether a message is about what runs here."""
        message = event.message
        if message.kind is Kind.READY:
            return True
        if message.kind is Kind.RESTART:
            return message.attempt == self.attempt + 1
        if message.kind is Kind.VERDICT:
            return event.node not in self.lost
        return message.attempt == self.attempt

    def _keep(self, node: int, message: Message) -> None:
        """Keep what a message says about its node."""
        if message.kind is Kind.READY:
            self.ready.add(node)
            if message.facts is not None:
                self.facts[node] = message.facts
            if message.clock is not None:
                self.skews[node] = message.clock - time.time()
        elif message.kind is Kind.HEARTBEAT and message.finished:
            self.finished.add(node)
        elif message.kind is Kind.ENDED and message.report is not None:
            self.reports[node] = Arrived(time.monotonic(), message.report)

    # -- lost nodes ------------------------------------------------------------------------------------------

    def lose_silent(self) -> bool:
        """Lose the nodes that are silent, and return whether the ranks cannot go on.

        A node that was itself frozen waits for the others once more: they may have sent it their verdict,
        which the network delivers after a while.
        """
        now = time.monotonic()
        if now - self._looked_at > self._silence / 2:
            self._mesh.heard = dict.fromkeys(self._mesh.heard, now)
        self._looked_at = now
        lost = False
        for node in self.others - self.lost.keys():
            since = self._mesh.heard[node]
            if now - since > self._silence:
                failure = Failure(node, Cause.SILENT, peer=self._node)
                lost |= self._lose(node, Seen(since, Observed(failure, 0.0)))
        return lost

    def lose_stuck(self) -> None:
        """Lose nodes that send heartbeats and do not take part in the end: those that have not reported how
        their ranks have ended, although they should have by now; or else the first one, which has not
        decided."""
        now = time.monotonic()
        stuck = self.left - self.reports.keys() or {min(self.left)}
        for node in stuck - {self._node}:
            failure = Failure(node, Cause.SILENT, peer=self._node, detail=STUCK)
            self.reports.pop(node, None)
            self._lose(node, Seen(now, Observed(failure, 0.0)))

    def _lose(self, node: int, seen: Seen) -> bool:
        """Keep that a node is lost; return whether it matters: its ranks had not ended."""
        if node in self.lost:
            return False
        ended = node in self.reports  # and the others have its report, too
        self.lost[node] = replace(seen, at=NEVER) if ended else seen
        return not ended

    @property
    def losses(self) -> list[Seen]:
        """The failures of the nodes that were lost before their ranks had ended."""
        return [one for one in self.lost.values() if one.at != NEVER]
