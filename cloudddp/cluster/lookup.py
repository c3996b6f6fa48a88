"""Finds clusters by tag: whose they are, the caller's cluster of a name, what is left of others, and what AWS
reports of lost nodes. Only AWS is queried for what exists; local state is not used.

A cluster is the caller's if it is in this computer's journal, or if its owner tag is the caller's STS
identity. The journal is checked first, so that a cluster created here costs no further AWS call. The tag is
not a proof (everyone who may tag can change it): this prevents colleagues from terminating each other's work
by mistake; access control is IAM's task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from cloudddp import local_state
from cloudddp.aws import caller, inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.prices import PUBLIC_IPV4_HOUR
from cloudddp.errors import CloudDDPError
from cloudddp.formats import format_time
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.tags import Tags


class Ownership:
    """Decides what belongs to the caller; with `anyone`, everything does."""

    def __init__(self, aws: AWS, *, anyone: bool = False) -> None:
        self._aws = aws
        self._anyone = anyone
        self._known: dict[str, tuple[ClusterRecord | None, frozenset[str]]] = {}
        self.problem = ""  # why the caller's identity could not be determined

    def mine(self, resource: Instance | Resource) -> bool:
        """Return whether the caller's commands may act on it. If the identity is unknown, they may not."""
        if self._anyone or self.created_here(resource):
            return True
        if resource.id in self._instances_created_here:  # regardless of its current tags
            return True
        return bool(self.identity) and resource.tags.owner == self.identity

    def owns(self, cluster: Cluster) -> bool:
        """Return whether all nodes of a cluster are the caller's; of one without nodes, all its instances."""
        return all(self.mine(instance) for instance in cluster.nodes.values() or cluster.live)

    @property
    def caller(self) -> str:
        """The caller's identity, for an error message."""
        if self.identity:
            return f"you are {self.identity}"
        return f"your AWS identity is unknown: {self.problem}"

    def created_here(self, resource: Instance | Resource) -> bool:
        """Return whether this computer's journal has the resource's cluster, with this name and region. No
        call. A tag can be copied, so an instance must be one that `up` created, if the journal lists them."""
        record, instances = self._journal(resource.tags.cluster_id)
        if record is None or (record.name, record.region) != (resource.tags.cluster, self._aws.region):
            return False
        return isinstance(resource, Resource) or not instances or resource.id in instances

    def _journal(self, cluster_id: str) -> tuple[ClusterRecord | None, frozenset[str]]:
        if cluster_id not in self._known:
            folder = ClusterFolder(cluster_id) if cluster_id else None
            record, instances = folder.record() if folder else None, frozenset[str]()
            if folder and record:
                with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
                    instances = folder.created_instances()
            self._known[cluster_id] = record, instances
        return self._known[cluster_id]

    @cached_property
    def identity(self) -> str:
        """The caller, as `up` writes it into the owner tag; '' if it is unknown."""
        try:
            found = caller.owner(self._aws)
        except CloudDDPError as error:
            self.problem = error.message
            return ""
        return "" if found == caller.UNKNOWN_OWNER else found

    @cached_property
    def _instances_created_here(self) -> frozenset[str]:
        return local_state.created_instances()


def find(aws: AWS, name: str | None = None) -> list[Cluster]:
    """Return the clusters of that name (or all) that have instances, live ones first. One AWS call."""
    groups: dict[tuple[str, str], list[Instance]] = {}
    for instance in inventory.instances(aws, inventory.named(name)):
        groups.setdefault((instance.tags.cluster, instance.tags.cluster_id), []).append(instance)
    clusters = [
        Cluster.of(members, name=cluster_name, cluster_id=cluster_id, region=aws.region)
        for (cluster_name, cluster_id), members in groups.items()
    ]
    return sorted(clusters, key=lambda c: (c.name, not c.live, c.id))


_REMAINS = ("Elastic IP", "security group", "key pair")


@dataclass(frozen=True, slots=True)
class OrphanedResources:
    """What is left of a cluster without nodes. `being_created`: an `up` here has yet to start them."""

    name: str
    id: str
    region: str
    resources: tuple[Resource, ...]
    being_created: bool

    @property
    def hour(self) -> float:
        """USD per hour."""
        return PUBLIC_IPV4_HOUR * sum(resource.kind == "Elastic IP" for resource in self.resources)

    @property
    def tags(self) -> Tags:
        return self.resources[0].tags


def remains(aws: AWS, live: Iterable[Cluster], name: str | None = None) -> list[OrphanedResources]:
    """Return what is left of clusters of that name (or all), other than the live ones. Three AWS calls."""
    groups: dict[tuple[str, str], list[Resource]] = {}
    for resource in inventory.resources(aws, inventory.named(name), _REMAINS):
        groups.setdefault((resource.tags.cluster, resource.tags.cluster_id), []).append(resource)
    with_nodes = {(cluster.name, cluster.id) for cluster in live}
    return [
        OrphanedResources(
            cluster, id_, aws.region, tuple(members), bool(id_) and ClusterFolder(id_).is_being_created()
        )
        for (cluster, id_), members in sorted(groups.items())
        if (cluster, id_) not in with_nodes
    ]


def refresh(aws: AWS, name: str, cluster_id: str) -> Cluster | None:
    """Return one cluster as AWS lists it now, or None if AWS lists none of its instances. One AWS call."""
    members = inventory.instances(aws, inventory.with_id(cluster_id))
    return Cluster.of(members, name=name, cluster_id=cluster_id, region=aws.region) if members else None


