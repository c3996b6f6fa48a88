"""ClusterSpec + what AWS told us -> Plan: the exact requests, their order, the deadline and the price. Pure.

The plan is the first half of the real path: `up` carries out what is written here, `--dry-run` prints it after
carrying it out in a rehearsal. A value that an earlier answer supplies is a `Ref`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp import __version__
from cloudddp.errors import UsageError
from cloudddp.prices import Price
from cloudddp.spec import ClusterSpec
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

WHY_CALLER = (
    "cloudddp caller"  # descriptions of the rules that open SSH: `allow-me` replaces only the first kind
)
WHY_GIVEN = "cloudddp ssh_from"

TIMER = "/etc/systemd/system/cloudddp-deadline.timer"
SERVICE = "/etc/systemd/system/cloudddp-deadline.service"
BOOT_CHECK = "/var/lib/cloud/scripts/per-boot/cloudddp-deadline"
USER_DATA_LIMIT = 16 * 1024  # bytes, before base64 (EC2)
SHORTEST = timedelta(minutes=10)  # less than this is gone before the nodes have booted


@dataclass(frozen=True, slots=True)
class Ref:
    """The answer of an earlier step, by its key: `Ref("security-group", "GroupId")`."""

    step: str
    key: str


@dataclass(frozen=True, slots=True)
class Request:
    """One AWS call: the step's name, boto3's method, its parameters (which may hold Refs)."""

    step: str
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """What had to be asked of AWS before planning: image, type, network, who and when."""

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
    """The keys of one cluster. The private host key travels in the user data and nowhere else; what runs on a node can
    read it there, so each node replaces it by one of its own (host_keys.py) before anything does."""

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
    """Return the name of a cluster's key pair, which reserves the cluster's own name; see reservation.py."""
    return f"cloudddp-{name}"


def lifetime(spec: ClusterSpec, price: Price) -> timedelta:
    """Return how long the cluster may live: the shorter of max_hours and what max_cost buys."""
    hours = spec.max_hours
    if spec.max_cost is not None:
        hours = min(hours, spec.max_cost / price.hour)
    life = timedelta(seconds=int(hours * 3600))
    if life < SHORTEST:
        least = (
            int(price.hour * SHORTEST.total_seconds() / 36 + 1) / 100
        )  # to the next cent, so that it suffices
        raise UsageError(
            f"the cluster would end {life.total_seconds() / 60:.1f} minutes after its start: "
            f"{spec.nodes} x {spec.instance_type} cost ${price.hour:.2f} an hour",
            hint=f"nodes need minutes to boot; allow at least ${least:.2f} and 0.17 hours",
        )
    return life


def plan(
    spec: ClusterSpec, place: Place, identity: Identity, price: Price, *, units: tuple[str, str]
) -> Plan:
    """Return the requests that make the cluster. `units` are the texts of the deadline's timer and service."""
    created = place.now.replace(microsecond=0)
    expires = created + lifetime(spec, price)
    tags = [
        {"Key": key, "Value": value}
        for key, value in {
            TAG_CLUSTER: spec.name,
            TAG_ID: identity.cluster_id,
            TAG_OWNER: place.owner,
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
    why = WHY_GIVEN if spec.ssh_from else WHY_CALLER
    requests = (
        # First, since it reserves the name: whoever is second has made nothing when EC2 refuses it.
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
                "VpcId": place.vpc_id,
                "TagSpecifications": _tagged(tags, "security-group"),
            },
        ),
        _rules("ingress", [_itself(), *(ssh_rule(block, spec.ssh_port, why) for block in place.ssh_from)]),
        _rules("egress", [_itself()]),  # EFA wants the group itself as destination, 0.0.0.0/0 does not count
        _run_instances(spec, place, tags, key, data, identity.cluster_id),
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


def _itself() -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": Ref("security-group", "GroupId")}]}


def ssh_rule(block: str, port: int, why: str) -> dict[str, Any]:
    """Return the permission that opens SSH to one address block."""
    ranges = (
        {"Ipv6Ranges": [{"CidrIpv6": block, "Description": why}]}
        if ":" in block
        else {"IpRanges": [{"CidrIp": block, "Description": why}]}
    )
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **ranges}


def _run_instances(
    spec: ClusterSpec, place: Place, tags: list[dict[str, str]], key: str, data: str, cluster_id: str
) -> Request:
    kinds = ["instance", "volume", "network-interface"] + (["spot-instances-request"] if spec.spot else [])
    params: dict[str, Any] = {
        "ImageId": place.image_id,
        "InstanceType": spec.instance_type,
        # All or none: a gang with a node missing trains nothing and bills all the same.
        "MinCount": spec.nodes,
        "MaxCount": spec.nodes,
        "KeyName": key,
        "NetworkInterfaces": [
            {
                "DeviceIndex": 0,
                "SubnetId": place.subnet_id,
                "Groups": [Ref("security-group", "GroupId")],
                "AssociatePublicIpAddress": True,
                "DeleteOnTermination": True,
            }
        ],
        "BlockDeviceMappings": [
            {
                "DeviceName": place.root_device,
                "Ebs": {
                    "VolumeSize": max(spec.disk_gb, place.image_disk_gb),
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
        # One-time and terminate: nothing launches again behind our back.
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    params["ClientToken"] = client_token(cluster_id, 1, place.zone, params)
    return Request("nodes", "run_instances", params)


def client_token(cluster_id: str, attempt: int, zone: str, params: Mapping[str, Any]) -> str:
    """Return EC2's idempotency token of one launch. The zone is in it, since EC2 remembers tokens by zone."""
    text = json.dumps([cluster_id, attempt, zone, params], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:48]


def user_data(identity: Identity, created: datetime, expires: datetime, units: tuple[str, str]) -> str:
    """Return the cloud-config that gives a node its first host key and arms its deadline. It holds no other secret, and
    that one is worthless when the node is ready.

    JSON after the first line: it is YAML, and quotes every value. cloud-init writes the host key before sshd
    starts (unit order of cloud-init-network), so sshd never shows another one, and does so once an instance (cc_ssh:
    PER_INSTANCE), so a reboot keeps the key that has replaced it. BOOT_CHECK, which cloud-init runs at
    every boot, ends a node that boots after its deadline: a timer whose moment has passed when it is first started
    never fires, nor does one that fired just before a reboot, or whose stamp a wrong clock has put into the future.
    The last command runs it again, for a deadline that passes before the timer is armed.
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
        raise UsageError(f"user data of {len(text)} bytes is over EC2's limit of {USER_DATA_LIMIT}")
    return text
