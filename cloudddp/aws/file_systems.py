"""Shared file systems by id: Amazon EFS and FSx for Lustre, and whether nodes reach them. Read-only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from cloudddp.aws.answers import Address, Answer, Id
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.errors import AWSError, CloudDDPError, UsageError
from cloudddp.text import one_line

T = TypeVar("T")


class _Target(Answer, frozen=True):
    network_interface_id: Id
    ip_address: Address
    life_cycle_state: str
    availability_zone_name: str = ""


class _Lustre(Answer, frozen=True, kw_only=True):
    file_system_type: str
    dns_name: Id = msgspec.field(default="", name="DNSName")
    network_interface_ids: tuple[Id, ...] = ()
    mount_name: Id | None = msgspec.field(default=None, name="LustreConfiguration.MountName")


class _Interface(Answer, frozen=True):
    network_interface_id: Id
    vpc_id: Id


def find(aws: AWS, name: str, node: Instance, warn: Callable[[str], None]) -> str:
    """Return what mount(8) mounts for a file system that the nodes reach. Raises UsageError if there is none
    of this id and of a type that is supported; CloudDDPError if it is not available, or in another VPC. Makes
    2 or 3 calls. `warn` is called if EFS has a mount target in another zone only."""
    targets = _found(aws, "efs", "describe_mount_targets", _Target, FileSystemId=name)
    if targets is not None:
        usable = [one for one in targets if one.life_cycle_state == "available"]
        usable.sort(key=lambda one: one.availability_zone_name != node.zone)
        if not usable:
            hint = f"create one in zone {node.zone}, in the cluster's VPC"
            raise CloudDDPError(f"{name} has no mount target that is available", hint=hint)
        _check_network(aws, name, node, (usable[0].network_interface_id,))
        if (zone := usable[0].availability_zone_name) not in ("", node.zone):
            warn(
                f"{name} has no mount target in zone {node.zone}: nodes use that of {one_line(zone, 40)}, "
                "and AWS bills what they read and write between zones"
            )
        return f"{usable[0].ip_address}:/"
    listed = _found(aws, "fsx", "describe_file_systems", _Lustre, FileSystemIds=[name])
    if not listed:
        what = f"there is no file system {name} of EFS or FSx in {aws.region}"
        raise UsageError(what, hint="correct [[shared]] source")
    found = listed[0]
    if found.mount_name is None:
        kind = one_line(found.file_system_type, 40)
        raise UsageError(f"{name} is FSx for {kind}", hint="EFS and FSx for Lustre are supported")
    if not found.network_interface_ids:
        raise CloudDDPError(f"{name} has no network interface yet", hint="wait until it is AVAILABLE")
    _check_network(aws, name, node, found.network_interface_ids[:10])
    return f"{found.dns_name}@tcp:/{found.mount_name}"


def _found(aws: AWS, service: str, method: str, kind: type[T], **params: Any) -> list[T] | None:
    """Return what `aws.listed` does; None for a file system that the service does not have."""
    try:
        return aws.listed(method, kind, service=service, **params)
    except AWSError as error:
        if error.code != "FileSystemNotFound":
            raise
        return None


def _check_network(aws: AWS, name: str, node: Instance, interfaces: tuple[str, ...]) -> None:
    """Raise CloudDDPError for a file system in another VPC. Whether its security groups admit the nodes shows
    when it is mounted."""
    asked = sorted({node.interface, *interfaces})
    described = aws.listed("describe_network_interfaces", _Interface, NetworkInterfaceIds=asked)
    vpcs = {one.network_interface_id: one.vpc_id for one in described}
    own = vpcs.pop(node.interface)
    if other := next((vpc for vpc in vpcs.values() if vpc != own), ""):
        raise CloudDDPError(
            f"{name} is in {other}, and the cluster in {own}", hint=f'create it there: vpc = "{other}"'
        )
