"""The RunInstances request of a cluster. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import MAX_TCP_TIMEOUT
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster import interfaces, placement_group
from cloudddp.cluster.plan_types import LaunchContext, Ref, Request, tagged
from cloudddp.cluster.prices import iops_of
from cloudddp.config import connection
from cloudddp.config.spec import ClusterSpec


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
    params: dict[str, Any] = {
        "ImageId": context.image.id,
        "InstanceType": spec.instance_type,
        # All or none: with one node missing the job cannot start, and the other nodes are billed
        # nevertheless.
        "MinCount": spec.nodes,
        "MaxCount": spec.nodes,
        "KeyName": key,
        "NetworkInterfaces": interfaces.specification(
            context.interfaces,
            subnet_id=subnet.id,
            group=Ref("security-group", "GroupId"),
            public=connection.mode(spec) == "public",
            ip_settings=_connection_tracking(context.info.tcp_timeout),
        ),
        "BlockDeviceMappings": [_root_volume(spec, context.image)],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": spec.imds_hop_limit,
        },
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tagged(tags, *kinds),
        "UserData": data,
    }
    if spec.instance_profile:
        by = "Arn" if spec.instance_profile.startswith("arn:") else "Name"
        params["IamInstanceProfile"] = {by: spec.instance_profile}
    if spec.spot:
        # A one-time request never launches a second instance.
        params["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
    if group := placement_group.name_for(context, spec.name, cluster_id):
        params["Placement"] = {"GroupName": group}
    if context.reservation is not None:
        params |= _into(context.reservation)
    params["ClientToken"] = client_token(cluster_id, 1, subnet.zone, params)
    return Request("nodes", "run_instances", params)


def _root_volume(spec: ClusterSpec, image: Image) -> dict[str, Any]:
    return {
        "DeviceName": image.root_device,
        "Ebs": {
            "VolumeSize": max(spec.disk_gb, image.disk_gb),
            "VolumeType": "gp3",
            "Throughput": spec.disk_throughput,
            "Iops": iops_of(spec.disk_throughput),
            "Encrypted": True,
            **({"KmsKeyId": spec.kms_key} if spec.kms_key else {}),
            "DeleteOnTermination": True,
        },
    }


def _into(reservation: Reservation) -> dict[str, Any]:
    target = {"CapacityReservationTarget": {"CapacityReservationId": reservation.id}}
    market = {"InstanceMarketOptions": {"MarketType": "capacity-block"}} if reservation.block else {}
    return {"CapacityReservationSpecification": target, **market}


def _connection_tracking(default: int) -> dict[str, Any]:
    """Return the setting that keeps idle connections alive on types that drop them after minutes (Nitro v6:
    350 s).

    The connections between ranks, to the rendezvous and of torchrun may be idle for longer: while a rank
    loads data, or compiles. Security groups track them, because no rule allows all addresses.
    """
    if default >= MAX_TCP_TIMEOUT:
        return {}
    return {"ConnectionTrackingSpecification": {"TcpEstablishedTimeout": MAX_TCP_TIMEOUT}}


def client_token(cluster_id: str, attempt: int, zone: str, params: Mapping[str, Any]) -> str:
    """Return the idempotency token of one launch, at most 64 ASCII characters (EC2).

    It contains the zone, because EC2 remembers tokens per zone, and begins with the cluster's id, which
    distinguishes the launch of `up` from others (node_ranks.py).
    """
    text = json.dumps([attempt, zone, params], sort_keys=True, default=repr)
    return f"{cluster_id}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"
