"""Unit files: parses the parts of timers and services that launchers use, as systemd does. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

FOLDERS = (Path("/etc/systemd/system"), Path("/run/systemd/system"))
_NAME = re.compile(r"[\w@:.\\-]+\.(?:service|timer)")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]*)\s*")
_MOMENT = re.compile(r"(\d{4})-(\d\d?)-(\d\d?)[ T](\d\d?):(\d\d?)(?::(\d\d?))? UTC")
_TRUE = ("true", "yes", "1", "on")
_UNITS = {
    **dict.fromkeys(("us", "usec", "µs"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
# Supported, or without effect on a simulated node, where units are not ordered.
_SUPPORTED = {
    *("Unit.Description", "Unit.Documentation", "Unit.DefaultDependencies"),
    *("Unit.After", "Unit.Before", "Unit.Wants", "Install.WantedBy"),
    *("Timer.OnCalendar", "Timer.OnBootSec", "Timer.OnActiveSec", "Timer.OnUnitActiveSec"),
    *("Timer.Persistent", "Timer.AccuracySec", "Timer.Unit"),
    *("Service.Type", "Service.ExecStart", "Service.RemainAfterExit"),
    *("Service.StandardOutput", "Service.StandardError"),
}
_UNSUPPORTED_TRIGGERS = {
    "Timer.OnStartupSec",
    "Timer.OnUnitInactiveSec",
    "Timer.OnClockChange",
}


@dataclass(frozen=True)
class Unit:
    """One unit file: every assignment, in order. An empty assignment resets the key."""

    name: str
    values: dict[str, list[str]] = field(default_factory=dict)
    path: Path | None = None

    def get(self, key: str) -> list[str]:
        return self.values.get(key, [])

    def last(self, key: str, default: str = "") -> str:
        return self.get(key)[-1] if self.get(key) else default

    @property
    def service(self) -> str:
        """The service that a timer starts."""
        return self.last("Timer.Unit", self.name.removesuffix(".timer") + ".service")

    @property
    def persistent(self) -> bool:
        """Whether a time that passed while the machine was down triggers the timer."""
        return self.last("Timer.Persistent").lower() in _TRUE

    @property
    def oneshot(self) -> bool:
        """Whether starting the service waits for its commands to end. systemd's default is `simple`."""
        return self.last("Service.Type", "simple") == "oneshot"

    @property
    def remains_after_exit(self) -> bool:
        """Whether a oneshot service stays active after its commands have ended."""
        return self.last("Service.RemainAfterExit").lower() in _TRUE

    @property
    def unsupported(self) -> list[str]:
        """The settings of the unit that a simulated node ignores."""
        return sorted(key.partition(".")[2] for key in set(self.values) - _SUPPORTED)


def find(name: str) -> Unit | None:
    """Return the unit with that name, or None. Raises ValueError for an invalid unit file."""
    if not _NAME.fullmatch(name):
        return None
    for folder in FOLDERS:
        try:
            return parse(name, (folder / name).read_text(), folder / name)
        except OSError:
            continue
    return None


def parse(name: str, text: str, path: Path | None = None) -> Unit:
    """Parse the text of a unit file. Raises ValueError for a line that is not an assignment."""
    unit, section = Unit(name, path=path), ""
    for number, raw in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[" and line[-1] == "]":
            section = line[1:-1]
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not section:
            raise ValueError(f"{name}: line {number} is not an assignment")
        values = unit.values.setdefault(f"{section}.{key}", [])
        if value:
            values.append(value)
        else:
            values.clear()
    return unit


def seconds(span: str) -> float:
    """Parse a time span, see systemd.time(7). Raises ValueError."""
    parts = _SPAN.findall(span.strip())
    if not parts or _SPAN.sub("", span.strip()) or any(unit not in _UNITS for _, unit in parts):
        raise ValueError(f"unsupported time span {span!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def timestamp(calendar: str) -> float:
    """Return the time of an absolute OnCalendar= in seconds since the epoch. Raises ValueError for other
    forms."""
    found = _MOMENT.fullmatch(calendar.strip())
    if found is None:
        raise ValueError(f"unsupported OnCalendar= {calendar!r}: expected `YYYY-MM-DD HH:MM:SS UTC`")
    year, month, day, hour, minute, second = (int(number or 0) for number in found.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()


@dataclass(frozen=True)
class Elapses:
    """When a timer elapses, in seconds since the epoch: by the calendar, and relative to a start
    (monotonic)."""

    realtime: Sequence[float]
    monotonic: Sequence[float]

    @property
    def all(self) -> list[float]:
        return sorted((*self.realtime, *self.monotonic))


def elapses(timer: Unit, *, booted: float, armed: float, since: float, last: float = 0.0) -> Elapses:
    """Return when the timer elapses. `booted`, `armed` (its start), `since` and `last` (when it elapsed last,
    0: never) are seconds since the epoch.

    Calendar times before `since` are skipped. That is the timer's start or, for a persistent timer, the time
    of its stamp file, which is created when the timer is started for the first time. So a time that has
    passed at the first start is missed, and one that passed while the machine was down is made up for. Raises
    ValueError.
    """
    unsupported = sorted(_UNSUPPORTED_TRIGGERS & set(timer.values))
    if unsupported:
        raise ValueError(f"{timer.name}: {', '.join(unsupported)} not supported")
    realtime = [max(at, armed) for at in map(timestamp, timer.get("Timer.OnCalendar")) if at >= since]
    monotonic = [max(booted + seconds(span), armed) for span in timer.get("Timer.OnBootSec")]
    monotonic += [armed + seconds(span) for span in timer.get("Timer.OnActiveSec")]
    if last:  # OnUnitActiveSec alone never elapses: it counts from the last start of the unit
        monotonic += [last + seconds(span) for span in timer.get("Timer.OnUnitActiveSec")]
    if not (timer.get("Timer.OnCalendar") or monotonic):
        raise ValueError(f"{timer.name} never elapses")
    return Elapses(sorted(realtime), sorted(monotonic))


def commands(service: Unit) -> list[tuple[list[str], bool]]:
    """Return the argv of each ExecStart=, and whether its failure is ignored ('-'). Raises ValueError."""
    found = []
    for line in service.get("Service.ExecStart"):
        words = shlex.split(line)
        flags = words[0][: len(words[0]) - len(words[0].lstrip("-@:+!"))]
        found.append(([words[0].lstrip("-@:+!"), *words[1:]], "-" in flags))
    if not found:
        raise ValueError(f"{service.name} has no ExecStart=")
    if not service.oneshot and len(found) > 1:
        raise ValueError(f"{service.name} has more than one ExecStart= and is not Type=oneshot")
    return found
