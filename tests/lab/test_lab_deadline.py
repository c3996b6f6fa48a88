"""A node's deadline fires despite faults on the node: disk, sshd, killed processes, the state of the
timer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, reachable, reboot, shell
from support.userdata import product_user_data

from cloudddp.simulator import control

AHEAD = timedelta(seconds=15)  # time to boot a node and to inject the fault
UNIT = "cloudddp-deadline"
STAMP = f"/var/lib/systemd/timers/stamp-{UNIT}.timer"


Rest = Callable[[], None]  # the rest of a fault, run shortly before or after the deadline


@dataclass
class Case:
    """A node with a fault that is about to reach its deadline."""

    laptop: LabLaptop
    node: dict[str, Any]
    ssh: paramiko.SSHClient
    expires: datetime
    rest: Rest | None = None

    @property
    def id(self) -> str:
        return str(self.node["InstanceId"])

    def detached(self, script: str) -> None:
        """Run a script as root in its own session, since it may end the connection."""
        attempt(self.ssh, f"nohup sudo setsid sh -c '{script}' > /dev/null 2>&1 < /dev/null &")

    def await_port_closed(self) -> None:
        """Return when the node's SSH port is closed."""
        until(lambda: not reachable(self.laptop.sim, self.node["PublicIpAddress"], 22))


def full_disk_and_reboot(case: Case) -> None:
    control.fault(case.laptop.sim, "fill-disk", [case.id])
    assert attempt(case.ssh, "echo word > file").status != 0
    reboot(case.laptop, case.node)


def full_state_folder(case: Case) -> None:
    case.detached("cat /dev/zero > /run/cloudddp/filler; touch /run/filled")
    until(lambda: attempt(case.ssh, "test -e /run/filled").status == 0)


def sshd_killed(case: Case) -> None:
    case.detached("pkill -9 -x sshd")
    case.await_port_closed()


def all_processes_killed(case: Case) -> None:
    case.detached("kill -9 -1")
    case.await_port_closed()


def stamp_in_the_future(case: Case) -> None:
    shell(case.ssh, f"sudo touch -d '+1 day' {STAMP}")
    reboot(case.laptop, case.node)


def rebooting_at_the_deadline(case: Case) -> Rest:
    def rest() -> None:
        pause(case.expires - timedelta(seconds=1))
        while datetime.now(UTC) < case.expires + timedelta(seconds=1):
            if case.laptop.state(case.id) == "running":
                case.laptop.ec2.reboot_instances(InstanceIds=[case.id])
            time.sleep(0.1)

    return rest


def stopped_after_firing(case: Case) -> Rest:
    """The stamp file says that the timer has fired, but the machine was stopped before the service ran."""
    fired = case.expires + timedelta(seconds=1)
    shell(case.ssh, f"sudo touch -d @{fired.timestamp():.0f} {STAMP}")
    case.laptop.ec2.stop_instances(InstanceIds=[case.id])
    until(lambda: case.laptop.state(case.id) == "stopped")

    def rest() -> None:
        pause(fired + timedelta(seconds=1))
        case.laptop.ec2.start_instances(InstanceIds=[case.id])

    return rest


def pause(end: datetime) -> None:
    while datetime.now(UTC) < end:
        time.sleep(0.05)


FAULTS: list[Callable[[Case], Rest | None]] = [
    full_disk_and_reboot,
    full_state_folder,
    sshd_killed,
    all_processes_killed,
    stamp_in_the_future,
    stopped_after_firing,
    rebooting_at_the_deadline,
]


def launch(laptop: LabLaptop) -> Case:
    """Launch a node with cloudddp's user data, and wait until its deadline is armed."""
    expires = datetime.now(UTC).replace(microsecond=0) + AHEAD
    (node,) = laptop.launch(
        UserData=product_user_data(laptop, expires=expires), InstanceInitiatedShutdownBehavior="terminate"
    )
    case = Case(laptop, node, laptop.login(node), expires)
    assert shell(case.ssh, "cloud-init status --wait") == "status: done"
    assert shell(case.ssh, f"systemctl is-active {UNIT}.timer") == "active"
    return case


@pytest.fixture(scope="module")
def broken(shared_lab_laptop: LabLaptop) -> dict[str, Case | Exception]:
    """One node per fault. All are launched before the first test waits for its deadline."""
    cases: dict[str, Case | Exception] = {}
    for fault in FAULTS:
        try:
            cases[fault.__name__] = case = launch(shared_lab_laptop)
            case.rest = fault(case)
        except Exception as error:  # reported by the test of this fault
            cases[fault.__name__] = error
    return cases


@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_deadline_ends_a_node_with(broken: dict[str, Case | Exception], fault: str) -> None:
    case = broken[fault]
    assert isinstance(case, Case), case
    if case.rest:
        case.rest()
    until(lambda: case.laptop.state(case.id) == "terminated")
    assert datetime.now(UTC) >= case.expires
    (shown,) = case.laptop.describe(case.id)
    assert shown["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def booting(laptop: LabLaptop, condition: str, expires: datetime) -> dict[str, Any]:
    """Launch a node whose boot waits for an hour."""
    data = product_user_data(laptop, expires=expires)
    more = {"UserData": data, "InstanceInitiatedShutdownBehavior": "terminate"}
    return laptop.booting({condition: 3600}, **more)


def test_deadline_ends_a_boot_that_hangs(lab_laptop: LabLaptop) -> None:
    """runcmd comes after multi-user.target: armed there, a node whose boot hangs would have no deadline at
    all. Nobody is connected: the laptop that started the node may be gone."""
    expires = datetime.now(UTC).replace(microsecond=0) + 2 * AHEAD
    silent = booting(lab_laptop, "ssh_seconds", expires)
    unfinished = booting(lab_laptop, "final_seconds", expires)
    client = lab_laptop.login(unfinished)
    assert shell(client, "cloud-init status") == "status: running"
    assert shell(client, f"systemctl is-active {UNIT}.timer") == "active"
    for node in (silent, unfinished):
        until(lambda node=node: lab_laptop.state(node["InstanceId"]) == "terminated")
    assert datetime.now(UTC) >= expires


def test_apt_waits_for_the_lock_of_unattended_upgrades(lab_laptop: LabLaptop) -> None:
    """Set-up commands run in the minutes in which apt-daily.service holds the lock on a new node."""
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    client = lab_laptop.login(booting(lab_laptop, "apt_lock_seconds", expires))
    done = attempt(client, "sudo timeout 6 apt-get -f -y install")
    if b"No such file" in done.err:
        pytest.skip("this computer has no apt")
    assert done.status == 124, done.err  # an apt that does not wait ends at once, with 100
    assert b"Waiting for cache lock" in done.out
    assert shell(client, "apt-config dump APT::Periodic::Enable") == 'APT::Periodic::Enable "0";'
