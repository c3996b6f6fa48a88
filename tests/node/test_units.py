"""The systemd units that terminate a node at its deadline, checked by systemd itself where it is installed."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from cloudddp import payload
from cloudddp.cluster.user_data import SERVICE, TIMER, Identity, user_data

DEADLINE = datetime(2026, 11, 20, 14, 30, 5, tzinfo=UTC)
CREATED = DEADLINE - timedelta(hours=2)

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and not os.environ.get("CI"),
    reason="systemd-analyze is not installed (Debian: apt-get install systemd)",
)


def units() -> dict[str, str]:
    """Return the units as cloud-init writes them on a node, by file name, with the deadline filled in."""
    texts = tuple(payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    config = yaml.safe_load(user_data(Identity("c", "k", "p", "q"), CREATED, DEADLINE, (texts[0], texts[1])))
    written = {}
    for command in config["bootcmd"]:
        if isinstance(command, str):
            path, text = re.fullmatch(
                r"\[ -e \S+ \] \|\| cat > (\S+) <<'END'\n(.*)\nEND", command, re.DOTALL
            ).groups()  # type: ignore[union-attr]
            written[Path(path).name] = f"{text}\n"
    return written


def section(unit: str, name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(units()[unit])
    return dict(parser[name])


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name, text in units().items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in units()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_ours = [line for line in done.stderr.splitlines() if "cloudddp" in line]
    assert (done.returncode, about_ours) == (0, []), done.stderr


@needs_systemd
def test_systemd_reports_an_error_in_a_unit(tmp_path: Path) -> None:
    """So that the test above can fail."""
    path = tmp_path / "cloudddp-deadline.timer"
    path.write_text(units()["cloudddp-deadline.timer"].replace("OnCalendar=2026", "OnCalendar=soon"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "cloudddp-deadline.timer" in done.stderr


@needs_systemd
def test_systemd_parses_the_deadline() -> None:
    when = section("cloudddp-deadline.timer", "Timer")["OnCalendar"]
    done = subprocess.run(
        ["systemd-analyze", "calendar", "--base-time=2026-11-20 00:00:00 UTC", when],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin", "TZ": "UTC", "LC_ALL": "C"},
    )
    assert "2026-11-20 14:30:05 UTC" in done.stdout
    (elapse,) = [line for line in done.stdout.splitlines() if "Next elapse" in line]
    assert "2026-11-20 14:30:05 UTC" in elapse


def test_timer_has_a_second_trigger_and_catches_up() -> None:
    timer = section("cloudddp-deadline.timer", "Timer")
    assert timer["OnCalendar"] == "2026-11-20 14:30:05 UTC"
    assert timer["Persistent"] == "true"
    assert timer["OnBootSec"] == "7200"
    assert "Unit" not in timer  # by its name it starts cloudddp-deadline.service
    assert Path(TIMER).stem == Path(SERVICE).stem


def test_service_has_no_dependencies_and_powers_off_despite_failures() -> None:
    assert section("cloudddp-deadline.service", "Unit")["DefaultDependencies"] == "no"
    commands = [
        line.removeprefix("ExecStart=")
        for line in units()["cloudddp-deadline.service"].splitlines()
        if line.startswith("ExecStart=")
    ]
    assert all(command.startswith("-") for command in commands[:-1])  # one that fails must not stop the rest
    commands = [command.removeprefix("-") for command in commands]
    assert "poweroff" in commands[0]
    assert commands[-1].endswith("poweroff --force --force")
    assert all(command.startswith("/") for command in commands)
