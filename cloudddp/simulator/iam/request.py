"""A call as IAM sees it: who calls which action where, and EC2's flat parameters (`Tag.1.Key`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cloudddp.simulator.iam.evaluate import Check, Context


@dataclass(frozen=True, slots=True)
class Resource:
    """An existing EC2 resource: the last part of its ARN, and what conditions can refer to.

    `keys` are condition keys of its own, such as ec2:Vpc. `public` resources belong to no account (images,
    snapshots).
    """

    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    public: bool = False


class Resources(Protocol):
    """Looks up the resources of the account in the region of a call."""

    def find(self, kind: str, name: str) -> Resource:
        """Return a resource by id, or by the name that the call uses. An unknown one has no tags."""


@dataclass(frozen=True, slots=True)
class Request:
    """`service` is the prefix of its actions, as in ec2:RunInstances. `parameters` are those of EC2 and
    STS."""

    service: str
    action: str
    region: str
    account: str
    principal: str
    parameters: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.service}:{self.action}"

    def arn(self, kind: str, resource: Resource | None = None) -> str:
        """Return the ARN of an EC2 resource, or of one that the call creates."""
        account = "" if resource is not None and resource.public else self.account
        return f"arn:aws:ec2:{self.region}:{account}:{kind}/{resource.name if resource else '*'}"

    def check(self, resource: str, context: Context | None = None, action: str = "") -> Check:
        """Return a check of this call, with the keys that every call has."""
        known = {
            "aws:PrincipalArn": (self.principal,),
            "aws:PrincipalAccount": (self.account,),
            "aws:RequestedRegion": (self.region,),
            "aws:SecureTransport": ("true",),  # AWS's endpoints are encrypted; the simulator's is not
        }
        if ":user/" in self.principal:  # roles have no aws:username
            known["aws:username"] = (self.principal.rpartition("/")[2],)
        if self.service == "ec2":
            known["ec2:Region"] = (self.region,)
        return Check(action or self.name, resource, {**known, **(context or {})})

    def text(self, name: str, default: str = "") -> str:
        return self.parameters.get(name, default)

    def values(self, name: str) -> list[str]:
        """Return the values of a parameter and of its numbered form, in order: InstanceId, InstanceId.1,
        ..."""
        pattern = re.compile(rf"{re.escape(name)}(\.[0-9]{{1,4}})?")
        return [value for key, value in self.parameters.items() if pattern.fullmatch(key)]

    def items(self, name: str) -> list[str]:
        """Return the prefixes of the items of a list: TagSpecification.1., TagSpecification.2., ..."""
        pattern = re.compile(rf"({re.escape(name)}\.[0-9]{{1,4}}\.)")
        return list(dict.fromkeys(found[1] for key in self.parameters if (found := pattern.match(key))))

    def tags(self, prefix: str = "") -> dict[str, str]:
        """Return the tags below a prefix."""
        return {
            self.text(f"{item}Key"): self.text(f"{item}Value")
            for item in self.items(f"{prefix}Tag")
            if f"{item}Key" in self.parameters
        }

    def created_tags(self) -> dict[str, dict[str, str]]:
        """Return the tags that the call gives to what it creates, by the kind of resource."""
        return {
            self.text(f"{item}ResourceType"): self.tags(item)
            for item in self.items("TagSpecification")
            if self.tags(item)
        }


def request_tags(tags: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the condition keys of tags in the request."""
    return {
        **{f"aws:RequestTag/{key}": (value,) for key, value in tags.items()},
        **({"aws:TagKeys": tuple(tags)} if tags else {}),
    }


def resource_keys(resource: Resource) -> dict[str, tuple[str, ...]]:
    """Return the condition keys of an existing resource."""
    found: dict[str, tuple[str, ...]] = {key: (value,) for key, value in resource.keys.items()}
    for key, value in resource.tags.items():
        found[f"aws:ResourceTag/{key}"] = found[f"ec2:ResourceTag/{key}"] = (value,)
    return found
