"""What is made to go wrong in the simulated account: how little capacity there is, which calls fail and how.

Pure, standard library only: the record, its JSON, and who uses it up. What a condition does to a request is front.py's
business (calls) and ec2/'s (launches).

The JSON, in a POST to /_cloudddp/conditions (GET answers with the same, all keys present). A body is merged into what
is set; `null` takes one entry away; `"clear": true` takes everything away first:

    {"clear": true,
     "capacity":       {"us-east-1a": {"p5.48xlarge": 2}},   how many more fit; what stops or ends gives its place back
     "quota":          {"on-demand-g": 64, "addresses": 5},  vCPUs at once in a region (names: QUOTAS); Elastic IPs
     "free_addresses": {"subnet-0123456789abcdef0": 3},      how many more private addresses the subnet has
     "throttle":       {"RunInstances": 2},                  the next calls answer RequestLimitExceeded, without effect
     "lose":           {"RunInstances": 1},                  the next calls take effect, and their answer never comes
     "latency":        {"*": 0.1, "RunInstances": 2.5},      seconds before a call begins; "*" for all others
     "reject":         {"RunInstances": {"code": "UnauthorizedOperation", "message": "", "status": 403, "calls": 1}}}

Counted conditions end by themselves and then vanish from the answer. A body that is wrong in any part changes nothing
and answers HTTP 400 with {"error": MESSAGE, "known": [NAMES]}.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

QUOTAS = (
    "on-demand-g",  # G and VT
    "on-demand-p",
    "on-demand-standard",
    "spot-g",
    "spot-p",  # P2, P3, P4
    "spot-p5",  # P5, P6
    "spot-standard",
    "addresses",  # Elastic IPs, not vCPUs
)
EXAMPLES: Mapping[str, Any] = {
    "capacity": {"us-east-1a": {"p5.48xlarge": 2}},
    "quota": {"on-demand-g": 64},
    "free_addresses": {"subnet-0123456789abcdef0": 3},
    "throttle": {"RunInstances": 2},
    "lose": {"RunInstances": 1},
    "latency": {"*": 0.2},
    "reject": {"RunInstances": {"code": "UnauthorizedOperation", "status": 403}},
}
"""One of each condition, as an error shows it."""

_NEAR = 12  # as many names as an error lists of a long list


class BadCondition(ValueError):
    """A condition that cannot be set. `known` holds the names there are, the nearest first (of a long list: some)."""

    def __init__(self, message: str, known: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.known = tuple(known)


@dataclass(frozen=True, slots=True)
class Names:
    """What may be named in a condition."""

    zones: frozenset[str]
    types: frozenset[str]
    actions: frozenset[str]
    subnets: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rejection:
    """An error that the next `calls` calls of an action are answered with, without effect."""

    code: str
    message: str = ""
    status: int = 400
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that is set; see the top of this file. Empty: the account of a lucky user."""

    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)
    free_addresses: Mapping[str, int] = field(default_factory=dict)
    throttle: Mapping[str, int] = field(default_factory=dict)
    lose: Mapping[str, int] = field(default_factory=dict)
    latency: Mapping[str, float] = field(default_factory=dict)
    reject: Mapping[str, Rejection] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; `merge(to_json())` into nothing gives the same conditions."""
        plain = {entry.name: dict(getattr(self, entry.name)) for entry in fields(self)}
        plain["capacity"] = {zone: dict(types) for zone, types in self.capacity.items()}
        plain["reject"] = {
            action: {name: getattr(rule, name) for name in ("code", "message", "status", "calls")}
            for action, rule in self.reject.items()
        }
        return plain


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one call. `refusal` and `lose` are never both set."""

    latency: float = 0.0  # seconds
    refusal: Rejection | None = None
    lose: bool = False


THROTTLED = Rejection("RequestLimitExceeded", "Request limit exceeded.", 503)


def merge(conditions: Conditions, body: object, names: Names) -> Conditions:
    """The conditions with `body` merged in. Raises BadCondition."""
    if not isinstance(body, dict):
        raise BadCondition(f"conditions are a JSON object, not {json.dumps(body)}; {_for_example('latency')}")
    changes = dict(body)
    if changes.pop("clear", False):
        conditions = Conditions()
    readers: dict[str, Callable[[Any, Any], Any]] = {
        "capacity": lambda old, new: _capacity(old, new, names),
        "quota": lambda old, new: _entries("quota", old, new, QUOTAS, _count),
        "free_addresses": lambda old, new: _entries("subnet", old, new, names.subnets, _count),
        "throttle": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "lose": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "latency": lambda old, new: _entries("action", old, new, {"*", *names.actions}, _seconds),
        "reject": lambda old, new: _entries("action", old, new, names.actions, _rejection),
    }
    for key, value in changes.items():
        _require("condition", key, readers)
        try:
            read = readers[key](getattr(conditions, key), value)
        except BadCondition as error:
            raise BadCondition(f"{key}: {error}; {_for_example(key)}", error.known) from None
        conditions = replace(conditions, **{key: read})
    return conditions


