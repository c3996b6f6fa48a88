"""A node's deadline fires whatever has broken on the node: disk, sshd, every process, the state of the timer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import paramiko
import pytest
from lab import LabLaptop, attempt, reachable, shell
from simlab import until

from cloudddp import payload
from cloudddp.plan import Identity, user_data
from cloudddp.sim import control, processes

AHEAD = timedelta(seconds=15)  # for a node to boot and to be broken
UNIT = "cloudddp-deadline"
STAMP = f"/var/lib/systemd/timers/stamp-{UNIT}.timer"


def comm(pid: int) -> str:
    """The name of a process; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


Later = Callable[[], None]  # what is still to be done, when the deadline has come or nearly so


@dataclass
class Case:
    """A node that is about to end, and who broke it."""

    laptop: LabLaptop
    node: dict[str, Any]
    ssh: paramiko.SSHClient
    expires: datetime
    later: Later | None = None

    @property
    def id(self) -> str:
        return str(self.node["InstanceId"])

    def processes(self, name: str) -> list[int]:
        """Pids of the node's processes that are called so, as this computer sees them."""
        found = processes.belonging(self.laptop.sim.home, self.id)
        return [p.pid for p in found if comm(p.pid) == name]

    def detached(self, script: str) -> None:
        """Run it as root in a session of its own, since it may end the connection."""
        attempt(self.ssh, f"nohup sudo setsid sh -c '{script}' > /dev/null 2>&1 < /dev/null &")

    def silent(self) -> None:
        """Return when the node's SSH port is closed."""
        until(lambda: not reachable(self.laptop.sim, self.node["PublicIpAddress"], 22))

    def reboot(self) -> None:
        """By EC2; return when the node has booted again."""
        before = self.home
        self.laptop.ec2.reboot_instances(InstanceIds=[self.id])
        until(lambda: self.home not in ("", before))

    @property
    def home(self) -> str:
        listed = control.nodes(self.laptop.sim)
        return next((str(n["home"]) for n in listed if n["instance_id"] == self.id), "")


def full_disk(case: Case) -> None:
    control.fault(case.laptop.sim, "fill-disk", [case.id])
    assert attempt(case.ssh, "echo word > file").status != 0


def full_disk_and_a_reboot(case: Case) -> None:
    full_disk(case)
    case.reboot()


def full_state_folder(case: Case) -> None:
    case.detached("cat /dev/zero > /run/cloudddp/filler; touch /run/filled")
    until(lambda: attempt(case.ssh, "test -e /run/filled").status == 0)


def sshd_stopped_by_systemctl(case: Case) -> None:
    case.detached("systemctl stop ssh")
    case.silent()


def sshd_killed(case: Case) -> None:
    case.detached("pkill -9 -x sshd")
    case.silent()


def sshd_standing_still(case: Case) -> None:
    for pid in case.processes("sshd"):
        os.kill(pid, signal.SIGSTOP)


def every_python_killed(case: Case) -> None:
    case.detached("pkill -9 -f [c]loudddp; pkill -9 python; touch /run/killed")
    until(lambda: attempt(case.ssh, "test -e /run/killed").status == 0)


def everything_killed(case: Case) -> None:
    case.detached("kill -9 -1")
    case.silent()


def a_stamp_in_the_future(case: Case) -> None:
    shell(case.ssh, f"sudo touch -d '+1 day' {STAMP}")
    case.reboot()


def rebooting_when_it_is_due(case: Case) -> Later:
    def later() -> None:
        pause(case.expires - timedelta(seconds=1))
        while datetime.now(UTC) < case.expires + timedelta(seconds=1):
            if case.laptop.state(case.id) == "running":
                case.laptop.ec2.reboot_instances(InstanceIds=[case.id])
            time.sleep(0.1)

    return later


def stopped_when_it_had_fired(case: Case) -> Later:
    """The stamp of the timer says that it has fired; the machine was switched off before the service could."""
    fired = case.expires + timedelta(seconds=1)
    shell(case.ssh, f"sudo touch -d @{fired.timestamp():.0f} {STAMP}")
    case.laptop.ec2.stop_instances(InstanceIds=[case.id])
    until(lambda: case.laptop.state(case.id) == "stopped")

    def later() -> None:
        pause(fired + timedelta(seconds=1))
        case.laptop.ec2.start_instances(InstanceIds=[case.id])

    return later


def pause(end: datetime) -> None:
    while datetime.now(UTC) < end:
        time.sleep(0.05)


FAULTS: list[Callable[[Case], Later | None]] = [
    full_disk,
    full_disk_and_a_reboot,
    full_state_folder,
    sshd_stopped_by_systemctl,
    sshd_killed,
    sshd_standing_still,
    every_python_killed,
    everything_killed,
    a_stamp_in_the_future,
    stopped_when_it_had_fired,
    rebooting_when_it_is_due,
]


def launch(laptop: LabLaptop) -> Case:
    """A node with the deadline that cloudddp's own user data sets, armed."""
    expires = datetime.now(UTC).replace(microsecond=0) + AHEAD
    texts = [payload.text(f"infra/node/{UNIT}.{kind}") for kind in ("timer", "service")]
    identity = Identity("c", "k", laptop.host_key.private, laptop.host_key.public)
    data = user_data(identity, expires - timedelta(hours=1), expires, (texts[0], texts[1]))
    (node,) = laptop.launch(UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    case = Case(laptop, node, laptop.login(node), expires)
    assert shell(case.ssh, "cloud-init status --wait") == "status: done"
    assert shell(case.ssh, f"systemctl is-active {UNIT}.timer") == "active"
    return case


@pytest.fixture(scope="module")
def broken(neighbour: LabLaptop) -> dict[str, Case | Exception]:
    """A node for each fault, which it has; all are made before the first is waited for."""
    cases: dict[str, Case | Exception] = {}
    for fault in FAULTS:
        try:
            cases[fault.__name__] = case = launch(neighbour)
            case.later = fault(case)
        except Exception as error:  # is that one test's
            cases[fault.__name__] = error
    return cases


@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_the_deadline_ends_a_node_with(broken: dict[str, Case | Exception], fault: str) -> None:
    case = broken[fault]
    assert isinstance(case, Case), case
    if case.later:
        case.later()
    until(lambda: case.laptop.state(case.id) == "terminated")
    assert datetime.now(UTC) >= case.expires
    (shown,) = case.laptop.describe(case.id)
    assert shown["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
