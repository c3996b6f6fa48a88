"""What exists of a cluster: its instances and other resources, found by tag and decoded into typed records,
and EC2's own report on instances that do not answer. Read-only.

The instance status check fails where the instance's kernel or network does not answer ARP requests, the
system status check where its host is at fault (EC2 User Guide, "Status checks for Amazon EC2 instances").
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec import field

from cloudddp.aws import answers
from cloudddp.aws.answers import Answer, Count, Id, Tagged, action
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


class _Interface(Answer, frozen=True):
    network_interface_id: str = ""
    device: Count = field(name="Attachment.DeviceIndex", default=0)
    card: Count = field(name="Attachment.NetworkCardIndex", default=0)


class _MemberOf(Answer, frozen=True):
    group_id: Id


class _Instance(Tagged, frozen=True, kw_only=True):
    """Its id and its state are required: `down` decides by them. Text that is only shown may have any
    length."""

    instance_id: Id
    state: str = field(name="State.Name")
    reason: str = field(name="StateReason.Message", default="")
    reason_code: str = field(name="StateReason.Code", default="")
    state_transition_reason: str = ""
    instance_type: str = ""
    zone: str = field(name="Placement.AvailabilityZone", default="")
    instance_lifecycle: str = ""
    private_ip_address: str = ""
    public_ip_address: str = ""
    ami_launch_index: Count = 0
    client_token: str = ""
    launch_time: datetime | None = None
    network_interfaces: tuple[_Interface, ...] = ()
    security_groups: tuple[_MemberOf, ...] = ()


class _Reservation(Answer, frozen=True):
    instances: list[_Instance]
    reservation_id: str = ""


def instances(aws: AWS, filters: Filters) -> list[Instance]:
    """Return the matching instances by cluster and launch order, terminated ones included while AWS lists
    them.

    One call, whatever their number.
    """
    reservations = aws.listed("describe_instances", _Reservation, key="Reservations", Filters=filters)
    found = [_instance(item, reservation) for reservation in reservations for item in reservation.instances]
    return sorted(found, key=lambda i: (i.tags.cluster, i.tags.cluster_id, i.launch_index, i.id))


def _instance(item: _Instance, reservation: _Reservation) -> Instance:
    state = _text(item.state)
    transition = item.state_transition_reason
    # Of several interfaces, only this one has a public address.
    primary = (nic.network_interface_id for nic in item.network_interfaces if not (nic.device or nic.card))
    return Instance(
        id=item.instance_id,
        state=state,
        reason=_text(item.reason or transition),
        reason_code=_text(item.reason_code),
        type=_text(item.instance_type),
        zone=_text(item.zone),
        spot=item.instance_lifecycle == "spot",
        private_ip=_text(item.private_ip_address),
        public_ip=_text(item.public_ip_address),
        reservation=_text(reservation.reservation_id),
        launch_index=item.ami_launch_index,
        client_token=_text(item.client_token),
        launched=item.launch_time,  # parsed by botocore
        ended=_end_time(transition) if state in GOING else None,
        tags=decode(item.tags),
        interface=_text(next(primary, "")),
        groups=tuple(group.group_id for group in item.security_groups),
    )


def _text(value: object) -> str:
    return one_line(str(value or ""), 300)


def _end_time(transition: str) -> datetime | None:
    with contextlib.suppress(ValueError):
        if found := _ENDED.search(transition):
            return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return None


# kind -> how it is listed and deleted, key of the id, key of the detail; in the order of deletion
KINDS = {
    "network interface": (
        "describe_network_interfaces",
        "delete_network_interface",
        "NetworkInterfaceId",
        "Status",
    ),
    "volume": ("describe_volumes", "delete_volume", "VolumeId", "State"),
    "Elastic IP": ("describe_addresses", "release_address", "AllocationId", "PublicIp"),
    "placement group": ("describe_placement_groups", "delete_placement_group", "GroupId", "GroupName"),
    "security group": ("describe_security_groups", "delete_security_group", "GroupId", "GroupName"),
    "key pair": ("describe_key_pairs", "delete_key_pair", "KeyPairId", "KeyName"),
}


class _Ingress(Answer, frozen=True):
    cidr_ip: str = ""
    cidr_ipv6: str = ""
    description: str = ""


class _Rule(Answer, frozen=True):
    from_port: int | None = None
    ip_ranges: tuple[_Ingress, ...] = ()
    ipv6_ranges: tuple[_Ingress, ...] = ()


class _Group(Answer, frozen=True):
    group_id: Id
    ip_permissions: list[_Rule]


def resources(aws: AWS, filters: Filters, kinds: Sequence[str] = tuple(KINDS)) -> list[Resource]:
    """Return the matching resources that are not instances: those of KINDS, or of some. One AWS call for
    each kind."""
    return [
        resource(aws, kind, item)
        for kind in kinds
        for item in aws.listed(KINDS[kind][0], dict[str, Any], Filters=filters)
        if item.get("State") not in ("deleting", "deleted")  # a volume that is already being deleted
    ]


def resource(aws: AWS, kind: str, item: dict[str, Any]) -> Resource:
    """Return the record of one resource, given AWS's description of it. Raises AWSError if that has no id."""
    method, _, id_key, detail_key = KINDS[kind]
    where = (action("ec2", method), aws.region)
    found = answers.decode(item, Id, *where, id_key)
    tags = answers.decode(item, Tagged, *where).tags
    return Resource(kind, found, decode(tags), _text(item.get(detail_key)))


def security_groups(aws: AWS, filters: Filters) -> list[dict[str, Any]]:
    """Return the matching security groups as AWS describes them; each has an id and rules. Raises AWSError
    otherwise."""
    found = aws.listed("describe_security_groups", dict[str, Any], Filters=filters)
    for group in found:
        answers.decode(group, _Group, "ec2:DescribeSecurityGroups", aws.region)
    return found


def ingress_blocks(group: dict[str, Any], port: int) -> dict[str, str]:
    """Return {address block: description} of the rules that open one TCP port; `group` is from
    `security_groups`."""
    rules = answers.decode(group, _Group, "ec2:DescribeSecurityGroups", "the region").ip_permissions
    opened = [one for rule in rules if rule.from_port == port for one in (*rule.ip_ranges, *rule.ipv6_ranges)]
    return {_text(one.cidr_ip or one.cidr_ipv6): one.description for one in opened}


_FAILED = "impaired"
_SYSTEM = "a problem of its host or of the host's network, which AWS has to repair"
_COMPLETED = ("[Completed]", "[Canceled]")  # how the description of an event begins that is over


class _Detail(Answer, frozen=True):
    impaired_since: datetime | None = None


class _Check(Answer, frozen=True):
    status: str = ""
    details: tuple[_Detail, ...] = ()


class _Event(Answer, frozen=True):
    code: str = ""
    description: str = ""
    not_before: datetime | None = None


class _Status(Answer, frozen=True):
    instance_id: Id
    instance_status: _Check = _Check()
    system_status: _Check = _Check()
    events: tuple[_Event, ...] = ()


def status_problems(aws: AWS, ids: Iterable[str]) -> dict[str, str]:
    """Return the failed status checks and the scheduled events of running instances, in words, by id; nothing
    if EC2 does not answer. One AWS call."""
    try:
        call = ("describe_instance_status", _Status)
        found = aws.listed(*call, key="InstanceStatuses", InstanceIds=sorted(ids))
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
