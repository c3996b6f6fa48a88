"""The event stream of one node: the agent's frames over SSH, read in a thread of its own, across broken
connections. The streams of a job share its connections, and when each node last responded: whether a node or
this computer has lost the network shows in those of the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

from cloudddp.agent import client, replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import SETUP_RANK
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import End, FollowRequest, Frame, Heartbeat, Log
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.replies import FrameDecoder
from cloudddp.config.timing import Timing, current
from cloudddp.errors import ConnectionLost, NodeError
from cloudddp.job.follow import events
from cloudddp.job.follow.lines import OpenLine, split
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.time_limits import AwakeClock


@dataclass(frozen=True, slots=True)
class LogSelection:
    """Read the logs of these ranks (all if empty), from what was written in the last `since` seconds, and
    from the last `tail` lines of each. `setup`: also that of the setup, unless `ranks` are named."""

    ranks: tuple[int, ...] = ()
    since: float | None = None
    tail: int | None = None
    setup: bool = False


class Connections:
    """Replaces the runner's broken connections until it is closed; one thread at a time per node."""

    def __init__(self, runner: Runner, nodes: Iterable[int]) -> None:
        self.runner = runner
        self.closed = False
        self._locks = {node: threading.Lock() for node in nodes}

    def reconnect(self, node: int) -> None:
        """Replace a node's connection. Raises NodeError if that fails, or after `close`."""
        with self._locks[node]:
            self._replace(node)

    def check(self, node: int, seconds: float) -> bool:
        """Return whether a node answers within so many seconds; if not, try once to connect to it again."""
        if not self._locks[node].acquire(blocking=False):
            return False  # another thread does that
        try:
            self.runner.run(node, CommandSpec("true", command_timeout=seconds))
            return True
        except Exception:
            with contextlib.suppress(Exception):
                self._replace(node)
            return False
        finally:
            self._locks[node].release()

    def _replace(self, node: int) -> None:
        if self.closed:
            raise NodeError(f"node {node}: no longer followed")
        self.runner.reconnect(node, wanted=lambda: not self.closed)

    def close(self) -> None:
        """Stop replacing connections. An attempt in progress replaces nothing, and the caller need not wait
        for it: with an instance that has ended it takes as long as it may last."""
        self.closed = True


class Liveness:
    """When each node last responded, and since when its connection has worked. Any thread may use it."""

    def __init__(self, nodes: Iterable[int], timing: Timing) -> None:
        self._timing = timing
        self.clock: Callable[[], float] = AwakeClock()
        now = self.clock()
        self._last_seen = dict.fromkeys(nodes, now)
        self._steady_since: dict[int, float] = {}
        self.finished_nodes: set[int] = set()  # whose streams have ended: they send no more heartbeats

    @property
    def last_seen(self) -> dict[int, float]:
        return self._last_seen.copy()

    def silence(self, node: int) -> float:
        """Seconds since a node last responded."""
        return self.clock() - self._last_seen[node]

    def received(self, node: int) -> None:
        self._last_seen[node] = self.clock()
        self._steady_since.setdefault(node, self._last_seen[node])

    def answered(self, node: int) -> None:
        """Record that a node responds, although its stream has ended or is being opened again."""
        self._last_seen[node] = self.clock()

    def broken(self, node: int) -> None:
        self._steady_since.pop(node, None)

    def should_give_up(self, node: int, broken_since: float) -> bool:
        """Whether reconnecting to a node has failed for long enough to give up. While other nodes respond,
        the node is at fault, and the limit is short; it is counted from when they began to respond, since
        after an outage here nodes come back one by one. While none responds, this computer is probably
        offline, and the limit is long."""
        now = self.clock()
        steady = self._steady_since.copy()
        others = [
            at
            for other, at in steady.items()
            if other != node and now - self._last_seen[other] < 2 * self._timing.heartbeat
        ]
        if others:
            return now - max(broken_since, min(others)) > self._timing.lost
        return now - broken_since > self._timing.offline


