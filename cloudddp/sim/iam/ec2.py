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

from cloudddp.sim.iam.ec2_launch import launch
from cloudddp.sim.iam.evaluate import Check
from cloudddp.sim.iam.request import Request, Resources, request_tags, resource_keys

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
        found = list(launch(request, resources))
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
