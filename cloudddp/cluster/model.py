"""A cluster as AWS shows it now: which instance is which node, and values computed from that. Pure.

A node keeps its rank when another one ends. `up` launches all nodes in one RunInstances call, and EC2 numbers
its instances from 0 (AmiLaunchIndex: "Each instance that is part of the same reservation has a unique
ami-launch-index number", EC2 User Guide, "Instance metadata"). That number never changes and comes with
DescribeInstances, so it is the node rank. A tag would need one CreateTags call per node, since one call gives
all its resources the same tags. Only a node that is launched alone, as a replacement, carries its rank in the
tag cloudddp:node-rank; a tag takes precedence.

Not every instance with the cluster's tags is one of its nodes: "Launch more like this" in the AWS console
copies tags.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from cloudddp.aws.inventory import Instance
from cloudddp.cluster import prices
from cloudddp.cluster.prices import Cost
from cloudddp.errors import CloudDDPError, Message, NodeError, UsageError, q
from cloudddp.formats import duration, plural
from cloudddp.tags import most_common

_UNKNOWN = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A live instance that has the tags of a cluster and is not one of its nodes."""

    instance: Instance
    reason: str


def assign_ranks(
    members: Sequence[Instance], cluster_id: str
) -> tuple[dict[int, Instance], tuple[Foreign, ...]]:
    """Return the live nodes of one cluster by node rank, in order, and the other live instances.

    `members` are all instances with the cluster's id that AWS lists, ended ones included. If two claim one
    rank, the one from the cluster's own launch gets it, then the older one.
    """
    launch = _launch(members)
    own = [member for member in members if launch and member.reservation == launch] or members
    # The largest: a smaller one, written to one node by another user, would make other nodes foreign.
    count = max((member.tags.nodes or 0 for member in own), default=0)
    nodes: dict[int, Instance] = {}
    foreign: list[Foreign] = []

    def precedence(one: Instance) -> tuple[bool, bool, datetime, str]:
        retagged = one.tags.node_rank not in (None, one.launch_index)
        return one.reservation != launch, retagged, one.launched or _UNKNOWN, one.id

    for instance in sorted((member for member in members if member.live), key=precedence):
        rank = instance.tags.node_rank
        if rank is None and instance.reservation == launch:
            rank = instance.launch_index
        if not cluster_id:
            reason = "it has no cluster id"
        elif rank is None:
            reason = "it was launched separately"
        elif count and rank >= count:
            reason = f"its rank is {rank}, and the cluster has {plural(count, 'node')}"
        elif rank in nodes:
            reason = f"node {rank} is {nodes[rank].id}"
        else:
            nodes[rank] = instance
            continue
        foreign.append(Foreign(instance, reason))
    return dict(sorted(nodes.items())), tuple(foreign)


