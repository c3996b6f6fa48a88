"""Instance types: which exist, what EC2 says of one, and what it costs. Read-only.

Prices are a service to the user: an account that may not ask, or an answer that cannot be read, is no error.
`None` then means that the table of cluster/prices.py counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Annotated, Any

import msgspec
from msgspec import field

from cloudddp.aws.answers import Answer, Count, Id
from cloudddp.aws.client import AWS
from cloudddp.config.cluster_spec import ClusterSpec, Placement
from cloudddp.config.schema import nearest
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.text import one_line

# Seconds: 5 days, the most that EC2 accepts, and the default of all types before Nitro v6, which have 350.
MAX_TCP_TIMEOUT = 432_000


# Limits far above every type that exists: a larger number is not EC2's.
_Number = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class NetworkCard(Answer, frozen=True):
    """A network card of an instance type: which of interface, efa and efa-only it takes, and how many."""

    index: _Number = field(name="NetworkCardIndex", default=0)
    interfaces: _Number = field(name="MaximumNetworkInterfaces", default=1)
    kinds: frozenset[str] = field(name="InterfaceTypes", default=frozenset())


class Device(Answer, frozen=True):
    manufacturer: str = ""
    name: str = ""
    count: _Number = 0

    @property
    def shown(self) -> str:
        return one_line(f"{self.manufacturer} {self.name}".strip(), 60)


_Devices = tuple[Device, ...]


class TypeInfo(Answer, frozen=True, kw_only=True):
    """EC2's description of an instance type."""

    name: Id = field(name="InstanceType")
    architectures: tuple[str, ...] = field(name="ProcessorInfo.SupportedArchitectures")
    vcpus: Count = field(name="VCpuInfo.DefaultVCpus")
    # Seconds until security groups forget an idle TCP connection, by default.
    tcp_timeout: Count = field(
        name="NetworkInfo.ConnectionTrackingConfiguration.DefaultTcpEstablishedTimeout",
        default=MAX_TCP_TIMEOUT,
    )
    cards: _Number = field(name="NetworkInfo.MaximumNetworkCards", default=1)
    described_cards: tuple[NetworkCard, ...] = field(name="NetworkInfo.NetworkCards", default=())
    has_efa: bool = field(name="NetworkInfo.EfaSupported", default=False)
    efa_interfaces: _Number = field(name="NetworkInfo.EfaInfo.MaximumEfaInterfaces", default=1)
    devices: _Devices = field(name="GpuInfo.Gpus", default=())
    neuron: _Devices = field(name="NeuronInfo.NeuronDevices", default=())
    inference: _Devices = field(name="InferenceAcceleratorInfo.Accelerators", default=())
    media: _Devices = field(name="MediaAcceleratorInfo.Accelerators", default=())
    placement: tuple[str, ...] = field(name="PlacementGroupInfo.SupportedStrategies", default=())
    usage_classes: tuple[str, ...] = field(name="SupportedUsageClasses", default=())
    burstable: bool = field(name="BurstablePerformanceSupported", default=False)  # earns CPU credits

    @property
    def family(self) -> str:
        """The part before the dot: p5en, g6e."""
        return self.name.partition(".")[0]

    @property
    def arch(self) -> str:
        return "arm64" if "arm64" in self.architectures else "x86_64"

    @property
    def nvidia(self) -> list[Device]:
        """The GPUs that nvidia-smi lists."""
        return [device for device in self.devices if device.manufacturer.upper() in ("", "NVIDIA")]

    @property
    def gpus(self) -> int:
        return sum(one.count for one in self.nvidia)

    @property
    def gpu_name(self) -> str:
        return self.nvidia[0].shown if self.nvidia else ""

    @property
    def accelerator(self) -> str:
        """Any other one: "AMD Radeon Pro V520", "AWS Trainium"; '' if it has none."""
        if others := [device for device in self.devices if device not in self.nvidia]:
            return others[0].shown
        if self.neuron:
            return f"AWS {self.neuron[0].shown}"
        found = self.inference or self.media
        return found[0].shown if found else ""

    @property
    def max_efa(self) -> int:
        """How many EFA interfaces it may have; 0 without EFA."""
        return self.efa_interfaces if self.has_efa else 0

    @property
    def network_cards(self) -> tuple[NetworkCard, ...]:
        """Its network cards by index.

        A botocore without InterfaceTypes does not say which cards take EFA. Then the last ones do: where
        there are fewer EFA interfaces than cards (p6-b300), card 0 takes none.
        """
        found = []
        for place, card in enumerate(sorted(self.described_cards, key=lambda card: card.index)):
            with_efa = ("efa", "efa-only") if place >= len(self.described_cards) - self.max_efa else ()
            kinds = card.kinds or frozenset(("interface", *with_efa))
            found.append(msgspec.structs.replace(card, kinds=kinds))
        return tuple(found) or (NetworkCard(kinds=frozenset(("interface",))),)

    @property
    def cluster_placement(self) -> bool:
        """Whether it can be in a placement group of strategy `cluster`."""
        return "cluster" in self.placement

    @property
    def blocks(self) -> bool:
        """Whether there are capacity blocks of it."""
        return "capacity-block" in self.usage_classes


