"""When each node last responded, and when a silent node counts as quiet or lost. Times are by a clock that
stands still while this process does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from cloudddp.config.timing import Timing
from cloudddp.job.follow.events import NodeLost, NodeQuiet, NodeResponding
from cloudddp.job.follow.state import FollowState
from cloudddp.ssh.awake import AwakeClock


class Liveness:
    """When each node last responded, and since when its connection has worked. Any thread may use it."""

    def __init__(self, nodes: Iterable[int], timing: Timing) -> None:
        self._timing = timing
        self.clock: Callable[[], float] = AwakeClock()
        now = self.clock()
        self._last_seen = dict.fromkeys(nodes, now)
        self._steady_since: dict[int, float] = {}
        self._finished: set[int] = set()

    @property
    def last_seen(self) -> dict[int, float]:
        """When each node last responded."""
        return self._last_seen.copy()

    def silence(self, node: int) -> float:
        """Seconds since a node last responded."""
        return self.clock() - self._last_seen[node]

    def received(self, node: int) -> None:
        """Record that a node has sent data."""
        self._last_seen[node] = self.clock()
        self._steady_since.setdefault(node, self._last_seen[node])

    def answered(self, node: int) -> None:
        """Record that a node responds, although its stream has ended or is being opened again."""
        self._last_seen[node] = self.clock()

    def broken(self, node: int) -> None:
        """Record that a node's connection has broken."""
        self._steady_since.pop(node, None)

    def finished(self, node: int) -> None:
        """Record that a node's stream has ended: it sends no more heartbeats."""
        self._finished.add(node)

    @property
    def finished_nodes(self) -> frozenset[int]:
        return frozenset(self._finished.copy())

    def should_give_up(self, node: int, broken_since: float) -> bool:
        """Whether reconnecting to a node has failed for long enough to give up.

        While other nodes respond, the node is at fault, and the limit is short. It is counted from when they
        began to respond, since after an outage of this computer's own network nodes come back one by one.
        While no node responds, this computer is probably offline, and the limit is long.
        """
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


def changes(
    state: FollowState, last_seen: Mapping[int, float], *, now: float, wall: float, timing: Timing
) -> Iterator[NodeQuiet | NodeResponding | NodeLost]:
    """Yield the nodes that became quiet, respond again, or are lost, from when each one last responded. Pure.

    A node that is silent for `timing.overdue` is lost even if its connection looks intact, provided that
    another node responds. `wall` is the time in seconds since the epoch.
    """
    quiet = {node for node in state.followed if now - last_seen.get(node, now) > timing.quiet}
    yield from (NodeQuiet(node) for node in sorted(quiet - state.quiet))
    yield from (NodeResponding(node) for node in sorted(state.quiet - quiet))
    if any(now - at < 2 * timing.heartbeat for at in last_seen.values()):
        for node in sorted(quiet):
            silence = now - last_seen[node]
            if silence > timing.overdue:
                yield NodeLost(node, f"no heartbeat for {timing.overdue:g} s", wall - silence)
