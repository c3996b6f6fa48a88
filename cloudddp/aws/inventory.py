"""What exists of a cluster, found by tag and decoded into typed records. Read-only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.tags import TAG_CLUSTER, TAG_ID, Tags, decode
from cloudddp.text import one_line

LIVE = ("pending", "running", "stopping", "stopped")
GOING = ("shutting-down", "terminated")
USER_SHUTDOWN = "Client.UserInitiatedShutdown"  # TerminateInstances was called for the instance
# "User initiated (2026-11-21 10:00:00 GMT)", "Service initiated (...)": the only place where EC2 gives this time
_ENDED = re.compile(r"\(([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}) (?:GMT|UTC)\)")

Filters = list[dict[str, Any]]  # as EC2's Describe calls take them


@dataclass(frozen=True, slots=True)
class Instance:
    """An EC2 instance, as its tags and AWS describe it. Every text is safe to print."""

    id: str
    state: str
    reason: str
    reason_code: str
    type: str
    zone: str
    spot: bool
    private_ip: str
    public_ip: str
    reservation: str  # the id of the RunInstances call that launched it
    launch_index: int  # its number in that call, from 0
    client_token: str  # the idempotency token of that call
    launched: datetime | None
    ended: datetime | None  # None while it is live, or if AWS does not give the time
    tags: Tags
    interface: str = ""  # the id of its primary network interface
    groups: tuple[str, ...] = ()  # ids of its security groups

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def cluster(self) -> str:
        return self.tags.cluster

    @property
    def cluster_id(self) -> str:
        """The id of its cluster, or '' if its tag holds none."""
        return self.tags.cluster_id

    @property
    def warnings(self) -> list[str]:
        """One sentence for each of its tags that cannot be used."""
        return [f"instance {self.id}: {text}" for text in self.tags.unreadable]


@dataclass(frozen=True, slots=True)
class Resource:
    """Any other resource of a cluster. `detail` identifies it to a person: a name, or a state."""

    kind: str
    id: str
    tags: Tags
    detail: str = ""

    @property
    def cluster_id(self) -> str:
        return self.tags.cluster_id


def named(cluster: str | None) -> Filters:
    """Return the filter for clusters of that name, or for every cluster of the account."""
    if cluster is None:
        return [{"Name": "tag-key", "Values": [TAG_CLUSTER]}]
    return [{"Name": f"tag:{TAG_CLUSTER}", "Values": [cluster]}]


def with_id(cluster_id: str) -> Filters:
    """Return the filter for one cluster, of several that may share a name."""
    return [{"Name": f"tag:{TAG_ID}", "Values": [cluster_id]}]


def instances(aws: AWS, filters: Filters) -> list[Instance]:
    """Return the matching instances by cluster and launch order, terminated ones included while AWS lists them.

    One call, whatever their number.
    """
    found = [
        _instance(item, reservation)
        for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=filters)
        for item in reservation["Instances"]
    ]
    return sorted(found, key=lambda i: (i.cluster, i.cluster_id, i.launch_index, i.id))


def _instance(item: dict[str, Any], reservation: dict[str, Any]) -> Instance:
    state = _text(item.get("State", {}).get("Name"))
    reason = item.get("StateReason", {})
    transition = item.get("StateTransitionReason", "") or ""
    return Instance(
        id=_text(item["InstanceId"]),
        state=state,
        reason=_text(reason.get("Message") or transition),
        reason_code=_text(reason.get("Code")),
        type=_text(item.get("InstanceType")),
        zone=_text(item.get("Placement", {}).get("AvailabilityZone")),
        spot=item.get("InstanceLifecycle") == "spot",
        private_ip=_text(item.get("PrivateIpAddress")),
        public_ip=_text(item.get("PublicIpAddress")),
        reservation=_text(reservation.get("ReservationId")),
        launch_index=int(item.get("AmiLaunchIndex") or 0),
        client_token=_text(item.get("ClientToken")),
        launched=item.get("LaunchTime"),  # parsed by botocore
        ended=_end_time(transition) if state in GOING else None,
        tags=_tags(item),
        interface=_primary_interface(item),
        groups=tuple(_text(one.get("GroupId")) for one in item.get("SecurityGroups") or []),
    )


def _primary_interface(item: dict[str, Any]) -> str:
    """Return the interface with device index 0 on network card 0: of several, only this one has a public address."""
    for nic in item.get("NetworkInterfaces", []):
        attachment = nic.get("Attachment", {})
        if not attachment.get("DeviceIndex") and not attachment.get("NetworkCardIndex"):
            return _text(nic.get("NetworkInterfaceId"))
    return ""


def _tags(item: dict[str, Any]) -> Tags:
    return decode(item.get("Tags", []) or item.get("TagSet", []))


def _text(value: object) -> str:
    return one_line(str(value or ""), 300)


def _end_time(transition: str) -> datetime | None:
    found = _ENDED.search(transition)
    if found is None:
        return None
    try:
        return datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


# kind -> method, key of the listing, key of the id, key of the detail
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
    "Elastic IP": ("describe_addresses", "Addresses", "AllocationId", "PublicIp"),
    "placement group": ("describe_placement_groups", "PlacementGroups", "GroupId", "GroupName"),
}
_NOT_PAGINATED = ("describe_key_pairs", "describe_addresses", "describe_placement_groups")


def resources(aws: AWS, filters: Filters) -> list[Resource]:
    """Return the matching resources that are not instances: those of _KINDS."""
    return [
        resource(kind, item)
        for kind, (method, key, _, _) in _KINDS.items()
        for item in _listing(aws, method, key, filters)
        if item.get("State") not in ("deleting", "deleted")  # a volume that is already being deleted
    ]


def resource(kind: str, item: dict[str, Any]) -> Resource:
    """Return the record of one resource, given AWS's description of it."""
    _, _, id_key, detail_key = _KINDS[kind]
    return Resource(kind, _text(item[id_key]), _tags(item), _text(item.get(detail_key)))


def security_groups(aws: AWS, filters: Filters) -> list[dict[str, Any]]:
    """Return the matching security groups, as AWS describes them."""
    return aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=filters)


def ingress_blocks(group: dict[str, Any], port: int) -> dict[str, str]:
    """Return {address block: description} of the rules of a security group that open one TCP port."""
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == port]
    blocks = {r["CidrIp"]: r.get("Description", "") for rule in rules for r in rule.get("IpRanges", [])}
    return blocks | {
        r["CidrIpv6"]: r.get("Description", "") for rule in rules for r in rule.get("Ipv6Ranges", [])
    }


def _listing(aws: AWS, method: str, key: str, filters: Filters) -> list[dict[str, Any]]:
    if method in _NOT_PAGINATED:
        return list(aws.call("ec2", method, Filters=filters)[key])
    return aws.pages("ec2", method, key, Filters=filters)
