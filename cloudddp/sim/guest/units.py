"""Unit files: the timers and services that launchers write, read as systemd would read those parts of them.

Knows the text of units and the arithmetic of their times, and runs nothing.
"""

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
_YES = ("true", "yes", "1", "on")
_UNITS = {
    **dict.fromkeys(("us", "usec", "µs"), 1e-6), **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0), **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}  # fmt: skip
# Obeyed, or without a meaning on a simulated node: nothing here is ordered, and nobody reads descriptions.
_KNOWN = {
    "Unit.Description", "Unit.Documentation", "Unit.DefaultDependencies", "Unit.After", "Unit.Before", "Unit.Wants",
    "Timer.OnCalendar", "Timer.OnBootSec", "Timer.OnActiveSec", "Timer.Persistent", "Timer.AccuracySec",
    "Timer.Unit", "Service.Type", "Service.ExecStart", "Service.RemainAfterExit", "Service.StandardOutput",
    "Service.StandardError", "Install.WantedBy",
}  # fmt: skip
_TRIGGERS = {"Timer.OnStartupSec", "Timer.OnUnitActiveSec", "Timer.OnUnitInactiveSec", "Timer.OnClockChange"}


@dataclass(frozen=True)
class Unit:
    """One unit file: every assignment, in order; a key that is given empty forgets what came before."""

    name: str
    values: dict[str, list[str]] = field(default_factory=dict)
    path: Path | None = None

    def get(self, key: str) -> list[str]:
        return self.values.get(key, [])

    def last(self, key: str, default: str = "") -> str:
        return self.get(key)[-1] if self.get(key) else default

    @property
    def service(self) -> str:
        """What a timer starts."""
        return self.last("Timer.Unit", self.name.removesuffix(".timer") + ".service")

    @property
    def persistent(self) -> bool:
        """Whether a moment that passed while the machine was down counts."""
        return self.last("Timer.Persistent").lower() in _YES

    @property
    def oneshot(self) -> bool:
        """Whether the service is started only when its commands have ended. Without Type=, systemd takes `simple`."""
        return self.last("Service.Type", "simple") == "oneshot"

    @property
    def stays(self) -> bool:
        """Whether a oneshot service is active after its commands have ended."""
        return self.last("Service.RemainAfterExit").lower() in _YES

    @property
    def disobeyed(self) -> list[str]:
        """What the unit asks for and does not get on a simulated node."""
        return sorted(key.partition(".")[2] for key in set(self.values) - _KNOWN)


def find(name: str) -> Unit | None:
    """The unit of that name, or None. Raises ValueError for a file that is no unit."""
    if not _NAME.fullmatch(name):
        return None
    for folder in FOLDERS:
        try:
            return parse(name, (folder / name).read_text(), folder / name)
        except OSError:
            continue
    return None


def parse(name: str, text: str, path: Path | None = None) -> Unit:
    """The unit that a file's text describes. Raises ValueError for a line that is no assignment."""
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
            raise ValueError(f"{name}: line {number} is no assignment")
        kept = unit.values.setdefault(f"{section}.{key}", [])
        if value:
            kept.append(value)
        else:
            kept.clear()
    return unit


def seconds(span: str) -> float:
    """A time span, as in systemd.time(7). Raises ValueError."""
    parts = _SPAN.findall(span.strip())
    if not parts or _SPAN.sub("", span.strip()) or any(unit not in _UNITS for _, unit in parts):
        raise ValueError(f"no time span that is known here: {span!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def moment(calendar: str) -> float:
    """The one moment that an absolute OnCalendar= names, as seconds since the epoch. Raises ValueError for others."""
    found = _MOMENT.fullmatch(calendar.strip())
    if found is None:
        raise ValueError(f"only `YYYY-MM-DD HH:MM:SS UTC` is known here: {calendar!r}")
    year, month, day, hour, minute, second = (int(number or 0) for number in found.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()


@dataclass(frozen=True)
class Times:
    """When a timer fires, as seconds since the epoch: by the calendar, and by a clock that counts from a start."""

    calendar: Sequence[float]
    counted: Sequence[float]

    @property
    def all(self) -> list[float]:
        return sorted((*self.calendar, *self.counted))


def elapses(timer: Unit, *, booted: float, armed: float, since: float) -> Times:
    """When the timer fires. `booted`, `armed` (when it was started) and `since` are seconds since the epoch.

    A moment of the calendar that is before `since` never comes any more: that is the timer's start or, for a
    persistent one, the time of its stamp, which is made when the timer is started for the first time ever. So a
    moment that has passed at the first start is missed, and one that passed during a stop is made up for.
    Raises ValueError for a time that is not known here.
    """
    unknown = sorted(_TRIGGERS & set(timer.values))
    if unknown:
        raise ValueError(f"{timer.name}: {', '.join(unknown)} not known here")
    calendar = [max(at, armed) for at in map(moment, timer.get("Timer.OnCalendar")) if at >= since]
    counted = [max(booted + seconds(span), armed) for span in timer.get("Timer.OnBootSec")]
    counted += [armed + seconds(span) for span in timer.get("Timer.OnActiveSec")]
    if not (timer.get("Timer.OnCalendar") or counted):
        raise ValueError(f"{timer.name} has no time to elapse at")
    return Times(sorted(calendar), sorted(counted))


def commands(service: Unit) -> list[tuple[list[str], bool]]:
    """Each ExecStart= as words, and whether its failure is forgiven ('-'). Raises ValueError."""
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
