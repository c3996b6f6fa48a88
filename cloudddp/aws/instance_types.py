"""Instance types: which exist, and what EC2 says of one. Read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudddp.aws.client import AWS
from cloudddp.config.schema import nearest
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import AWSError, UsageError
from cloudddp.text import one_line

# Seconds: 5 days, the most that EC2 accepts, and the default of all types before Nitro v6, which have 350.
MAX_TCP_TIMEOUT = 432_000


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network card of an instance type: the interface types that it takes, and how many interfaces."""

    index: int
    kinds: frozenset[str]  # of interface, efa, efa-only
    interfaces: int


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """EC2's description of an instance type."""

    name: str
    arch: str  # x86_64 or arm64
    gpus: int  # NVIDIA GPUs: those that nvidia-smi lists
    gpu_name: str
    accelerator: str  # any other one: "AMD Radeon Pro V520", "AWS Trainium"; '' if it has none
    vcpus: int
    cards: int  # network cards
    tcp_timeout: int  # seconds until security groups forget an idle TCP connection, by default
    network_cards: tuple[NetworkCard, ...] = ()
    max_efa: int = 0  # EFA interfaces; 0 without EFA
    cluster_placement: bool = False  # whether it can be in a placement group of strategy `cluster`

    @property
    def family(self) -> str:
        """The part before the dot: p5en, g6e."""
        return self.name.partition(".")[0]


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
    """Return the type's data. Raises UsageError for a type that the region lacks, or one without a GPU unless
    spec.allow_cpu."""
    try:
        found = aws.call("ec2", "describe_instance_types", InstanceTypes=[spec.instance_type])[
            "InstanceTypes"
        ]
    except AWSError as error:
        if error.code != "InvalidInstanceType":
            raise
        found = []
    if not found:
        raise UsageError(
            f"{aws.region} does not offer {spec.instance_type}",
            hint="try another --region (or several: --regions), or another type",
        )
    info = _type_info(spec.instance_type, found[0])
    if not info.gpus and not info.accelerator and not spec.allow_cpu:
        what = "a fraction of a GPU" if found[0].get("GpuInfo") else "no GPU"
        raise UsageError(
            f"{spec.instance_type} has {what}", hint="choose a GPU type such as g5.xlarge, or add --allow-cpu"
        )
    return info


def _type_info(name: str, item: Mapping[str, Any]) -> TypeInfo:
    network = item.get("NetworkInfo", {})
    tracking = network.get("ConnectionTrackingConfiguration", {})
    listed = item.get("GpuInfo", {}).get("Gpus", [])
    nvidia = [gpu for gpu in listed if str(gpu.get("Manufacturer", "NVIDIA")).upper() == "NVIDIA"]
    max_efa = _max_efa(network)
    return TypeInfo(
        name=name,
        arch="arm64" if "arm64" in item["ProcessorInfo"]["SupportedArchitectures"] else "x86_64",
        gpus=sum(int(gpu.get("Count", 0)) for gpu in nvidia),
        gpu_name=_named(nvidia[0]) if nvidia else "",
        accelerator=_other_accelerator(item, [gpu for gpu in listed if gpu not in nvidia]),
        vcpus=int(item["VCpuInfo"]["DefaultVCpus"]),
        cards=int(network.get("MaximumNetworkCards", 1)),
        tcp_timeout=int(tracking.get("DefaultTcpEstablishedTimeout") or MAX_TCP_TIMEOUT),
        network_cards=_cards(network, max_efa),
        max_efa=max_efa,
        cluster_placement="cluster" in item.get("PlacementGroupInfo", {}).get("SupportedStrategies", []),
    )


def _max_efa(network: Mapping[str, Any]) -> int:
    if not network.get("EfaSupported"):
        return 0
    return int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1))


def _cards(network: Mapping[str, Any], max_efa: int) -> tuple[NetworkCard, ...]:
    """Return the network cards by index.

    A botocore without InterfaceTypes does not say which cards take EFA. Then the last ones do: where there are fewer
    EFA interfaces than cards (p6-b300), card 0 takes none.
    """
    listed = sorted(network.get("NetworkCards", []), key=lambda card: int(card.get("NetworkCardIndex", 0)))
    found = []
    for place, card in enumerate(listed):
        kinds = card.get("InterfaceTypes")
        if kinds is None:
            with_efa = place >= len(listed) - max_efa
            kinds = ("interface", "efa", "efa-only") if with_efa else ("interface",)
        index, interfaces = int(card.get("NetworkCardIndex", 0)), int(card.get("MaximumNetworkInterfaces", 1))
        found.append(NetworkCard(index, frozenset(map(str, kinds)), interfaces))
    return tuple(found) or (NetworkCard(0, frozenset(("interface",)), 1),)


def _named(device: Mapping[str, Any]) -> str:
    return one_line(f"{device.get('Manufacturer', '')} {device.get('Name', '')}".strip(), 60)


def _other_accelerator(item: Mapping[str, Any], gpus: list[Mapping[str, Any]]) -> str:
    if gpus:
        return _named(gpus[0])
    if neuron := item.get("NeuronInfo", {}).get("NeuronDevices"):
        return f"AWS {_named(neuron[0])}"
    for kind in ("InferenceAcceleratorInfo", "MediaAcceleratorInfo"):
        if found := item.get(kind, {}).get("Accelerators"):
            return _named(found[0])
    return ""
