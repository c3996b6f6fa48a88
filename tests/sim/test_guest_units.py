"""How the stand-in for systemd reads unit files, with systemd itself as witness where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from cloudddp import payload
from cloudddp.plan import Identity, user_data
from cloudddp.sim.guest import units

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0


def timer(*lines: str) -> units.Unit:
    return units.parse("x.timer", "[Timer]\n" + "\n".join(lines))


def our_units() -> dict[str, units.Unit]:
    """The units that cloudddp's own user data writes, for a deadline at noon after two hours."""
    texts = [payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service")]
    ends = datetime.fromtimestamp(NOON, UTC)
    text = user_data(Identity("c", "k", "p", "q"), ends - timedelta(hours=2), ends, (texts[0], texts[1]))
    from cloudddp.sim import userdata

    files = userdata.parse(text.encode()).config["write_files"]
    return {
        name: units.parse(name, file["content"])
        for file in files
        for name in [file["path"].rpartition("/")[2]]
        if name.endswith((".timer", ".service"))
    }


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
def test_spans_are_systemds(span: str, expected: float) -> None:
    assert units.seconds(span) == expected
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "timespan", span],
            capture_output=True,
            text=True,
            timeout=60,
            env={"LC_ALL": "C.UTF-8"},
        )
        assert f"{int(expected * 1e6)}" in done.stdout, done


@pytest.mark.parametrize("span", ["", "soon", "2 fortnights", "h", "-3s"])
def test_a_span_that_is_none_is_refused(span: str) -> None:
    with pytest.raises(ValueError, match="no time span"):
        units.seconds(span)


def test_only_an_absolute_moment_in_utc_is_taken() -> None:
    assert units.moment("2026-11-20 12:00:00 UTC") == NOON
    for other in ("daily", "*-*-* 12:00:00", "2026-11-20 12:00:00", "2026-13-01 00:00:00 UTC", "Mon 12:00"):
        with pytest.raises(ValueError):
            units.moment(other)


def test_a_moment_that_has_passed_at_the_first_start_is_missed_as_on_systemd() -> None:
    late = timer("OnCalendar=2026-11-20 12:00:00 UTC", "Persistent=true")
    assert units.elapses(late, booted=NOON, armed=NOON + 5, since=NOON + 5).all == []


def test_a_moment_that_passed_while_the_machine_was_down_fires_at_once() -> None:
    missed = timer("OnCalendar=2026-11-20 12:00:00 UTC", "Persistent=true")
    assert units.elapses(missed, booted=NOON + 60, armed=NOON + 61, since=NOON - HOUR).all == [NOON + 61]


def test_the_span_from_the_boot_counts_from_the_boot() -> None:
    found = units.elapses(
        timer("OnBootSec=1h", "OnActiveSec=2h"), booted=NOON, armed=NOON + 10, since=NOON + 10
    )
    assert list(found.counted) == [NOON + HOUR, NOON + 10 + 2 * HOUR]
    assert list(found.calendar) == []


@pytest.mark.parametrize("line", ["OnUnitActiveSec=5min", "OnStartupSec=1h", "AccuracySec=1s"])
def test_a_timer_whose_times_are_not_known_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not known here|no time to elapse"):
        units.elapses(timer(line), booted=0, armed=0, since=0)


def test_our_own_timer_fires_at_the_deadline_and_starts_our_own_service() -> None:
    ours = our_units()
    found = units.elapses(
        ours["cloudddp-deadline.timer"], booted=NOON - HOUR, armed=NOON - HOUR, since=NOON - HOUR
    )
    assert list(found.calendar) == [NOON]
    assert list(found.counted) == [NOON + HOUR]
    assert ours["cloudddp-deadline.timer"].service == "cloudddp-deadline.service"
    assert ours["cloudddp-deadline.timer"].persistent


def test_nothing_in_our_own_units_is_disobeyed() -> None:
    assert {name: unit.disobeyed for name, unit in our_units().items()} == {
        "cloudddp-deadline.timer": [],
        "cloudddp-deadline.service": [],
    }


def test_our_own_service_powers_off_and_goes_on_after_a_failure() -> None:
    (first, forgiven), *_, (last, final) = units.commands(our_units()["cloudddp-deadline.service"])
    assert (first[-1], forgiven) == ("poweroff", True)
    assert (last[-2:], final) == (["--force", "--force"], False)


def test_an_empty_assignment_forgets_what_came_before() -> None:
    unit = units.parse(
        "x.service", "[Service]\nType=oneshot\nExecStart=/bin/a\nExecStart=\nExecStart=-/bin/b 'c d'\n"
    )
    assert units.commands(unit) == [(["/bin/b", "c d"], True)]


def test_comments_and_continued_lines_are_read_as_systemd_reads_them() -> None:
    unit = units.parse("x.service", "# c\n; c\n[Service]\nExecStart=/bin/a \\\n  b\n")
    assert units.commands(unit) == [(["/bin/a", "b"], False)]


@pytest.mark.parametrize("text", ["Key=value\n", "[Unit]\nnonsense\n"])
def test_a_file_that_is_no_unit_is_refused_without_a_word_of_its_content(text: str) -> None:
    with pytest.raises(ValueError) as error:
        units.parse("x.service", text)
    assert "nonsense" not in str(error.value)


def test_a_simple_service_has_one_command() -> None:
    with pytest.raises(ValueError, match="more than one ExecStart"):
        units.commands(units.parse("x.service", "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n"))


@pytest.mark.parametrize("name", ["../../etc/shadow", "a/b.service", "x.mount", "x"])
def test_a_name_that_is_no_units_is_found_nowhere(name: str) -> None:
    assert units.find(name) is None
