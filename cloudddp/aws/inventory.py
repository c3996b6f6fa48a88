"""What exists of a cluster, found by tag, and how it is taken away. The journal and the laptop do not matter here."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError
from cloudddp.tags import TAG_CLUSTER, TAG_ID, Tags, decode
from cloudddp.text import one_line

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


REFUSED = ("OperationNotPermitted", "UnauthorizedOperation")  # of one instance
USER_SHUTDOWN = "Client.UserInitiatedShutdown"  # TerminateInstances was called for it
# "User initiated (2026-11-21 10:00:00 GMT)", "Service initiated (...)": the only place where EC2 says when
_ENDED = re.compile(r"\(([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}) (?:GMT|UTC)\)")


@dataclass(frozen=True, slots=True)
class Instance:
    """An EC2 instance of a cluster, as its tags and AWS describe it. Every text is safe to show."""

    id: str
    state: str
    reason: str
    reason_code: str
    type: str
    zone: str
    image: str
    key_name: str
    spot: bool
    private_ip: str
    public_ip: str
    launched: datetime | None
    ended: datetime | None  # None where it lives, or where AWS does not say when
    tags: Tags

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def cluster(self) -> str:
        return self.tags.cluster

    @property
    def cluster_id(self) -> str:
        """The id of its cluster, or '' where its tag holds none."""
        return self.tags.cluster_id

    @property
    def warnings(self) -> list[str]:
        """What its tags say that cannot be used, in sentences that name the instance."""
        return [f"instance {self.id}: {text}" for text in self.tags.unreadable]


@dataclass(frozen=True, slots=True)
class Thing:
    """Anything else that a cluster consists of: its kind, its id, and what identifies it to a person."""

    kind: str
    id: str
    tags: Tags
    detail: str = ""

    @property
    def cluster_id(self) -> str:
        return self.tags.cluster_id


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


def _tags(item: dict[str, Any]) -> Tags:
    return decode(item.get("Tags", []) or item.get("TagSet", []))


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
    return sorted(found, key=lambda i: (i.cluster, i.cluster_id, _last(i.tags.node_rank), i.private_ip, i.id))


def _last(rank: int | None) -> int:
    return 1 << 30 if rank is None else rank


def _instance(item: dict[str, Any]) -> Instance:
    state = _text(item.get("State", {}).get("Name"))
    why = item.get("StateReason", {})
    moved = item.get("StateTransitionReason", "") or ""
    return Instance(
        id=_text(item["InstanceId"]),
        state=state,
        reason=_text(why.get("Message") or moved),
        reason_code=_text(why.get("Code")),
        type=_text(item.get("InstanceType")),
        zone=_text(item.get("Placement", {}).get("AvailabilityZone")),
        image=_text(item.get("ImageId")),
        key_name=_text(item.get("KeyName")),
        spot=item.get("InstanceLifecycle") == "spot",
        private_ip=_text(item.get("PrivateIpAddress")),
        public_ip=_text(item.get("PublicIpAddress")),
        launched=item.get("LaunchTime"),  # botocore has parsed it
        ended=_ended(moved) if state in GOING else None,
        tags=_tags(item),
    )


def _text(value: object) -> str:
    return one_line(str(value or ""), 300)


def _ended(reason: str) -> datetime | None:
    found = _ENDED.search(reason)
    if found is None:
        return None
    try:
        return datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


# kind -> method, key of the listing, key of the id, key of what identifies it to a person
_KINDS = {
    "security group": ("describe_security_groups", "SecurityGroups", "GroupId", "GroupName"),
    "key pair": ("describe_key_pairs", "KeyPairs", "KeyPairId", "KeyName"),
    "volume": ("describe_volumes", "Volumes", "VolumeId", "State"),
    "network interface": (
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
        "Status",
    ),
}


def things(aws: AWS, where: Where) -> list[Thing]:
    """Return everything of a cluster that is not an instance: groups, keys, volumes, interfaces."""
    return [
        thing(kind, item)
        for kind, (method, key, _, _) in _KINDS.items()
        for item in _listing(aws, method, key, where)
        if item.get("State") not in ("deleting", "deleted")  # a volume that is on its way out
    ]


def thing(kind: str, item: dict[str, Any]) -> Thing:
    """Return what AWS describes as one of that kind."""
    _, _, id_key, detail_key = _KINDS[kind]
    return Thing(kind, _text(item[id_key]), _tags(item), _text(item.get(detail_key)))


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
    """Return the ids that AWS does not know. Of those it refuses, raises once the others have been asked for.

    One instance fails the whole call: one that does not exist, that is protected, or that the caller may not end
    (somebody else's, with this cluster's tags). The others are ended all the same.
    """
    try:
        aws.call("ec2", "terminate_instances", InstanceIds=ids)
    except AWSError as error:
        if error.code not in ("InvalidInstanceID.NotFound", *REFUSED):
            raise
        if len(ids) > 1:
            return _terminate_each(aws, ids)
        if error.code in REFUSED:
            raise
        return ids
    return []


def _terminate_each(aws: AWS, ids: list[str]) -> list[str]:
    unknown: list[str] = []
    refused: AWSError | None = None
    for one in ids:
        try:
            unknown += _terminate_once(aws, [one])
        except AWSError as error:
            if error.code not in REFUSED:
                raise
            refused = error
    if refused is not None:
        raise refused
    return unknown


def wait_terminated(
    aws: AWS,
    look: Callable[[], list[Instance]],
    *,
    timeout: float = 600.0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Instance]:
    """Wait until `look` shows none but terminated instances, ending those that turn up meanwhile; return the others.

    Own poll: botocore's waiter takes 15 s steps and fails where an instance has already vanished. One look that
    fails (a network that hiccups) does not end the waiting; a few in a row do.
    """
    deadline = time.monotonic() + timeout
    pause, failures = 0.2, 0
    left: list[Instance] = []
    while True:
        try:
            left = [i for i in look() if i.state != "terminated"]
            if late := [i.id for i in left if i.live]:
                terminate(aws, late)
            failures = 0
        except AWSError as error:
            failures += 1
            if failures > 3 or error.code:
                raise
        if (not left and not failures) or time.monotonic() > deadline:
            return left
        progress(len(left))
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS)


def delete(aws: AWS, thing: Thing) -> AWSError | None:
    """Try once to delete one thing. Return None where it is gone, else the error; `in_use` tells which will pass."""
    calls: dict[str, tuple[str, dict[str, str]]] = {
        "security group": ("delete_security_group", {"GroupId": thing.id}),
        # By its id: the name is a reservation, which somebody else may hold by now.
        "key pair": ("delete_key_pair", {"KeyPairId": thing.id}),
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
