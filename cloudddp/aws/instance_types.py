"""Instance types: which exist, and what EC2 says of one. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.aws.client import AWS
from cloudddp.config.spec import ClusterSpec, nearest
from cloudddp.errors import UsageError


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


def describe(aws: AWS, spec: ClusterSpec) -> TypeInfo:
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
