"""The event stream of one node: the agent's frames over SSH, across broken connections.

The frames of all nodes are read in one thread. Connecting again waits, and is done in a few others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from cloudddp.agent import client, failures
from cloudddp.agent.client import Runner
from cloudddp.agent.frames import FrameDecoder
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import Dropped, End, FollowRequest, Heartbeat, Log
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.config.timing import Timing
from cloudddp.errors import NodeError
from cloudddp.job.follow.events import (
    Event,
    JobUpdate,
    LogData,
    LogDropped,
    NodeDisconnected,
    NodeFinished,
    NodeLost,
    NodeReconnected,
    NodeUnreachable,
)
from cloudddp.job.follow.liveness import Liveness
from cloudddp.job.follow.selection import EVERYTHING, Selection
from cloudddp.ssh.running import Result
from cloudddp.ssh.tasks import TaskPool

ATTEMPTS = 16  # to connect again, at a time


class Connections:
    """Replaces the runner's broken connections until it is closed; one thread at a time per node."""

    def __init__(self, runner: Runner, nodes: Iterable[int]) -> None:
        self.runner = runner
        self.closed = False
        self.attempts = TaskPool(ATTEMPTS, "reconnect")
        self._locks = {node: threading.Lock() for node in nodes}

    def reconnect(self, node: int) -> None:
        """Replace a node's connection. Raises NodeError if that fails, or after `close`."""
        with self._locks[node]:
            if self.closed:
                raise NodeError(f"node {node}: no longer followed")
            self.runner.reconnect(node, wanted=lambda: not self.closed)

    def close(self) -> None:
        """Stop replacing connections. An attempt in progress replaces nothing: the caller may use the connections, and need
        not wait, which with an instance that has ended takes as long as the attempt may last."""
        self.closed = True


class NodeStream:
    """Emits the events of one node until the job has ended there or the node is lost.

    `wait`: until the job ends; otherwise read the logs as they are. `emit` may block, which throttles all nodes.
    """

    def __init__(
        self,
        node: int,
        job: str,
        *,
        wait: bool,
        connections: Connections,
        liveness: Liveness,
        emit: Callable[[Event], None],
        timing: Timing,
        selection: Selection = EVERYTHING,
    ) -> None:
        self._node = node
        self._job = job
        self._wait = wait
        self._connections = connections
        self._liveness = liveness
        self._emit = emit
        self._timing = timing
        self._selection = selection
        self._offsets: dict[int, int] = {}  # of each rank's log: what has been emitted
        self._phase: JobPhase | None = None  # as the node reported it last
        self._ended = False
        self._broken_since: float | None = None
        self._claimed = threading.Lock()  # held by what reads

    def start(self) -> None:
        """Start reading, if that was not done before.

        Ctrl-C may interrupt this, and leave it unknown whether it was started. So it may be started twice, and only one of
        both reads.
        """
        if not self._claimed.locked():
            self._connections.attempts.submit(self._begin)

    def _begin(self) -> None:
        if self._claimed.acquire(blocking=False):
            self._read()

    def _read(self) -> None:
        """Begin to follow the job over the current connection."""
        frames = FrameDecoder()

        def received(data: bytes) -> None:
            self._broken_since = None
            self._liveness.received(self._node)
            for frame in frames.feed(data):
                if not isinstance(frame, Heartbeat) and not self._ended:
                    self._emit(self._event(frame))

        begun = self._phase is not None  # then each log is either in the offsets, or has appeared since
        request = FollowRequest(
            self._job,
            wait=self._wait,
            heartbeat=self._timing.heartbeat,
            offsets=dict(self._offsets),
            ranks=self._selection.ranks,
            since=None if begun else self._selection.since,
            tail=None if begun else self._selection.tail,
            setup=self._selection.setup,
        )
        try:
            client.start_step(
                self._connections.runner, self._node, request, self._read_ended,
                timeout=self._timing.silence, on_stdout=received, span=False, is_last=True,
            )  # fmt: skip
        except Exception as error:
            self._read_ended(error)

    def _read_ended(self, end: Result | Exception) -> None:
        """Handle the end of the frames: that of the job on this node, or of the connection."""
        if not isinstance(end, Exception) and not self._ended:
            end = NodeError(f"node {self._node}: {failures.failure_text(end)}")
        if not isinstance(end, Exception):
            self._liveness.finished(self._node)
        elif isinstance(end, ProtocolError):
            unreadable = failures.unreadable(self._node, FollowRequest.STEP, end)
            self._emit(NodeLost(self._node, str(unreadable), time.time(), unreadable))
        elif self._may_recover(end):
            self._emit(NodeDisconnected(self._node))
            self._try_later(end)
        else:
            self._lose(end)

    def _lose(self, error: Exception) -> None:
        # Not since the connection broke: when a machine fails silently, ranks on other nodes fail because of it long before
        # its connection times out.
        since = time.time() - self._liveness.silence(self._node)
        self._emit(NodeLost(self._node, _reason(error), since))

    def _event(self, frame: Log | Dropped | JobState | End) -> Event:
        """Return the event of a frame. Raises ProtocolError for a frame that no agent sends in this place."""
        match frame:
            case Log():
                self._offsets[frame.rank] = frame.end
                return LogData(self._node, frame.rank, frame.data)
            case Dropped():
                self._offsets[frame.rank] = frame.end
                return LogDropped(self._node, frame.rank, frame.size)
            case JobState():
                if frame.job != self._job:
                    raise ProtocolError(f"it has the state of job {frame.job}")
                self._phase = frame.phase
                return JobUpdate(self._node, frame)
            case End():
                if self._phase is None:
                    raise ProtocolError("it ends without the job's state")
                if self._wait and not self._phase.ended:
                    raise ProtocolError(f"it ends while the job is {self._phase.value}")
                self._ended = True
                return NodeFinished(self._node)

    def _may_recover(self, error: Exception) -> bool:
        """Note that the connection has broken; return False if the node is lost."""
        now = self._liveness.clock()
        self._broken_since = self._broken_since or now
        self._liveness.broken(self._node)
        refused = isinstance(error, failures.RefusedByAgent)
        return self._wait and not refused and now - self._broken_since <= self._timing.offline

    def _try_later(self, error: Exception) -> None:
        self._connections.attempts.submit_later(self._timing.reconnect, lambda: self._reconnect(error))

    def _reconnect(self, error: Exception) -> None:
        """Try once to connect again, and follow the job from there."""
        self._check_finished_nodes()
        give_up = self._liveness.should_give_up(self._node, self._broken_since or self._liveness.clock())
        try:
            self._connections.reconnect(self._node)
        except Exception:
            if give_up or self._connections.closed:  # decided before this last attempt
                self._lose(error)
            else:
                self._emit(NodeUnreachable(self._node))
                self._try_later(error)
            return
        self._liveness.answered(self._node)
        self._emit(NodeReconnected(self._node))
        self._read()

    def _check_finished_nodes(self) -> None:
        """Check that nodes whose streams have ended still respond. Otherwise a node that is lost after the others have
        finished would look as if this computer were offline."""
        for node in self._liveness.finished_nodes:
            if self._liveness.silence(node) < self._timing.heartbeat:
                continue
            try:
                self._connections.runner.run(node, "true", command_timeout=self._timing.heartbeat)
                self._liveness.answered(node)
            except Exception:
                with contextlib.suppress(Exception):
                    self._connections.reconnect(node)


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, NodeError) else "") or str(error)
