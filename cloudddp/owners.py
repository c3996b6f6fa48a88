"""Ownership of clusters: the caller's own, or another user's in the same account.

A cluster is the caller's where this laptop's journal knows it, or where its owner tag is the caller's own STS
identity. The journal is asked first, so that what this laptop made costs no further AWS call. The tag is no proof
(whoever may tag may change it): this keeps colleagues from ending each other's work by mistake, IAM keeps others out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property

from cloudddp import state
from cloudddp.aws import discover
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Thing
from cloudddp.errors import CloudDDPError


class Ownership:
    """Says what is the caller's; with `anyone`, everything is."""

    def __init__(self, aws: AWS, *, anyone: bool = False) -> None:
        self._aws = aws
        self._anyone = anyone
        self._known: dict[str, tuple[state.ClusterRecord | None, frozenset[str]]] = {}
        self.problem = ""  # why the caller's identity could not be determined

    def mine(self, resource: Instance | Thing) -> bool:
        """Return whether the caller's commands may act on it. Where the identity is not known, they may not."""
        if self._anyone or self.made_here(resource):
            return True
        if resource.id in self._instances_made_here:  # also with tags that were changed
            return True
        return bool(self.identity) and resource.tags.owner == self.identity

    def all_mine(self, resources: Iterable[Instance | Thing]) -> bool:
        return all(self.mine(resource) for resource in resources)

    @property
    def caller(self) -> str:
        """Who the caller is, for an error message."""
        if self.identity:
            return f"you are {self.identity}"
        return f"your AWS identity is unknown: {self.problem}"

    def made_here(self, resource: Instance | Thing) -> bool:
        """Return whether this laptop's journal knows the resource's cluster, under the name that its tag gives, in this
        region. Makes no call.

        A tag can be copied: an instance has to be one that `up` made, as far as the journal says which those are.
        """
        record, instances = self._journal(resource.cluster_id)
        if record is None or (record.name, record.region) != (resource.tags.cluster, self._aws.region):
            return False
        return isinstance(resource, Thing) or not instances or resource.id in instances

    def _journal(self, cluster_id: str) -> tuple[state.ClusterRecord | None, frozenset[str]]:
        if cluster_id not in self._known:
            folder = state.ClusterFolder(cluster_id) if cluster_id else None
            record = folder.record() if folder else None
            made = frozenset[str]()
            if folder and record:
                # A journal that cannot be read knows nothing.
                with contextlib.suppress(OSError, CloudDDPError):
                    made = folder.instances_made()
            self._known[cluster_id] = record, made
        return self._known[cluster_id]

    @cached_property
    def identity(self) -> str:
        """The caller, as `up` writes it into the owner tag; '' where AWS does not say."""
        try:
            found = discover.owner(self._aws)
        except CloudDDPError as error:
            self.problem = error.message
            return ""
        return "" if found == discover.NOBODY else found

    @cached_property
    def _instances_made_here(self) -> frozenset[str]:
        return state.instances_made()
