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

import msgspec

from cloudddp.aws.answers import SHORTAGES
from cloudddp.cluster import launch_errors
from cloudddp.cluster.launch_errors import Attempt, NotLaunched, attempt
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.offers import Offer
from cloudddp.cluster.plan import Plan, lifetime
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, seconds_of
from cloudddp.errors import AWSError, CloudDDPError, Interrupted, ProgressCallback, UsageError
from cloudddp.formats import moment

Create = Callable[[Offer, ClusterSpec], tuple[Cluster, Plan]]
Look = Callable[[], tuple[Sequence[Offer], Sequence[Attempt]]]


@dataclass(slots=True)
class _Waiting:
    """The launches that AWS has accepted and that ended before the nodes were ready. `nothing_exists`: the
    last attempt has failed, and removed everything."""

    nothing_exists: bool = False
    usd: float = 0.0
    accepted: Counter[str] = field(default_factory=Counter)  # by code

    @property
    def cost(self) -> str:
        return f"${self.usd:.2f}"


def create_in_any(
    look: Look, spec: ClusterSpec, create: Create, progress: ProgressCallback
) -> tuple[Cluster, Plan]:
    """Return the cluster that `create` has created in one of the offers, and its plan.

    `look` returns the offers, and the regions that were excluded; it is called before each round, and
    resolves them again when they are old. `create` raises NotLaunched, after removing everything, if an offer
    has no capacity; its settings have a max_cost without the cost so far. Raises CloudDDPError with a table
    if no zone has capacity within spec.wait_capacity.
    """
    waiting = _Waiting()
    try:
        return _create_in_any(look, spec, create, progress, waiting)
    except KeyboardInterrupt:
        if waiting.nothing_exists:
            raise Interrupted("interrupted while waiting for capacity; nothing is running") from None
        raise


def _create_in_any(
    look: Look, spec: ClusterSpec, create: Create, progress: ProgressCallback, waiting: _Waiting
) -> tuple[Cluster, Plan]:
    wait = seconds_of(spec.wait_capacity)
    deadline, until = time.monotonic() + wait, datetime.now(UTC) + timedelta(seconds=wait)
    limits = timing.current()
    pause = limits.capacity_first
    excluded: Sequence[Attempt] = ()
    while True:
        failures: list[NotLaunched] = []
        try:
            offers, excluded = look()
        except AWSError as error:
            if not wait or not error.transient:
                raise
            offers = ()
            failures.append(_outage(error, ""))
        for offer in offers:
            if offer.label:
                progress(f"trying {spec.nodes} x {offer.label} in {offer.aws.region}")
            created = _create_in(offer, create, failures, waiting)
            if created is not None:
                return created
        attempts = [one for failure in failures for one in failure.attempts]
        left = deadline - time.monotonic()
        if left <= 0 or not any(one.waiting_helps for one in attempts):
            raise _failed(spec, excluded, failures, waiting, waited=wait > 0)
        # Jitter: several users who wait for the same capacity must not ask at the same moments.
        seconds = min(pause * random.uniform(0.5, 1.0), left)  # noqa: S311
        billed = f"; cost so far at most {waiting.cost}" if waiting.usd else ""
        progress(
            f"{_why(attempts)}: next attempt in {seconds:.0f} s, until {moment(until)} (Ctrl-C ends; nothing "
            f"is running{billed})"
        )
        time.sleep(seconds)
        pause = min(pause * 1.5, limits.capacity_longest)


def _why(attempts: Sequence[Attempt]) -> str:
    places = ", ".join(dict.fromkeys(one.zone or one.region for one in attempts if not one.transient))
    if places:
        return f"no capacity in {places}"
    return f"AWS does not answer as usual ({attempts[-1].reason})"


def _create_in(
    offer: Offer, create: Create, failures: list[NotLaunched], waiting: _Waiting
) -> tuple[Cluster, Plan] | None:
    """Create the cluster of one offer; None if no zone of it has capacity, which is added to `failures`.

    A launch that was accepted and failed later ends an attempt before the remaining zones were tried.
    """
    remaining: Sequence[str] = [subnet.zone for subnet in offer.context.subnets]
    while remaining:
        paid = _remaining_budget(offer, waiting)
        waiting.nothing_exists = False
        try:
            return create(offer.only(remaining), paid)
        except NotLaunched as failure:
            waiting.nothing_exists = True
            failure.attempts = tuple(replace(one, what=offer.label) for one in failure.attempts)
            failures.append(failure)
            _count(failure, waiting)
            remaining = failure.remaining
        except AWSError as error:
            if offer.spec.wait_capacity == "0" or not error.transient:
                raise
            waiting.nothing_exists = True
            failures.append(_outage(error, offer.aws.region))
            return None
    return None


def _outage(error: AWSError, region: str) -> NotLaunched:
    return NotLaunched([attempt(region, "", error)], error)


def _count(failure: NotLaunched, waiting: _Waiting) -> None:
    """Count a launch that was accepted and ended: each of them is billed. Raises CloudDDPError for too
    many."""
    if not failure.accepted:
        return
    code = failure.attempts[-1].code
    waiting.usd += failure.usd
    waiting.accepted[code] += 1
    if (count := waiting.accepted[code]) < launch_errors.most_accepted(code):
        return
    raise CloudDDPError(
        f"{count} launches that AWS accepted ended before the nodes were ready, the last one with {code}: "
        f"{failure.attempts[-1].reason}. Such launches are billed: they cost at most {waiting.cost}; nothing "
        "is running",
        hint="try again later, or choose other --zones, --regions, --no-placement-group or another "
        "--instance-type",
    ) from None


def _remaining_budget(offer: Offer, waiting: _Waiting) -> ClusterSpec:
    """Return the settings with a max_cost without the cost so far. Raises CloudDDPError if it is too
    little."""
    spec = offer.spec
    if spec.max_cost is None or not waiting.usd:
        return spec
    left = round(spec.max_cost - waiting.usd, 4)
    try:
        paid = msgspec.structs.replace(spec, max_cost=max(left, 0.0001))
        lifetime(paid, offer.price)
    except UsageError as error:
        raise CloudDDPError(
            "launches that AWS accepted and that ended before the nodes were ready cost at most "
            f"{waiting.cost}; what is left "
            f"of max_cost ({spec.max_cost:.2f}) is too little: {error.message}. Nothing is running",
            hint="raise --max-cost, or try again later: `cloudddp up`",
        ) from None
    return paid


def _failed(
    spec: ClusterSpec,
    excluded: Sequence[Attempt],
    failures: Sequence[NotLaunched],
    waiting: _Waiting,
    *,
    waited: bool,
) -> CloudDDPError:
    attempts = [*excluded, *(one for failure in failures for one in failure.attempts)]
    wider = launch_errors.widening(spec)
    if len(attempts) == 1 and not waited:
        first = failures[0].first
        if isinstance(first, AWSError) and attempts[0].code in SHORTAGES:
            return AWSError(first.message, hint=launch_errors.advice(attempts, wider), code=first.code)
        return first
    billed = f"launches that AWS accepted and that ended cost at most {waiting.cost}" if waiting.usd else ""
    after = spec.wait_capacity if waited else ""
    return launch_errors.exhausted(spec.title, attempts, after, billed, wider=wider)
