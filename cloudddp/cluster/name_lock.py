"""The key pair of a cluster is the lock on its name, so that two `up`s of one name cannot both start nodes.

Checking first and creating afterwards leaves a gap in which a second `up` finds nothing, as long as the user
takes to answer "Start these nodes?". So the name is taken by a call that EC2 itself makes exclusive.

Why the key pair: EC2 keeps one key pair per name in an account and region and refuses a second one with
InvalidKeyPair.Duplicate (EC2 API reference, "Error codes": "The key pair name already exists in that
Region"). The name of a security group is unique in its VPC only, so `--vpc` or `--subnets` would bypass it,
and instances have no unique name at all. All computers share the account, so the lock holds between them as
well. ImportKeyPair takes the tags in the same call: a refused `up` can read who holds the name, since when,
and for which cluster.

The key pair is created first, after the user has confirmed, and deleted last, by its id: by its name, a slow
`down` could delete the lock of the next `up`. An `up` that is killed leaves it behind. On the same computer
the next `up` detects this (ClusterFolder.is_being_created) and replaces it; elsewhere `down` releases it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cluster.lookup import Ownership
from cloudddp.cluster.plan import key_name
from cloudddp.errors import CloudDDPError, Message
from cloudddp.local_state import ClusterFolder

DUPLICATE = "InvalidKeyPair.Duplicate"
_ATTEMPTS = 3  # without a key pair, before it counts as gone: EC2 may not list a new one at once
_ATTEMPT_SECONDS = 1.0


class NameTaken(CloudDDPError):
    """Another cluster has the name. Nothing was created."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The key pair that locks a name, and the time of the lock."""

    key: Resource
    since: datetime | None

    @property
    def cluster_id(self) -> str:
        return self.key.tags.cluster_id


def holder(aws: AWS, name: str) -> Holder | None:
    """Return who holds the name, or None if it is free. One AWS call."""
    filters = [{"Name": "key-name", "Values": [key_name(name)]}]
    found = aws.listed("ec2", "describe_key_pairs", "KeyPairs", dict[str, Any], Filters=filters)
    if not found:
        return None
    key = inventory.resource(aws, "key pair", found[0])
    created = found[0].get("CreateTime")  # parsed by botocore
    return Holder(key, key.tags.created or (created if isinstance(created, datetime) else None))


def lost(aws: AWS, name: str, cluster_id: str) -> bool:
    """Return whether the cluster no longer holds its name: another command is removing it, or has removed
    it."""
    for attempt in range(_ATTEMPTS):
        time.sleep(_ATTEMPT_SECONDS if attempt else 0.0)
        found = holder(aws, name)
        if found is not None:
            return found.cluster_id != cluster_id
    return True


def abandoned(aws: AWS, held_by: Holder) -> bool:
    """Return whether the cluster that holds the name is neither in use nor being created, so that it may be
    removed.

    Its `up` was killed on this computer, or its nodes have reached their deadline. A live node means that it
    is in use; and an `up` on another computer cannot be ruled out.
    """
    if not held_by.cluster_id:
        return False
    if any(instance.live for instance in inventory.instances(aws, inventory.with_id(held_by.cluster_id))):
        return False
    folder, ownership = ClusterFolder(held_by.cluster_id), Ownership(aws)
    if ownership.created_here(held_by.key):
        return not folder.is_being_created()
    expires = held_by.key.tags.expires
    return expires is not None and expires < datetime.now(UTC) and ownership.mine(held_by.key)


def taken(aws: AWS, name: str, by: Holder | Instance) -> NameTaken:
    """Return the error that names the owner of the name, since when, and what to type."""
    resource = by.key if isinstance(by, Holder) else by
    tags = resource.tags
    if not tags.cluster_id:
        kind = "key pair" if isinstance(by, Holder) else "instance"
        return NameTaken(
            f"the name {name!r} is taken in {aws.region} by {kind} {resource.id}, whose tags hold no "
            "readable cluster id; nothing was created",
            hint="choose another name with -c; or, if it is yours: `cloudddp down --anyone`, or delete it in "
            "the AWS console",
        )
    since = by.since if isinstance(by, Holder) else tags.created or by.launched
    when = f"{since:%Y-%m-%d %H:%M:%S} UTC" if since else "an unknown time"
    return NameTaken(
        f"the name {name!r} is taken in {aws.region}: cluster {tags.cluster_id} of "
        f"{tags.owner or 'an unknown owner'}, "
        f"since {when}; nothing was created",
        hint=_advice(aws, resource),
    )


def _advice(aws: AWS, found: Resource | Instance) -> str:
    ownership = Ownership(aws)
    if ownership.created_here(found):
        if ClusterFolder(found.tags.cluster_id).is_being_created():
            return Message(
                "another `cloudddp up` on this computer is creating it; `cloudddp status` shows it"
            )
        return Message(
            "`cloudddp status` shows it; `cloudddp up` again checks that it is ready, `cloudddp down` "
            "removes it"
        )
    if ownership.mine(found):
        return Message(
            "another computer of yours created it, or is still in `cloudddp up`: `cloudddp status` shows "
            "its nodes. Use it from there, or choose another name with -c; `cloudddp down` removes it with "
            "its jobs and results"
        )
    return Message("choose another name with -c; or, if it is no longer needed: `cloudddp down --anyone`")
