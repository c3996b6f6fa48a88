"""The current conditions of a process. Calls and launches use up the counted ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cloudddp.simulator.conditions.model import Conditions, LaunchFailure, Rejection, Role
from cloudddp.simulator.conditions.reading import Names, merge

NOT_AUTHORIZED = "UnauthorizedOperation"
THROTTLED = Rejection("RequestLimitExceeded", "Request limit exceeded.", 503)
"""EC2 API reference, "Error codes for the Amazon EC2 API", server error codes."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What the conditions do to one call. `rejection` and `lose` are never both set."""

    latency: float = 0.0  # seconds
    rejection: Rejection | None = None
    lose: bool = False


class Store:
    """Safe to use from any thread. `names` returns the names that conditions may refer to now."""

    def __init__(self, names: Callable[[], Names]) -> None:
        self._names = names
        self._conditions = Conditions()
        self._lock = threading.Lock()
        self._tokens: dict[tuple[str, str], tuple[float, float]] = {}  # action, region -> left, as of

    def read(self) -> Conditions:
        return self._conditions

    def update(self, body: object) -> Conditions:
        """Merge a JSON body and return the result. Raises InvalidCondition, with nothing changed."""
        names = self._names()
        with self._lock:
            before, self._conditions = self._conditions, merge(self._conditions, body, names)
            if self._conditions.request_rate != before.request_rate:
                self._tokens.clear()
            return self._conditions

    def call(self, action: str, *, region: str = "", dry_run: bool = False) -> CallOutcome:
        """Return the outcome of one call of `action`, and count it against the condition that applies.

        A dry run is refused only where the permission is missing: the other conditions are about calls with
        an effect.
        """
        with self._lock:
            now = self._conditions
            latency = now.latency.get(action, now.latency.get("*", 0.0))
            if not self._take_token(action, region):  # dry runs are requests, too
                return CallOutcome(latency, THROTTLED)
            rule = now.reject.get(action)
            if dry_run and (rule is None or rule.code != NOT_AUTHORIZED):
                return CallOutcome(latency)
            if rule:
                left = replace(rule, calls=rule.calls - 1) if rule.calls > 1 else None
                self._conditions = replace(now, reject=_with(now.reject, action, left))
                return CallOutcome(latency, rule)
            if calls := now.throttle.get(action, 0):
                self._conditions = replace(now, throttle=_with(now.throttle, action, calls - 1))
                return CallOutcome(latency, THROTTLED)
            if calls := now.lose.get(action, 0):
                self._conditions = replace(now, lose=_with(now.lose, action, calls - 1))
                return CallOutcome(latency, lose=True)
            return CallOutcome(latency)

    def _take_token(self, action: str, region: str) -> bool:
        """Return whether the action's token bucket in a region has a token for a call, and take it."""
        rate, now = self._conditions.request_rate.get(action), time.monotonic()
        if rate is None:
            return True
        left, since = self._tokens.get((action, region), (rate.bucket, now))
        left = min(float(rate.bucket), left + (now - since) * rate.refill)
        self._tokens[action, region] = (left - (left >= 1), now)
        return left >= 1

    def launch_failure(self, zone: str) -> LaunchFailure | None:
        """Return how the launch that is being made in a zone fails, and count it; None if it succeeds."""
        with self._lock:
            rule = self._conditions.fail_launch.get(zone)
            if rule is not None:
                left = replace(rule, launches=rule.launches - 1) if rule.launches > 1 else None
                entries = _with(self._conditions.fail_launch, zone, left)
                self._conditions = replace(self._conditions, fail_launch=entries)
            return rule

    def role(self, arn: str) -> Role:
        """Return the rules of a role; those of every other role by default."""
        return self._conditions.roles.get(arn, Role())

    def use_code(self, arn: str, code: str) -> bool:
        """Return whether an MFA code is valid for the role, and use it up."""
        with self._lock:
            now, role = self._conditions, self.role(arn)
            if code not in (role.codes or ()):
                return False
            left = replace(role, codes=tuple(one for one in role.codes or () if one != code))
            self._conditions = replace(now, roles={**now.roles, arn: left})
            return True

    @property
    def clock(self) -> int:
        """By how many seconds AWS's clock is ahead of this computer's."""
        return self._conditions.clock.get("ahead", 0)

    def capacity(self, zone: str, instance_type: str) -> int | None:
        """Return how many more instances of the type fit in the zone; None for no limit."""
        return self._conditions.capacity.get(zone, {}).get(instance_type)

    def spot_capacity(self, zone: str, instance_type: str) -> int | None:
        """Return how many spot instances of the type a launch in the zone may have; None for no limit."""
        return self._conditions.spot_capacity.get(zone, {}).get(instance_type)

    def use_capacity(self, zone: str, instance_type: str, count: int) -> None:
        """Use `count` places in a zone, or free them if negative."""
        with self._lock:
            left = self.capacity(zone, instance_type)
            if left is None:
                return
            types = {**self._conditions.capacity[zone], instance_type: max(0, left - count)}
            self._conditions = replace(self._conditions, capacity={**self._conditions.capacity, zone: types})

    def use_addresses(self, subnet: str, count: int) -> None:
        """Use `count` private addresses of a subnet, or free them if negative."""
        with self._lock:
            free = self._conditions.free_addresses.get(subnet)
            if free is not None:
                left = {**self._conditions.free_addresses, subnet: max(0, free - count)}
                self._conditions = replace(self._conditions, free_addresses=left)


def _with(entries: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the entries with one replaced, or removed if `value` is falsy."""
    return {key: value if key == name else old for key, old in entries.items() if key != name or value}
