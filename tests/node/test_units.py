"""The systemd units that terminate a node at its deadline, checked by systemd itself where it is
installed."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shutil
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from support.namespaces import as_root

from cloudddp.cluster.user_data import IDLE_CHECK, SERVICE, TIMER, Identity, IdleGuard, user_data
from cloudddp.files import payload_text

DEADLINE = datetime(2026, 11, 20, 14, 30, 5, tzinfo=UTC)
CREATED = DEADLINE - timedelta(hours=2)

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and not os.environ.get("CI"),
    reason="systemd-analyze is not installed (Debian: apt-get install systemd)",
)


def units() -> dict[str, str]:
    """Return the units as cloud-init writes them on a node, by file name, with the deadline filled in."""
    texts = tuple(payload_text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
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


def test_timer_has_a_second_trigger_and_catches_up() -> None:
    """Without default dependencies the service does not conflict with shutdown.target: it has to run until
    the power is off."""
    assert section("cloudddp-deadline.service", "Unit")["DefaultDependencies"] == "no"
    timer = section("cloudddp-deadline.timer", "Timer")
    assert timer["OnCalendar"] == "2026-11-20 14:30:05 UTC"
    assert timer["Persistent"] == "true"
    assert timer["OnBootSec"] == "7200"
    assert "Unit" not in timer  # by its name it starts cloudddp-deadline.service
    assert Path(TIMER).stem == Path(SERVICE).stem


PLAIN, DIRECT, FORCED = "--no-block poweroff", "poweroff --force --force", "poweroff --force"
# A poweroff of each kind. systemd obeys FORCED by killing every process, also those that have a poweroff left
# to try; DIRECT is done by systemctl itself, after a sync.
SYSTEMCTL = """\
#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in {hanging}) exec sleep 1000 ;; "--no-block poweroff") exit 0 ;; esac
kill -9 0
"""
SLEEP = """\
#!/bin/sh
echo "$1" >> {folder}/seconds
while [ "$(wc -l < {folder}/calls)" -lt "$(wc -l < {folder}/seconds)" ]; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("hanging", "called", "within"),
    [
        ((), [PLAIN, DIRECT], 120),  # a unit that does not stop: systemctl has returned at once
        ((PLAIN,), [PLAIN, DIRECT], 120),  # systemd does not answer
        ((PLAIN, DIRECT), [PLAIN, DIRECT, FORCED], 150),  # a sync waits for a mount whose server is gone
    ],
    ids=["a unit does not stop", "systemd hangs", "a mount hangs"],
)
def test_poweroff_that_hangs_leads_to_the_next_one(
    tmp_path: Path, hanging: tuple[str, ...], called: list[str], within: int
) -> None:
    """Runs the commands of the service one after the other, as systemd does, with a systemctl that hangs."""
    pattern = "|".join(f'"{one}"' for one in hanging) or '""'
    commands = ""
    (tmp_path / "calls").touch()
    for name, text in (("systemctl", SYSTEMCTL), ("sleep", SLEEP)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, hanging=pattern))
        (tmp_path / name).chmod(0o755)
    for line in units()["cloudddp-deadline.service"].splitlines():
        if line.startswith("ExecStart="):
            commands += re.sub(
                r"/bin/(systemctl|sleep)\b", rf"{tmp_path}/\1", line.split("=", 1)[1].lstrip("-")
            )
            commands += "\n"
    process = subprocess.Popen(["sh", "-c", commands], start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        assert (tmp_path / "calls").read_text().splitlines() == called
        waits = (tmp_path / "seconds").read_text().split()
        assert sum(map(int, waits[: len(called) - 1])) == within
        assert process.poll() == -signal.SIGKILL, "nothing has powered the node off"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- what keeps an idle node (infra/node/cloudddp-idle.sh), in a process namespace where nothing else runs ---


ALONE = ("--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("ssm-session-worker", True),  # AWS's Session Manager; the kernel keeps 15 characters of it
        ("login", True),  # on a console; systems without utmp do not list it in `who`
        ("cloudddp-wait", True),
        ("agetty", False),
        ("amazon-ssm-agent", False),
    ],
)
def test_process_keeps_its_node(tmp_path: Path, name: str, keeps: bool) -> None:
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    begins = f"{program} 60 & until [ /proc/$!/exe -ef {program} ]; do sleep 0.02; done; "
    assert is_kept(tmp_path, begins) is keeps


@pytest.mark.parametrize(
    ("connections", "keeps"),
    [
        (["lastsnd:4 lastrcv:4 lastack:4"], True),
        (["lastsnd:4 lastrcv:200000 lastack:4"], True),  # a client that only shows what a program prints
        (["lastsnd:4 lastrcv:200000 lastack:200000"], False),  # a computer that has vanished
        (["lastrcv:200000 lastack:200000", "lastrcv:4 lastack:200000"], True),
        ([], False),
    ],
)
def test_ssh_connection_keeps_its_node(tmp_path: Path, connections: list[str], keeps: bool) -> None:
    """What `ss -Htin` prints is given: two lines for each connection."""
    lines = "".join(
        f"0 0 10.0.0.4:22 10.0.0.9:999\n\t cubic rto:204 {one} rcv_rtt:1\n" for one in connections
    )
    ss = tmp_path / "ss"
    ss.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    ss.chmod(0o755)
    assert is_kept(tmp_path, f"PATH={tmp_path}:$PATH; ") is keeps


def is_kept(folder: Path, begins: str) -> bool:
    """Run the check of a node that was last used 100 s ago; return whether it counts as used since."""
    guard = IdleGuard(
        300, 60, ssh_port=1, timer="", service="", check=payload_text("infra/node/cloudddp-idle.sh")
    )
    (text,) = [file["content"] for file in guard.files if file["path"] == IDLE_CHECK]
    check, used = folder / "idle.sh", folder / "cloudddp-in-use"
    check.write_text(text.replace("/run/", f"{folder}/"))
    used.write_text(f"{float(Path('/proc/uptime').read_text().split()[0]) - 100:.0f}\n")
    before = used.read_text()
    done = subprocess.run(
        [*as_root(*ALONE), "sh", "-c", f"{begins}exec sh {check}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return used.read_text() != before
