"""Reads conditions from JSON: merges a body into the current conditions, and says what is wrong with it."""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from cloudddp.simulator.conditions.model import (
    LISTED_LATE,
    NOT_OPTED_IN,
    QUOTAS,
    Block,
    Boot,
    Conditions,
    LaunchFailure,
    Link,
    Rate,
    Rejection,
    Role,
)

EXAMPLES: Mapping[str, Any] = {
    "capacity": {"us-east-1a": {"p5.48xlarge": 2}},
    "spot_capacity": {"us-east-1a": {"g5.xlarge": 0}},
    "quota": {"on-demand-g": 64},
    "free_addresses": {"subnet-0123456789abcdef0": 3},
    "vpn": {"vpc-0123456789abcdef0": "10.8.0.10"},
    "regions": {"af-south-1": NOT_OPTED_IN},
    "blocks": {
        "cr-0123456789abcdef0": {
            "zone": "us-east-1a",
            "type": "p5.48xlarge",
            "count": 2,
            "start": "2026-11-20T11:30:00Z",
            "end": "2026-11-22T11:30:00Z",
        }
    },
    "cleanup": {"reservations": 120},
    "efa_devices": {"p4d.24xlarge": 3},
    "throttle": {"RunInstances": 2},
    "request_rate": {"RunInstances": {"bucket": 2, "refill": 1}},
    "lose": {"RunInstances": 1},
    "lingering": {"interfaces": 60},
    "unlisted": {"elastic-ip": 2},
    "latency": {"*": 0.2},
    "fail_launch": {"us-east-1a": {"code": "Server.InsufficientInstanceCapacity", "instances": 1}},
    "prices": {"g5.xlarge": 1.5},
    "spot_prices": {"us-east-1a": {"g5.xlarge": 0.4}},
    "reject": {"RunInstances": {"code": "UnauthorizedOperation", "status": 403}},
    "link": {"latency": 0.05, "mbit": 200, "loss": 5},
    "boot": {"ssh_seconds": 60, "nologin_seconds": 30},
    "roles": {"arn:aws:iam::123456789012:role/trainer": {"codes": ["123456"], "seconds": 900}},
    "clock": {"ahead": 900},
}
"""One example of each condition, for error messages."""

_RESERVATION = re.compile(r"cr-[0-9a-f]{8,17}")
_MAX_LISTED = 12  # names in an error message
_ARN = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]{1,512}")
_CODE = re.compile(r"[0-9]{6}")
_MAX_SECONDS = 43200  # STS's longest role session, 12 hours
_MAX_AHEAD = 86400
_MAX_LATENCY = 10.0  # seconds
_MAX_MBIT = 100_000.0
_LINK_LIMITS = {"latency": _MAX_LATENCY, "mbit": _MAX_MBIT, "loss": 100.0}
_LINK_UNITS = {
    "latency": f"seconds of a round trip, from 0 to {_MAX_LATENCY:g} (0.05 is 50 ms)",
    "mbit": f"Mbit/s above 0, at most {_MAX_MBIT:g}",
    "loss": "percent from 0 to 100",
}
_MAX_GPUS = 16
_BOOT_SETTINGS = tuple(field.name for field in fields(Boot))
_LINK_SETTINGS = tuple(field.name for field in fields(Link))


