"""The AWS calls of a plan, as data: what they are made from, a value that an earlier call returns, and the
requests for the nodes, their network interfaces and their placement group. Pure.

With EFA the layout of the interfaces follows EC2's description of the type (DescribeInstanceTypes,
NetworkInfo), not a table. Source: EC2 User Guide, "Maximize network bandwidth on Amazon EC2 instances with
multiple network cards". Its section on P5 has two layouts; this is the one that saves addresses: an
`efa-only` interface has none, so a p5.48xlarge takes one address of the subnet and not 32.

A placement group of strategy `cluster` places nodes close together in one zone: lower latency, and a single
TCP flow gets 10 Gbps instead of 5 (EC2 User Guide, "Placement groups"). Its name contains the cluster's id:
names are unique in an account and region, and CreatePlacementGroup has no idempotency token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import MAX_TCP_TIMEOUT, TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster.prices import iops_of
from cloudddp.config.cluster_spec import Access, ClusterSpec, Machine, Placement, connection_mode
from cloudddp.errors import UsageError


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface: its network card, its device index on that card, and EC2's interface type."""

    card: int = 0
    device: int = 0
    kind: str = "interface"  # or efa (with an IP address), efa-only (without)

    @property
    def efa(self) -> bool:
        return self.kind != "interface"


ORDINARY = (Interface(),)


def choose_interfaces(spec: Placement, info: TypeInfo) -> tuple[Interface, ...]:
    """Return the interfaces of each node, the primary one first. EFA is for traffic between nodes: a single
    node gets it only if it is required. Raises UsageError if the type has none then."""
    if spec.require_efa and not info.max_efa:
        raise UsageError(
            f"{spec.instance_type} has no EFA",
            hint="choose a type with EFA, such as g5.8xlarge, p4d.24xlarge or p5.48xlarge, or omit "
            "--require-efa",
        )
    if not spec.efa or not info.max_efa or (spec.nodes == 1 and not spec.require_efa):
        return ORDINARY
    return _with_efa(info)


def _with_efa(info: TypeInfo) -> tuple[Interface, ...]:
    cards = sorted(info.network_cards, key=lambda card: card.index)
    if info.max_efa == 1 and "efa" in cards[0].kinds:
        return (Interface(kind="efa"),)  # one interface, so that EC2 can assign a public address
    # Card 0 may take an `efa-only` interface beside the primary one: not on p6-b300.
    takes_second = "efa-only" in cards[0].kinds and cards[0].interfaces > 1
    extra = [Interface(device=1, kind="efa-only")] if takes_second else []
    extra += [Interface(card.index, 0, "efa-only") for card in cards[1:] if "efa-only" in card.kinds]
    # The primary interface has no EFA here. EC2 refuses more EFA interfaces than the type's maximum.
    return (Interface(), *extra[: info.max_efa])


def efa_devices(interfaces: Sequence[Interface]) -> int:
    """Return how many EFA devices a node has."""
    return sum(interface.efa for interface in interfaces)


def needs_elastic_ip(spec: Access, interfaces: Sequence[Interface]) -> bool:
    """Return whether each node has to get an Elastic IP for its public address.

    EC2 assigns a public address at launch to an instance with a single interface only (API reference,
    InstanceNetworkInterfaceSpecification.AssociatePublicIpAddress).
    """
    return connection_mode(spec) == "public" and len(interfaces) > 1


