"""The record of all conditions, and its JSON form.

The JSON, in a POST to /_cloudddp/conditions (GET returns the same with all keys present). A body is merged into the
current conditions; `null` removes one entry; `"clear": true` first removes all:

    {"clear": true,
     "capacity":       {"us-east-1a": {"p5.48xlarge": 2}},   how many more fit; stopped and terminated ones free a place
     "quota":          {"on-demand-g": 64, "addresses": 5},  vCPUs at once in a region (names: QUOTAS); Elastic IPs
     "free_addresses": {"subnet-0123456789abcdef0": 3},      how many more private addresses the subnet has
     "vpn":            {"vpc-0123456789abcdef0": "10.8.0.10"},  the laptop reaches private addresses, as 10.8.0.10
     "blocks":         {"cr-0123456789abcdef0": {            capacity blocks that the account has bought
                            "zone": "us-east-1a", "type": "p5.48xlarge", "count": 2,
                            "start": "2026-11-20T11:30:00Z", "end": "2026-11-22T11:30:00Z"}},
     "cleanup":        {"reservations": 120},                seconds until the place of an ended instance is free again
     "efa_devices":    {"p4d.24xlarge": 3},                  new nodes show at most this many EFA devices
     "throttle":       {"RunInstances": 2},                  the next calls fail with RequestLimitExceeded, no effect
     "lose":           {"RunInstances": 1},                  the next calls take effect, and their response is lost
     "unlisted":       {"elastic-ip": 2},                    seconds in which a filter by tag omits new ones (LISTED_LATE)
     "latency":        {"*": 0.1, "RunInstances": 2.5},      seconds before a call starts; "*" for all others
     "fail_launch":    {"us-east-1a": {"code": "Server.InsufficientInstanceCapacity", "instances": 1, "launches": 1}},
                       the next launches in a zone succeed, and so many of their instances terminate instead of running
     "prices":         {"g5.xlarge": 1.5},                   USD per hour on demand, in every region (Pricing API)
     "spot_prices":    {"us-east-1a": {"g5.xlarge": 0.4}},   USD per hour
     "reject":         {"RunInstances": {"code": "UnauthorizedOperation", "message": "", "status": 403, "calls": 1}},
     "link":           {"latency": 0.05, "mbit": 200, "loss": 5},   between laptop and nodes (link.py); null removes it
     "boot":           {"ssh_seconds": 60},                  of the nodes that boot from then on (boot.py)
     "roles":          {"arn:aws:iam::123456789012:role/x": {"codes": ["123456"], "seconds": 900}},   see roles.Role
     "clock":          {"ahead": 900}}                       seconds by which AWS's clock is ahead of this computer's

Conditions that count calls end by themselves and disappear from the response. A body that is invalid in any part
changes nothing and is answered with HTTP 400 and {"error": MESSAGE, "known": [NAMES]}.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from cloudddp.sim.conditions import boot as boots
from cloudddp.sim.conditions import link as links
from cloudddp.sim.conditions import roles
from cloudddp.sim.conditions.boot import Boot
from cloudddp.sim.conditions.link import Link
from cloudddp.sim.conditions.roles import Role

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
LISTED_LATE = ("elastic-ip", "key-pair", "placement-group", "security-group")
EXAMPLES: Mapping[str, Any] = {
    "capacity": {"us-east-1a": {"p5.48xlarge": 2}},
    "quota": {"on-demand-g": 64},
    "free_addresses": {"subnet-0123456789abcdef0": 3},
    "vpn": {"vpc-0123456789abcdef0": "10.8.0.10"},
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
    "lose": {"RunInstances": 1},
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


class InvalidCondition(ValueError):
    """A condition that cannot be set. `known` lists valid names, the closest first (not all of a long list)."""

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


@dataclass(frozen=True, slots=True)
class Rejection:
    """An error response for the next `calls` calls of an action, which have no effect."""

    code: str
    message: str = ""
    status: int = 400
    calls: int = 1


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """The end of some instances of the next `launches` that EC2 has accepted. `code` is that of their StateReason."""

    code: str
    message: str = ""
    instances: int = 1
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """A capacity block: places for instances of one type in one zone, from its start to its end."""

    zone: str
    instance_type: str
    count: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Conditions:
    """All conditions; see the module docstring."""

    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)
    free_addresses: Mapping[str, int] = field(default_factory=dict)
    vpn: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    cleanup: Mapping[str, float] = field(default_factory=dict)
    efa_devices: Mapping[str, int] = field(default_factory=dict)
    throttle: Mapping[str, int] = field(default_factory=dict)
    lose: Mapping[str, int] = field(default_factory=dict)
    unlisted: Mapping[str, float] = field(default_factory=dict)
    latency: Mapping[str, float] = field(default_factory=dict)
    fail_launch: Mapping[str, LaunchFailure] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    spot_prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reject: Mapping[str, Rejection] = field(default_factory=dict)
    link: Mapping[str, float] = field(default_factory=dict)
    boot: Mapping[str, float] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    clock: Mapping[str, int] = field(default_factory=dict)

    @property
    def next_boot(self) -> Boot:
        """How a node boots that starts now."""
        return Boot(**self.boot)  # type: ignore[arg-type]  # checked by `merge`

    @property
    def laptop_link(self) -> Link | None:
        """The link between laptop and nodes; None if there is none but the computer itself."""
        return Link(**self.link) if self.link else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; `merge(Conditions(), to_json(), names)` returns the same conditions."""
        plain = {entry.name: dict(getattr(self, entry.name)) for entry in fields(self)}
        for key in ("capacity", "spot_prices"):
            plain[key] = {zone: dict(types) for zone, types in getattr(self, key).items()}
        plain["fail_launch"] = {zone: asdict(rule) for zone, rule in self.fail_launch.items()}
        plain["reject"] = {action: asdict(rule) for action, rule in self.reject.items()}
        plain["roles"] = {arn: role.to_json() for arn, role in self.roles.items()}
        plain["blocks"] = {
            name: {
                "zone": block.zone,
                "type": block.instance_type,
                "count": block.count,
                "start": _iso(block.start),
                "end": _iso(block.end),
            }
            for name, block in self.blocks.items()
        }
        return plain


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


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
        "quota": lambda old, new: _entries("quota", old, new, QUOTAS, _count),
        "free_addresses": lambda old, new: _entries("subnet", old, new, names.subnets, _count),
        "vpn": lambda old, new: _entries("VPC", old, new, names.vpcs, _address),
        "blocks": lambda old, new: _blocks(old, new, names),
        "cleanup": lambda old, new: _entries("kind", old, new, ("reservations",), _seconds),
        "efa_devices": lambda old, new: _entries("instance type", old, new, names.types, _count),
        "throttle": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "lose": lambda old, new: _entries("action", old, new, names.actions, _calls),
        "unlisted": lambda old, new: _entries("kind", old, new, LISTED_LATE, _seconds),
        "latency": lambda old, new: _entries("action", old, new, {"*", *names.actions}, _seconds),
        "fail_launch": lambda old, new: _entries("zone", old, new, names.zones, _launch_failure),
        "prices": lambda old, new: _entries("instance type", old, new, names.types, _usd),
        "spot_prices": lambda old, new: _by_zone(old, new, names, _usd),
        "reject": lambda old, new: _entries("action", old, new, names.actions, _rejection),
        "link": lambda old, new: _link(old, new),
        "boot": lambda old, new: _entries("setting of a boot", old, new, boots.NAMES, _boot_setting),
        "roles": lambda old, new: _entries("role ARN", old, new, _arns(new), _reading(roles.read_role)),
        "clock": lambda old, new: _entries("key", old, new, ("ahead",), _reading(roles.read_clock)),
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


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidCondition(f"{name}: expected a whole number of at least 0, not {json.dumps(value)}")
    return value


