"""Which checks a call of EC2 needs: one for each resource of an action, and CreateTags for tags given at
creation.

ec2_authorization.json is EC2's page of the Service Authorization Reference, for the actions that create,
change and remove. Other actions, most of which only read, have no resources: they are checked on `*`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudddp.simulator.iam.evaluate import Check
from cloudddp.simulator.iam.request import Request, Resource, Resources, request_tags, resource_keys

_DATA = Path(__file__).with_name("ec2_authorization.json")

# Resource type -> parameters that name it.
_PARAMETERS = {
    "capacity-reservation": ("CapacityReservationId",),
    "elastic-ip": ("AllocationId", "AssociationId", "PublicIp"),
    "fleet": ("FleetId",),
    "image": ("ImageId",),
    "instance": ("InstanceId",),
    "internet-gateway": ("InternetGatewayId",),
    "key-pair": ("KeyName", "KeyPairId"),
    "launch-template": ("LaunchTemplateId", "LaunchTemplateName"),
    "network-interface": ("NetworkInterfaceId",),
    "placement-group": ("GroupName", "GroupId"),
    "route-table": ("RouteTableId",),
    "security-group": ("GroupId", "GroupName"),
    "snapshot": ("SnapshotId",),
    "spot-instances-request": ("SpotInstanceRequestId",),
    "subnet": ("SubnetId",),
    "volume": ("VolumeId",),
    "vpc": ("VpcId",),
}
# Created under a name of the caller's choice, so that its ARN is known; others are TYPE/* until they exist.
_NAMED = ("key-pair", "placement-group")
_PREFIXES = {
    "cr": "capacity-reservation",
    "eipalloc": "elastic-ip",
    "eni": "network-interface",
    "i": "instance",
    "key": "key-pair",
    "pg": "placement-group",
    "rtb": "route-table",
    "sg": "security-group",
    "sgr": "security-group-rule",
    "sir": "spot-instances-request",
    "snap": "snapshot",
    "subnet": "subnet",
    "vol": "volume",
    "vpc": "vpc",
    "igw": "internet-gateway",
    "ami": "image",
    "lt": "launch-template",
}


@functools.cache
def authorization() -> dict[str, dict[str, Any]]:
    """Return action -> resource type -> {"required": ..., "keys": [...]}. Keys that end with / have a tag's
    key there."""
    found: dict[str, dict[str, Any]] = json.loads(_DATA.read_text())["actions"]
    # Not in the reference, but in the policies of the User Guide's "Example: Work with Spot Instances".
    found["RunInstances"]["spot-instances-request"] = {
        "required": False,
        "keys": ["aws:RequestTag/", "aws:TagKeys"],
    }
    return found


def checks(request: Request, resources: Resources) -> list[Check]:
    """Return every check of a call. All have to be allowed."""
    if request.action in ("CreateTags", "DeleteTags"):
        return list(_tagging(request, resources))
    known = authorization().get(request.action, {})
    if request.action == "RunInstances":
        found = list(_launch(request, resources))
    else:
        found = [check for kind in known for check in _of_type(request, resources, kind)]
    return [_limited(check, known) for check in found or [request.check("*")]] + _implied_tagging(request)


def _of_type(request: Request, resources: Resources, kind: str) -> Iterator[Check]:
    """Yield the checks on the resources of one type: existing ones that the call names, or the one that it
    creates."""
    facts = authorization()[request.action][kind]
    names = [value for one in _PARAMETERS.get(kind, ()) for value in request.values(one)]
    if "aws:RequestTag/" in facts["keys"]:
        tags = request.created_tags().get(kind, {})
        # "Policies using the security-group-rule resource-level permission are only enforced when the API
        # request includes TagSpecifications" (Service Authorization Reference), and likewise for other
        # optional types.
        if facts["required"] or tags:
            created = resources.find(kind, names[0]) if names and kind in _NAMED else None
            yield request.check(request.arn(kind, created), request_tags(tags))
        return
    for name in dict.fromkeys(names):
        resource = resources.find(kind, name)
        yield request.check(request.arn(kind, resource), resource_keys(resource))
    if not names and facts["required"]:
        yield request.check(request.arn(kind))


def _tagging(request: Request, resources: Resources) -> Iterator[Check]:
    """Yield the checks of CreateTags and DeleteTags on existing resources: there is no ec2:CreateAction."""
    for name in request.values("ResourceId"):
        kind = _PREFIXES.get(name.partition("-")[0], "instance")
        resource = resources.find(kind, name)
        context = {**resource_keys(resource), **request_tags(request.tags())}
        yield request.check(request.arn(kind, resource), context)


def _implied_tagging(request: Request) -> list[Check]:
    """Return the checks of ec2:CreateTags that tags in a creating call need.

    EC2 User Guide, "Grant permission to tag Amazon EC2 resources during creation".
    """
    return [
        request.check(
            request.arn(kind),
            {**request_tags(tags), "ec2:CreateAction": (request.action,)},
            action="ec2:CreateTags",
        )
        for kind, tags in request.created_tags().items()
    ]


def _limited(check: Check, known: dict[str, Any]) -> Check:
    """Return the check with the condition keys only that EC2 supports for this action and resource type."""
    if check.resource == "*" or not check.action.startswith("ec2:"):
        return check
    kind = check.resource.rsplit(":", 1)[-1].partition("/")[0]
    supported = known.get(kind, {}).get("keys", [])
    context = {
        key: values
        for key, values in check.context.items()
        if key.startswith(("aws:Principal", "aws:RequestedRegion", "aws:Secure", "aws:username"))
        or key == "ec2:Region"
        or key in supported
        or f"{key.partition('/')[0]}/" in supported
    }
    return Check(check.action, check.resource, context)


# -- RunInstances: everything that a launch uses, and everything that it creates -----------------------------


def _launch(request: Request, resources: Resources) -> Iterator[Check]:
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
