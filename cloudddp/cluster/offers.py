"""What a region offers for a cluster: type, image, subnets and price, queried before anything is created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from cloudddp.aws import caller as callers
from cloudddp.aws import images, instance_types, networks
from cloudddp.aws.client import AWS
from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster import name_lock, node_addresses, prices
from cloudddp.cluster.connect import is_direct
from cloudddp.cluster.launch_errors import LaunchAttempt, exhausted
from cloudddp.cluster.plan import Plan, plan
from cloudddp.cluster.preconditions import find_reservation, require_launch, reservation_title
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import (
    LaunchContext,
    choose_interfaces,
    needs_elastic_ip,
    wants_placement_group,
)
from cloudddp.cluster.user_data import Identity, new_identity
from cloudddp.config import timing
from cloudddp.config.cluster_spec import ClusterSpec, Machine, Placement, connection_mode
from cloudddp.errors import CloudDDPError, UsageError

_ROUNDING = 0.001  # USD


@dataclass(frozen=True, slots=True)
class Offer:
    """One type and market in one region that can run the cluster, as far as AWS says without launching
    anything. `spec` has only that type and market."""

    aws: AWS
    spec: ClusterSpec
    info: TypeInfo
    context: LaunchContext
    price: Price
    label: str = ""  # type and market, where there are several

    @property
    def key(self) -> tuple[str, str]:
        return self.aws.region, self.label

    def plan(self, spec: ClusterSpec, identity: Identity) -> Plan:
        """Return the plan for a cluster whose lifetime begins now."""
        context = replace(self.context, now=datetime.now(UTC))
        return plan(spec, context, identity, self.price)

    def only(self, zones: Sequence[str]) -> Offer:
        """Return the offer without any other zone."""
        subnets = tuple(subnet for subnet in self.context.subnets if subnet.zone in zones)
        return replace(self, context=replace(self.context, subnets=subnets))


def resolve(
    clouds: Sequence[AWS], spec: ClusterSpec, ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]]
) -> tuple[list[Offer], list[LaunchAttempt]]:
    """Return the offers in the order in which to try them, and why other candidates cannot run the cluster.

    Candidates are the types with their markets, in each region, in the order of the settings or by price. A
    fixed number of AWS calls for each. With one candidate its error is raised; with several, only if none is
    left.
    """
    ssh_from = () if spec.proxy_jump else ssh_sources(clouds[0], spec)
    owner = callers.owner(clouds[0])
    offers, excluded = [], []
    several = len(spec.candidates) > 1
    places = [(candidate, aws) for candidate in spec.candidates for aws in clouds]
    for one, aws in places:
        label = one.label if several else ""
        try:
            # A jump host is looked up among the instances of each region.
            if (offer := offer_of(aws, one, ssh_from or ssh_sources(aws, one), owner)) is not None:
                require_launch(aws, one, offer.plan(one, new_identity()[0]).launches[0].request)
                offers.append(replace(offer, label=label))
        except CloudDDPError as error:
            if len(places) == 1:
                raise
            excluded.append(LaunchAttempt(aws.region, "", error, label))
    if not offers:
        raise exhausted(spec, excluded)
    if "." not in spec.instance_type:  # a GPU: every type that has it
        offers.sort(key=lambda offer: offer.price.spot or (offer.price.node_hour,))
    return offers, excluded


@dataclass(slots=True)
class Offers:
    """The offers of all regions, resolved again once they are old: a wait for capacity may last for days."""

    clouds: Sequence[AWS]
    spec: ClusterSpec
    ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]]
    _confirmed: dict[tuple[str, str], float] = field(default_factory=dict)  # USD an hour
    _found: tuple[list[Offer], list[LaunchAttempt]] = ([], [])
    _resolved: float = 0.0

    def look(self) -> tuple[list[Offer], list[LaunchAttempt]]:
        """Return the offers, only at the prices of the first call, which the user has confirmed, and the
        excluded regions, as `resolve` does. Raises CloudDDPError if all are more expensive."""
        first = not self._found[0]
        if first or time.monotonic() - self._resolved > timing.current().refresh_interval:
            self._found = resolve(self.clouds, self.spec, self.ssh_sources)
            self._resolved = time.monotonic()
            if first:
                self._confirmed = {offer.key: offer.price.hour for offer in self._found[0]}
            else:
                self._found = self._affordable(), self._found[1]
        return self._found

    def _affordable(self) -> list[Offer]:
        now = [offer for offer in self._found[0] if offer.key in self._confirmed]
        same = [offer for offer in now if offer.price.hour <= self._confirmed[offer.key] + _ROUNDING]
        if same:
            return same
        if not now:
            raise CloudDDPError("no region that was confirmed can still run the cluster; nothing is running")
        region, hour = now[0].aws.region, now[0].price.hour
        raise CloudDDPError(
            f"the price in {region} has risen from ${self._confirmed[now[0].key]:.2f} to ${hour:.2f} an hour "
            "while `up` was waiting for capacity; nothing is running",
            hint="to accept it: `cloudddp up` again",
        )


T = TypeVar("T")


class Ask(Protocol):
    """Makes one step of an offer, or keeps its error and returns None: `doctor` asks all that it can."""

    def __call__(self, name: str, step: Callable[[], T], /) -> T | None: ...


def _raising(_name: str, step: Callable[[], T], /) -> T:
    return step()


def offer_of(
    aws: AWS, spec: ClusterSpec, ssh_from: tuple[str, ...], owner: str, ask: Ask = _raising
) -> Offer | None:
    """Return what a region offers, or None if `ask` has kept an error. A fixed number of AWS calls."""
    info = ask("instance type", lambda: _type(aws, spec))
    if info is None:
        return None
    reservation = ask("reservation", lambda: find_reservation(aws, spec)) if spec.reservation else None
    usual = ask("price", lambda: price(aws, spec, reservation))
    image = ask("image", lambda: _image(aws, spec, info, reservation))
    found = ask("network", lambda: _subnets(aws, spec, ssh_from, reservation))
    if not (usual and image and found):
        return None
    spot: dict[str, float] = {}
    if spec.spot:
        with contextlib.suppress(CloudDDPError):  # they are shown, and decide nothing but the order
            spot = instance_types.spot_prices(aws, spec.instance_type)
    now = [spot[one.zone] for one in found if one.zone in spot]
    interfaces = choose_interfaces(spec, info)
    if needs_elastic_ip(spec, interfaces):
        ask("Elastic IPs", lambda: node_addresses.check_limit(aws, spec, lambda: _abandoned(aws, spec.name)))
    context = LaunchContext(
        aws.region,
        info,
        image,
        found,
        ssh_from,
        owner,
        datetime.now(UTC),
        interfaces=interfaces,
        own_placement_group=wants_placement_group(spec, info, reservation),
        reservation=reservation,
    )
    disk_gb, current = max(spec.disk_gb, image.disk_gb), (min(now), max(now)) if now else None
    return Offer(aws, spec, info, context, replace(usual, disk_gb=disk_gb, spot=current))


def _type(aws: AWS, spec: Placement) -> TypeInfo:
    info = instance_types.describe(aws, spec)
    choose_interfaces(spec, info)  # raises if EFA is required and the type has none
    return info


def _image(aws: AWS, spec: Machine, info: TypeInfo, reservation: Reservation | None) -> Image:
    """Return the image. Raises UsageError if the reservation is for another platform, such as Windows."""
    image = images.find(aws, spec, info)
    if reservation is not None and reservation.platform != image.platform:
        raise UsageError(
            f"{reservation_title(reservation)} is for platform {reservation.platform}, and the image is for "
            f"{image.platform}",
            hint="give another --image, or a reservation for the image's platform",
        )
    return image


def _abandoned(aws: AWS, name: str) -> str:
    """Return the id of the cluster whose remains `up` removes before it creates one of that name, or ''."""
    holder = name_lock.holder(aws, name)
    return holder.tags.cluster_id if holder is not None and name_lock.abandoned(aws, holder) else ""


def _subnets(
    aws: AWS, spec: ClusterSpec, ssh_from: tuple[str, ...], reservation: Reservation | None
) -> tuple[Subnet, ...]:
    """Return the subnets of the nodes, one per zone: with a reservation, those in its zone."""
    sources = ssh_from if is_direct(spec) else ()  # which need a route back through an internet gateway
    if reservation is None:
        return networks.candidates(aws, spec, reached_from=sources)
    there = replace(spec, zones=(reservation.zone,))
    try:
        return networks.candidates(aws, there, reached_from=sources)
    except UsageError as error:
        title = reservation_title(reservation)
        raise UsageError(f"{title} is in zone {reservation.zone}: {error.message}", hint=error.hint) from None


def price(aws: AWS, spec: ClusterSpec, reservation: Reservation | None = None) -> Price:
    """Return the price of the cluster in a region: as given, as AWS's list has it now, or as our table has
    it. At most one AWS call; a capacity block is prepaid. Raises UsageError if none is known."""
    title = reservation_title(reservation) if reservation is not None else ""
    if reservation is not None and reservation.block:
        found: prices.ListPrice | None = prices.ListPrice(0.0, f"{title} is prepaid")
    elif spec.price is not None:
        found = prices.ListPrice(spec.price, "as given")
    else:
        found = listed(aws, spec.instance_type)
    if found is None:
        raise UsageError(
            f"cloudddp does not know the price of {spec.instance_type} in {aws.region}, and never assumes 0",
            hint="look it up and give it: --price USD (per node and hour), or `price` in cloudddp.toml",
        )
    source = found.source
    if reservation is not None and not reservation.block:
        source += f"; {title} is billed also without nodes"
    return Price(
        found.usd,
        spec.nodes,
        spec.disk_gb,
        source,
        found.published,
        gp3_month=prices.gp3_month(aws.region),
        throughput=spec.disk_throughput,
        addresses=int(connection_mode(spec) == "public"),
    )


def listed(aws: AWS, instance_type: str) -> prices.ListPrice | None:
    """Return the price of a node on demand: AWS's own, else that of our table, else None. One AWS call."""
    now = instance_types.on_demand_price(aws, instance_type)
    if now is None:
        return prices.listed(instance_type, aws.region)
    usd, published = now
    return prices.ListPrice(
        usd, f"on-demand price of AWS{f', list of {published}' if published else ''}", published
    )