@dataclass(eq=False)
class NodeStream:
    """Emits the events of one node until the job has ended there or the node is lost; without `wait` it reads
    the logs as they are. `emit` may block, which throttles the node."""

    node: int
    job: str
    _: KW_ONLY
    wait: bool
    connections: Connections
    liveness: Liveness
    emit: Callable[[events.Event], None]
    timing: Timing
    selection: LogSelection

    def __post_init__(self) -> None:
        self._offsets: dict[int, int] = {}  # of each rank's log: what has been emitted
        self._phase: JobPhase | None = None  # as the node reported it last
        self._ended = False
        self._broken_since: float | None = None

    def run(self) -> None:
        """Follow the job over one connection after the other, until it has ended here or the node is lost."""
        while True:
            try:
                self.read()
            except ProtocolError as error:
                unreadable = replies.unreadable(self.node, FollowRequest.STEP, error)
                self.emit(events.NodeLost(self.node, str(unreadable), time.time(), unreadable))
                return
            except Exception as error:
                now = self.liveness.clock()
                self._broken_since = self._broken_since or now
                self.liveness.broken(self.node)
                refused = isinstance(error, replies.RefusedByAgent)
                if refused or not self.wait or now - self._broken_since > self.timing.offline:
                    self._lose(error)
                    return
                self.emit(events.NodeDisconnected(self.node))
                if not self._reconnect(error):
                    return
            else:
                self.liveness.finished_nodes.add(self.node)
                return

    def read(self) -> None:
        """Follow the job over the current connection, to its end; without `wait` to what there is, from where
        the last time ended. Raises NodeError, ProtocolError."""
        self._ended, frames = False, FrameDecoder()

        def received(data: bytes) -> None:
            self._broken_since = None
            self.liveness.received(self.node)
            for frame in frames.feed(data):
                if not isinstance(frame, Heartbeat) and not self._ended:
                    self.emit(self._event(frame))

        begun = self._phase is not None  # then each log is either in the offsets, or has appeared since
        request = FollowRequest(
            self.job,
            wait=self.wait,
            heartbeat=self.timing.heartbeat,
            offsets=dict(self._offsets),
            ranks=self.selection.ranks,
            since=None if begun else self.selection.since,
            tail=None if begun else self.selection.tail,
            setup=self.selection.setup,
        )
        result = client.run_step(
            self.connections.runner,
            self.node,
            request,
            timeout=self.timing.silence,
            on_stdout=received,
        )
        if not self._ended:
            if not result.exit_code:
                frames.end()
            raise NodeError(f"node {self.node}: {replies.failure_text(result)}")

    def _lose(self, error: Exception) -> None:
        # Not since the connection broke: when a machine fails silently, ranks on other nodes fail because of
        # it long before its connection times out.
        since = time.time() - self.liveness.silence(self.node)
        reason = error.reason if isinstance(error, ConnectionLost) else str(error)
        self.emit(events.NodeLost(self.node, reason, since))

    def _event(self, frame: Frame) -> events.Event:
        """Return the event of a frame. Raises ProtocolError for a frame that no agent sends in this place."""
        match frame:
            case Log():
                self._offsets[frame.rank] = frame.end
                return events.LogData(self.node, frame.rank, frame.data)
            case JobState():
                if frame.job != self.job:
                    raise ProtocolError(f"it has the state of job {frame.job}")
                self._phase = frame.phase
                return events.JobUpdate(self.node, frame)
            case End():
                if self._phase is None:
                    raise ProtocolError("it ends without the job's state")
                if self.wait and not self._phase.ended:
                    raise ProtocolError(f"it ends while the job is {self._phase.value}")
                self._ended = True
                return events.NodeFinished(self.node)
        raise ProtocolError("it has a frame of another step")

    def _reconnect(self, broken: Exception) -> bool:
        """Connect again, and return True; return False if the node is lost."""
        while True:
            time.sleep(self.timing.reconnect)
            self._check_finished_nodes()
            give_up = self.liveness.should_give_up(self.node, self._broken_since or self.liveness.clock())
            try:
                self.connections.reconnect(self.node)
            except Exception:
                if give_up or self.connections.closed:  # decided before this last attempt
                    self._lose(broken)
                    return False
                self.emit(events.NodeUnreachable(self.node))
                continue
            self.liveness.answered(self.node)
            self.emit(events.NodeReconnected(self.node))
            return True

    def _check_finished_nodes(self) -> None:
        """Check that nodes whose streams have ended still respond. Otherwise a node that is lost after the
        others have finished would look as if this computer were offline."""
        for node in self.liveness.finished_nodes.copy():
            quiet = self.liveness.silence(node) >= self.timing.heartbeat
            if quiet and self.connections.check(node, self.timing.heartbeat):
                self.liveness.answered(node)


class SetupLogs:
    """Reads the output of a job's setup commands, again and again. `on_line` gets node and line."""

    def __init__(self, runner: Runner, job: str, on_line: Callable[[int, str], None]) -> None:
        self._runner, self._job, self._on_line = runner, job, on_line
        self._streams: dict[int, NodeStream] = {}
        self._open: dict[int, OpenLine] = {}  # the line of each node that is not complete
        self._lock = threading.Lock()  # each node has a thread of its own

    def read(self, nodes: Iterable[int]) -> None:
        """Read what these nodes have written since the last time, as far as they answer."""
        outcome = self._runner.each(self._read, nodes=nodes, fatal=lambda _: False)
        for error in outcome.errors.values():
            if not isinstance(error, NodeError | ProtocolError):  # of `on_line`
                raise error

    def _read(self, node: int) -> None:
        if node not in self._streams:
            self._streams[node] = NodeStream(
                node,
                self._job,
                wait=False,
                connections=Connections(self._runner, [node]),
                liveness=Liveness([node], current()),
                emit=self._take,
                timing=current(),
                selection=LogSelection((SETUP_RANK,), setup=True),
            )
        self._streams[node].read()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.LogData) and event.rank == SETUP_RANK:
            with self._lock:
                lines, self._open[event.node] = split(self._open.get(event.node, OpenLine()), event.data)
                for line in lines:
                    self._on_line(event.node, line)
