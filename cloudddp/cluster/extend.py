"""Moves the deadline of a cluster: the tag and the timer of each node, and the record on this computer.

At every moment the tag of a node says the latest time at which it may end. So it is written before a timer
is moved to a later time, and after the node has confirmed an earlier one. The timers decide which it is: AWS
may list an old tag for some seconds. A node that cannot be reached keeps both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.aws.client import AWS
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError, UsageError, q
from cloudddp.formats import dollars, format_time
from cloudddp.local_state import MOVED, MOVING, ClusterFolder
from cloudddp.ssh.fleet import Outcome
from cloudddp.tags import TAG_EXPIRES, iso, parse_time
from cloudddp.text import node_list

ROUNDING = 1.01  # of the prices in tags
LONGEST = timedelta(hours=336)  # from the creation; the limit of max_hours in config/spec.py


@dataclass(frozen=True, slots=True)
class Limits:
    """What a new deadline depends on. `current`: when the first node ends; `last`: when all have to."""

    now: datetime
    current: datetime
    last: datetime
    so_far: float | None  # USD
    hour: float | None  # USD
    max_cost: float | None = None  # USD, of the configuration

    def cost(self, until: datetime) -> float | None:
        """Return what the cluster will have cost by then, in USD; None if that is unknown."""
        if self.so_far is None or self.hour is None:
            return None
        return self.so_far + self.hour * max((until - self.now).total_seconds(), 0.0) / 3600


def new_deadline(
    limits: Limits, *, hours: float | None = None, until: datetime | None = None, usd: float | None = None
) -> datetime:
    """Return the new deadline, in whole seconds: `hours` after the current one, `until`, or when the whole
    cluster will have cost `usd`. Raises UsageError for one in the past or beyond a limit, CloudDDPError where
    it cannot be computed. Pure."""
    if usd is not None:
        if limits.so_far is None or not limits.hour:
            raise CloudDDPError("the price of this cluster is unknown", hint="give --hours or --until")
        until = limits.now + timedelta(hours=min((usd - limits.so_far) / limits.hour, 1000.0))
    found = (until or limits.current + timedelta(hours=hours or 0.0)).replace(microsecond=0)
    if found < limits.now + timedelta(seconds=timing.current().minute):
        raise UsageError(
            f"the new deadline, {format_time(found)}, is in the past or less than a minute ahead (cost so "
            f"far: {dollars(limits.so_far)})",
            hint="`cloudddp down` ends the cluster now",
        )
    if found > limits.last:
        raise UsageError(
            f"{format_time(found)} is too late: the cluster has to end {LONGEST.total_seconds() / 3600:.0f} "
            "hours after it was created, and before its capacity block does",
            hint=f"at the latest: `cloudddp extend --until {q(iso(limits.last))}`",
        )
    most, cost = limits.max_cost, limits.cost(found)
    if most is None or usd is not None or found <= limits.current:
        return found
    if cost is None or cost > ROUNDING * most:
        raise UsageError(
            f"the cost until {format_time(found)} would be {dollars(cost)}, and cluster.max_cost is {most:g}",
            hint="raise it in the configuration, or give --max-cost USD here instead",
        )
    return found


def timers(runner: Runner, new: datetime | None = None) -> Outcome[datetime | None]:
    """Return when each node's timer ends it, after it was moved to `new`; None where it is not armed."""
    words: tuple[str, ...] = ()
    if new is not None:
        words = f"{new.timestamp():.0f}", f"{max((new - datetime.now(UTC)).total_seconds(), 0.0):.0f}"

    def run(node: int) -> datetime | None:
        problem = "cannot move its deadline"
        shown = client.run_script(runner, node, "move-deadline.sh", *words, problem=problem)
        return parse_time(shown.decode(errors="replace").strip())

    return runner.each(run, fatal=lambda _: False)


def move(
    aws: AWS, cluster: Cluster, runner: Runner, new: datetime, before: Mapping[int, datetime | None]
) -> Outcome[datetime | None]:
    """Move the deadline of the nodes that are connected; return what their timers say then. One command at a
    time.

    Raises CloudDDPError if timers are not as they were `before`, when the user was asked, and AWSError if AWS
    refuses the tags before the nodes are asked: nothing was changed.
    """
    current = timers(runner).values
    if changed := [node for node in before if current.get(node, before[node]) != before[node]]:
        raise CloudDDPError(
            f"another command has moved the deadline of {node_list(changed)} meanwhile; nothing was changed",
            hint="`cloudddp status` shows it; then repeat the command",
        )
    folder = ClusterFolder(cluster.id)
    known = {node: current.get(node, cluster.nodes[node].tags.expires) for node in runner.nodes}
    later = [node for node, ends in known.items() if ends is None or ends < new]
    _tag(aws, cluster, later, new)
    folder.update(expires=iso(new), extended=MOVING)
    found = timers(runner, new)
    confirmed = [node for node, ends in found.values.items() if ends == new]
    _tag(aws, cluster, [node for node in confirmed if node not in later], new)
    if len(confirmed) == len(cluster.nodes):
        folder.update(extended=MOVED)
    return found


def _tag(aws: AWS, cluster: Cluster, nodes: Iterable[int], expires: datetime) -> None:
    if ids := [cluster.nodes[node].id for node in nodes]:
        tags = [{"Key": TAG_EXPIRES, "Value": iso(expires)}]
        aws.call("ec2", "create_tags", Resources=ids, Tags=tags)
