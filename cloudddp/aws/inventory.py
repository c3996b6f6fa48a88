"""What exists of a cluster: its instances and other resources, found by tag and decoded into typed records,
and EC2's own report on instances that do not answer. Read-only.

The instance status check fails where the instance's kernel or network does not answer ARP requests, the
system status check where its host is at fault (EC2 User Guide, "Status checks for Amazon EC2 instances").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.aws import answers
from cloudddp.aws.answers import Count, Id, Record, Tagged, action
from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError
from cloudddp.tags import TAG_CLUSTER, TAG_ID, Tags, decode
from cloudddp.text import one_line

LIVE = ("pending", "running", "stopping", "stopped")
GOING = ("shutting-down", "terminated")
USER_SHUTDOWN = "Client.UserInitiatedShutdown"  # TerminateInstances was called for the instance
OWN_SHUTDOWN = "Client.InstanceInitiatedShutdown"  # it has powered off
SPOT_SHUTDOWN = "Server.SpotInstanceTermination"
# "User initiated (2026-11-21 10:00:00 GMT)", "Service initiated (...)": the only place where EC2 gives this
# time
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


@dataclass(frozen=True, slots=True)
class Resource:
    """Any other resource of a cluster. `detail` identifies it to a person: a name, or a state."""

    kind: str
    id: str
    tags: Tags
    detail: str = ""


def named(cluster: str | None) -> Filters:
    """Return the filter for clusters of that name, or for every cluster of the account."""
    if cluster is None:
        return [{"Name": "tag-key", "Values": [TAG_CLUSTER]}]
    return [{"Name": f"tag:{TAG_CLUSTER}", "Values": [cluster]}]


def with_id(cluster_id: str) -> Filters:
    """Return the filter for one cluster, of several that may share a name."""
    return [{"Name": f"tag:{TAG_ID}", "Values": [cluster_id]}]


class _Named(Record, frozen=True):
    name: str


class _Reason(Record, frozen=True):
    code: str = ""
    message: str = ""


class _Zone(Record, frozen=True):
    availability_zone: str = ""


class _Attachment(Record, frozen=True):
    device_index: Count = 0
    network_card_index: Count = 0


class _Interface(Record, frozen=True):
    network_interface_id: str = ""
    attachment: _Attachment = _Attachment()


class _MemberOf(Record, frozen=True):
    group_id: Id


class _Instance(Tagged, frozen=True):
    """Its id and its state are required: `down` decides by them. Text that is only shown may have any
    length."""

    instance_id: Id
    state: _Named
    state_reason: _Reason = _Reason()
    state_transition_reason: str = ""
    instance_type: str = ""
    placement: _Zone = _Zone()
    instance_lifecycle: str = ""
    private_ip_address: str = ""
    public_ip_address: str = ""
    ami_launch_index: Count = 0
    client_token: str = ""
    launch_time: datetime | None = None
    network_interfaces: tuple[_Interface, ...] = ()
    security_groups: tuple[_MemberOf, ...] = ()


class _Reservation(Record, frozen=True):
    instances: list[_Instance]
    reservation_id: str = ""


def instances(aws: AWS, filters: Filters) -> list[Instance]:
    """Return the matching instances by cluster and launch order, terminated ones included while AWS lists
    them.

    One call, whatever their number.
    """
    found = [
        _instance(item, reservation)
        for reservation in aws.listed(
            "ec2", "describe_instances", "Reservations", _Reservation, Filters=filters
        )
        for item in reservation.instances
    ]
    return sorted(found, key=lambda i: (i.tags.cluster, i.tags.cluster_id, i.launch_index, i.id))


def _instance(item: _Instance, reservation: _Reservation) -> Instance:
    state = _text(item.state.name)
    transition = item.state_transition_reason
    return Instance(
        id=item.instance_id,
        state=state,
        reason=_text(item.state_reason.message or transition),
        reason_code=_text(item.state_reason.code),
        type=_text(item.instance_type),
        zone=_text(item.placement.availability_zone),
        spot=item.instance_lifecycle == "spot",
        private_ip=_text(item.private_ip_address),
        public_ip=_text(item.public_ip_address),
        reservation=_text(reservation.reservation_id),
        launch_index=item.ami_launch_index,
        client_token=_text(item.client_token),
        launched=item.launch_time,  # parsed by botocore
        ended=_end_time(transition) if state in GOING else None,
        tags=decode(item.tags),
        interface=_primary_interface(item),
        groups=tuple(one.group_id for one in item.security_groups),
    )


def _primary_interface(item: _Instance) -> str:
    """Return the interface with device index 0 on network card 0: of several, only this one has a public
    address."""
    for nic in item.network_interfaces:
        if not nic.attachment.device_index and not nic.attachment.network_card_index:
            return _text(nic.network_interface_id)
    return ""


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


# kind -> method, key of the listing, key of the id, key of the detail; in the order in which they are deleted
KINDS = {
    "network interface": (
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
        "Status",
    ),
    "volume": ("describe_volumes", "Volumes", "VolumeId", "State"),
    "Elastic IP": ("describe_addresses", "Addresses", "AllocationId", "PublicIp"),
    "placement group": ("describe_placement_groups", "PlacementGroups", "GroupId", "GroupName"),
    "security group": ("describe_security_groups", "SecurityGroups", "GroupId", "GroupName"),
    "key pair": ("describe_key_pairs", "KeyPairs", "KeyPairId", "KeyName"),
}


class _Ingress(Record, frozen=True):
    cidr_ip: str = ""
    cidr_ipv6: str = ""
    description: str = ""


class _Rule(Record, frozen=True):
    from_port: int | None = None
    ip_ranges: tuple[_Ingress, ...] = ()
    ipv6_ranges: tuple[_Ingress, ...] = ()


class _Group(Record, frozen=True):
    group_id: Id
    ip_permissions: list[_Rule]


def resources(aws: AWS, filters: Filters, kinds: Sequence[str] = tuple(KINDS)) -> list[Resource]:
    """Return the matching resources that are not instances: those of KINDS, or of some. One AWS call for
    each kind."""
    return [
        resource(aws, kind, item)
        for kind in kinds
        for method, key, _, _ in [KINDS[kind]]
        for item in aws.listed("ec2", method, key, dict[str, Any], Filters=filters)
        if item.get("State") not in ("deleting", "deleted")  # a volume that is already being deleted
    ]


def resource(aws: AWS, kind: str, item: dict[str, Any]) -> Resource:
    """Return the record of one resource, given AWS's description of it. Raises AWSError if that has no id."""
    method, _, id_key, detail_key = KINDS[kind]
    where = (action("ec2", method), aws.region)
    found = answers.decode(item.get(id_key), Id, *where)
    tags = answers.decode(item, Tagged, *where).tags
    return Resource(kind, found, decode(tags), _text(item.get(detail_key)))