def _launch(members: Sequence[Instance]) -> str:
    """Return the reservation that `up` launched: the oldest one whose idempotency token begins with the
    cluster's id, else the oldest one, of instances without a rank tag; '' if there is none."""

    def preference(one: Instance) -> tuple[bool, datetime, str]:
        ours = one.client_token.startswith(f"{one.tags.cluster_id}-")
        return not ours, one.launched or _UNKNOWN, one.reservation

    unranked = (member for member in members if member.tags.node_rank is None)
    first = min(unranked, key=preference, default=None)
    return first.reservation if first else ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The live nodes of a cluster by node rank, in order; its other live instances; and those that have
    ended.

    `id` is '' for instances whose tag holds no valid cluster id: `down` terminates them, and they are no
    nodes.
    """

    name: str
    id: str
    region: str
    nodes: Mapping[int, Instance]
    foreign: tuple[Foreign, ...] = ()
    gone: tuple[Instance, ...] = ()
    seen: float = field(default_factory=time.time, compare=False)  # when AWS was asked; since the epoch

    @classmethod
    def of(cls, members: Sequence[Instance], *, name: str, cluster_id: str, region: str) -> Cluster:
        """Return the cluster of these instances, which share a name and a cluster id."""
        gone = tuple(member for member in members if not member.live)
        return cls(name, cluster_id, region, *assign_ranks(members, cluster_id), gone)

    def only(self, ids: Collection[str]) -> Cluster:
        """Return the cluster as if it consisted of these instances."""
        nodes = {rank: node for rank, node in self.nodes.items() if node.id in ids}
        return replace(self, nodes=nodes, foreign=(), gone=tuple(one for one in self.gone if one.id in ids))

    @property
    def live(self) -> tuple[Instance, ...]:
        """Everything that may be billed: its nodes, and the foreign instances with its tags."""
        return (*self.nodes.values(), *(one.instance for one in self.foreign))

    @property
    def created(self) -> datetime | None:
        return most_common(i.tags.created or i.launched for i in self._all)

    @property
    def expires(self) -> datetime | None:
        return most_common(i.tags.expires for i in self._all)

    @property
    def ended(self) -> datetime | None:
        """When the last of its nodes ended, if AWS gives the time."""
        return max((at for i in self.gone if (at := i.ended)), default=None)

    @property
    def overdue(self) -> float:
        """For how many seconds running nodes have outlived the deadline; 0 while they may be powering off."""
        if self.expires is None or not self._running:
            return 0.0
        late = (datetime.now(UTC) - self.expires).total_seconds()
        return late if late > prices.POWER_OFF.total_seconds() else 0.0

    @property
    def time_left(self) -> str:
        """How long it may still run, for people."""
        if self.expires is None:
            return "no deadline"
        if late := self.overdue:
            return f"overdue {duration(late)}"
        return duration((self.expires - datetime.now(UTC)).total_seconds())

    @property
    def _running(self) -> list[str]:
        return [instance.id for instance in self.live if instance.state == "running"]

    @property
    def type(self) -> str:
        return self._all[0].type

    @property
    def owner(self) -> str:
        return ", ".join(sorted({i.tags.owner for i in (*self.nodes.values(),) or self._all} - {""}))

    @property
    def _all(self) -> tuple[Instance, ...]:
        return (*self.live, *self.gone)

    @property
    def missing(self) -> int:
        """How many of the nodes that it was created with no longer exist."""
        return max((most_common(i.tags.nodes for i in self._all) or 0) - len(self.nodes), 0) if self.id else 0

    @property
    def require_efa(self) -> bool:
        """Whether it was created with require_efa, so that jobs must not use TCP between nodes."""
        return bool(most_common(i.tags.require_efa for i in self.nodes.values()))

    @property
    def idle_minutes(self) -> float:
        """Minutes without a job and an SSH connection after which each node ends; 0: it does not."""
        return most_common(i.tags.idle_minutes for i in self._all) or 0.0

    @property
    def efa(self) -> int:
        """EFA devices that each node was launched with; 0 if that is unknown."""
        return most_common(i.tags.efa for i in self._all) or 0

    @property
    def node_hour(self) -> float | None:
        """The price of one node in USD per hour, or None if it is unknown."""
        return most_common(i.tags.price for i in self._all)

    @property
    def gpus(self) -> int:
        """GPUs that each node has by its type; 0 if that is unknown."""
        return most_common(i.tags.gpus for i in self._all) or 0

    @property
    def hour(self) -> float | None:
        """The price of everything that is live, in USD per hour, or None if it is unknown."""
        return None if self.node_hour is None else self.node_hour * len(self.live)

    @property
    def spot(self) -> bool:
        """Whether a live node is a spot instance, which costs at most its on-demand price."""
        return any(instance.spot for instance in self.live)

    @property
    def warnings(self) -> list[str]:
        """Sentences about a deadline that was missed, tags that cannot be used and foreign instances."""
        found = [f"instance {one.id}: {text}" for one in self.live for text in one.tags.unreadable]
        for rank, node in self.nodes.items():
            if self.expires is not None and node.tags.expires not in (None, self.expires):
                ends = f"node {rank} ({node.id}) ends at {node.tags.expires:%Y-%m-%d %H:%M:%S} UTC"
                found.append(f"{ends}, and the cluster at {self.expires:%Y-%m-%d %H:%M:%S} UTC")
        if late := self.overdue:
            one = len(self._running) == 1
            found.append(
                f"{', '.join(self._running)} should have terminated {late / 60:.0f} min ago and "
                f"{'is' if one else 'are'} still running and billed, perhaps because of a hung kernel; "
                f"`down` terminates {'it' if one else 'them'}"
            )
        return found + [
            f"instance {one.instance.id} has the tags of cluster {self.name!r} but is not one of its nodes: "
            f"{one.reason}; `down` terminates it"
            for one in self.foreign
            if self.id
        ]

    def cost(self, now: datetime | None = None) -> Cost:
        """Return the cost until now, ended instances included."""
        return prices.cost_so_far(self._all, now or datetime.now(UTC))

    def require_running(self, rank: int) -> None:
        """Raise NodeError if EC2 says that this node cannot answer now: stopped, or only just launched."""
        node = self.nodes[rank]
        launched = node.state == "pending" and not node.public_ip
        if node.state not in ("stopping", "stopped") and not launched:
            return
        raise NodeError(
            f"node {rank} ({node.id}) is {node.state}{f' ({node.reason})' if node.reason else ''}",
            hint="repeat the command when it runs" if launched else self.stopped_hint(rank),
        )

    def stopped_hint(self, rank: int) -> str:
        """Return what to type for a node that was stopped."""
        start = Message(
            f"`aws ec2 start-instances --region {q(self.region)} --instance-ids {q(self.nodes[rank].id)}` "
            "starts it again"
        )
        if len(self.nodes) == 1:
            return start
        return Message(
            f"{start}; `cloudddp resume --replace {q(rank)}` terminates it, with its disk, and launches "
            "another"
        )

    def require_replaceable(self, ranks: Collection[int]) -> None:
        """Raise UsageError for a node that the cluster does not have, and unless another one stays."""
        count = len(self.nodes) + self.missing
        if unknown := [rank for rank in sorted(ranks) if not 0 <= rank < count]:
            raise UsageError(
                f"--replace {unknown[0]}: the cluster has no such node",
                hint=f"its nodes are 0 to {count - 1}",
            )
        if ranks and not self.nodes.keys() - ranks:
            raise UsageError(
                "--replace names every node that is left, and a replacement needs one that stays",
                hint="`cloudddp down` and `cloudddp up` replace them all",
            )

    def require_node(self, rank: int) -> Instance:
        """Return the node of that rank. Raises CloudDDPError if there is none, or it has ended."""
        if rank in self.nodes:
            return self.nodes[rank]
        listed = ", ".join(map(str, self.nodes)) or "none"
        ended = 0 <= rank < len(self.nodes) + self.missing
        raise CloudDDPError(
            f"node {rank} has ended" if ended else f"there is no node {rank}", hint=f"live nodes: {listed}"
        )