def require_known_types(aws: AWS, spec: ClusterSpec) -> None:
    """Raise UsageError for a type that is not in botocore's model of EC2, and for one price of several types.
    Makes no call."""
    known = aws.client("ec2").meta.service_model.shape_for("InstanceType").enum
    for name in spec.types:
        if name in known:
            continue
        family = [k for k in known if k.split(".")[0] == name.split(".")[0]]
        near = nearest(name, family or known)
        raise UsageError(
            f"unknown instance type {name!r}",
            hint=f"{near if family or near.startswith('did') else 'for example g5.xlarge, p5.48xlarge'} "
            "(a type newer than your botocore: pip install -U botocore)",
        )
    if len(spec.types) > 1 and spec.price is not None:
        raise UsageError(
            f"cluster.price is that of one type, and there are {len(spec.types)}: {', '.join(spec.types)}",
            hint="leave out price, or give one --instance-type",
        )


def describe(aws: AWS, spec: Placement) -> TypeInfo:
    """Return the type's data. Raises UsageError for a type that the region lacks, or one without a GPU unless
    spec.allow_cpu."""
    wanted = [spec.instance_type]
    found = aws.listed(
        "describe_instance_types", TypeInfo, absent="InvalidInstanceType", InstanceTypes=wanted
    )
    if not found:
        raise UsageError(
            f"{aws.region} does not offer {spec.instance_type}",
            hint="try another --region (or several: --regions), or another type",
        )
    info = found[0]
    if not info.gpus and not info.accelerator and not spec.allow_cpu:
        what = "a fraction of a GPU" if info.devices else "no GPU"
        raise UsageError(
            f"{spec.instance_type} has {what}", hint="choose a GPU type such as g5.xlarge, or add --allow-cpu"
        )
    return info


_LARGE = 12  # 12xlarge: the smallest size with more than one GPU of most families


def power_minutes(instance_type: str, gpus: int) -> float:
    """Return the minutes that an instance may take to boot, or to shut down. Pure.

    AWS's metal instances can take over 20 minutes (canonical/pycloudlib, PR 192, which waits for 40).
    Clusters of large GPU machines exceed 10 minutes (NVIDIA/nephele, PR 16, which proposes 30).
    """
    if ".metal" in instance_type:
        return 40.0
    # By its size, where the number of GPUs is not known, and for Trainium; a CPU type may take as long.
    size = re.search(r"\.(\d+)xlarge\Z", instance_type)
    is_large = gpus > 1 or (size is not None and int(size[1]) >= _LARGE)
    return 30.0 if is_large else 10.0


_HIGHEST_PRICE = 1e4  # USD an hour: no instance costs more, so that a higher price is an error


def on_demand_price(aws: AWS, instance_type: str) -> tuple[float, str] | None:
    """Return (USD per hour for Linux, date of the price list), or None if AWS does not tell one price. One
    call."""
    if aws.partition != "aws":  # other partitions have lists, and currencies, of their own
        return None
    wanted = {
        "instanceType": instance_type,
        "regionCode": aws.region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",  # capacity blocks are products of the same type
    }
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    try:
        answer = aws.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)
        # Each item of the list is JSON text in the JSON answer (AWS Price List API, "GetProducts").
        found = {price for text in answer.get("PriceList", []) for price in _prices(json.loads(text))}
    except (CloudDDPError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return found.pop() if len(found) == 1 else None


def _prices(entry: Any) -> Iterator[tuple[float, str]]:
    """Yield the prices of an hour in a product, and the date of their list. Raises ValueError, LookupError,
    TypeError or AttributeError for what is not as AWS documents it."""
    published = entry.get("publicationDate", "")[:10]
    day = date.fromisoformat(published).isoformat() if published else ""
    for term in entry["terms"].get("OnDemand", {}).values():
        for one in term["priceDimensions"].values():
            price = float(one["pricePerUnit"].get("USD", "0"))
            if one["unit"] == "Hrs" and 0 < price <= _HIGHEST_PRICE:
                yield price, day


class _SpotPrice(Answer, frozen=True):
    availability_zone: Id
    spot_price: Annotated[str, msgspec.Meta(pattern=r"^\d{1,6}(\.\d{1,10})?\Z")]


def spot_prices(aws: AWS, instance_type: str) -> dict[str, float]:
    """Return the current spot price in each zone, USD per hour. One call. Raises AWSError."""
    found = aws.listed(
        "describe_spot_price_history",
        _SpotPrice,
        InstanceTypes=[instance_type],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC),  # the answer then has the price of each zone that is valid now
    )
    prices = {one_line(one.availability_zone, 40): float(one.spot_price) for one in found}
    return {zone: price for zone, price in prices.items() if 0 < price <= _HIGHEST_PRICE}
