"""vCPU quotas: how many vCPUs of an instance family may run in a region, and how many do. Read-only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.errors import AWSError, Message, q


@dataclass(frozen=True, slots=True)
class Quota:
    """One vCPU quota of EC2: the instance families that count against it, by their letters, and by
    generation."""

    code: str
    name: str
    letters: tuple[str, ...]  # of the family: g of g6e
    spot: bool
    generations: tuple[str, ...] = ()  # p4 of p4de; empty for all

    def counts(self, instance_type: str) -> bool:
        """Return whether instances of the type count, if they are spot instances or not as the quota."""
        family = instance_type.partition(".")[0]
        found = re.match(r"[a-z]+", family)
        letters = found[0] if found else ""
        return letters in self.letters and (not self.generations or family.startswith(self.generations))


@dataclass(frozen=True, slots=True)
class Usage:
    """How many vCPUs a quota allows, how many of them run, and how many more a cluster needs."""

    quota: Quota
    limit: int
    used: int
    needed: int

    @property
    def suffices(self) -> bool:
        return self.limit - self.used >= self.needed

    @property
    def detail(self) -> str:
        name = f"{self.quota.name} ({self.quota.code})"
        return f"{name}: {self.limit} vCPUs, {self.used} in use, {self.needed} needed"

    def increase(self, region: str) -> str:
        """Return how to ask for a sufficient quota in a region."""
        return Message(
            "ask for more (hours to days): `aws service-quotas request-service-quota-increase "
            f"--region {q(region)} --service-code ec2 --quota-code {q(self.quota.code)} --desired-value "
            f"{q(self.used + self.needed)}`"
        )


_STANDARD = ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z")
# Codes and names of Service Quotas, service `ec2`. On demand, one quota counts all P types; for spot there
# are two.
_QUOTAS = (
    Quota("L-DB2E81BA", "Running On-Demand G and VT instances", ("g", "gr", "vt"), False),
    Quota("L-417A185B", "Running On-Demand P instances", ("p",), False),
    Quota("L-1216C47A", "Running On-Demand Standard instances", _STANDARD, False),
    Quota("L-3819A6DF", "All G and VT Spot Instance Requests", ("g", "gr", "vt"), True),
    Quota("L-C4BD4855", "All P5 Spot Instance Requests", ("p",), True, ("p5", "p6")),
    Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", ("p",), True, ("p2", "p3", "p4")),
    Quota("L-34B43A08", "All Standard Spot Instance Requests", _STANDARD, True),
)


def caveat(instance_type: str, *, spot: bool) -> str:
    """Return what is not certain about the quota of a type; '' for the others. The quota that P6 counts
    against by AWS's grouping of families is named for P5."""
    if spot and instance_type.startswith("p6"):
        family = instance_type.partition(".")[0]
        return f"AWS does not document that {family} counts against it; look for a quota of P6 spot instances"
    return ""


_Value = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def quota_of(instance_type: str, *, spot: bool) -> Quota | None:
    """Return the quota that the type counts against; None for one that is not known here (Trainium, DL,
    HPC)."""
    found = [one for one in _QUOTAS if one.spot == spot and one.counts(instance_type)]
    return found[0] if found else None


def limit(aws: AWS, quota: Quota) -> int:
    """Return how many vCPUs may run. Raises AWSError, for example if the caller may not ask."""
    call = ("service-quotas", "get_service_quota", _Value, "Quota.Value")
    return int(aws.read(*call, ServiceCode="ec2", QuotaCode=quota.code))


def used(aws: AWS, quota: Quota) -> int:
    """Return how many vCPUs run that count against the quota: two AWS calls at most."""
    filters = [
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
        {"Name": "instance-type", "Values": [f"{letters}*" for letters in quota.letters]},
    ]
    found = [
        instance.type
        for instance in inventory.instances(aws, filters)
        if quota.counts(instance.type) and instance.spot == quota.spot
    ]
    if not found:
        return 0
    types = aws.listed("describe_instance_types", TypeInfo, InstanceTypes=sorted(set(found)))
    vcpus = {one.name: one.vcpus for one in types}
    return sum(vcpus.get(name, 0) for name in found)


def usage(aws: AWS, quota: Quota, needed: int) -> Usage:
    """Return the state of a quota, of which `needed` more vCPUs are wanted. Three AWS calls at most. Raises
    AWSError."""
    return Usage(quota, limit(aws, quota), used(aws, quota), needed)


EXCEEDED = ("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded")
"""The codes of a launch that a vCPU quota does not allow."""


def explained(aws: AWS, error: AWSError, instance_type: str, vcpus: int, *, spot: bool) -> AWSError:
    """Return the error for a launch of so many vCPUs that exceeds a quota, with its number and how to ask for
    more.

    Three AWS calls at most. The error itself where the quota is not known, or the caller may not read it.
    """
    quota = quota_of(instance_type, spot=spot)
    if quota is None:
        return error
    try:
        found = usage(aws, quota, vcpus)
    except AWSError:
        return error
    fewer = "omit --spot" if spot else "use fewer nodes"
    uncertain = caveat(instance_type, spot=spot)
    hint = Message(
        f"{found.detail}{f' ({uncertain})' if uncertain else ''}; {found.increase(aws.region)}, or {fewer}; "
        "`cloudddp doctor` checks it"
    )
    return AWSError(error.message, hint=hint, code=error.code)