class InvalidCondition(ValueError):
    """A condition that cannot be set. `known` has valid names, the closest first (not all of a long list)."""

    def __init__(self, message: str, known: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.known = tuple(known)


@dataclass(frozen=True, slots=True)
class Names:
    """The names that conditions may refer to."""

    zones: frozenset[str]
    types: frozenset[str]
    actions: frozenset[str]
    subnets: frozenset[str]
    vpcs: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()


def merge(conditions: Conditions, body: object, names: Names) -> Conditions:
    """Return the conditions with a JSON body merged in. Raises InvalidCondition."""
    if not isinstance(body, dict):
        raise InvalidCondition(
            f"conditions must be a JSON object, not {json.dumps(body)}; {_example('latency')}"
        )
    changes = dict(body)
    if changes.pop("clear", False):
        conditions = Conditions()
    readers: dict[str, Callable[[Any, Any], Any]] = {
        "capacity": lambda old, new: _by_zone(old, new, names, _count),
        "spot_capacity": lambda old, new: _by_zone(old, new, names, _count),
        "quota": lambda old, new: _entries("quota", old, new, QUOTAS, _count),
        "free_addresses": lambda old, new: _entries("subnet", old, new, names.subnets, _count),
        "vpn": lambda old, new: _entries("VPC", old, new, names.vpcs, _address),
        "regions": lambda old, new: _entries("region", old, new, names.regions, _opt_in_status),
        "blocks": lambda old, new: _blocks(old, new, names),
        "cleanup": lambda old, new: _entries("kind", old, new, ("reservations",), _seconds),
        "efa_devices": lambda old, new: _entries("instance type", old, new, names.types, _count),
        "throttle": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "request_rate": lambda old, new: _entries("action", old, new, names.actions, _rate),
        "lose": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "lingering": lambda old, new: _entries("kind", old, new, ("interfaces",), _seconds),
        "unlisted": lambda old, new: _entries("kind", old, new, LISTED_LATE, _seconds),
        "latency": lambda old, new: _entries("action", old, new, {"*", *names.actions}, _seconds),
        "fail_launch": lambda old, new: _entries("zone", old, new, names.zones, _launch_failure),
        "prices": lambda old, new: _entries("instance type", old, new, names.types, _usd),
        "spot_prices": lambda old, new: _by_zone(old, new, names, _usd),
        "reject": lambda old, new: _entries("action", old, new, names.actions, _rejection),
        "link": lambda old, new: (
            {} if new is None else _entries("setting of a link", old, new, _LINK_SETTINGS, _link_setting)
        ),
        "boot": lambda old, new: _entries("setting of a boot", old, new, _BOOT_SETTINGS, _boot_setting),
        "roles": lambda old, new: _entries("role ARN", old, new, _arns(new), _role),
        "clock": lambda old, new: _entries("key", old, new, ("ahead",), _clock),
    }
    for key, value in changes.items():
        _check_name("condition", key, readers)
        try:
            read = readers[key](getattr(conditions, key), value)
        except InvalidCondition as error:
            raise InvalidCondition(f"{key}: {error}; {_example(key)}", error.known) from None
        conditions = replace(conditions, **{key: read})
    return conditions


def _example(key: str) -> str:
    return f"for example {json.dumps({key: EXAMPLES[key]})}"


def _by_zone(
    old: Mapping[str, Mapping[str, Any]], new: Any, names: Names, read: Callable[[str, Any], Any]
) -> dict[str, Any]:
    def types(zone: str, value: Any) -> dict[str, Any]:
        return _entries("instance type", old.get(zone, {}), value, names.types, read)

    merged = {**old, **_entries("zone", {}, new, names.zones, types)}
    removed = [zone for zone, value in new.items() if value is None]
    return {zone: value for zone, value in merged.items() if value and zone not in removed}


def _entries(
    kind: str, old: Mapping[str, Any], new: Any, known: Iterable[str], read: Callable[[str, Any], Any]
) -> dict[str, Any]:
    if not isinstance(new, dict):
        raise InvalidCondition(f"expected an object with a key per {kind}, not {json.dumps(new)}")
    merged = dict(old)
    for name, value in new.items():
        _check_name(kind, name, known)
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = read(name, value)
    return merged


def _blocks(old: Mapping[str, Block], new: Any, names: Names) -> dict[str, Any]:
    def read(name: str, value: Any) -> Block:
        if not isinstance(value, dict) or value.keys() != {"zone", "type", "count", "start", "end"}:
            raise InvalidCondition(f'{name}: expected "zone", "type", "count", "start" and "end"')
        _check_name("zone", str(value["zone"]), names.zones)
        _check_name("instance type", str(value["type"]), names.types)
        start, end = _moment(name, value["start"]), _moment(name, value["end"])
        return Block(value["zone"], value["type"], _count(name, value["count"]), start, end)

    given = new if isinstance(new, dict) else {}
    for name in given:
        if not _RESERVATION.fullmatch(name):
            raise InvalidCondition(f"{name!r} is not the id of a capacity reservation")
    return _entries("reservation", old, new, {*old, *given}, read)


def _moment(name: str, value: Any) -> datetime:
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).astimezone(UTC)
    except ValueError:
        raise InvalidCondition(
            f"{name}: expected a time such as 2026-11-20T11:30:00Z, not {json.dumps(value)}"
        ) from None


def _check_name(kind: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=_MAX_LISTED, cutoff=0.4)
    likely = [*close, *(one for one in names if one[:2] == name[:2])]
    others = [] if likely and len(names) > _MAX_LISTED else names
    shown = list(dict.fromkeys([*likely, *others]))[:_MAX_LISTED]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    raise InvalidCondition(f"unknown {kind} {name!r}; known: {', '.join(shown) or 'none'}{more}", shown)


