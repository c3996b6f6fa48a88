"""ClusterSpec + what AWS answered -> Plan: the exact requests, their order, the deadline and the price. Pure.

`up` sends exactly the planned requests; `--dry-run` sends them to an in-process moto and prints them. A value that
comes from an earlier answer is a `Ref`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp import __version__
from cloudddp.cluster.prices import Price
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import UsageError
from cloudddp.tags import (
    TAG_CLUSTER,
    TAG_CREATED,
    TAG_EXPIRES,
    TAG_ID,
    TAG_NODES,
    TAG_OWNER,
    TAG_PRICE,
    TAG_VERSION,
    iso,
)

# Descriptions of the rules that open SSH: `allow-me` replaces only the first kind.
CALLER_RULE = "cloudddp caller"
CONFIG_RULE = "cloudddp ssh_from"

TIMER = "/etc/systemd/system/cloudddp-deadline.timer"
SERVICE = "/etc/systemd/system/cloudddp-deadline.service"
BOOT_CHECK = "/var/lib/cloud/scripts/per-boot/cloudddp-deadline"
USER_DATA_LIMIT = 16 * 1024  # bytes, before base64 (EC2)
SHORTEST = timedelta(minutes=10)  # a shorter one would pass while the nodes boot


@dataclass(frozen=True, slots=True)
class Ref:
    """The answer of an earlier step, by its key: `Ref("security-group", "GroupId")`."""

    step: str
    key: str


@dataclass(frozen=True, slots=True)
class Request:
    """One AWS call: the name of the step, the boto3 method, its parameters (which may contain Refs)."""

    step: str
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What AWS answered before planning: image, network, owner; and the time."""

    image_id: str
    root_device: str
    image_disk_gb: int
    vpc_id: str
    subnet_id: str
    zone: str
    ssh_from: tuple[str, ...]
    owner: str
    now: datetime


@dataclass(frozen=True, slots=True)
class Identity:
    """The id and the keys of one cluster.

    The private host key is in the user data and nowhere else. Every process on a node can read it there, so each node
    replaces it by a key of its own before any rank runs (host_keys.py).
    """

    cluster_id: str
    public_key: str
    host_private: str
    host_public: str


@dataclass(frozen=True, slots=True)
class Plan:
    cluster_id: str
    requests: tuple[Request, ...]
    price: Price
    created: datetime
    expires: datetime

    @property
    def hours(self) -> float:
        return (self.expires - self.created).total_seconds() / 3600

    @property
    def cost(self) -> float:
        """USD if the cluster runs until its deadline."""
        return self.price.hour * self.hours


def key_name(name: str) -> str:
    """Return the name of a cluster's key pair, which is the lock on the cluster's name: see name_lock.py."""
    return f"cloudddp-{name}"


def lifetime(spec: ClusterSpec, price: Price) -> timedelta:
    """Return how long the cluster may live: max_hours, or the time that max_cost pays for if that is less.

    Raises UsageError if that is too short for the nodes to boot.
    """
    hours = spec.max_hours
    if spec.max_cost is not None:
        hours = min(hours, spec.max_cost / price.hour)
    life = timedelta(seconds=int(hours * 3600))
    if life < SHORTEST:
        least = int(price.hour * SHORTEST.total_seconds() / 36 + 1) / 100  # rounded up to a cent
        raise UsageError(
            f"the cluster would terminate {life.total_seconds() / 60:.1f} minutes after its start: "
            f"{spec.nodes} x {spec.instance_type} cost ${price.hour:.2f} an hour",
            hint=f"nodes take minutes to boot; allow at least ${least:.2f} and 0.17 hours",
        )
    return life


def plan(
    spec: ClusterSpec, context: LaunchContext, identity: Identity, price: Price, *, units: tuple[str, str]
) -> Plan:
    """Return the requests that create the cluster. `units` are the texts of the deadline's timer and service."""
    created = context.now.replace(microsecond=0)
    expires = created + lifetime(spec, price)
    tags = [
        {"Key": key, "Value": value}
        for key, value in {
            TAG_CLUSTER: spec.name,
            TAG_ID: identity.cluster_id,
            TAG_OWNER: context.owner,
            TAG_CREATED: iso(created),
            TAG_EXPIRES: iso(expires),
            TAG_VERSION: __version__,
            TAG_NODES: str(spec.nodes),
            TAG_PRICE: f"{price.hour / spec.nodes:.4f}",
            "Name": f"cloudddp-{spec.name}",
        }.items()
    ]
    key = key_name(spec.name)
    data = user_data(identity, created, expires, units)
    description = CONFIG_RULE if spec.ssh_from else CALLER_RULE
    requests = (
        # First, because it locks the name: if another cluster has it, EC2 refuses and nothing has been created.
        Request(
            "key-pair",
            "import_key_pair",
            {
                "KeyName": key,
                "PublicKeyMaterial": identity.public_key.encode(),
                "TagSpecifications": _tagged(tags, "key-pair"),
            },
        ),
        Request(
            "security-group",
            "create_security_group",
            {
                "GroupName": f"{key}-{identity.cluster_id}",
                "Description": f"cloudddp cluster {spec.name}: all traffic within, SSH from the caller",
                "VpcId": context.vpc_id,
                "TagSpecifications": _tagged(tags, "security-group"),
            },
        ),
        _rules(
            "ingress",
            [_self_reference(), *(ssh_rule(b, spec.ssh_port, description) for b in context.ssh_from)],
        ),
        _rules(
            "egress", [_self_reference()]
        ),  # EFA needs the group itself as destination; 0.0.0.0/0 is not enough
        _run_instances(spec, context, tags, key, data, identity.cluster_id),
    )
    return Plan(identity.cluster_id, requests, price, created, expires)


