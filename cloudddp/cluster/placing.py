"""Creates a cluster in the first region and zone that has capacity, and waits for capacity if asked to.

Between two attempts nothing exists in the account: each attempt that fails has removed what it created, so that a
computer that is switched off while it waits leaves nothing behind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from cloudddp.cluster import capacity
from cloudddp.cluster.capacity import Attempt, NotLaunched
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.offers import Offer
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.progress import ProgressCallback
from cloudddp.config import duration, timing
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, Interrupted

Create = Callable[[Offer], tuple[Cluster, Plan]]


def create_in_any(
    offers: Sequence[Offer],
    excluded: Sequence[Attempt],
    spec: ClusterSpec,
    create: Create,
    progress: ProgressCallback,
) -> tuple[Cluster, Plan]:
    """Return the cluster that `create` has created in one of the offers, and its plan.

    `create` raises NotLaunched, after removing everything, if an offer has no capacity. `excluded` are regions that
    were excluded before. Raises CloudDDPError with a table if no zone has capacity within spec.wait_capacity.
    """
    wait = duration.seconds(spec.wait_capacity)
    deadline, until = time.monotonic() + wait, datetime.now(UTC) + timedelta(seconds=wait)
    limits = timing.current()
    pause = limits.capacity_first
    while True:
        failures: list[NotLaunched] = []
        for offer in offers:
            created = _create_in(offer, create, failures)
            if created is not None:
                return created
        attempts = [one for failure in failures for one in failure.attempts]
        left = deadline - time.monotonic()
        if left <= 0 or not any(one.waiting_helps for one in attempts):
            raise _failed(spec, excluded, failures, waited=wait > 0)
        # Jitter: several users who wait for the same capacity must not ask at the same moments.
        seconds = min(pause * random.uniform(0.5, 1.0), left)  # noqa: S311
        zones = ", ".join(dict.fromkeys(one.zone or one.region for one in attempts))
        progress(
            f"no capacity in {zones}: next attempt in {seconds:.0f} s, until {_time(until)} (Ctrl-C ends; nothing is running)"
        )
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            raise Interrupted("interrupted while waiting for capacity; nothing is running") from None
        pause = min(pause * 1.5, limits.capacity_longest)


def _time(until: datetime) -> str:
    """Return a time in UTC, with its date where that is not today's."""
    today = until.date() == datetime.now(UTC).date()
    return f"{until:%H:%M} UTC" if today else f"{until:%Y-%m-%d %H:%M} UTC"


def _create_in(offer: Offer, create: Create, failures: list[NotLaunched]) -> tuple[Cluster, Plan] | None:
    """Create the cluster in one region; None if no zone of it has capacity, which is added to `failures`.

    A launch that was accepted and failed later ends an attempt before the remaining zones were tried.
    """
    remaining: Sequence[str] = [subnet.zone for subnet in offer.context.subnets]
    while remaining:
        try:
            return create(offer.only(remaining))
        except NotLaunched as failure:
            failures.append(failure)
            remaining = failure.remaining
    return None


def _failed(
    spec: ClusterSpec, excluded: Sequence[Attempt], failures: Sequence[NotLaunched], *, waited: bool
) -> CloudDDPError:
    attempts = [*excluded, *(one for failure in failures for one in failure.attempts)]
    if len(attempts) == 1 and not waited:
        return failures[0].first
    what = f"{spec.nodes} x {spec.instance_type}"
    return capacity.exhausted(what, attempts, spec.wait_capacity if waited else "")
