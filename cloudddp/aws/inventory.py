"""What exists of a cluster, found by tag, and how it is taken away. The journal and the laptop do not matter here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError
from cloudddp.plan import (
    TAG_CLUSTER,
    TAG_CREATED,
    TAG_EXPIRES,
    TAG_ID,
    TAG_NODE_RANK,
    TAG_NODES,
    TAG_OWNER,
    TAG_PRICE,
)

LIVE = ("pending", "running", "stopping", "stopped")
GOING = ("shutting-down", "terminated")
POLL_SECONDS = 2.0
UNKNOWN_SECONDS = 30.0
IN_USE = (
    "DependencyViolation",
    "InvalidGroup.InUse",
    "VolumeInUse",
    "IncorrectState",
    "InvalidParameterValue",  # "Network interface ... is currently in use"
    "InvalidNetworkInterface.InUse",
)


@dataclass(frozen=True, slots=True)
class Instance:
    """An EC2 instance of a cluster, as its tags and AWS describe it."""

    id: str
    state: str
    reason: str
    cluster: str
    cluster_id: str
    type: str
    zone: str
    image: str
    key_name: str
    spot: bool
    private_ip: str
    public_ip: str
    created: str
    expires: str
    owner: str
    fixed_rank: int | None
    wanted: int | None  # how many nodes the cluster was made with
    price: float | None  # USD an hour on demand, None where it is unknown

    @property
    def live(self) -> bool:
        return self.state in LIVE


@dataclass(frozen=True, slots=True)
class Thing:
    """Anything else that a cluster consists of: its kind, its id, and what identifies it to a person."""

    kind: str
    id: str
    cluster_id: str
    detail: str = ""


# Which clusters are meant, as EC2 filters.
Where = list[dict[str, Any]]


def named(cluster: str | None) -> Where:
    """Return the filter for the clusters of that name, or for every cluster of the account."""
    if cluster is None:
        return [{"Name": "tag-key", "Values": [TAG_CLUSTER]}]
    return [{"Name": f"tag:{TAG_CLUSTER}", "Values": [cluster]}]


def with_id(cluster_id: str) -> Where:
    """Return the filter for one cluster, of several that may share a name."""
    return [{"Name": f"tag:{TAG_ID}", "Values": [cluster_id]}]


def _tags(item: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags", []) or item.get("TagSet", [])}


def instances(aws: AWS, where: Where) -> list[Instance]:
    """Return the instances of a cluster (or of all clusters), terminated ones included while AWS shows them.

    One call however many there are. In node order: by tag where set, else by private address as a string, which
    is how torchrun's c10d rendezvous orders nodes, so that node 0 runs rank 0.
    """
    found = [
        _instance(item)
        for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=where)
        for item in reservation["Instances"]
    ]
    return sorted(found, key=lambda i: (i.cluster, i.cluster_id, _last(i.fixed_rank), i.private_ip, i.id))


def _last(rank: int | None) -> int:
    return 1 << 30 if rank is None else rank


def _instance(item: dict[str, Any]) -> Instance:
    tags = _tags(item)
    rank, wanted = tags.get(TAG_NODE_RANK, ""), tags.get(TAG_NODES, "")
    reason = item.get("StateReason", {}).get("Message") or item.get("StateTransitionReason", "")
    return Instance(
        id=item["InstanceId"],
        state=item["State"]["Name"],
        reason=reason,
        cluster=tags.get(TAG_CLUSTER, ""),
        cluster_id=tags.get(TAG_ID, ""),
        type=item.get("InstanceType", ""),
        zone=item.get("Placement", {}).get("AvailabilityZone", ""),
        image=item.get("ImageId", ""),
        key_name=item.get("KeyName", ""),
        spot=item.get("InstanceLifecycle") == "spot",
        private_ip=item.get("PrivateIpAddress", "") or "",
        public_ip=item.get("PublicIpAddress", "") or "",
        created=tags.get(TAG_CREATED, ""),
        expires=tags.get(TAG_EXPIRES, ""),
        owner=tags.get(TAG_OWNER, ""),
        fixed_rank=int(rank) if rank.isdigit() else None,
        wanted=int(wanted) if wanted.isdigit() else None,
        price=_number(tags.get(TAG_PRICE, "")),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def things(aws: AWS, where: Where) -> list[Thing]:
    """Return everything of a cluster that is not an instance: groups, keys, volumes, interfaces."""
    listings = (
        ("security group", "describe_security_groups", "SecurityGroups", "GroupId", "GroupName"),
        ("key pair", "describe_key_pairs", "KeyPairs", "KeyPairId", "KeyName"),
        ("volume", "describe_volumes", "Volumes", "VolumeId", "State"),
        (
            "network interface",
            "describe_network_interfaces",
            "NetworkInterfaces",
            "NetworkInterfaceId",
            "Status",
        ),
    )
    found = []
    for kind, method, key, id_key, detail_key in listings:
        found += [
            Thing(kind, item[id_key], _tags(item).get(TAG_ID, ""), str(item.get(detail_key, "")))
            for item in _listing(aws, method, key, where)
            if item.get("State") not in ("deleting", "deleted")  # a volume that is on its way out
        ]
    return found


def groups(aws: AWS, where: Where) -> list[dict[str, Any]]:
    """Return the security groups of a cluster, as AWS describes them."""
    return aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=where)


def open_blocks(group: dict[str, Any], port: int) -> dict[str, str]:
    """Return {address block: why} that a security group lets in at one TCP port."""
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == port]
    blocks = {r["CidrIp"]: r.get("Description", "") for rule in rules for r in rule.get("IpRanges", [])}
    return blocks | {
        r["CidrIpv6"]: r.get("Description", "") for rule in rules for r in rule.get("Ipv6Ranges", [])
    }


def _listing(aws: AWS, method: str, key: str, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if method == "describe_key_pairs":  # the one listing of these without pages
        return list(aws.call("ec2", method, Filters=filters)[key])
    return aws.pages("ec2", method, key, Filters=filters)


def terminate(aws: AWS, ids: list[str]) -> list[str]:
    """Ask for the end of these instances, until AWS has accepted it for each; return those it never knew.

    InvalidInstanceID.NotFound does not mean that an instance has ended: one made a moment ago may not be known yet
    (EC2, eventual consistency), and one unknown id fails the whole batch. So unknown ones are asked for again.
    """
    deadline = time.monotonic() + UNKNOWN_SECONDS
    left = list(ids)
    while True:
        left = _terminate_once(aws, left)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_SECONDS)


def _terminate_once(aws: AWS, ids: list[str]) -> list[str]:
    """Return the ids that AWS does not know."""
    try:
        aws.call("ec2", "terminate_instances", InstanceIds=ids)
    except AWSError as error:
        if error.code != "InvalidInstanceID.NotFound":
            raise
        return ids if len(ids) == 1 else [one for each in ids for one in _terminate_once(aws, [each])]
    return []


def wait_terminated(
    aws: AWS,
    where: Where,
    *,
    timeout: float = 600.0,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Wait until no instance of the cluster is left but terminated ones, ending those that turn up meanwhile.

    Own poll: botocore's waiter takes 15 s steps and fails where an instance has already vanished. One look that
    fails (a network that hiccups) does not end the waiting; a few in a row do.
    """
    deadline = time.monotonic() + timeout
    pause, failures = 0.2, 0
    left: list[Instance] = []
    while True:
        try:
            left = [i for i in instances(aws, where) if i.state != "terminated"]
            if late := [i.id for i in left if i.live]:
                terminate(aws, late)
            failures = 0
        except AWSError as error:
            failures += 1
            if failures > 3 or error.code:
                raise
        if (not left and not failures) or time.monotonic() > deadline:
            return
        progress(len(left))
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS)


def delete(aws: AWS, thing: Thing) -> AWSError | None:
    """Try once to delete one thing. Return None where it is gone, else the error; `in_use` tells which will pass."""
    calls: dict[str, tuple[str, dict[str, str]]] = {
        "security group": ("delete_security_group", {"GroupId": thing.id}),
        "key pair": ("delete_key_pair", {"KeyName": thing.detail}),
        "volume": ("delete_volume", {"VolumeId": thing.id}),
        "network interface": ("delete_network_interface", {"NetworkInterfaceId": thing.id}),
    }
    method, params = calls[thing.kind]
    try:
        aws.call("ec2", method, **params)
    except AWSError as error:
        return None if ".NotFound" in error.code else error
    return None


def in_use(error: AWSError) -> bool:
    """Return whether time mends it: interfaces and volumes of ended instances are let go of only after a while."""
    return error.code in IN_USE
