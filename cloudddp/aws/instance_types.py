"""Instance types: which exist, what EC2 says of one, and what it costs. Read-only.

Prices are a service to the user: an account that may not ask, or an answer that cannot be read, is no error.
`None` then means that the table of cluster/prices.py counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated

import msgspec

from cloudddp.aws.answers import Count, Id, Record
from cloudddp.aws.client import AWS
from cloudddp.config.schema import nearest
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, UsageError
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
    blocks: bool = False  # whether there are capacity blocks of it
    burstable: bool = False  # whether it earns CPU credits (T types)

    @property
    def family(self) -> str:
        """The part before the dot: p5en, g6e."""
        return self.name.partition(".")[0]


# Limits far above every type that exists: a larger number is not EC2's.
_Number = Annotated[int, msgspec.Meta(ge=0, le=1024)]


class _Processor(Record, frozen=True):
    supported_architectures: list[str]


class _VCpus(Record, frozen=True):
    default_v_cpus: Count


class _Device(Record, frozen=True):
    manufacturer: str = ""
    name: str = ""
    count: _Number = 0


class _Accelerators(Record, frozen=True):
    """GpuInfo, NeuronInfo and the like: each names its list in its own way."""

    gpus: tuple[_Device, ...] = ()
    neuron_devices: tuple[_Device, ...] = ()
    accelerators: tuple[_Device, ...] = ()


class _Tracking(Record, frozen=True):
    default_tcp_established_timeout: Count = 0


class _Efa(Record, frozen=True):
    maximum_efa_interfaces: _Number = 1


class _Card(Record, frozen=True):
    network_card_index: _Number = 0
    maximum_network_interfaces: _Number = 1
    interface_types: list[str] | None = None


class _Network(Record, frozen=True):
    connection_tracking_configuration: _Tracking = _Tracking()
    maximum_network_cards: _Number = 1
    efa_supported: bool = False
    efa_info: _Efa = _Efa()
    network_cards: tuple[_Card, ...] = ()


class _Placement(Record, frozen=True):
    supported_strategies: tuple[str, ...] = ()


class _Type(Record, frozen=True):
    processor_info: _Processor
    v_cpu_info: _VCpus
    network_info: _Network = _Network()
    gpu_info: _Accelerators = _Accelerators()
    neuron_info: _Accelerators = _Accelerators()
    inference_accelerator_info: _Accelerators = _Accelerators()
    media_accelerator_info: _Accelerators = _Accelerators()
    placement_group_info: _Placement = _Placement()
    supported_usage_classes: tuple[str, ...] = ()
    burstable_performance_supported: bool = False


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


def describe(aws: AWS, spec: ClusterSpec) -> TypeInfo:
    """Return the type's data. Raises UsageError for a type that the region lacks, or one without a GPU unless
    spec.allow_cpu."""
    call = ("ec2", "describe_instance_types", "InstanceTypes", _Type)
    found = aws.listed(*call, absent="InvalidInstanceType", InstanceTypes=[spec.instance_type])
    if not found:
        raise UsageError(
            f"{aws.region} does not offer {spec.instance_type}",
            hint="try another --region (or several: --regions), or another type",
        )
    info = _type_info(spec.instance_type, found[0])
    if not info.gpus and not info.accelerator and not spec.allow_cpu:
        what = "a fraction of a GPU" if found[0].gpu_info.gpus else "no GPU"
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


def _type_info(name: str, item: _Type) -> TypeInfo:
    network = item.network_info
    tracking = network.connection_tracking_configuration
    listed = item.gpu_info.gpus
    nvidia = [gpu for gpu in listed if gpu.manufacturer.upper() in ("", "NVIDIA")]
    max_efa = network.efa_info.maximum_efa_interfaces if network.efa_supported else 0
    return TypeInfo(
        name=name,
        arch="arm64" if "arm64" in item.processor_info.supported_architectures else "x86_64",
        gpus=sum(gpu.count for gpu in nvidia),
        gpu_name=_named(nvidia[0]) if nvidia else "",
        accelerator=_other_accelerator(item, [gpu for gpu in listed if gpu not in nvidia]),
        vcpus=item.v_cpu_info.default_v_cpus,
        cards=network.maximum_network_cards,
        tcp_timeout=tracking.default_tcp_established_timeout or MAX_TCP_TIMEOUT,
        network_cards=_cards(network, max_efa),
        max_efa=max_efa,
        cluster_placement="cluster" in item.placement_group_info.supported_strategies,
        blocks="capacity-block" in item.supported_usage_classes,
        burstable=item.burstable_performance_supported,
    )


def _cards(network: _Network, max_efa: int) -> tuple[NetworkCard, ...]:
    """Return the network cards by index.

    A botocore without InterfaceTypes does not say which cards take EFA. Then the last ones do: where there
    are fewer EFA interfaces than cards (p6-b300), card 0 takes none.
    """
    listed = sorted(network.network_cards, key=lambda card: card.network_card_index)
    found = []
    for place, card in enumerate(listed):
        kinds = card.interface_types
        if kinds is None:
            with_efa = place >= len(listed) - max_efa
            kinds = ["interface", "efa", "efa-only"] if with_efa else ["interface"]
        found.append(NetworkCard(card.network_card_index, frozenset(kinds), card.maximum_network_interfaces))
    return tuple(found) or (NetworkCard(0, frozenset(("interface",)), 1),)


def _named(device: _Device) -> str:
    return one_line(f"{device.manufacturer} {device.name}".strip(), 60)


def _other_accelerator(item: _Type, gpus: list[_Device]) -> str:
    if gpus:
        return _named(gpus[0])
    if neuron := item.neuron_info.neuron_devices:
        return f"AWS {_named(neuron[0])}"
    found = item.inference_accelerator_info.accelerators or item.media_accelerator_info.accelerators
    return _named(found[0]) if found else ""


_HIGHEST_PRICE = 1e4  # USD an hour: no instance costs more, so that a higher price is an error


class _Dimension(msgspec.Struct, rename={"per_unit": "pricePerUnit"}):
    unit: str
    per_unit: dict[str, str]


class _Term(msgspec.Struct, rename={"dimensions": "priceDimensions"}):
    dimensions: dict[str, _Dimension]


class _Terms(msgspec.Struct, rename={"on_demand": "OnDemand"}):
    on_demand: dict[str, _Term] = {}


class _Entry(msgspec.Struct, rename={"published": "publicationDate"}):
    """One item of a PriceList, which is JSON text in the JSON answer (AWS Price List API, "GetProducts")."""

    terms: _Terms
    published: str = ""


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
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        answer = aws.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)
        entries = [msgspec.json.decode(text, type=_Entry) for text in answer.get("PriceList", [])]
        found = {(price, _day(entry.published)) for entry in entries for price in _prices(entry)}
    except (CloudDDPError, msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None
    return found.pop() if len(found) == 1 else None


def _day(published: str) -> str:
    """Return the date of a time such as 2026-11-20T08:15:30Z. Raises ValueError."""
    return date.fromisoformat(published[:10]).isoformat() if published else ""


def _prices(entry: _Entry) -> list[float]:
    dimensions = [one for term in entry.terms.on_demand.values() for one in term.dimensions.values()]
    prices = [float(one.per_unit.get("USD", "0")) for one in dimensions if one.unit == "Hrs"]
    return [price for price in prices if 0 < price <= _HIGHEST_PRICE]


class _SpotPrice(Record, frozen=True):
    availability_zone: Id
    spot_price: Annotated[str, msgspec.Meta(pattern=r"^\d{1,6}(\.\d{1,10})?\Z")]


def spot_prices(aws: AWS, instance_type: str) -> dict[str, float]:
    """Return the current spot price in each zone, USD per hour. One call. Raises AWSError."""
    found = aws.listed(
        "ec2",
        "describe_spot_price_history",
        "SpotPriceHistory",
        _SpotPrice,
        InstanceTypes=[instance_type],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC),  # the answer then has the price of each zone that is valid now
    )
    prices = {one_line(one.availability_zone, 40): float(one.spot_price) for one in found}
    return {zone: price for zone, price in prices.items() if 0 < price <= _HIGHEST_PRICE}