def interface_parameters(
    interfaces: Sequence[Interface],
    *,
    subnet_id: str,
    group: object,
    public: bool,
    ip_settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the parameter NetworkInterfaces of RunInstances. `group`: the security group, or a Ref to it.
    `ip_settings`: more parameters of interfaces that have an IP address."""
    entries: list[dict[str, Any]] = []
    for interface in interfaces:
        entry: dict[str, Any] = {
            "DeviceIndex": interface.device,
            "SubnetId": subnet_id,
            "Groups": [group],
            "DeleteOnTermination": True,
        }
        if interface.efa or len(interfaces) > 1:
            entry["InterfaceType"] = interface.kind
        if len(interfaces) > 1:
            entry["NetworkCardIndex"] = interface.card
        else:
            entry["AssociatePublicIpAddress"] = public
        entries.append({**entry, **(ip_settings if interface.kind != "efa-only" else {})})
    return entries


@dataclass(frozen=True, slots=True)
class Ref:
    """The answer of an earlier step, by its key: `Ref("security-group", "GroupId")`."""

    step: str
    key: str


@dataclass(frozen=True, slots=True)
class Request:
    """One AWS call: the name of the step, the botocore method, its parameters (which may contain Refs)."""

    step: str
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What AWS answered before planning, and the time. `subnets`: one per zone, as they are tried."""

    region: str
    info: TypeInfo
    image: Image
    subnets: tuple[Subnet, ...]
    ssh_from: tuple[str, ...]
    owner: str
    now: datetime
    interfaces: tuple[Interface, ...] = ORDINARY  # of each node
    own_placement_group: bool = False  # whether the cluster gets a placement group
    reservation: Reservation | None = None


def tag_specifications(tags: list[dict[str, str]], *kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


PLACEMENT_STEP = "placement-group"


def wants_placement_group(spec: Placement, info: TypeInfo, reservation: Reservation | None) -> bool:
    """Return whether the cluster gets a placement group of its own.

    Not with a reservation: a capacity block supports no group, one that was created in a group needs that
    one, and for any other one EC2 may find only some of the instances close together, and refuses the rest
    (https://github.com/eksctl-io/eksctl/issues/7949: 11 of 16).
    """
    return reservation is None and spec.placement_group and spec.nodes > 1 and info.cluster_placement


def placement_group_name(cluster: str, cluster_id: str) -> str:
    """Return the name of a cluster's own placement group."""
    return f"cloudddp-{cluster}-{cluster_id}"


def placement_group_request(cluster: str, cluster_id: str, tags: list[dict[str, str]]) -> Request:
    params = {
        "GroupName": placement_group_name(cluster, cluster_id),
        "Strategy": "cluster",
        "TagSpecifications": tag_specifications(tags, "placement-group"),
    }
    return Request(PLACEMENT_STEP, "create_placement_group", params)


def run_instances(
    spec: ClusterSpec,
    context: LaunchContext,
    subnet: Subnet,
    tags: list[dict[str, str]],
    key: str,
    data: str,
    cluster_id: str,
) -> Request:
    """Return the launch of all nodes in one subnet."""
    kinds = ["instance", "volume", "network-interface"] + (["spot-instances-request"] if spec.spot else [])
    # Some types drop idle connections after minutes (Nitro v6: 350 s). Those between ranks, to the rendezvous
    # and of torchrun may be idle for longer: while a rank loads data, or compiles. Security groups track
    # them, because no rule allows all addresses.
    tracking = {"ConnectionTrackingSpecification": {"TcpEstablishedTimeout": MAX_TCP_TIMEOUT}}
    params: dict[str, Any] = {
        "ImageId": context.image.id,
        "InstanceType": spec.instance_type,
        # All or none: with one node missing the job cannot start, and the other nodes are billed
        # nevertheless.
        "MinCount": spec.nodes,
        "MaxCount": spec.nodes,
        "KeyName": key,
        "NetworkInterfaces": interface_parameters(
            context.interfaces,
            subnet_id=subnet.id,
            group=Ref("security-group", "GroupId"),
            public=connection_mode(spec) == "public",
            ip_settings=tracking if context.info.tcp_timeout < MAX_TCP_TIMEOUT else {},
        ),
        "BlockDeviceMappings": [_root_volume(spec, context.image)],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": spec.imds_hop_limit,
        },
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tag_specifications(tags, *kinds),
        "UserData": data,
    }
    if spec.instance_profile:
        by = "Arn" if spec.instance_profile.startswith("arn:") else "Name"
        params["IamInstanceProfile"] = {by: spec.instance_profile}
    if context.info.burstable:
        # "unlimited", the default of most types, bills CPU beyond the baseline, which no price list has (EC2
        # User Guide, "Unlimited mode for burstable performance instances").
        params["CreditSpecification"] = {"CpuCredits": "standard"}
    if spec.spot:
        # A one-time request never launches a second instance.
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    group = placement_group_name(spec.name, cluster_id) if context.own_placement_group else ""
    if (reservation := context.reservation) is not None:
        target = {"CapacityReservationId": reservation.id}
        params["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
        group = reservation.placement_group
        if reservation.block:
            params["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if group:
        params["Placement"] = {"GroupName": group}
    params["ClientToken"] = client_token(cluster_id, 1, subnet.zone, params)
    return Request("nodes", "run_instances", params)


def is_spot(launch: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a launch are for the spot market."""
    options = launch.get("InstanceMarketOptions")
    return isinstance(options, Mapping) and options.get("MarketType") == "spot"


def on_demand(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a spot launch as those of one on demand."""
    kept = {key: value for key, value in launch.items() if key != "InstanceMarketOptions"}
    tags = [one for one in launch["TagSpecifications"] if one["ResourceType"] != "spot-instances-request"]
    return {**kept, "TagSpecifications": tags}


def _root_volume(spec: Machine, image: Image) -> dict[str, Any]:
    return {
        "DeviceName": image.root_device,
        "Ebs": {
            "VolumeSize": max(spec.disk_gb, image.disk_gb),
            "VolumeType": "gp3",
            "Throughput": spec.disk_throughput,
            "Iops": iops_of(spec.disk_throughput),
            **({"VolumeInitializationRate": spec.volume_init_rate} if spec.volume_init_rate else {}),
            "Encrypted": True,
            **({"KmsKeyId": spec.kms_key} if spec.kms_key else {}),
            "DeleteOnTermination": True,
        },
    }


def client_token(cluster_id: str, attempt: int, zone: str, params: Mapping[str, Any]) -> str:
    """Return the idempotency token of one launch, at most 64 ASCII characters (EC2). EC2 remembers tokens per
    zone, so it contains the zone; it begins with the cluster's id, by which model.py knows the nodes."""
    text = json.dumps([attempt, zone, params], sort_keys=True, default=repr)
    return f"{cluster_id}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"
