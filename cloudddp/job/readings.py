"""What the nodes of a cluster measure, as it arrives: a thread connects to each node, reads, and begins again
where that breaks; another one asks AWS from time to time which nodes there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
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
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.job import status
from cloudddp.job.status import JobRecord
from cloudddp.local_state import ClusterFolder
from cloudddp.text import reason_of

HISTORY = 60  # readings of each node that are kept
READY, CONNECTING, SILENT = "ready", "connecting", "not responding"


@dataclass(frozen=True, slots=True)
class NodeReadings:
    """What one node has sent: the state of its newest job, and the last readings, the newest last. `problem`:
    why none arrives, '' while they do."""

    job: JobState | None = None
    readings: tuple[Reading, ...] = ()
    problem: str = ""

    def received(self, frame: object) -> NodeReadings:
        """Return it with what the node has sent. Raises ProtocolError for what no agent sends here."""
        if isinstance(frame, JobState):
            return replace(self, job=frame)
        if isinstance(frame, Reading):
            return replace(self, readings=(*self.readings, frame)[-HISTORY:], problem="")
        raise ProtocolError("it has a frame of another step")


@dataclass(frozen=True, slots=True)
class LatestReadings:
    """A cluster as AWS listed it last, and what its nodes have sent, by node rank."""

    cluster: Cluster
    nodes: Mapping[int, NodeReadings]

    @property
    def states(self) -> dict[int, str]:
        """`ready`, or why there are no readings, of each node, also of those that have ended."""
        live = self.cluster.nodes
        return {node: self._state(node) for node in sorted({*range(len(live) + self.cluster.missing), *live})}

    def _state(self, node: int) -> str:
        instance, known = self.cluster.nodes.get(node), self.nodes.get(node, NodeReadings())
        if instance is None or instance.state != "running":
            return "lost" if instance is None else instance.state
        return SILENT if known.problem else READY if known.readings else CONNECTING

    @property
    def ready(self) -> dict[int, NodeReadings]:
        """The nodes that are ready; each has a reading."""
        return {node: self.nodes[node] for node, state in self.states.items() if state == READY}

    @property
    def job(self) -> JobRecord | None:
        """The newest job of the nodes that are ready."""
        states = {node: one.job for node, one in self.ready.items() if one.job is not None}
        newest = max((state.job for state in states.values()), default="")
        same = {node: one for node, one in states.items() if one.job == newest}
        return status.record(newest, same) if same else None

    @property
    def metrics(self) -> dict[str, float | None]:
        """The numbers that rank 0 last reported, or wrote for TensorBoard; None for NaN and infinity."""
        newest = (one.readings[-1].metrics for one in self.ready.values())
        return next(filter(None, newest), {})

    @property
    def line(self) -> str:
        return next(filter(None, (one.readings[-1].line for one in self.ready.values())), "")


class ClusterReadings:
    """What is received from the nodes of a cluster, until this process ends."""

    def __init__(self, cluster: Cluster, spec: ClusterSpec, aws: Callable[[], AWS]) -> None:
        """Raises CloudDDPError if this computer has no key of the cluster."""
        ClusterFolder(cluster.id).login_key()
        self._cluster, self._spec, self._aws = cluster, spec, aws
        self._known: dict[str, NodeReadings] = {}  # by instance; each is written by one thread
        self._read_new_nodes()
        threading.Thread(target=self._ask, daemon=True).start()

    def snapshot(self) -> LatestReadings:
        cluster = self._cluster
        known = {node: self._known.get(one.id, NodeReadings()) for node, one in cluster.nodes.items()}
        return LatestReadings(cluster, known)

    def _read_new_nodes(self) -> None:
        for node, one in self._cluster.nodes.items():
            if one.id not in self._known:
                self._known[one.id] = NodeReadings()
                threading.Thread(target=self._follow, args=(node, one.id), daemon=True).start()

    def _ask(self) -> None:
        while True:
            time.sleep(2 * timing.current().ask_again)
            with suppress(CloudDDPError):  # the next time, perhaps
                found = lookup.refresh(self._aws(), self._cluster.name, self._cluster.id)
                self._cluster = found or replace(self._cluster, nodes={})
                self._read_new_nodes()

    def _follow(self, node: int, instance: str) -> None:
        while (cluster := self._cluster.only([instance])).nodes:
            try:
                self._read(cluster, node, instance)
            except ProtocolError as error:
                problem = replies.unreadable(node, ReadingsRequest.STEP, error).message
            except Exception as error:
                problem = reason_of(error)
            self._known[instance] = replace(self._known[instance], problem=problem)
            time.sleep(5 * timing.current().reconnect)

    def _read(self, cluster: Cluster, node: int, instance: str) -> None:
        """Read from a node until that breaks; raise why."""
        frames, limits = FrameDecoder(), timing.current()

        def receive(data: bytes) -> None:
            for frame in frames.feed(data):
                self._known[instance] = self._known[instance].received(frame)

        runner, _ = connect.connect_reachable(cluster, self._spec)
        request = ReadingsRequest(limits.reading, connect.PROJECT)
        with closing(runner):
            result = client.run_step(runner, node, request, timeout=limits.silence, on_stdout=receive)
        raise NodeError(f"node {node}: {replies.failure_text(result)}")
