"""Networks: the VPC, subnet and zone of a cluster's nodes. Read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, UsageError


@dataclass(frozen=True, slots=True)
class Network:
    vpc_id: str
    subnet_id: str
    zone: str


def choose(aws: AWS, spec: ClusterSpec) -> Network:
    """Return one subnet for all nodes: in a zone that offers the type, with enough free addresses."""
    vpc_id = spec.vpc
    filters: list[dict[str, Any]] = [{"Name": "state", "Values": ["available"]}]
    if spec.subnet:
        filters.append({"Name": "subnet-id", "Values": [spec.subnet]})
    else:
        vpc_id = vpc_id or _default_vpc(aws)
        filters.append({"Name": "vpc-id", "Values": [vpc_id]})
    subnets = aws.pages("ec2", "describe_subnets", "Subnets", Filters=filters)
    offered = {
        offering["Location"]
        for offering in aws.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [spec.instance_type]}],
        )
    }
    return _choose(spec, subnets, offered, vpc_id, aws.region)


def _default_vpc(aws: AWS) -> str:
    answer = aws.call("ec2", "describe_vpcs", Filters=[{"Name": "is-default", "Values": ["true"]}])
    if not answer["Vpcs"]:
        raise CloudDDPError(
            f"this account has no default VPC in {aws.region}",
            hint="give --vpc vpc-... (or --subnet), or create one: `aws ec2 create-default-vpc`",
        )
    return str(answer["Vpcs"][0]["VpcId"])


def _choose(
    spec: ClusterSpec, subnets: list[dict[str, Any]], offered: set[str], vpc_id: str | None, region: str
) -> Network:
    if not subnets:
        raise UsageError(
            f"no subnet {spec.subnet or 'in ' + str(vpc_id)} in {region}", hint="give --subnet or --vpc"
        )
    if spec.zone and not any(s["AvailabilityZone"] == spec.zone for s in subnets):
        zones = sorted({s["AvailabilityZone"] for s in subnets})
        raise UsageError(
            f"no subnet of {vpc_id or spec.subnet} is in zone {spec.zone}", hint="zones: " + ", ".join(zones)
        )
    good = [
        s for s in subnets
        if s["AvailabilityZone"] in offered and (not spec.zone or s["AvailabilityZone"] == spec.zone)
    ]  # fmt: skip
    if not good:
        raise UsageError(
            f"{spec.instance_type} is not offered in "
            + (f"zone {spec.zone}" if spec.zone else "any zone that has a subnet here"),
            hint="offered in: " + (", ".join(sorted(offered)) or f"no zone of {region}"),
        )
    large = [s for s in good if s["AvailableIpAddressCount"] >= spec.nodes]
    if not large:
        raise CloudDDPError(
            f"no subnet has {spec.nodes} free addresses: "
            + ", ".join(f"{s['SubnetId']} {s['AvailableIpAddressCount']}" for s in good),
            hint="give a larger --subnet, or fewer --nodes",
        )
    # A subnet that assigns public addresses most likely has a route to the internet, and so SSH can reach it.
    best = min(
        large,
        key=lambda s: (
            not s.get("MapPublicIpOnLaunch"),
            s["AvailabilityZone"],
            not s.get("DefaultForAz"),
            s["SubnetId"],
        ),
    )
    if spec.vpc and best["VpcId"] != spec.vpc:
        raise UsageError(
            f"subnet {best['SubnetId']} is in {best['VpcId']}, not in {spec.vpc}",
            hint="give only one of --vpc and --subnet",
        )
    return Network(best["VpcId"], best["SubnetId"], best["AvailabilityZone"])
