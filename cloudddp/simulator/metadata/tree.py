"""The metadata of an instance as a tree of folders and leaves, from moto's Instance."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.ec2 import instance_status, key_pairs, role_sessions

_VERSION = re.compile(r"latest|1\.0|\d{4}-\d\d-\d\d")


_VERSIONS = ("1.0", "2021-07-15", "latest")
_LISTING = ""  # key of a folder's listing, where it differs from the list of its names

Tree = dict[str, Any]  # name -> text, bytes, or another Tree


@dataclass(frozen=True, slots=True)
class Notice:
    """The interruption notice of a spot instance: when it was given, and when the instance ends. Both in
    UTC."""

    given: datetime
    ends: datetime


def tree_of(instance: Any, notice: Notice | None) -> Tree:
    """Return the metadata of an instance."""
    user_data = base64.b64decode(str(instance.user_data or ""))
    return {
        "dynamic": {"instance-identity": {"document": _identity_document(instance)}},
        "meta-data": {**_metadata(instance), **_interruption(instance, notice)},
        **({"user-data": user_data} if user_data else {}),
    }


def find(tree: Tree, path: str) -> bytes | None:
    """Return what is at /VERSION/... of the tree: a leaf, or the listing of a folder; None if there is
    nothing."""
    version, *names = [name for name in path.split("/") if name] or [""]
    if not version:
        return "\n".join(_VERSIONS).encode()
    if not _VERSION.fullmatch(version):
        return None
    current: Any = tree
    for name in names:
        if not isinstance(current, dict) or name == _LISTING or name not in current:
            return None
        current = current[name]
    if not isinstance(current, dict):
        return current if isinstance(current, bytes) else str(current).encode()
    listing = current.get(_LISTING) or "\n".join(
        f"{name}/" if isinstance(child, dict) else name for name, child in sorted(current.items())
    )
    return str(listing).encode()


def _metadata(instance: Any) -> Tree:
    """Return meta-data/. As on EC2, names that do not apply to the instance are missing."""
    primary = instance.nics[0]
    tree: Tree = {
        "ami-id": instance.image_id,
        "ami-launch-index": instance.ami_launch_index,
        "ami-manifest-path": "(unknown)",
        "block-device-mapping": {"ami": instance.root_device_name, "root": instance.root_device_name},
        "events": {"maintenance": _maintenance(instance)},
        "hostname": instance.private_dns_name,
        "instance-action": "none",
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": instance.private_dns_name,
        "local-ipv4": instance.private_ip,
        "mac": primary.mac_address,
        "network": {
            "interfaces": {
                "macs": {f"{nic.mac_address}": _interface(instance, nic) for nic in instance.nics.values()}
            }
        },
        "placement": _placement(instance),
        "profile": "default-hvm",
        "reservation-id": instance.reservation_id,
        "security-groups": "\n".join(group.name for group in primary.group_set),
        "services": {"domain": "amazonaws.com", "partition": "aws"},
        "system": "nitro",
    }
    if (profile := role_sessions.profile_of(instance)) is not None:
        tree["iam"] = _iam(instance, profile)
    if instance.public_ip:
        tree |= {"public-hostname": instance.public_dns_name, "public-ipv4": instance.public_ip}
    if key := key_pairs.public_key(instance):
        tree["public-keys"] = {_LISTING: f"0={instance.key_name}", "0": {"openssh-key": key}}
    if instance.metadata_options.instance_metadata_tags == "enabled":
        tree["tags"] = {"instance": {tag["key"]: tag["value"] for tag in instance.get_tags()}}
    return tree


def _iam(instance: Any, profile: Any) -> Tree:
    """Return the instance profile, and the credentials of its role if it has one."""
    now = _iso(datetime.now(UTC))
    info = {
        "Code": "Success",
        "LastUpdated": now,
        "InstanceProfileArn": profile.arn,
        "InstanceProfileId": profile.id,
    }
    tree: Tree = {"info": json.dumps(info, indent=2)}
    if (role := next(iter(profile.roles), None)) is not None:
        session = role_sessions.session_of(instance, role)
        credentials = {
            "Code": "Success",
            "LastUpdated": now,
            "Type": "AWS-HMAC",
            "AccessKeyId": session.access_key_id,
            "SecretAccessKey": session.secret_access_key,
            "Token": session.session_token,
            "Expiration": _iso(role_sessions.end_of(session)),
        }
        tree["security-credentials"] = {role.name: json.dumps(credentials, indent=2)}
    return tree


def _interface(instance: Any, nic: Any) -> Tree:
    groups, subnet = list(nic.group_set), nic.subnet
    vpc = instance.ec2_backend.get_vpc(subnet.vpc_id)
    tree: Tree = {
        "device-number": nic.device_index or 0,
        "interface-id": nic.id,
        "mac": nic.mac_address,
        "owner-id": instance.owner_id,
        "security-group-ids": "\n".join(group.id for group in groups),
        "security-groups": "\n".join(group.name for group in groups),
        "subnet-id": subnet.id,
        "subnet-ipv4-cidr-block": subnet.cidr_block,
        "vpc-id": subnet.vpc_id,
        "vpc-ipv4-cidr-block": vpc.cidr_block,
        "vpc-ipv4-cidr-blocks": vpc.cidr_block,
    }
    if card := getattr(nic, "network_card_index", 0):
        tree["network-card"] = card
    if nic.private_ip_address:  # an efa-only interface has none
        tree |= {"local-hostname": instance.private_dns_name, "local-ipv4s": nic.private_ip_address}
    if nic.public_ip:
        tree |= {"public-ipv4s": nic.public_ip, "ipv4-associations": {nic.public_ip: nic.private_ip_address}}
    return tree


def _placement(instance: Any) -> Tree:
    zone = instance.availability_zone
    tree: Tree = {"availability-zone": zone, "region": instance.region_name}
    if found := instance.ec2_backend.get_zone_by_name(zone):
        tree["availability-zone-id"] = found.zone_id
    if instance.placement.group_name:
        tree["group-name"] = instance.placement.group_name
    return tree


def _maintenance(instance: Any) -> Tree:
    return {
        "history": json.dumps(instance_status.events_in_metadata(instance, completed=True)),
        "scheduled": json.dumps(instance_status.events_in_metadata(instance, completed=False)),
    }


def _interruption(instance: Any, notice: Notice | None) -> Tree:
    """Return what a spot instance reads after its notice; the rebalance recommendation comes at the same
    time."""
    if notice is None:
        return {}
    ends = _iso(notice.ends)
    return {
        "events": {
            "maintenance": _maintenance(instance),
            "recommendations": {"rebalance": json.dumps({"noticeTime": _iso(notice.given)})},
        },
        "spot": {
            "instance-action": json.dumps({"action": "terminate", "time": ends}),
            "termination-time": ends,
        },
    }


def _identity_document(instance: Any) -> str:
    """Return the identity document. Only AWS can sign one, so the signatures are missing."""
    empty = ("billingProducts", "devpayProductCodes", "kernelId", "marketplaceProductCodes", "ramdiskId")
    values = {
        "accountId": instance.owner_id,
        "architecture": instance.architecture,
        "availabilityZone": instance.availability_zone,
        "imageId": instance.image_id,
        "instanceId": instance.id,
        "instanceType": instance.instance_type,
        "pendingTime": _iso(instance.launch_time.replace(tzinfo=UTC)),
        "privateIp": instance.private_ip,
        "region": instance.region_name,
        "version": "2017-09-30",
    }
    return json.dumps({**dict.fromkeys(empty), **values}, sort_keys=True, indent=2)


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
