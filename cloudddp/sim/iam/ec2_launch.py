"""The checks of RunInstances: on everything that a launch uses, and on everything that it creates."""

from __future__ import annotations

from collections.abc import Iterator

from cloudddp.sim.iam.evaluate import Check
from cloudddp.sim.iam.request import Request, Resource, Resources, request_tags, resource_keys


def launch(request: Request, resources: Resources) -> Iterator[Check]:
    """Yield the checks of a launch, one for each of its resources."""
    image = resources.find("image", request.text("ImageId"))
    subnets = _subnets(request, resources)
    zone = next((one.keys.get("ec2:AvailabilityZone", "") for one in subnets), "")
    zone = request.text("Placement.AvailabilityZone") or zone
    yield _existing(request, "image", image)
    yield _instance(request, zone)
    yield from _interfaces(request, resources, zone)
    for kind, names in _used(request).items():
        for name in dict.fromkeys(names):
            yield _existing(request, kind, resources.find(kind, name))
    for subnet in subnets:
        yield _existing(request, "subnet", subnet)
    yield from _volumes(request, zone)
    if tags := request.created_tags().get("spot-instances-request"):
        yield request.check(request.arn("spot-instances-request"), request_tags(tags))
    if profile := request.text("IamInstanceProfile.Arn") or request.text("IamInstanceProfile.Name"):
        role = f"arn:aws:iam::{request.account}:role/{profile.rpartition('/')[2]}"
        yield request.check(role, {"iam:PassedToService": ("ec2.amazonaws.com",)}, action="iam:PassRole")


def _existing(request: Request, kind: str, resource: Resource) -> Check:
    return request.check(request.arn(kind, resource), resource_keys(resource))


def _used(request: Request) -> dict[str, list[str]]:
    """Return the names of the other existing resources of a launch, by type."""
    groups = request.values("SecurityGroupId") + request.values("SecurityGroup")
    existing = False  # an interface, which has its groups
    for item in request.items("NetworkInterface"):
        groups += request.values(f"{item}SecurityGroupId")
        existing = existing or f"{item}NetworkInterfaceId" in request.parameters
    target = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
    snapshots = [request.text(f"{item}Ebs.SnapshotId") for item in request.items("BlockDeviceMapping")]
    found = {
        "security-group": groups,
        "key-pair": request.values("KeyName"),
        "placement-group": [request.text("Placement.GroupName") or request.text("Placement.GroupId")],
        "capacity-reservation": request.values(target),
        "snapshot": snapshots,
    }
    named = {kind: [name for name in names if name] for kind, names in found.items()}
    if not named["security-group"] and not existing:
        named["security-group"] = ["default"]  # of the VPC, which needs the permission as well
    return named


def _subnets(request: Request, resources: Resources) -> list[Resource]:
    names = request.values("SubnetId")
    names += [request.text(f"{item}SubnetId") for item in request.items("NetworkInterface")]
    return [resources.find("subnet", name) for name in dict.fromkeys(names) if name]


def _instance(request: Request, zone: str) -> Check:
    market = request.text("InstanceMarketOptions.MarketType", "on-demand")
    profile = request.text("IamInstanceProfile.Arn")
    keys = {
        "ec2:AvailabilityZone": zone,
        "ec2:EbsOptimized": request.text("EbsOptimized", "false"),
        "ec2:InstanceMarketType": market,
        "ec2:InstanceProfile": profile,
        "ec2:InstanceType": request.text("InstanceType"),
        "ec2:MetadataHttpEndpoint": request.text("MetadataOptions.HttpEndpoint"),
        "ec2:MetadataHttpPutResponseHopLimit": request.text("MetadataOptions.HttpPutResponseHopLimit"),
        "ec2:MetadataHttpTokens": request.text("MetadataOptions.HttpTokens"),
        "ec2:RootDeviceType": "ebs",
        "ec2:Tenancy": request.text("Placement.Tenancy", "default"),
    }
    return _created(request, "instance", keys)


def _interfaces(request: Request, resources: Resources, zone: str) -> Iterator[Check]:
    """Yield a check for each interface: the launch creates one if the request has none."""
    for item in request.items("NetworkInterface") or [""]:
        if existing := item and request.text(f"{item}NetworkInterfaceId"):
            yield _existing(request, "network-interface", resources.find("network-interface", existing))
            continue
        subnet = request.text(f"{item}SubnetId")
        found = resources.find("subnet", subnet) if subnet else None
        keys = {
            "ec2:AssociatePublicIpAddress": request.text(f"{item}AssociatePublicIpAddress") if item else "",
            "ec2:AvailabilityZone": zone,
            "ec2:Subnet": request.arn("subnet", found) if found else "",
            "ec2:Vpc": found.keys.get("ec2:Vpc", "") if found else "",
        }
        yield _created(request, "network-interface", keys)


def _volumes(request: Request, zone: str) -> Iterator[Check]:
    """Yield a check for each volume: the launch creates the root volume if the request has none."""
    items = [one for one in request.items("BlockDeviceMapping") if f"{one}NoDevice" not in request.parameters]
    for item in items or [""]:
        keys = {
            "ec2:AvailabilityZone": zone,
            "ec2:Encrypted": (request.text(f"{item}Ebs.Encrypted") if item else "") or "false",
            "ec2:KmsKeyId": request.text(f"{item}Ebs.KmsKeyId"),
            "ec2:VolumeIops": request.text(f"{item}Ebs.Iops"),
            "ec2:VolumeSize": request.text(f"{item}Ebs.VolumeSize"),
            "ec2:VolumeThroughput": request.text(f"{item}Ebs.Throughput"),
            "ec2:VolumeType": request.text(f"{item}Ebs.VolumeType"),
        }
        yield _created(request, "volume", keys)


def _created(request: Request, kind: str, keys: dict[str, str]) -> Check:
    context = {key: (value,) for key, value in keys.items() if value}
    return request.check(request.arn(kind), {**context, **request_tags(request.created_tags().get(kind, {}))})
