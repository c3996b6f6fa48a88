"""The key pair of a cluster is the lock on its name, so that two `up`s of one name cannot both start nodes.

Checking first and creating afterwards leaves a gap, as long as the user takes to answer "Start these nodes?",
in which a second `up` finds nothing. So the name is taken by a call that EC2 itself makes exclusive.

Why the key pair: EC2 keeps one per name in an account and region and refuses a second one with
InvalidKeyPair.Duplicate (EC2 API reference, "Error codes"), so the lock holds between all computers of the
account. The name of a security group is unique in its VPC only, and instances have no unique name at all.
ImportKeyPair takes the tags in the same call: a refused `up` can read who holds the name, since when, and for
which cluster.

The key pair is created first, after the user has confirmed, and deleted last, by its id: by its name, a slow
`down` could delete the lock of the next `up`. An `up` that is killed leaves it behind. On the same computer
the next `up` detects this (ClusterFolder.is_being_created) and replaces it; elsewhere `down` releases it.
"""

from __future__ import annotations

import time
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


def holder(aws: AWS, name: str) -> Resource | None:
    """Return the key pair that locks the name, or None if it is free. One AWS call."""
    filters = [{"Name": "key-name", "Values": [key_name(name)]}]
    found = aws.listed("describe_key_pairs", dict[str, Any], Filters=filters)
    return inventory.resource(aws, "key pair", found[0]) if found else None


def lost(aws: AWS, name: str, cluster_id: str) -> bool:
    """Return whether the cluster no longer holds its name: another command removes it."""
    for attempt in range(_ATTEMPTS):
        time.sleep(_ATTEMPT_SECONDS if attempt else 0.0)
        found = holder(aws, name)
        if found is not None:
            return found.tags.cluster_id != cluster_id
    return True


def abandoned(aws: AWS, key: Resource) -> bool:
    """Return whether the cluster that holds the name is neither in use nor being created, so that it may be
    removed.

    Its `up` was killed on this computer, or its nodes have reached their deadline. A live node means that it
    is in use; and an `up` on another computer cannot be ruled out.
    """
    cluster_id, expires = key.tags.cluster_id, key.tags.expires
    if not cluster_id:
        return False
    if any(instance.live for instance in inventory.instances(aws, inventory.with_id(cluster_id))):
        return False
    ownership = Ownership(aws)
    if ownership.created_here(key):
        return not ClusterFolder(cluster_id).is_being_created()
    return expires is not None and expires < datetime.now(UTC) and ownership.mine(key)


def taken(aws: AWS, name: str, by: Resource | Instance) -> NameTaken:
    """Return the error that names the owner of the name, since when, and what to type."""
    tags, ownership = by.tags, Ownership(aws)
    if not tags.cluster_id:
        kind = "instance" if isinstance(by, Instance) else by.kind
        return NameTaken(
            f"the name {name!r} is taken in {aws.region} by {kind} {by.id}, whose tags hold no readable "
            "cluster id; nothing was created",
            hint="choose another name with -c; or, if it is yours: `cloudddp down --anyone`, or delete it in "
            "the AWS console",
        )
    if ownership.created_here(by):
        text = "`cloudddp status` shows it; "
        if ClusterFolder(tags.cluster_id).is_being_created():
            text += "another `cloudddp up` on this computer is creating it"
        else:
            text += "`cloudddp up` again checks that it is ready, `cloudddp down` removes it"
        hint = Message(text)
    elif ownership.mine(by):
        hint = Message(
            "another computer of yours created it, or is still in `cloudddp up`: `cloudddp status` shows "
            "its nodes. Use it from there, or choose another name with -c; `cloudddp down` removes it with "
            "its jobs and results"
        )
    else:
        hint = Message("choose another name with -c; or, if it is no longer needed: `cloudddp down --anyone`")
    since = tags.created or (by.launched if isinstance(by, Instance) else None)
    when = f"{since:%Y-%m-%d %H:%M:%S} UTC" if since else "an unknown time"
    return NameTaken(
        f"the name {name!r} is taken in {aws.region}: cluster {tags.cluster_id} of "
        f"{tags.owner or 'an unknown owner'}, since {when}; nothing was created",
        hint=hint,
    )