def security_groups(aws: AWS, filters: Filters) -> list[dict[str, Any]]:
    """Return the matching security groups as AWS describes them; each has an id and rules. Raises AWSError
    otherwise."""
    found = aws.listed("ec2", "describe_security_groups", "SecurityGroups", dict[str, Any], Filters=filters)
    for group in found:
        answers.decode(group, _Group, "ec2:DescribeSecurityGroups", aws.region)
    return found


def ingress_blocks(group: dict[str, Any], port: int) -> dict[str, str]:
    """Return {address block: description} of the rules that open one TCP port; `group` is from
    `security_groups`."""
    found = answers.decode(group, _Group, "ec2:DescribeSecurityGroups", "the region")
    ranges = [
        one
        for rule in found.ip_permissions
        if rule.from_port == port
        for one in (*rule.ip_ranges, *rule.ipv6_ranges)
    ]
    return {_text(one.cidr_ip or one.cidr_ipv6): one.description for one in ranges}


_FAILED = "impaired"
_SYSTEM = "a problem of its host or of the host's network, which AWS has to repair"
_COMPLETED = ("[Completed]", "[Canceled]")  # how the description of an event begins that is over


class _Detail(Record, frozen=True):
    impaired_since: datetime | None = None


class _Check(Record, frozen=True):
    status: str = ""
    details: tuple[_Detail, ...] = ()


class _Event(Record, frozen=True):
    code: str = ""
    description: str = ""
    not_before: datetime | None = None


class _Status(Record, frozen=True):
    instance_id: Id
    instance_status: _Check = _Check()
    system_status: _Check = _Check()
    events: tuple[_Event, ...] = ()


def status_problems(aws: AWS, ids: Iterable[str]) -> dict[str, str]:
    """Return the failed status checks and the scheduled events of running instances, in words, by id; nothing
    if EC2 does not answer. One AWS call."""
    try:
        found = aws.listed(
            "ec2", "describe_instance_status", "InstanceStatuses", _Status, InstanceIds=sorted(ids)
        )
    except CloudDDPError:  # the policy may lack the action; the error of the node itself is reported anyway
        return {}
    texts = {one.instance_id: "; ".join(_problems_of(one)) for one in found}
    return {instance: text for instance, text in texts.items() if text}


def _problems_of(one: _Status) -> Iterable[str]:
    for name, check, more in (
        ("instance", one.instance_status, ""),
        ("system", one.system_status, f": {_SYSTEM}"),
    ):
        if check.status == _FAILED:
            since = next((detail.impaired_since for detail in check.details if detail.impaired_since), None)
            yield (
                f"EC2's {name} status check has been "
                f"failing{f' since {since:%Y-%m-%d %H:%M} UTC' if since else ''}{more}"
            )
    for event in one.events:
        if not event.description.startswith(_COMPLETED):
            begins = f" at {event.not_before:%Y-%m-%d %H:%M} UTC" if event.not_before else ""
            yield f"AWS has scheduled {one_line(event.code, 40)}{begins} ({one_line(event.description, 200)})"
