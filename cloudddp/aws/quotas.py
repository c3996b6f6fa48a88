"""vCPU quotas: how many vCPUs of an instance family may run in a region, and how many do. Read-only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cloudddp.aws.client import AWS


@dataclass(frozen=True, slots=True)
class Quota:
    """One vCPU quota of EC2: the instance families that count against it, by their letters, and by generation."""

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


_STANDARD = ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z")
# Codes and names of Service Quotas, service `ec2`. On demand, one quota counts all P types; for spot there are two.
_QUOTAS = (
    Quota("L-DB2E81BA", "Running On-Demand G and VT instances", ("g", "gr", "vt"), False),
    Quota("L-417A185B", "Running On-Demand P instances", ("p",), False),
    Quota("L-1216C47A", "Running On-Demand Standard instances", _STANDARD, False),
    Quota("L-3819A6DF", "All G and VT Spot Instance Requests", ("g", "gr", "vt"), True),
    Quota("L-C4BD4855", "All P5 Spot Instance Requests", ("p",), True, ("p5", "p6")),
    Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", ("p",), True, ("p2", "p3", "p4")),
    Quota("L-34B43A08", "All Standard Spot Instance Requests", _STANDARD, True),
)


def quota_of(instance_type: str, *, spot: bool) -> Quota | None:
    """Return the quota that the type counts against; None for one that is not known here (Trainium, DL, HPC)."""
    found = [one for one in _QUOTAS if one.spot == spot and one.counts(instance_type)]
    return found[0] if found else None


def limit(aws: AWS, quota: Quota) -> int:
    """Return how many vCPUs may run. Raises AWSError, for example if the caller may not ask."""
    answer = aws.call("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=quota.code)
    return int(answer["Quota"]["Value"])


def used(aws: AWS, quota: Quota) -> int:
    """Return how many vCPUs run that count against the quota: two AWS calls at most."""
    filters = [
        {"Name": "instance-state-name", "Values": ["pending", "running"]},
        {"Name": "instance-type", "Values": [f"{letters}*" for letters in quota.letters]},
    ]
    found = [
        str(item["InstanceType"])
        for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=filters)
        for item in reservation["Instances"]
        if quota.counts(str(item["InstanceType"])) and (item.get("InstanceLifecycle") == "spot") == quota.spot
    ]
    if not found:
        return 0
    types = aws.pages("ec2", "describe_instance_types", "InstanceTypes", InstanceTypes=sorted(set(found)))
    vcpus = {str(one["InstanceType"]): int(one["VCpuInfo"]["DefaultVCpus"]) for one in types}
    return sum(vcpus.get(name, 0) for name in found)