@dataclass(frozen=True, slots=True)
class EndedNode:
    """What AWS reports about a node whose instance has ended. `gone`: it cannot answer, while one that is
    shutting down may. `stopped`: it has not ended, and its disk is kept."""

    report: str
    gone: bool = True
    stopped: bool = False


def ended_nodes(
    aws: AWS, cluster: Cluster, ranks: Iterable[int], *, stopped: bool = False
) -> dict[int, EndedNode]:
    """Return what AWS reports about those nodes whose instances have ended, by node rank; with `stopped` also
    about those that were stopped. One AWS call."""
    now = {instance.id: instance for instance in inventory.instances(aws, inventory.with_id(cluster.id))}
    found = {rank: ended_node(cluster, rank, now) for rank in ranks}
    return {rank: one for rank, one in found.items() if one is not None and (stopped or not one.stopped)}


def ended_node(cluster: Cluster, rank: int, now: Mapping[str, Instance]) -> EndedNode | None:
    """Return what it means for a node that AWS lists the instances `now`, by id; None if it has not ended."""
    before = cluster.nodes.get(rank)
    if before is None:
        return EndedNode("that its instance has ended")
    after = now.get(before.id)
    if after is None:
        return EndedNode(f"that {before.id} no longer exists")
    if after.state in ("stopping", "stopped"):
        why = f" ({after.reason})" if after.reason else ""
        return EndedNode(f"that {after.id} is {after.state}{why}", stopped=True)
    if after.live:
        return None
    return EndedNode(
        f"that {after.id} is {after.state}: {_ended_by(after, cluster)}", gone=after.state == "terminated"
    )


def status_problems(aws: AWS, cluster: Cluster, ranks: Iterable[int]) -> dict[int, str]:
    """Return the failed status checks and the scheduled events of nodes that run and do not answer, in words,
    by node rank. One AWS call; none without nodes."""
    ids = {cluster.nodes[rank].id: rank for rank in ranks if rank in cluster.nodes}
    found = inventory.status_problems(aws, ids) if ids else {}
    return {ids[one]: text for one, text in found.items()}


def _ended_by(instance: Instance, cluster: Cluster) -> str:
    """Return who ended an instance, in words, with AWS's reason."""
    reason = instance.reason or "no reason given"
    if instance.reason_code == inventory.USER_SHUTDOWN:
        return f"somebody terminated it, with a `down` or another call ({reason})"
    if instance.reason_code == inventory.OWN_SHUTDOWN:
        ended, expires = instance.ended or datetime.now(UTC), instance.tags.expires or cluster.expires
        if expires is not None and ended >= expires:
            return f"the cluster's deadline, {format_time(expires)}, has ended it ({reason})"
        return f"it has powered off by itself ({reason})"
    if instance.reason_code == inventory.SPOT_SHUTDOWN:
        return f"AWS has interrupted this spot instance ({reason})"
    return reason


class NoCluster(CloudDDPError):
    """No cluster of that name has nodes. `last`: the newest one whose instances AWS still lists, or None.
    `is_explained`: the message says what has ended it."""

    def __init__(
        self, message: str, *, hint: str = "", last: Cluster | None = None, is_explained: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.last, self.is_explained = last, is_explained


def last_ended(known: Iterable[Cluster]) -> Cluster | None:
    """Return the newest cluster without live instances, for about an hour after its end: AWS then lists it no
    more. It need not have a time of its end, which AWS does not give for instances that powered off."""
    gone = [cluster for cluster in known if not cluster.live]
    earliest = datetime.min.replace(tzinfo=UTC)
    return max(gone, key=lambda cluster: (cluster.created or earliest, cluster.id), default=None)


def get(aws: AWS, name: str, ownership: Ownership | None = None) -> Cluster:
    """Return the caller's live cluster of that name. Raises NoCluster; CloudDDPError for several."""
    ownership = ownership or Ownership(aws)
    known = find(aws, name)
    usable = [cluster for cluster in known if cluster.nodes]
    own = [cluster for cluster in usable if ownership.owns(cluster)]
    if not usable:
        now = datetime.now(UTC)
        expired = max((one.expires for one in known if one.expires and one.expires <= now), default=None)
        text = f"there is no cluster {name!r} in {aws.region}"
        if expired is not None:
            text += (
                f"; the last cluster of that name reached its deadline at {expired:%Y-%m-%d %H:%M} UTC, and "
                "results that were not pulled from it are lost"
            )
        raise NoCluster(
            text,
            hint="create one: `cloudddp up`; `cloudddp ls` lists all",
            last=last_ended(known),
            is_explained=expired is not None,
        )
    if not own:
        listed = ", ".join(f"{c.id or 'without an id'} of {c.owner or 'an unknown owner'}" for c in usable)
        raise CloudDDPError(
            f"cluster {name!r} in {aws.region} is not yours: {listed}; {ownership.caller}",
            hint="add --anyone to act on it anyway, or choose another name with -c",
        )
    if len(own) > 1:
        raise ambiguous(name, aws.region, own)
    return own[0]


def ambiguous(name: str, region: str, found: Iterable[Cluster]) -> CloudDDPError:
    """Return the error for several clusters of one name, all of them the caller's."""
    ids = [cluster.id for cluster in found]
    return CloudDDPError(
        f"there are {len(ids)} clusters named {name!r} in {region}: {', '.join(ids)}",
        hint="remove them all with `cloudddp down`, or wait for their deadlines",
    )
