"""Shared file systems by id: Amazon EFS and FSx for Lustre, and whether nodes reach them. Read-only."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address, ip_network
from typing import Any, TypeVar

import msgspec

from cloudddp.aws.answers import Address, Id, Record
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.errors import AWSError, CloudDDPError, ToolCommand, UsageError
from cloudddp.text import one_line

T = TypeVar("T")
NFS_PORT, LUSTRE_PORT = 2049, 988


class _Target(Record, frozen=True):
    network_interface_id: Id
    ip_address: Address
    life_cycle_state: str
    availability_zone_name: str = ""


class _Configuration(Record, frozen=True):
    mount_name: Id


class _Lustre(Record, frozen=True, kw_only=True):
    file_system_type: str
    dns_name: Id = msgspec.field(default="", name="DNSName")
    network_interface_ids: tuple[Id, ...] = ()
    lustre_configuration: _Configuration | None = None


class _Group(Record, frozen=True):
    group_id: Id
    ip_permissions: tuple[dict[str, Any], ...] = ()


class _Interface(Record, frozen=True):
    network_interface_id: Id
    vpc_id: Id
    groups: tuple[_Group, ...] = ()


def find(aws: AWS, name: str, node: Instance) -> str:
    """Return what mount(8) mounts for a file system that the nodes reach. Raises UsageError if there is none
    of this id and of a type that is supported; CloudDDPError if it is not available, or its network keeps
    the nodes out. Makes 3 or 4 calls."""
    targets = _found(aws, "efs", "describe_mount_targets", "MountTargets", _Target, FileSystemId=name)
    if targets is not None:
        usable = [one for one in targets if one.life_cycle_state == "available"]
        usable.sort(key=lambda one: one.availability_zone_name != node.zone)
        if not usable:
            hint = f"create one in zone {node.zone}, in the cluster's VPC"
            raise CloudDDPError(f"{name} has no mount target that is available", hint=hint)
        _check_network(aws, name, node, (usable[0].network_interface_id,), NFS_PORT)
        return f"{usable[0].ip_address}:/"
    listed = _found(aws, "fsx", "describe_file_systems", "FileSystems", _Lustre, FileSystemIds=[name])
    if not listed:
        what = f"there is no file system {name} of EFS or FSx in {aws.region}"
        raise UsageError(what, hint="correct [[shared]] source")
    found = listed[0]
    if found.lustre_configuration is None:
        kind = one_line(found.file_system_type, 40)
        raise UsageError(f"{name} is FSx for {kind}", hint="EFS and FSx for Lustre are supported")
    if not found.network_interface_ids:
        raise CloudDDPError(f"{name} has no network interface yet", hint="wait until it is AVAILABLE")
    _check_network(aws, name, node, found.network_interface_ids[:10], LUSTRE_PORT)
    return f"{found.dns_name}@tcp:/{found.lustre_configuration.mount_name}"


def _found(aws: AWS, service: str, method: str, key: str, kind: type[T], **params: Any) -> list[T] | None:
    """Return what `aws.listed` does; None for a file system that the service does not have."""
    try:
        return aws.listed(service, method, key, kind, **params)
    except AWSError as error:
        if error.code != "FileSystemNotFound":
            raise
        return None


def _check_network(aws: AWS, name: str, node: Instance, interfaces: Collection[str], port: int) -> None:
    """Raise CloudDDPError for a file system in another VPC, or whose security groups keep nodes out: all are
    in the groups and the zone of this one."""
    asked = sorted({node.interface, *interfaces})
    described = aws.listed(
        "ec2", "describe_network_interfaces", "NetworkInterfaces", _Interface, NetworkInterfaceIds=asked
    )
    vpc = next(one.vpc_id for one in described if one.network_interface_id == node.interface)
    theirs = [one for one in described if one.network_interface_id in interfaces]
    if other := next((one.vpc_id for one in theirs if one.vpc_id != vpc), ""):
        raise CloudDDPError(
            f"{name} is in {other}, and the cluster in {vpc}", hint=f'create it there: vpc = "{other}"'
        )
    ids = sorted({group.group_id for one in theirs for group in one.groups})
    groups = aws.listed("ec2", "describe_security_groups", "SecurityGroups", _Group, GroupIds=ids)
    if not any(_admits(rule, node, port) for group in groups for rule in group.ip_permissions):
        words = ("--protocol", "tcp", "--port", str(port), "--source-group", node.groups[0])
        raise CloudDDPError(
            f"{name} does not admit the nodes: no rule of {', '.join(ids)} opens TCP port {port} to them",
            hint=ToolCommand("aws", "ec2", "authorize-security-group-ingress", "--group-id", ids[0], *words),
        )


def _admits(rule: dict[str, Any], node: Instance, port: int) -> bool:
    """Return whether a rule may admit a node; what a prefix list holds is not looked up."""
    is_open = rule.get("IpProtocol") == "tcp" and rule.get("FromPort", 0) <= port <= rule.get("ToPort", 65535)
    if not (is_open or rule.get("IpProtocol") == "-1"):
        return False
    groups = {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())}
    blocks = [str(one.get("CidrIp")) for one in rule.get("IpRanges", ())]
    inside = any(ip_address(node.private_ip) in ip_network(block, strict=False) for block in blocks)
    return bool(groups.intersection(node.groups)) or inside or bool(rule.get("PrefixListIds"))