def _address(name: str, value: Any) -> str:
    try:
        return str(ipaddress.IPv4Address(str(value)))
    except ValueError:
        raise InvalidCondition(f"{name}: expected an IPv4 address, not {json.dumps(value)}") from None


def _link(old: Mapping[str, float], new: Any) -> dict[str, Any]:
    if new is None:
        return {}
    return _entries("setting of a link", old, new, links.NAMES, _reading(links.read_setting))


def _calls(name: str, value: Any) -> int:
    if not _count(name, value):
        raise InvalidCondition(f"{name}: expected at least 1 call (null removes the condition)")
    return int(value)


def _usd(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 10_000:
        raise InvalidCondition(f"{name}: expected USD per hour above 0, not {json.dumps(value)}")
    return float(value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise InvalidCondition(f"{name}: expected seconds from 0 to 3600, not {json.dumps(value)}")
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
    if not name.endswith("_gpus"):
        return _seconds(name, value)
    if _count(name, value) > boots.MAX_GPUS:
        raise InvalidCondition(f"{name}: expected at most {boots.MAX_GPUS}, not {json.dumps(value)}")
    return int(value)


def _arns(new: Any) -> list[str]:
    """Return the valid ARNs among the keys: a role need not exist, as in moto."""
    found = [name for name in new if roles.ARN.fullmatch(name)] if isinstance(new, dict) else []
    return found or ["arn:aws:iam::123456789012:role/NAME"]


def _reading(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a reader whose ValueError is an InvalidCondition that names the entry."""

    def reader(name: str, value: Any) -> Any:
        try:
            return read(name, value)
        except ValueError as error:
            raise InvalidCondition(f"{name}: {error}") from None

    return reader


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
