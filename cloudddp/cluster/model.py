"""A cluster as AWS shows it now, and values computed from that. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cloudddp.aws.inventory import Instance
from cloudddp.cluster import cost, node_ranks
from cloudddp.cluster.cost import Cost
from cloudddp.cluster.node_ranks import Foreign
from cloudddp.errors import CloudDDPError, Command, NodeError, Part, ToolCommand
from cloudddp.tags import most_common


@dataclass(frozen=True, slots=True)
class Cluster:
    """The live nodes of a cluster by node rank, in order; its other live instances; and those that have
    ended.

    `id` is '' for instances whose tag holds no valid cluster id: they are listed, and `down` terminates them,
    but they are nodes of no cluster.
    """

    name: str
    id: str
    region: str
    nodes: Mapping[int, Instance]
    foreign: tuple[Foreign, ...] = ()
    gone: tuple[Instance, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Instance], *, name: str, cluster_id: str, region: str) -> Cluster:
        """Return the cluster of these instances, which share a name and a cluster id."""
        gone = tuple(member for member in members if not member.live)
        if not cluster_id:
            foreign = tuple(Foreign(m, "it has no cluster id") for m in members if m.live)
            return cls(name, cluster_id, region, {}, foreign, gone)
        nodes, foreign = node_ranks.assign(members)
        return cls(name, cluster_id, region, nodes, foreign, gone)

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
    def past_deadline(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(UTC)

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
        """Sentences about tags that cannot be used and about foreign instances."""
        unreadable = [warning for instance in self.live for warning in instance.warnings]
        return unreadable + [one.warning for one in self.foreign if self.id]

    def cost(self, now: datetime | None = None) -> Cost:
        """Return the cost until now, ended instances included."""
        return cost.so_far(self._all, now or datetime.now(UTC))

    def require_running(self, rank: int) -> None:
        """Raise NodeError if EC2 says that this node cannot answer now: it was stopped, or has only been
        launched."""
        node = self.nodes[rank]
        launched = node.state == "pending" and not node.public_ip
        if node.state not in ("stopping", "stopped") and not launched:
            return
        raise NodeError(
            f"node {rank} ({node.id}) is {node.state}{f' ({node.reason})' if node.reason else ''}",
            hint="repeat the command when it runs" if launched else self.stopped_hint(rank),
        )

    def stopped_hint(self, rank: int) -> tuple[Part, ...]:
        """Return what to type for a node that was stopped."""
        words = ("start-instances", "--region", self.region, "--instance-ids", self.nodes[rank].id)
        start = (ToolCommand("aws", "ec2", *words), " starts it again")
        if len(self.nodes) == 1:
            return start
        replace_it = Command("resume", "--replace", str(rank))
        return (*start, "; ", replace_it, " terminates it, with its disk, and launches another")

    def require_node(self, rank: int) -> Instance:
        """Return the node of that rank. Raises CloudDDPError if there is none, or it has ended."""
        if rank in self.nodes:
            return self.nodes[rank]
        listed = ", ".join(map(str, self.nodes)) or "none"
        ended = 0 <= rank < len(self.nodes) + self.missing
        raise CloudDDPError(
            f"node {rank} has ended" if ended else f"there is no node {rank}", hint=f"live nodes: {listed}"
        )
