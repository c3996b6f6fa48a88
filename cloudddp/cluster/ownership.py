"""Ownership of clusters: the caller's own, or another user's in the same account.

A cluster is the caller's if it is in this computer's journal, or if its owner tag is the caller's STS
identity. The journal is checked first, so that a cluster created here costs no further AWS call. The tag is
not a proof (everyone who may tag can change it): this prevents colleagues from terminating each other's work
by mistake; access control is IAM's task.
"""

from __future__ import annotations

import contextlib
from functools import cached_property

from cloudddp import local_state
from cloudddp.aws import caller
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError


class Ownership:
    """Decides what belongs to the caller; with `anyone`, everything does."""

    def __init__(self, aws: AWS, *, anyone: bool = False) -> None:
        self._aws = aws
        self._anyone = anyone
        self._known: dict[str, tuple[local_state.ClusterRecord | None, frozenset[str]]] = {}
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
        """Return whether this computer's journal has the resource's cluster, with this name and region.

        Makes no call. A tag can be copied, so an instance must be one that `up` created, if the journal lists
        them.
        """
        record, instances = self._journal(resource.cluster_id)
        if record is None or (record.name, record.region) != (resource.tags.cluster, self._aws.region):
            return False
        return isinstance(resource, Resource) or not instances or resource.id in instances

    def _journal(self, cluster_id: str) -> tuple[local_state.ClusterRecord | None, frozenset[str]]:
        if cluster_id not in self._known:
            folder = local_state.ClusterFolder(cluster_id) if cluster_id else None
            record = folder.record() if folder else None
            instances = frozenset[str]()
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