def _for_example(key: str) -> str:
    return f"for example {json.dumps({key: EXAMPLES[key]})}"


def _capacity(old: Mapping[str, Mapping[str, int]], new: Any, names: Names) -> dict[str, Any]:
    def types(zone: str, value: Any) -> dict[str, int]:
        return _entries("instance type", old.get(zone, {}), value, names.types, _count)

    merged = {**old, **_entries("zone", {}, new, names.zones, types)}
    gone = [zone for zone, value in new.items() if value is None]
    return {zone: value for zone, value in merged.items() if value and zone not in gone}


def _entries(
    kind: str, old: Mapping[str, Any], new: Any, known: Iterable[str], read: Callable[[str, Any], Any]
) -> dict[str, Any]:
    if not isinstance(new, dict):
        raise BadCondition(f"an object by {kind} is wanted, not {json.dumps(new)}")
    merged = dict(old)
    for name, value in new.items():
        _require(kind, name, known)
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = read(name, value)
    return merged


def _require(kind: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=_NEAR, cutoff=0.4)
    likely = [*near, *(one for one in names if one[:2] == name[:2])]
    rest = [] if likely and len(names) > _NEAR else names
    shown = list(dict.fromkeys([*likely, *rest]))[:_NEAR]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    raise BadCondition(f"unknown {kind} {name!r}; known: {', '.join(shown) or 'none'}{more}", shown)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadCondition(f"{name}: a whole number of 0 or more is wanted, not {json.dumps(value)}")
    return value


def _calls(name: str, value: Any) -> int:
    if not _count(name, value):
        raise BadCondition(f"{name}: at least 1 call is wanted (null to take the condition away)")
    return int(value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise BadCondition(f"{name}: seconds from 0 to 3600 are wanted, not {json.dumps(value)}")
    return float(value)


def _rejection(name: str, value: Any) -> Rejection:
    wanted = {"code", "message", "status", "calls"}
    if not isinstance(value, dict) or not value.get("code") or not value.keys() <= wanted:
        raise BadCondition(
            f'{name}: {{"code": CODE}} is wanted, with "message", "status", "calls" if need be'
        )
    rule = Rejection(
        code=str(value["code"]),
        message=str(value.get("message") or ""),
        status=_count(name, value.get("status", 400)),
        calls=_calls(name, value.get("calls", 1)),
    )
    if not 400 <= rule.status <= 599:
        raise BadCondition(f"{name}: an HTTP status from 400 to 599 is wanted, not {rule.status}")
    return rule


class Store:
    """The conditions of one process, and the using up of the counted ones. Safe to use from any thread."""

    def __init__(self, names: Callable[[], Names]) -> None:
        self._names = names
        self._conditions = Conditions()
        self._lock = threading.Lock()

    def read(self) -> Conditions:
        """What is set now."""
        return self._conditions

    def update(self, body: object) -> Conditions:
        """Merge a JSON body in and return what is set now. Raises BadCondition, and then nothing has changed."""
        names = self._names()
        with self._lock:
            self._conditions = merge(self._conditions, body, names)
            return self._conditions

    def verdict(self, action: str) -> Verdict:
        """What becomes of one call of `action`, which uses up one of each counted condition that meets it."""
        with self._lock:
            now = self._conditions
            latency = now.latency.get(action, now.latency.get("*", 0.0))
            if rule := now.reject.get(action):
                left = replace(rule, calls=rule.calls - 1) if rule.calls > 1 else None
                self._conditions = replace(now, reject=_without(now.reject, action, left))
                return Verdict(latency, rule)
            if calls := now.throttle.get(action, 0):
                self._conditions = replace(now, throttle=_without(now.throttle, action, calls - 1))
                return Verdict(latency, THROTTLED)
            if calls := now.lose.get(action, 0):
                self._conditions = replace(now, lose=_without(now.lose, action, calls - 1))
                return Verdict(latency, lose=True)
            return Verdict(latency)

    def room(self, zone: str, instance_type: str) -> int | None:
        """How many more instances of the type fit into the zone; None for any number."""
        return self._conditions.capacity.get(zone, {}).get(instance_type)

    def occupy(self, zone: str, instance_type: str, count: int) -> None:
        """Take `count` places in a zone, or give them back (less than 0)."""
        with self._lock:
            room = self.room(zone, instance_type)
            if room is None:
                return
            types = {**self._conditions.capacity[zone], instance_type: max(0, room - count)}
            self._conditions = replace(self._conditions, capacity={**self._conditions.capacity, zone: types})

    def take_addresses(self, subnet: str, count: int) -> None:
        """Take `count` private addresses of a subnet, or give them back (less than 0)."""
        with self._lock:
            free = self._conditions.free_addresses.get(subnet)
            if free is not None:
                left = {**self._conditions.free_addresses, subnet: max(0, free - count)}
                self._conditions = replace(self._conditions, free_addresses=left)


def _without(entries: Mapping[str, Any], name: str, left: Any) -> dict[str, Any]:
    return {key: left if key == name else value for key, value in entries.items() if key != name or left}
