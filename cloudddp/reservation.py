"""The name of a cluster is reserved by its key pair, so that two `up`s of one name cannot both start nodes.

Looking first and making afterwards leaves a gap in which a second `up` finds nothing, and the gap is as long as
somebody takes to answer "Start these nodes?". So the name is taken by a call that EC2 itself makes exclusive.

Why the key pair: EC2 keeps one key pair of a name in an account and region and refuses a second with
InvalidKeyPair.Duplicate (EC2 API reference, "Error codes": "The key pair name already exists in that Region"). A
security group's name is unique in a VPC only, so `--vpc` or `--subnet` would circumvent it, and an instance has
no unique name at all. The account is what laptops have in common, so it holds between them as well. ImportKeyPair
takes the tags in the same call: whoever is refused can read who holds the name, since when, and for which cluster.

The key pair is made first, after the question was answered, and deleted last, by its id: by its name, a slow `down`
could delete the reservation of the next `up`. An `up` that is killed leaves it behind. On the same computer the next
`up` can tell (state.ClusterFolder.is_held) and takes over; elsewhere `down` releases it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Thing
from cloudddp.errors import CloudDDPError
from cloudddp.owners import Ownership
from cloudddp.plan import key_name
from cloudddp.state import ClusterFolder

DUPLICATE = "InvalidKeyPair.Duplicate"
LOOKS = 3  # without a reservation before it counts as gone: EC2 may not list a new one at once
LOOK_SECONDS = 1.0


class NameTaken(CloudDDPError):
    """Another cluster has the name. Nothing was made."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The key pair that holds a name, and since when."""

    key: Thing
    since: datetime | None

    @property
    def cluster_id(self) -> str:
        return self.key.cluster_id


def holder(aws: AWS, name: str) -> Holder | None:
    """Return who holds the name, or None where it is free. One AWS call."""
    filters = [{"Name": "key-name", "Values": [key_name(name)]}]
    found: list[dict[str, Any]] = aws.call("ec2", "describe_key_pairs", Filters=filters)["KeyPairs"]
    if not found:
        return None
    key = inventory.thing("key pair", found[0])
    return Holder(key, key.tags.created or found[0].get("CreateTime"))


def lost(aws: AWS, name: str, cluster_id: str) -> bool:
    """Return whether the cluster no longer holds its name: somebody is taking it down, or has."""
    for look in range(LOOKS):
        time.sleep(LOOK_SECONDS if look else 0.0)
        found = holder(aws, name)
        if found is not None:
            return found.cluster_id != cluster_id
    return True


def abandoned(aws: AWS, held_by: Holder) -> bool:
    """Return whether nobody makes or uses the cluster that holds the name, so that what is left of it may go.

    Its `up` was killed on this computer, or its nodes have reached their deadline. A live node means that it is used,
    and of an `up` on another computer it cannot be known whether it still runs.
    """
    if not held_by.cluster_id:
        return False
    if any(node.live for node in inventory.instances(aws, inventory.with_id(held_by.cluster_id))):
        return False
    folder, whose = ClusterFolder(held_by.cluster_id), Ownership(aws)
    if whose.made_here(held_by.key):
        return not folder.is_held()
    expires = held_by.key.tags.expires
    return expires is not None and expires < datetime.now(UTC) and whose.mine(held_by.key)


def taken(aws: AWS, name: str, by: Holder | Instance) -> NameTaken:
    """Return the error that says who has the name, since when, and what to type."""
    tags = by.key.tags if isinstance(by, Holder) else by.tags
    since = by.since if isinstance(by, Holder) else by.tags.created or by.launched
    if not tags.cluster_id:
        what = f"key pair {by.key.id}" if isinstance(by, Holder) else f"instance {by.id}"
        return NameTaken(
            f"the name {name!r} is taken in {aws.region} by {what}, whose tags hold no readable cluster id; "
            "nothing was made",
            hint="choose another name with -c; or, if it is yours: cloudddp down --anyone, or delete it in the AWS console",
        )
    when = f"{since:%Y-%m-%d %H:%M:%S} UTC" if since else "an unknown time"
    return NameTaken(
        f"the name {name!r} is taken in {aws.region}: cluster {tags.cluster_id} of {tags.owner or 'an unknown owner'}, "
        f"since {when}; nothing was made",
        hint=_advice(aws, by.key if isinstance(by, Holder) else by),
    )


def _advice(aws: AWS, found: Thing | Instance) -> str:
    whose = Ownership(aws)
    if whose.made_here(found):
        if ClusterFolder(found.cluster_id).is_held():
            return "another `cloudddp up` on this computer is making it; cloudddp status shows it"
        return "cloudddp status shows it; `cloudddp up` again checks that it is ready, `cloudddp down` removes it"
    if whose.mine(found):
        return (
            "you made it from another computer: remove it with cloudddp down, or choose another name with -c"
        )
    return "choose another name with -c; or, if nobody needs it any more: cloudddp down --anyone"