def _expect(name: str, what: str, value: Any, *, is_met: bool) -> None:
    if not is_met:
        raise InvalidCondition(f"{name}: expected {what}, not {json.dumps(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any, least: int, most: float) -> bool:
    return _is_number(value) and isinstance(value, int) and least <= value <= most


def _count(name: str, value: Any) -> int:
    _expect(name, "a whole number of at least 0", value, is_met=_is_integer(value, 0, math.inf))
    return int(value)


def _address(name: str, value: Any) -> str:
    try:
        return str(ipaddress.IPv4Address(str(value)))
    except ValueError:
        raise InvalidCondition(f"{name}: expected an IPv4 address, not {json.dumps(value)}") from None


def _link_setting(name: str, value: Any) -> float:
    is_met = _is_number(value) and 0 <= value <= _LINK_LIMITS[name] and not (name == "mbit" and value == 0)
    _expect(name, _LINK_UNITS[name], value, is_met=is_met)
    return float(value)


def _calls(name: str, value: Any) -> int:
    if not _count(name, value):
        raise InvalidCondition(f"{name}: expected at least 1 call (null removes the condition)")
    return int(value)


def _rate(name: str, value: Any) -> Rate:
    if not isinstance(value, dict) or value.keys() != {"bucket", "refill"}:
        raise InvalidCondition(f'{name}: expected {{"bucket": TOKENS, "refill": TOKENS PER SECOND}}')
    refill = value["refill"]
    _expect(f"{name}: refill", "tokens per second above 0", refill, is_met=_is_number(refill) and refill > 0)
    return Rate(_calls(f"{name}: bucket", value["bucket"]), float(refill))


def _opt_in_status(name: str, value: Any) -> str:
    _expect(name, f'"{NOT_OPTED_IN}"', value, is_met=value == NOT_OPTED_IN)
    return NOT_OPTED_IN


def _usd(name: str, value: Any) -> float:
    _expect(name, "USD per hour above 0", value, is_met=_is_number(value) and 0 < value <= 10_000)
    return float(value)


def _seconds(name: str, value: Any) -> float:
    _expect(name, "seconds from 0 to 3600", value, is_met=_is_number(value) and 0 <= value <= 3600)
    return float(value)


def _launch_failure(name: str, value: Any) -> LaunchFailure:
    keys = {"code", "message", "instances", "launches"}
    if not isinstance(value, dict) or not value.get("code") or not value.keys() <= keys:
        raise InvalidCondition(
            f'{name}: expected {{"code": CODE}}, with optional "message", "instances" and "launches"'
        )
    return LaunchFailure(
        code=str(value["code"]),
        message=str(value.get("message") or ""),
        instances=_calls(name, value.get("instances", 1)),
        launches=_calls(name, value.get("launches", 1)),
    )


def _boot_setting(name: str, value: Any) -> float:
    if name in ("ssh_socket", "no_nfs"):
        _expect(name, "0 or 1", value, is_met=_is_integer(value, 0, 1))
        return int(value)
    if not name.endswith("_gpus"):
        return _seconds(name, value)
    _expect(name, f"at most {_MAX_GPUS}", value, is_met=_count(name, value) <= _MAX_GPUS)
    return int(value)


def _arns(new: Any) -> list[str]:
    """Return the valid ARNs among the keys: a role need not exist, as in moto."""
    found = [name for name in new if _ARN.fullmatch(name)] if isinstance(new, dict) else []
    return found or ["arn:aws:iam::123456789012:role/NAME"]


def _role(name: str, value: Any) -> Role:
    if not isinstance(value, dict) or not value.keys() <= {"codes", "seconds", "refuse"}:
        raise InvalidCondition(
            f'{name}: expected {{"codes": ["123456"]}}, with optional "seconds" and "refuse"'
        )
    codes, seconds, refuse = value.get("codes"), value.get("seconds"), value.get("refuse", False)
    are_codes = codes is None or (
        isinstance(codes, list) and all(isinstance(code, str) and _CODE.fullmatch(code) for code in codes)
    )
    _expect(f"{name}: codes", "a list of codes of 6 digits", codes, is_met=are_codes)
    is_length = seconds is None or _is_integer(seconds, 0, _MAX_SECONDS)
    _expect(f"{name}: seconds", f"a whole number from 0 to {_MAX_SECONDS}", seconds, is_met=is_length)
    _expect(f"{name}: refuse", "true or false", refuse, is_met=isinstance(refuse, bool))
    return Role(None if codes is None else tuple(codes), seconds, refuse)


def _clock(name: str, value: Any) -> int:
    what = f"whole seconds from -{_MAX_AHEAD} to {_MAX_AHEAD}"
    _expect(name, what, value, is_met=_is_integer(value, -_MAX_AHEAD, _MAX_AHEAD))
    return int(value)


def _rejection(name: str, value: Any) -> Rejection:
    keys = {"code", "message", "status", "calls"}
    if not isinstance(value, dict) or not value.get("code") or not value.keys() <= keys:
        raise InvalidCondition(
            f'{name}: expected {{"code": CODE}}, with optional "message", "status" and "calls"'
        )
    rule = Rejection(
        code=str(value["code"]),
        message=str(value.get("message") or ""),
        status=_count(name, value.get("status", 400)),
        calls=_calls(name, value.get("calls", 1)),
    )
    if not 400 <= rule.status <= 599:
        raise InvalidCondition(f"{name}: expected an HTTP status from 400 to 599, not {rule.status}")
    return rule
