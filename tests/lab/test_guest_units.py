"""Parsing of unit files, compared with systemd where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from cloudddp.cluster.user_data import Identity, user_data
from cloudddp.simulator.guest import units
from cloudddp.simulator.hosts import node_spec as parser

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0


def timer(*lines: str) -> units.Unit:
    return units.parse("x.timer", "[Timer]\n" + "\n".join(lines))


def our_units() -> dict[str, units.Unit]:
    """The units in cloudddp's user data, for a deadline at noon, two hours after the start."""
    ends = datetime.fromtimestamp(NOON, UTC)
    text = user_data(Identity("c", "k", "p", "q"), ends - timedelta(hours=2), ends)
    commands = parser.parse(text.encode()).config["bootcmd"]
    written = [
        re.search(r"> (\S+/)?(\S+\.(?:timer|service)) <<'END'\n(.*)\nEND$", one, re.S)
        for one in commands
        if isinstance(one, str)
    ]
    return {found[2]: units.parse(found[2], found[3]) for found in written if found}


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("90", 90),
        ("2h", 7200),
        ("1h 30min", 5400),
        ("1min30s", 90),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("2 days", 172800),
    ],
)
def test_time_spans_as_in_systemd(span: str, expected: float) -> None:
    assert units.seconds(span) == expected
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "timespan", span],
            capture_output=True,
            text=True,
            timeout=300,
            env={"LC_ALL": "C.UTF-8"},
        )
        assert f"{int(expected * 1e6)}" in done.stdout, done


def test_time_passed_before_first_start_is_missed() -> None:
    late = timer("OnCalendar=2026-11-20 12:00:00 UTC", "Persistent=true")
    assert units.elapses(late, booted=NOON, armed=NOON + 5, since=NOON + 5).all == []


def test_time_passed_while_down_elapses_at_once() -> None:
    missed = timer("OnCalendar=2026-11-20 12:00:00 UTC", "Persistent=true")
    assert units.elapses(missed, booted=NOON + 60, armed=NOON + 61, since=NOON - HOUR).all == [NOON + 61]


def test_our_timer_elapses_at_the_deadline() -> None:
    found_units = our_units()
    found = units.elapses(
        found_units["cloudddp-deadline.timer"], booted=NOON - HOUR, armed=NOON - HOUR, since=NOON - HOUR
    )
    assert list(found.realtime) == [NOON]
    assert list(found.monotonic) == [NOON + HOUR]
    assert found_units["cloudddp-deadline.timer"].service == "cloudddp-deadline.service"
    assert found_units["cloudddp-deadline.timer"].persistent


def test_our_units_are_fully_supported() -> None:
    assert {name: unit.unsupported for name, unit in our_units().items()} == {
        "cloudddp-deadline.timer": [],
        "cloudddp-deadline.service": [],
    }
