"""What the nodes of a cluster measure, as it arrives: a thread connects to each node, reads, and begins again
where that breaks; another one asks AWS from time to time which nodes there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from cloudddp.agent import client, replies
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.readings import Reading, ReadingsRequest
from cloudddp.agent.replies import FrameDecoder
from cloudddp.aws.client import AWS
from cloudddp.cluster import connect, lookup
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.local_state import ClusterFolder
from cloudddp.text import reason_of

HISTORY = 150  # readings of each node that are kept


@dataclass(frozen=True, slots=True)
class NodeReadings:
    """What one node has sent: the state of its newest job, and the last readings, the newest last. `at`: when
    that arrived, by the monotonic clock. `problem`: why none arrives, '' while they do."""

    job: JobState | None = None
    readings: tuple[Reading, ...] = ()
    at: float | None = None
    problem: str = ""

    def received(self, frame: object, now: float) -> NodeReadings:
        """Return it with what the node has sent. Pure. Raises ProtocolError for what no agent sends here."""
        if isinstance(frame, JobState):
            same = self.job is not None and self.job.job == frame.job
            return replace(self, job=frame, readings=self.readings if same else ())
        if isinstance(frame, Reading):
            return replace(self, readings=(*self.readings, frame)[-HISTORY:], at=now, problem="")
        raise ProtocolError("it has a frame of another step")


class ClusterReadings:
    """What was received from the nodes of a cluster, where a reading arrives every `interval` seconds."""

    def __init__(self, cluster: Cluster, spec: ClusterSpec, interval: float) -> None:
        self.cluster = cluster  # as AWS has listed it last
        self.problem = ""  # why the last query failed
        self._spec, self._interval = spec, interval
        self._known: dict[str, NodeReadings] = {}  # by instance; each is written by one thread
        self._closed = threading.Event()

    @property
    def nodes(self) -> dict[int, NodeReadings]:
        """By node rank."""
        found = self.cluster.nodes.items()
        return {node: self._known[one.id] for node, one in found if one.id in self._known}

    def start(self, aws: Callable[[], AWS]) -> None:
        """Read until `close`. Raises CloudDDPError if this computer has no key of the cluster."""
        ClusterFolder(self.cluster.id).login_key()
        self._read_new_nodes()
        threading.Thread(target=self._ask, args=(aws,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _read_new_nodes(self) -> None:
        for node, one in self.cluster.nodes.items():
            if one.id not in self._known:
                self._known[one.id] = NodeReadings()
                threading.Thread(target=self._follow, args=(node, one.id), daemon=True).start()

    def _ask(self, aws: Callable[[], AWS]) -> None:
        while not self._closed.wait(2 * timing.current().ask_again):
            try:
                found = lookup.refresh(aws(), self.cluster.name, self.cluster.id)
                self.cluster, self.problem = found or replace(self.cluster, nodes={}, foreign=()), ""
                self._read_new_nodes()
            except CloudDDPError as error:
                self.problem = error.message

    def _follow(self, node: int, instance: str) -> None:
        """Read from a node until its instance has ended."""
        pause = 0.0
        while not self._closed.wait(pause):
            cluster = self.cluster.only([instance])
            if not cluster.nodes:
                return
            try:
                self._read(cluster, node, instance)
            except ProtocolError as error:
                problem = replies.unreadable(node, ReadingsRequest.STEP, error).message
            except Exception as error:
                problem = reason_of(error)
            self._known[instance] = replace(self._known[instance], problem=problem)
            pause = 5 * timing.current().reconnect

    def _read(self, cluster: Cluster, node: int, instance: str) -> None:
        """Read from a node until that breaks; raise why."""
        frames, limits = FrameDecoder(), timing.current()

        def receive(data: bytes) -> None:
            for frame in frames.feed(data):
                self._known[instance] = self._known[instance].received(frame, time.monotonic())

        runner, _ = connect.connect_reachable(cluster, self._spec)
        silence = max(limits.silence, 2 * self._interval + limits.quiet)
        request = ReadingsRequest(self._interval)
        with closing(runner):
            result = client.run_step(
                runner, node, request, timeout=silence, on_stdout=receive, span=False, is_last=True
            )
        raise NodeError(f"node {node}: {replies.failure_text(result)}")
