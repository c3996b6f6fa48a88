"""Moves the deadline of a cluster: its tags, the record on this computer, and the timer of each node.

At every moment the tag of a node says the latest time at which it may end. So tags are raised before the
timers are moved, and lowered after the nodes have confirmed it; a node that cannot be reached keeps both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import DeadlineRequest
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster.lookup import REMAINS
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.errors import AWSError, CloudDDPError, Command, UsageError
from cloudddp.local_state import EXTENDED, EXTENDING, ClusterFolder
from cloudddp.ssh.fleet import Outcome
from cloudddp.tags import TAG_EXPIRES, iso

LONGEST = timedelta(hours=336)  # from the creation; the limit of max_hours in config/spec.py
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a new deadline depends on. `present`: when the first node ends; `latest`: by a capacity block."""

    now: datetime
    present: datetime | None
    created: datetime | None
    so_far: float | None  # USD
    hour: float | None  # USD
    max_cost: float | None = None  # USD, of the configuration
    latest: datetime | None = None

    def cost(self, until: datetime) -> float | None:
        """Return what the cluster will have cost by then, in USD; None if that is unknown."""
        if self.so_far is None or self.hour is None:
            return None
        return self.so_far + self.hour * max((until - self.now).total_seconds(), 0.0) / 3600


def new_deadline(
    limits: Limits, *, hours: float | None = None, until: datetime | None = None, usd: float | None = None
) -> datetime:
    """Return the new deadline, in whole seconds: `hours` more than at present, `until`, or when the whole
    cluster will have cost `usd`. Raises UsageError for one in the past or beyond a limit, CloudDDPError where
    it cannot be computed. Pure."""
    if hours is not None:
        if limits.present is None:
            raise CloudDDPError("the present deadline is unknown: the nodes have no tag", hint="give --until")
        until = limits.present + timedelta(hours=hours)
    if usd is not None:
        if limits.so_far is None or not limits.hour:
            raise CloudDDPError("the price of this cluster is unknown", hint="give --hours or --until")
        until = limits.now + timedelta(hours=min((usd - limits.so_far) / limits.hour, 1000.0))
    found = (until or limits.now).astimezone(UTC).replace(microsecond=0)
    if found < limits.now + timedelta(seconds=timing.current().minute):
        cost = f"; the cluster has cost ${limits.so_far:.2f} already" if usd is not None else ""
        raise UsageError(
            f"the new deadline, {_text(found)}, is in the past or less than a minute ahead{cost}",
            hint=(Command("down"), " ends the cluster now"),
        )
    ends = {limits.latest: "before its capacity block does"}
    if limits.created is not None:
        ends[limits.created + LONGEST] = f"{LONGEST.total_seconds() / 3600:.0f} hours after it was created"
    for last, why in ends.items():
        if last is not None and found > last:
            raise UsageError(
                f"{_text(found)} is too late: the cluster has to end {why}",
                hint=("at the latest: ", Command("extend", "--until", iso(last))),
            )
    most, cost_then = limits.max_cost, limits.cost(found)
    if most is None or usd is not None or (limits.present is not None and found <= limits.present):
        return found
    if cost_then is None or cost_then > 1.01 * most:  # prices in tags are rounded
        shown = "an unknown amount" if cost_then is None else f"up to ${cost_then:.2f}"
        raise UsageError(
            f"by {_text(found)} the cluster would cost {shown}, and cluster.max_cost is {most:g}",
            hint="raise it in the configuration, or give --max-cost USD here instead",
        )
    return found


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def timers(runner: Runner, request: DeadlineRequest | None = None) -> Outcome[datetime | None]:
    """Return when the timers of the nodes end them, after `request` has moved them; None where one is not
    armed. No error of a node stops the others."""
    asked = dict.fromkeys(runner.nodes, request or DeadlineRequest())
    done = client.run_on_all(runner, asked, fatal=lambda _: False)
    ends = {node: one.ends for node, one in sorted(done.values.items())}
    moments = {node: None if one is None else datetime.fromtimestamp(one, UTC) for node, one in ends.items()}
    return Outcome(moments, done.errors)


def move(aws: AWS, cluster: Cluster, runner: Runner, new: datetime) -> Outcome[datetime | None]:
    """Move the deadline of the nodes that are connected; return what their timers say then.

    Raises CloudDDPError where AWS refuses the tags; nothing is changed if it refuses the first.
    """
    folder = ClusterFolder(cluster.id)
    others = inventory.resources(aws, inventory.with_id(cluster.id), REMAINS)
    ids = {node: cluster.nodes[node].id for node in runner.nodes if node in cluster.nodes}
    tags = {one.id: one.tags.expires for one in cluster.nodes.values()}
    tags |= {one.id: one.tags.expires for one in others}
    changing = [*ids.values(), *(one.id for one in others)]
    folder.journal(EXTENDING, expires=iso(new))
    try:
        tags |= _tag(aws, [one for one in changing if (tags[one] or _NEVER) < new], new)
    except AWSError as error:
        if not error.transient:  # refused: nothing was changed
            folder.journal(EXTENDED, refused=error.code)
        raise
    folder.record_deadline(_latest(tags))
    left = max((new - datetime.now(UTC)).total_seconds(), 0.0)
    found = timers(runner, DeadlineRequest(new.timestamp(), left))
    confirmed = {ids[node]: ends or new for node, ends in found.values.items()}
    if len(confirmed) == len(cluster.nodes) and {*confirmed.values()} == {new}:
        confirmed |= {one.id: new for one in others}
    try:
        for moment in {*confirmed.values()}:
            wrong = [one for one, ends in confirmed.items() if ends == moment and tags[one] != moment]
            tags |= _tag(aws, wrong, moment)
    except CloudDDPError as error:
        raise CloudDDPError(
            f"the timers of the nodes were moved to {_text(new)}, and their tags may still say another time: "
            f"{error.message}",
            hint=("repeat ", Command("extend", "--until", iso(new))),
        ) from None
    folder.record_deadline(_latest(tags))
    if not found.errors and {*found.values.values()} == {new}:  # else later commands warn of it
        folder.journal(EXTENDED, expires=iso(new))
    return found


def _latest(tags: Mapping[str, datetime | None]) -> datetime:
    return max(one for one in tags.values() if one is not None)


def _tag(aws: AWS, ids: list[str], moment: datetime) -> dict[str, datetime]:
    """Write the tag of these resources; return what they have now."""
    if ids:
        tags = [{"Key": TAG_EXPIRES, "Value": iso(moment)}]
        aws.call("ec2", "create_tags", Resources=ids, Tags=tags)
    return dict.fromkeys(ids, moment)
