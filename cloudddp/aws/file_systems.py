"""Shared file systems by id: Amazon EFS and FSx for Lustre, and whether nodes reach them. Read-only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec

from cloudddp.aws.answers import Id, Record
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.errors import AWSError, CloudDDPError, ToolCommand, UsageError
from cloudddp.text import one_line

_PORTS = {"nfs4": 2049, "lustre": 988}
Source = tuple[str, str]  # type and source, as mount(8) takes them


class _Target(Record, frozen=True):
    network_interface_id: Id
    ip_address: str
    life_cycle_state: str
    availability_zone_name: str = ""


class _Targets(Record, frozen=True):
    mount_targets: tuple[_Target, ...]


class _Lustre(Record, frozen=True):
    mount_name: str


class _Fsx(Record, frozen=True, kw_only=True):
    file_system_type: str
    lifecycle: str = "AVAILABLE"
    dns_name: str = msgspec.field(default="", name="DNSName")
    network_interface_ids: tuple[str, ...] = ()
    lustre_configuration: _Lustre | None = None


class _Group(Record, frozen=True):
    group_id: Id
    ip_permissions: tuple[dict[str, Any], ...] = ()


class _Interface(Record, frozen=True):
    network_interface_id: Id
    vpc_id: Id
    groups: tuple[_Group, ...] = ()


def find(aws: AWS, name: str, nodes: Sequence[Instance]) -> Source:
    """Return what is mounted for a file system that the nodes reach. Raises UsageError if there is none of
    this id and of a type that is supported; CloudDDPError if it is not available, or its network keeps the
    nodes out. Makes 3 or 4 calls."""
    try:
        found = aws.read("efs", "describe_mount_targets", _Targets, FileSystemId=name).mount_targets
    except AWSError as error:
        if error.code != "FileSystemNotFound":
            raise
        kind, text, interfaces = _lustre(aws, name)
    else:
        usable = sorted(
            (one for one in found if one.life_cycle_state == "available"),
            key=lambda one: one.availability_zone_name != nodes[0].zone,
        )
        if not usable:
            raise CloudDDPError(
                f"{name} has no mount target that is available",
                hint=f"create one in zone {nodes[0].zone}, in the cluster's VPC",
            )
        kind, text = "nfs4", f"{usable[0].ip_address}:/"
        interfaces = (usable[0].network_interface_id,)
    _check_network(aws, name, nodes, interfaces, _PORTS[kind])
    return kind, text


def _lustre(aws: AWS, name: str) -> tuple[str, str, tuple[str, ...]]:
    try:
        listed = aws.listed("fsx", "describe_file_systems", "FileSystems", _Fsx, FileSystemIds=[name])
    except AWSError as error:
        if error.code != "FileSystemNotFound":
            raise
        listed = []
    if not listed:
        what = f"there is no file system {name} of EFS or FSx in {aws.region}"
        raise UsageError(what, hint="correct [[shared]] source")
    found = listed[0]
    if found.file_system_type != "LUSTRE" or found.lustre_configuration is None:
        kind = one_line(found.file_system_type, 40)
        raise UsageError(f"{name} is FSx for {kind}", hint="EFS and FSx for Lustre are supported")
    if found.lifecycle not in ("AVAILABLE", "UPDATING"):
        raise CloudDDPError(f"{name} is {one_line(found.lifecycle, 40)}", hint="wait until it is AVAILABLE")
    source = f"{found.dns_name}@tcp:/{found.lustre_configuration.mount_name}"
    return "lustre", source, found.network_interface_ids[:10]


def _check_network(
    aws: AWS, name: str, nodes: Sequence[Instance], interfaces: Collection[str], port: int
) -> None:
    """Raise CloudDDPError for a file system in another VPC, or whose security groups keep a node out."""
    asked = sorted({nodes[0].interface, *interfaces})
    described = aws.listed(
        "ec2", "describe_network_interfaces", "NetworkInterfaces", _Interface, NetworkInterfaceIds=asked
    )
    vpc = next(one.vpc_id for one in described if one.network_interface_id == nodes[0].interface)
    theirs = [one for one in described if one.network_interface_id in interfaces]
    if other := next((one.vpc_id for one in theirs if one.vpc_id != vpc), ""):
        raise CloudDDPError(
            f"{name} is in {other}, and the cluster in {vpc}", hint=f'create it there: vpc = "{other}"'
        )
    ids = sorted({group.group_id for one in theirs for group in one.groups})
    groups = aws.listed("ec2", "describe_security_groups", "SecurityGroups", _Group, GroupIds=ids)
    rules = [rule for group in groups for rule in group.ip_permissions]
    if kept := [node for node in nodes if not any(_admits(rule, node, port) for rule in rules)]:
        words = ("--protocol", "tcp", "--port", str(port), "--source-group", kept[0].groups[0])
        raise CloudDDPError(
            f"{name} does not admit the nodes: no rule of {', '.join(ids)} opens TCP port {port} to them",
            hint=ToolCommand("aws", "ec2", "authorize-security-group-ingress", "--group-id", ids[0], *words),
        )


def _admits(rule: dict[str, Any], node: Instance, port: int) -> bool:
    """Return whether a rule may admit a node; what a prefix list holds is not looked up."""
    if rule.get("IpProtocol") not in ("-1", "tcp"):
        return False
    if not rule.get("FromPort", 0) <= port <= rule.get("ToPort", 65535) and rule["IpProtocol"] != "-1":
        return False
    pairs = {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())}
    blocks = [str(one.get("CidrIp")) for one in rule.get("IpRanges", ())]
    inside = any(ip_address(node.private_ip) in ip_network(block, strict=False) for block in blocks)
    return bool(pairs.intersection(node.groups)) or inside or bool(rule.get("PrefixListIds"))