def _tagged(tags: list[dict[str, str]], *kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


def _rules(direction: str, permissions: list[dict[str, Any]]) -> Request:
    return Request(
        f"{direction}-rules",
        f"authorize_security_group_{direction}",
        {"GroupId": Ref("security-group", "GroupId"), "IpPermissions": permissions},
    )


def _self_reference() -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": Ref("security-group", "GroupId")}]}


def ssh_rule(block: str, port: int, description: str) -> dict[str, Any]:
    """Return the permission that opens SSH to one address block."""
    ranges = (
        {"Ipv6Ranges": [{"CidrIpv6": block, "Description": description}]}
        if ":" in block
        else {"IpRanges": [{"CidrIp": block, "Description": description}]}
    )
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **ranges}


def _run_instances(
    spec: ClusterSpec,
    context: LaunchContext,
    tags: list[dict[str, str]],
    key: str,
    data: str,
    cluster_id: str,
) -> Request:
    kinds = ["instance", "volume", "network-interface"] + (["spot-instances-request"] if spec.spot else [])
    params: dict[str, Any] = {
        "ImageId": context.image_id,
        "InstanceType": spec.instance_type,
        # All or none: with one node missing the job cannot start, and the other nodes are billed nevertheless.
        "MinCount": spec.nodes,
        "MaxCount": spec.nodes,
        "KeyName": key,
        "NetworkInterfaces": [
            {
                "DeviceIndex": 0,
                "SubnetId": context.subnet_id,
                "Groups": [Ref("security-group", "GroupId")],
                "AssociatePublicIpAddress": True,
                "DeleteOnTermination": True,
            }
        ],
        "BlockDeviceMappings": [
            {
                "DeviceName": context.root_device,
                "Ebs": {
                    "VolumeSize": max(spec.disk_gb, context.image_disk_gb),
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 1,
        },
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": _tagged(tags, *kinds),
        "UserData": data,
    }
    if spec.spot:
        # A one-time request never launches a second instance.
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    params["ClientToken"] = client_token(cluster_id, 1, context.zone, params)
    return Request("nodes", "run_instances", params)


def client_token(cluster_id: str, attempt: int, zone: str, params: Mapping[str, Any]) -> str:
    """Return the idempotency token of one launch, at most 64 ASCII characters (EC2).

    It contains the zone, because EC2 remembers tokens per zone, and begins with the cluster's id, which
    distinguishes the launch of `up` from others (node_ranks.py).
    """
    text = json.dumps([attempt, zone, params], sort_keys=True, default=repr)
    return f"{cluster_id}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def user_data(identity: Identity, created: datetime, expires: datetime, units: tuple[str, str]) -> str:
    """Return the cloud-config that installs the first host key of a node and arms its deadline.

    It contains no other secret, and that key is worthless once the node is ready. After the first line it is JSON, which
    is YAML with every value quoted. cloud-init writes the host key before sshd starts (unit order of
    cloud-init-network), so sshd never presents another one; it does so once per instance (cc_ssh: PER_INSTANCE), so the
    key that replaced it survives a reboot. cloud-init runs BOOT_CHECK at every boot, which shuts down a node that boots
    after its deadline: a timer that is first started after its time never fires, nor does one that fired just before a
    reboot, nor one whose stamp a wrong clock put into the future. The last command runs it again, for a deadline that
    passes before the timer is armed.
    """
    deadline = expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lifetime = str(int((expires - created).total_seconds()))
    timer, service = (u.replace("@DEADLINE@", deadline).replace("@LIFETIME@", lifetime) for u in units)
    late = f'[ "$(date +%s)" -lt {int(expires.timestamp())} ] || systemctl start --no-block cloudddp-deadline.service'
    check = f"#!/bin/sh\n{late}\n"
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": identity.host_private, "ed25519_public": identity.host_public},
        "write_files": [
            {"path": TIMER, "permissions": "0644", "content": timer},
            {"path": SERVICE, "permissions": "0644", "content": service},
            {"path": BOOT_CHECK, "permissions": "0755", "content": check},
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", "cloudddp-deadline.timer"],
            ["sh", BOOT_CHECK],
        ],
    }
    text = "#cloud-config\n" + json.dumps(config, indent=1) + "\n"
    if len(text.encode()) > USER_DATA_LIMIT:
        raise UsageError(f"user data of {len(text)} bytes exceeds EC2's limit of {USER_DATA_LIMIT}")
    return text
