"""The deadline that `up` gives a node ends it under a real systemd, whatever the node does.

The nodes of all cases run at the same time. The times from the deadline to the end are printed (`-s`). Only
what ends a node is asserted: its power-off, or the first fallback.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, boot_id, shell
from support.userdata import HUNG, product_user_data

from cloudddp.simulator import control

pytestmark = pytest.mark.timeout(900, func_only=True)  # the first one may make the operating system

AHEAD = timedelta(seconds=120)  # to boot all nodes at once on a busy computer, and to prepare each
FALLBACK = 120.0  # seconds, in cloudddp-deadline.service
LAST = 175.0  # after the last of them, `poweroff --force`, which waits for nothing


@dataclass
class Case:
    laptop: LabLaptop
    node: dict[str, Any]
    expires: datetime
    ended: datetime | None = None

    @property
    def id(self) -> str:
        return str(self.node["InstanceId"])

    def run(self, command: str) -> str:
        client = self.laptop.login(self.laptop.describe(self.id)[0])
        try:
            return shell(client, command)
        finally:
            client.close()

    def booted(self) -> None:
        """Return when cloud-init has run everything."""
        self.run("cloud-init status --wait > /dev/null; test -e /var/lib/cloud/instance/boot-finished")
        assert self.run("systemctl is-active cloudddp-deadline.timer") == "active"


def idle(case: Case) -> None:
    case.booted()


def endless_exec_stop(case: Case) -> None:
    case.run(f"echo '{HUNG}' | sudo tee /etc/systemd/system/hung.service && sudo systemctl start hung")


def shutdown_inhibitor(case: Case) -> None:
    case.run("sudo systemd-run --unit=inhibitor systemd-inhibit --what=shutdown --mode=block sleep infinity")
    until(lambda: "block" in case.run("systemd-inhibit --list --no-pager"))


def rebooted(case: Case) -> None:
    before = boot_id(case.laptop, case.node)
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # which may end before it answers
        attempt(case.laptop.login(case.node), "sudo systemctl reboot")
    until(lambda: boot_id(case.laptop, case.node) not in ("", before))
    case.booted()


def open_connection(case: Case) -> None:
    case.booted()
    client = case.laptop.login(case.node)
    client.get_transport().open_session().exec_command("sleep infinity")


def stopped_and_started(case: Case) -> None:
    case.booted()
    case.laptop.ec2.stop_instances(InstanceIds=[case.id])
    until(lambda: case.laptop.state(case.id) == "stopped")
    case.laptop.ec2.start_instances(InstanceIds=[case.id])
    until(lambda: case.laptop.state(case.id) == "running")
    case.booted()


def late_first_boot(case: Case) -> None:
    """Nothing: the deadline is two hours before the first boot."""


CASES: dict[Callable[[Case], None], bool] = {  # whether only a fallback ends it
    idle: False,
    endless_exec_stop: True,
    shutdown_inhibitor: True,
    rebooted: False,
    open_connection: False,
    stopped_and_started: False,
    late_first_boot: False,
}


def launch(laptop: LabLaptop, prepare: Callable[[Case], None]) -> Case:
    now = datetime.now(UTC).replace(microsecond=0)  # the timer of the deadline has whole seconds
    created = now - timedelta(hours=3) if prepare is late_first_boot else now
    expires = created + (timedelta(hours=1) if prepare is late_first_boot else AHEAD)
    data = product_user_data(laptop, created=created, expires=expires)
    (node,) = laptop.launch(
        UserData=data, InstanceType="c5.large", InstanceInitiatedShutdownBehavior="terminate"
    )
    return Case(laptop, node, max(expires, now))


def test_deadline_ends_every_node(machines: control.Simulator) -> None:
    laptop = LabLaptop(machines, "deadlines")
    try:
        cases = {prepare: launch(laptop, prepare) for prepare in CASES}
        errors: list[str] = []

        def follow(prepare: Callable[[Case], None], case: Case) -> None:
            try:
                prepare(case)
                left = (case.expires - datetime.now(UTC)).total_seconds() + LAST
                until(lambda: laptop.state(case.id) == "terminated", left, why="the node has ended")
                case.ended = datetime.now(UTC)
            except BaseException as error:  # in a thread: the test reports it
                errors.append(f"{prepare.__name__}: {error!r}")

        threads = [threading.Thread(target=follow, args=item) for item in cases.items()]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert not errors
        for prepare, case in cases.items():
            assert case.ended is not None
            seconds = (case.ended - case.expires).total_seconds()
            print(f"{prepare.__name__}: ended {seconds:.1f} s after its deadline")
            assert 0 < seconds < LAST, prepare.__name__
            if prepare is not late_first_boot:  # from its launch on, with the whole boot
                assert (seconds > FALLBACK) == CASES[prepare], (prepare.__name__, seconds)
            reason = laptop.describe(case.id)[0]["StateReason"]["Code"]
            assert reason == "Client.InstanceInitiatedShutdown", (prepare.__name__, reason)
    finally:
        laptop.leave()
