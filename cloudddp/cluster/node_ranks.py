"""Node ranks: which instance is which node of a cluster, unchanged when another node ends. Pure.

`up` launches all nodes in one RunInstances call, and EC2 numbers its instances from 0 (AmiLaunchIndex: "Each
instance that is part of the same reservation has a unique ami-launch-index number", EC2 User Guide, "Instance
metadata"). That number never changes and comes with DescribeInstances, so it is the node rank. A tag would
need one CreateTags call per node, since one call gives all its resources the same tags. Only a node that is
launched alone, as a replacement, carries its rank in the tag cloudddp:node-rank; a tag takes precedence.

Not every instance with the cluster's tags is one of its nodes: "Launch more like this" in the AWS console
copies tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudddp.aws.inventory import Instance

_UNKNOWN = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A live instance that has the tags of a cluster and is not one of its nodes."""

    instance: Instance
    reason: str

    @property
    def warning(self) -> str:
        return (
            f"instance {self.instance.id} has the tags of cluster {self.instance.cluster!r} but is not one "
            f"of its nodes: {self.reason}; `down` terminates it"
        )


def assign(members: Sequence[Instance]) -> tuple[dict[int, Instance], tuple[Foreign, ...]]:
    """Return the live nodes of one cluster by node rank, in order, and the other live instances.

    `members` are all instances with the cluster's id that AWS lists, ended ones included. If two claim one
    rank, the one from the cluster's own launch gets it, then the older one.
    """
    launch = _launch(members)
    own = [member for member in members if launch and member.reservation == launch] or members
    # The largest: a smaller one, written to one node by another user, would make other nodes foreign.
    count = max((member.tags.nodes for member in own if member.tags.nodes is not None), default=None)
    nodes: dict[int, Instance] = {}
    foreign: list[Foreign] = []
    for instance in sorted(
        (member for member in members if member.live), key=lambda i: _precedence(i, launch)
    ):
        rank = _rank(instance, launch)
        if rank is None:
            reason = "it was launched separately"
        elif count is not None and rank >= count:
            reason = f"its rank is {rank}, and the cluster has {count} node{'s' * (count != 1)}"
        elif rank in nodes:
            reason = f"node {rank} is {nodes[rank].id}"
        else:
            nodes[rank] = instance
            continue
        foreign.append(Foreign(instance, reason))
    return dict(sorted(nodes.items())), tuple(foreign)


def _rank(instance: Instance, launch: str) -> int | None:
    if instance.tags.node_rank is not None:
        return instance.tags.node_rank
    return instance.launch_index if instance.reservation == launch else None


def _precedence(instance: Instance, launch: str) -> tuple[bool, bool, datetime, str]:
    retagged = instance.tags.node_rank not in (None, instance.launch_index)
    return instance.reservation != launch, retagged, instance.launched or _UNKNOWN, instance.id


def _launch(members: Sequence[Instance]) -> str:
    """Return the reservation that `up` launched, of all those whose instances have no rank tag; '' if there
    is none.

    Its idempotency token begins with the cluster's id. A later launch may have such a token as well (tokens
    can be read), so the oldest with one counts. If none has one, the largest reservation counts, then the
    oldest.
    """
    reservations: defaultdict[str, list[Instance]] = defaultdict(list)
    for member in members:
        if member.tags.node_rank is None:
            reservations[member.reservation].append(member)

    def preference(name: str) -> tuple[bool, int, datetime, str]:
        launched = reservations[name]
        ours = any(i.client_token.startswith(f"{i.cluster_id}-") for i in launched)
        size = 0 if ours else -len(launched)
        return not ours, size, min(i.launched or _UNKNOWN for i in launched), name

    return min(reservations, key=preference, default="")
