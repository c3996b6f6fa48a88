"""What `up` queries from AWS before it creates anything: identity, image, instance type, network. Read-only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.config.spec import ClusterSpec, nearest
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.text import one_line

UNKNOWN_OWNER = "unknown"  # if STS returns no ARN
CHECKIP = "https://checkip.amazonaws.com"


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """EC2's description of an instance type."""

    arch: str  # x86_64 or arm64
    gpus: int
    gpu_name: str
    vcpus: int
    cards: int  # network cards


def require_known_type(aws: AWS, name: str) -> None:
    """Raise UsageError for a type that is not in botocore's model of EC2. Makes no call."""
    known = aws.client("ec2").meta.service_model.shape_for("InstanceType").enum
    if name not in known:
        family = [k for k in known if k.split(".")[0] == name.split(".")[0]]
        near = nearest(name, family or known)
        raise UsageError(
            f"unknown instance type {name!r}",
            hint=f"{near if family or near.startswith('did') else 'for example g5.xlarge, p5.48xlarge'} "
            "(a type newer than your botocore: pip install -U boto3)",
        )


def instance_type(aws: AWS, spec: ClusterSpec) -> TypeInfo:
    """Return the type's data. Raises UsageError for a type without a GPU unless spec.allow_cpu."""
    answer = aws.call("ec2", "describe_instance_types", InstanceTypes=[spec.instance_type])
    if not answer["InstanceTypes"]:
        raise UsageError(
            f"{aws.region} does not offer {spec.instance_type}", hint="try another region or type"
        )
    info = answer["InstanceTypes"][0]
    gpus = info.get("GpuInfo", {}).get("Gpus", [])
    count = sum(int(gpu.get("Count", 0)) for gpu in gpus)
    if not count and not spec.allow_cpu:
        what = "a fraction of a GPU" if gpus else "no GPU"
        raise UsageError(
            f"{spec.instance_type} has {what}", hint="choose a GPU type such as g5.xlarge, or add --allow-cpu"
        )
    arch = "arm64" if "arm64" in info["ProcessorInfo"]["SupportedArchitectures"] else "x86_64"
    name = f"{gpus[0].get('Manufacturer', '')} {gpus[0].get('Name', '')}".strip() if gpus else ""
    cards = int(info.get("NetworkInfo", {}).get("MaximumNetworkCards", 1))
    return TypeInfo(arch, count, name, int(info["VCpuInfo"]["DefaultVCpus"]), cards)


@dataclass(frozen=True, slots=True)
class Image:
    """A machine image: its id, the device of its root volume, and the smallest size of that volume."""

    id: str
    root_device: str
    disk_gb: int


def image(aws: AWS, spec: ClusterSpec, arch: str) -> Image:
    """Return the image of `spec.image` (an id or an SSM parameter). Raises UsageError if the type cannot run it."""
    image_id = spec.image
    if image_id.startswith("/"):
        name = image_id.replace("{arch}", arch)
        image_id = aws.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"]
    found = aws.call("ec2", "describe_images", ImageIds=[image_id])["Images"]
    if not found:
        raise UsageError(
            f"image {image_id} does not exist in {aws.region}", hint="see `image` in cloudddp.toml"
        )
    data = found[0]
    if data.get("Architecture", arch) != arch:
        raise UsageError(f"image {image_id} is for {data['Architecture']}, {spec.instance_type} is {arch}")
    root = data.get("RootDeviceName") or "/dev/sda1"
    disks = [
        m.get("Ebs", {}).get("VolumeSize", 0)
        for m in data.get("BlockDeviceMappings", [])
        if m.get("DeviceName") == root
    ]
    return Image(image_id, root, max([int(d or 0) for d in disks], default=0))


@dataclass(frozen=True, slots=True)
class Network:
    vpc_id: str
    subnet_id: str
    zone: str


def network(aws: AWS, spec: ClusterSpec) -> Network:
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


# A role assumed without a session name: botocore and the SDKs generate a new name for each session.
_GENERATED = re.compile(r"(assumed-role/[^/]+)/(?:botocore-session|aws-sdk-[a-z-]+|aws-go-sdk)-[0-9]+")


def owner(aws: AWS) -> str:
    """Return the caller's identity in the form of the owner tag: the last part of the ARN, the same in every session."""
    arn = str(aws.call("sts", "get_caller_identity").get("Arn", ""))
    found = one_line(arn.rsplit(":", 1)[-1])[:200]
    generated = _GENERATED.fullmatch(found)
    return (generated.group(1) if generated else found) or UNKNOWN_OWNER


def caller_block() -> str:
    """Return this computer's address as AWS sees it, as a /32 or /128 block.

    CLOUDDDP_CHECKIP_URL selects another service that returns the caller's address as text.
    """
    import urllib.request  # takes 11 ms, which `status` does not need

    url = os.environ.get("CLOUDDDP_CHECKIP_URL", CHECKIP)
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an http or https URL")
        # Without the proxy of the environment: SSH does not use it either.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=10) as answer:
            address = ip_address(answer.read(100).decode().strip())
    except (OSError, ValueError) as error:
        raise CloudDDPError(
            f"cannot find the address of this computer: {url}: {error}",
            hint="give it: --ssh-from 203.0.113.7/32 (or ssh_from in cloudddp.toml)",
        ) from None
    return f"{address}/{address.max_prefixlen}"
