"""Creates a cluster in the first region and zone that has capacity, and waits for capacity if asked to.

Between two attempts nothing exists in the account: each attempt that fails has removed what it created, so
that a computer that is switched off while it waits leaves nothing behind. A launch that AWS accepts and that
ends before the nodes are ready is billed nevertheless: such launches are limited, and count against max_cost.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cloudddp.aws.answers import SHORTAGES
from cloudddp.cluster.launch_errors import LaunchAttempt, NotLaunched, advice, exhausted
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.offers import Offer
from cloudddp.cluster.plan import Plan, lifetime
from cloudddp.config import timing
from cloudddp.config.cluster_spec import ClusterSpec, Placement
from cloudddp.config.values import seconds_of
from cloudddp.errors import AWSError, CloudDDPError, Interrupted, ProgressCallback, UsageError
from cloudddp.formats import format_time

Create = Callable[[Offer, ClusterSpec], tuple[Cluster, Plan]]
Look = Callable[[], tuple[Sequence[Offer], Sequence[LaunchAttempt]]]
# How many launches that AWS accepted and that ended are made, by the reason. Each is billed, at least 60 s
# per node. A lack of capacity ends by itself; the other reasons may be permanent, such as a disk that EC2
# cannot attach.
_MOST_ACCEPTED = {"Server.InsufficientInstanceCapacity": 20}
_MOST_OF_OTHERS = 3


def create_in_first_available(
    look: Look, spec: Placement, create: Create, progress: ProgressCallback
) -> tuple[Cluster, Plan]:
    """Return the cluster that `create` has created in one of the offers, and its plan.

    `look` returns the offers, and the regions that were excluded; it is called before each round, and
    resolves them again when they are old. `create` raises NotLaunched, after removing everything, if an offer
    has no capacity; its settings have a max_cost without the cost so far. Raises CloudDDPError with a table
    if no zone has capacity within spec.wait_capacity.
    """
    wait = seconds_of(spec.wait_capacity)
    deadline, until = time.monotonic() + wait, datetime.now(UTC) + timedelta(seconds=wait)
    limits = timing.current()
    pause = limits.capacity_first
    excluded: Sequence[LaunchAttempt] = ()
    launches = _Launches(create)
    try:
        while True:
            failed: list[LaunchAttempt] = []
            try:
                offers, excluded = look()
            except AWSError as error:
                if not wait or not error.transient:
                    raise
                offers = ()
                failed.append(LaunchAttempt("", "", error))
            for offer in offers:
                if offer.label:
                    progress(f"trying {spec.nodes} x {offer.label} in {offer.aws.region}")
                if (created := launches.create_in(offer, failed)) is not None:
                    return created
            left = deadline - time.monotonic()
            if left <= 0 or not any(one.waiting_helps for one in failed):
                raise _failed(spec, [*excluded, *failed], launches, waited=wait > 0)
            # Jitter: several users who wait for the same capacity must not ask at the same moments.
            seconds = min(pause * random.uniform(0.5, 1.0), left)  # noqa: S311
            billed = f"; cost so far at most {launches.cost}" if launches.usd else ""
            progress(
                f"{_why(failed)}: next attempt in {seconds:.0f} s, until {format_time(until)} (Ctrl-C ends; "
                f"nothing is running{billed})"
            )
            time.sleep(seconds)
            pause = min(pause * 1.5, limits.capacity_longest)
    except KeyboardInterrupt:
        if launches.nothing_exists:
            raise Interrupted("interrupted while waiting for capacity; nothing is running") from None
        raise


def _why(attempts: Sequence[LaunchAttempt]) -> str:
    places = ", ".join(
        dict.fromkeys(attempt.zone or attempt.region for attempt in attempts if not attempt.transient)
    )
    if places:
        return f"no capacity in {places}"
    return f"AWS does not answer as usual ({attempts[-1].reason})"


@dataclass(slots=True)
class _Launches:
    """The launches so far. `nothing_exists`: the last one has failed, and removed everything. `usd` and
    `accepted`, by code: of those that AWS has accepted and that ended before the nodes were ready."""

    create: Create
    nothing_exists: bool = False
    usd: float = 0.0
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def cost(self) -> str:
        return f"${self.usd:.2f}"

    def create_in(self, offer: Offer, failed: list[LaunchAttempt]) -> tuple[Cluster, Plan] | None:
        """Create the cluster of one offer; None, with its attempts in `failed`, if no zone has capacity. A
        launch that was accepted and failed later ends an attempt before the remaining zones were tried."""
        zones = [subnet.zone for subnet in offer.context.subnets]
        while zones:
            paid = self._within_budget(offer)
            self.nothing_exists = False
            try:
                return self.create(offer.only(zones), paid)
            except NotLaunched as error:
                failure = error
            except AWSError as error:
                if offer.spec.wait_capacity == "0" or not error.transient:
                    raise
                failure = NotLaunched(LaunchAttempt(offer.aws.region, "", error))
            self.nothing_exists = True
            failed += [replace(attempt, what=offer.label) for attempt in failure.attempts]
            last = failure.attempts[-1]
            if failure.accepted:
                self._count(last, failure.usd)
            further = failure.accepted and not last.transient and last.zone in zones
            zones = zones[zones.index(last.zone) + 1 :] if further else []
        return None

    def _count(self, last: LaunchAttempt, usd: float) -> None:
        """Count a launch that was accepted and ended, which is billed. Raises CloudDDPError for too many."""
        self.usd += usd
        self.accepted[last.code] += 1
        count = self.accepted[last.code]
        if count >= _MOST_ACCEPTED.get(last.code, _MOST_OF_OTHERS):
            raise CloudDDPError(
                f"{count} launches that AWS accepted ended before the nodes were ready, the last one with "
                f"{last.code}: {last.reason}. Such launches are billed: they cost at most {self.cost}; "
                "nothing is running",
                hint="try again later, or choose other --zones, --regions, --no-placement-group or another "
                "--instance-type",
            )

    def _within_budget(self, offer: Offer) -> ClusterSpec:
        """Return the settings with what is left of max_cost. Raises CloudDDPError if that is too little."""
        spec = offer.spec
        if spec.max_cost is None or not self.usd:
            return spec
        try:
            paid = replace(spec, max_cost=max(round(spec.max_cost - self.usd, 4), 0.0001))
            lifetime(paid, offer.price)
        except UsageError as error:
            raise CloudDDPError(
                "launches that AWS accepted and that ended before the nodes were ready cost at most "
                f"{self.cost}; what is left of max_cost ({spec.max_cost:.2f}) is too little: "
                f"{error.message}. Nothing is running",
                hint="raise --max-cost, or try again later: `cloudddp up`",
            ) from None
        return paid


def _failed(
    spec: Placement, attempts: Sequence[LaunchAttempt], launches: _Launches, *, waited: bool
) -> CloudDDPError:
    if len(attempts) == 1 and not waited:
        first = attempts[0].error
        if isinstance(first, AWSError) and first.code in SHORTAGES:
            return AWSError(first.message, hint=advice(spec, attempts), code=first.code)
        return first
    billed = f"launches that AWS accepted and that ended cost at most {launches.cost}" if launches.usd else ""
    return exhausted(spec, attempts, spec.wait_capacity if waited else "", billed)
