"""What a region offers for a cluster: type, image, subnets and price, queried before anything is created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from cloudddp.aws import caller as callers
from cloudddp.aws import images, instance_types, networks
from cloudddp.aws.client import AWS
from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster import name_lock, node_addresses, prices
from cloudddp.cluster.connect import is_direct
from cloudddp.cluster.launch_errors import Attempt, attempt, exhausted, widening
from cloudddp.cluster.plan import Plan, plan
from cloudddp.cluster.preconditions import (
    check_reservation_platform,
    find_reservation,
    require_launch,
    reservation_title,
)
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import (
    LaunchContext,
    choose_interfaces,
    needs_elastic_ip,
    wants_placement_group,
)
from cloudddp.cluster.user_data import Identity, new_identity
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, connection_mode
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
        subnets = tuple(one for one in self.context.subnets if one.zone in zones)
        return replace(self, context=replace(self.context, subnets=subnets))


def resolve(
    clouds: Sequence[AWS], spec: ClusterSpec, ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]]
) -> tuple[list[Offer], list[Attempt]]:
    """Return the offers in the order in which to try them, and why other candidates cannot run the cluster.

    Candidates are the types with their markets, in each region, in the order of the settings or by price. A
    fixed number of AWS calls for each. With one candidate its error is raised; with several, only if none is
    left.
    """
    ssh_from = () if spec.proxy_jump else ssh_sources(clouds[0], spec)
    owner = callers.owner(clouds[0])
    offers, excluded = [], []
    several = len(spec.candidates) > 1
    places = [(one, aws) for one in spec.candidates for aws in clouds]
    for one, aws in places:
        label = one.label if several else ""
        try:
            # A jump host is looked up among the instances of each region.
            offer = _offer(aws, one, ssh_from or ssh_sources(aws, one), owner)
            offers.append(replace(offer, label=label))
        except CloudDDPError as error:
            if len(places) == 1:
                raise
            excluded.append(attempt(aws.region, "", error, label))
    if not offers:
        raise exhausted(spec.title, excluded, wider=widening(spec))
    if "." not in spec.instance_type:  # a GPU: every type that has it
        offers.sort(key=lambda offer: offer.price.spot or (offer.price.node_hour,))
    return offers, excluded


class Offers:
    """The offers of all regions, resolved again once they are old: a wait for capacity may last for days."""

    def __init__(
        self,
        clouds: Sequence[AWS],
        spec: ClusterSpec,
        ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]],
    ) -> None:
        self._clouds, self._spec, self._ssh_sources = clouds, spec, ssh_sources
        self._confirmed: dict[tuple[str, str], float] = {}  # key -> USD per hour that the user was shown
        self._found: tuple[list[Offer], list[Attempt]] = ([], [])
        self._resolved = 0.0

    def look(self) -> tuple[list[Offer], list[Attempt]]:
        """Return the offers and the excluded regions, as `resolve` does.

        Only those at the prices of the first call, which the user has confirmed. Raises CloudDDPError if all
        are more expensive.
        """
        first = not self._found[0]
        if first or time.monotonic() - self._resolved > timing.current().look_again:
            self._found = resolve(self._clouds, self._spec, self._ssh_sources)
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
            raise CloudDDPError(
                "no region that was confirmed can run the cluster any more; nothing is running"
            )
        region, hour = now[0].aws.region, now[0].price.hour
        raise CloudDDPError(
            f"the price in {region} has risen from ${self._confirmed[now[0].key]:.2f} to ${hour:.2f} an hour "
            "while `up` was waiting for capacity; nothing is running",
            hint="to accept it: `cloudddp up` again",
        )


def _offer(aws: AWS, spec: ClusterSpec, ssh_from: tuple[str, ...], owner: str) -> Offer:
    info = instance_types.describe(aws, spec)
    reservation = find_reservation(aws, spec)
    usual = price(aws, spec, reservation)
    image = images.find(aws, spec, info)
    check_reservation_platform(reservation, image.platform)
    found = subnets(aws, spec, ssh_from, reservation)
    offer = offer_of(aws, spec, info, image, found, usual, ssh_from, owner, reservation)
    check_addresses(offer, spec)
    require_launch(aws, spec, offer.plan(spec, new_identity()[0]).launches[0].request)
    return offer


def offer_of(
    aws: AWS,
    spec: ClusterSpec,
    info: TypeInfo,
    image: Image,
    found: tuple[Subnet, ...],
    usual: Price,
    ssh_from: tuple[str, ...],
    owner: str,
    reservation: Reservation | None,
) -> Offer:
    """Return the offer that consists of these answers. One AWS call with `spot`, for the current price."""
    spot: dict[str, float] = {}
    if spec.spot:
        with contextlib.suppress(CloudDDPError):  # they are shown, and decide nothing but the order
            spot = instance_types.spot_prices(aws, spec.instance_type)
    context = LaunchContext(
        aws.region,
        info,
        image,
        found,
        ssh_from,
        owner,
        datetime.now(UTC),
        interfaces=choose_interfaces(spec, info),
        own_placement_group=wants_placement_group(spec, info, reservation),
        reservation=reservation,
    )
    now = [spot[one.zone] for one in found if one.zone in spot]
    current = (min(now), max(now)) if now else None
    full = replace(usual, disk_gb=max(spec.disk_gb, image.disk_gb), spot=current)
    return Offer(aws, spec, info, context, full)


def check_addresses(offer: Offer, spec: ClusterSpec) -> None:
    """Raise CloudDDPError if the nodes need more Elastic IPs than the account may have. Two AWS calls, or
    none."""
    if needs_elastic_ip(offer.context.interfaces, public=connection_mode(spec) == "public"):
        node_addresses.check_limit(offer.aws, spec.name, spec.nodes, lambda: _abandoned(offer.aws, spec.name))


def _abandoned(aws: AWS, name: str) -> str:
    """Return the id of the cluster whose remains `up` removes before it creates one of that name, or ''."""
    holder = name_lock.holder(aws, name)
    return holder.cluster_id if holder is not None and name_lock.abandoned(aws, holder) else ""


def subnets(
    aws: AWS, spec: ClusterSpec, ssh_from: tuple[str, ...], reservation: Reservation | None
) -> tuple[Subnet, ...]:
    """Return the subnets of the nodes, one per zone: with a reservation, those in its zone."""
    sources = ssh_from if is_direct(spec) else ()  # which need a route back through an internet gateway
    if reservation is None:
        return networks.candidates(aws, spec, reached_from=sources)
    there = msgspec.structs.replace(spec, zones=(reservation.zone,))
    try:
        return networks.candidates(aws, there, reached_from=sources)
    except UsageError as error:
        title = reservation_title(reservation)
        raise UsageError(f"{title} is in zone {reservation.zone}: {error.message}", hint=error.hint) from None


def price(aws: AWS, spec: ClusterSpec, reservation: Reservation | None = None) -> Price:
    """Return the price of the cluster in a region: as given, as AWS's price list has it now, or as our table
    has it.

    At most one AWS call, none for a capacity block, which is prepaid. Raises UsageError if no price is known.
    """
    title = reservation_title(reservation) if reservation is not None else ""
    if reservation is not None and reservation.block:
        found: prices.Listed | None = prices.Listed(0.0, f"{title} is prepaid")
    elif spec.price is not None:
        found = prices.Listed(spec.price, "as given")
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
        gp3_month=prices.gp3_month(aws.region),
        throughput=spec.disk_throughput,
        addresses=int(connection_mode(spec) == "public"),
    )


def listed(aws: AWS, instance_type: str) -> prices.Listed | None:
    """Return the price of a node on demand: AWS's own, else that of our table, else None. One AWS call."""
    now = instance_types.on_demand_price(aws, instance_type)
    if now is None:
        return prices.listed(instance_type, aws.region)
    usd, published = now
    return prices.Listed(usd, f"on-demand price of AWS{f', list of {published}' if published else ''}")
