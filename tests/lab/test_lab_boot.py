"""Slow and broken boots in the lab (the condition `boot`): what a client of EC2 meets in the first minutes of
a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, inside, reachable, shell
from support.simlab import Laptop

from cloudddp.sim import control

LONG = 600  # seconds; no test waits for it


@pytest.fixture
def slowly(lab_laptop: LabLaptop) -> Iterator[Callable[..., Any]]:
    """Launch a node that boots under a condition."""

    def launch(condition: dict[str, float], **more: Any) -> Any:
        control.conditions(lab_laptop.sim, {"boot": condition})
        try:
            (node,) = lab_laptop.launch(**more)
        finally:
            control.conditions(lab_laptop.sim, {"boot": dict.fromkeys(condition)})
        return node

    yield launch


def test_node_runs_before_ssh_answers(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    node = slowly({"ssh_seconds": LONG})
    assert lab_laptop.state(node["InstanceId"]) == "running"
    assert not reachable(lab_laptop.sim, node["PublicIpAddress"], 22)
    lab_laptop.terminate(node["InstanceId"])


def test_pam_refuses_logins_while_nologin_exists(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    """OpenSSH with the node's own PAM: the key is accepted, then the account is refused, and sshd closes the
    connection within the authentication (auth2.c, userauth_finish; pam_nologin(8)). Root may log in, ubuntu
    not."""
    node = slowly({"nologin_seconds": 3})
    refusals: list[Exception] = []

    def login() -> paramiko.SSHClient | None:
        try:
            with inside(lab_laptop.sim):
                return Laptop.connect(lab_laptop, node["PublicIpAddress"])
        except paramiko.AuthenticationException as error:
            refusals.append(error)
        except (paramiko.ssh_exception.NoValidConnectionsError, TimeoutError):
            pass
        return None

    client = until(login)
    assert refusals
    assert {str(one) for one in refusals} == {"Authentication failed: transport shut down or saw EOF"}
    log = shell(client, "sudo cat /var/log/auth.log")
    assert "Accepted publickey for ubuntu" in log
    assert "Access denied for user ubuntu by PAM account configuration" in log
    assert attempt(client, "test -e /run/nologin").status != 0


def test_bootcmd_runs_before_logind_and_sshd(lab_laptop: LabLaptop) -> None:
    """bootcmd runs in cloud-init's network stage, before sysinit.target (cloud-init-network.service): there
    is no bus for logind's ScheduleShutdown, while systemd answers root on its private socket."""
    commands = [
        "shutdown -P +60 2> /root/shutdown; echo $? >> /root/shutdown",
        "printf '[Timer]\\nOnBootSec=1h\\n' > /etc/systemd/system/late.timer",
        "printf '[Service]\\nExecStart=/bin/true\\n' > /etc/systemd/system/late.service",
        "systemctl daemon-reload && systemctl start --no-block late.timer; echo $? > /root/systemctl",
        "pgrep -x sshd; echo $? > /root/sshd",
    ]
    (node,) = lab_laptop.launch(UserData=lab_laptop.user_data(bootcmd=commands))
    client = lab_laptop.login(node)
    assert shell(client, "sudo cat /root/shutdown") == (
        "Failed to poweroff: Failed to connect to bus: No such file or directory\n1"
    )
    assert shell(client, "sudo cat /root/systemctl /root/sshd") == "0\n1"
    assert shell(client, "systemctl is-active late.timer") == "active"
    assert attempt(client, "sudo shutdown -P +60 && sudo shutdown -c").status == 0


def test_poweroff_in_bootcmd_ends_the_node(lab_laptop: LabLaptop) -> None:
    """Without a delay, `poweroff` falls back from logind to a request to systemd
    (systemctl-start-special.c)."""
    (started,) = lab_laptop.run(
        UserData=lab_laptop.user_data(bootcmd=["poweroff"]), InstanceInitiatedShutdownBehavior="terminate"
    )
    until(lambda: lab_laptop.state(started["InstanceId"]) == "terminated")


def test_timer_started_in_bootcmd_ends_a_boot_that_hangs(lab_laptop: LabLaptop) -> None:
    commands = [
        "printf '[Timer]\\nOnBootSec=2\\nAccuracySec=1s\\n' > /etc/systemd/system/end.timer",
        "printf '[Service]\\nExecStart=/bin/systemctl poweroff\\n' > /etc/systemd/system/end.service",
        "systemctl start --no-block end.timer",
        f"sleep {LONG}",
    ]
    (started,) = lab_laptop.run(
        UserData=lab_laptop.user_data(bootcmd=commands), InstanceInitiatedShutdownBehavior="terminate"
    )
    until(lambda: lab_laptop.state(started["InstanceId"]) == "terminated")


def test_last_stage_of_cloud_init_can_be_late(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    node = slowly({"final_seconds": LONG}, UserData=lab_laptop.user_data(runcmd=["touch /run/final"]))
    client = lab_laptop.login(node)
    assert shell(client, "cloud-init status") == "status: running"
    assert attempt(client, "test -e /run/final").status != 0


def test_dpkg_lock_is_held_after_boot(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    """The real apt-get meets the lock of unattended-upgrades; DPkg::Lock::Timeout (apt 1.9.11) makes it
    wait."""
    client = lab_laptop.login(slowly({"apt_lock_seconds": 4}))
    refused = attempt(client, "sudo apt-get -f -y install")
    if b"command not found" in refused.err:
        pytest.skip("this computer has no apt")
    assert refused.status == 100
    assert b"Could not get lock /var/lib/dpkg/lock-frontend" in refused.err
    assert attempt(client, "sudo apt-get -o DPkg::Lock::Timeout=60 -f -y install").status == 0


def test_failed_gpu_is_lost_by_nvidia_smi(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    """nvidia-smi(1): 15, the GPU has fallen off the bus; the others are listed."""
    client = lab_laptop.login(slowly({"failed_gpus": 1}))
    done = attempt(client, "nvidia-smi -L")
    lines = done.out.decode().splitlines()
    assert done.status == 15
    assert sum(line.startswith("GPU ") for line in lines) == 3
    assert lines[3] == "Unable to determine the device handle for GPU 00000000:03:00.0: Unknown Error"


def test_condition_ends_with_the_next_boot(lab_laptop: LabLaptop, slowly: Callable[..., Any]) -> None:
    node = slowly({"failed_gpus": 1})
    lab_laptop.ec2.reboot_instances(InstanceIds=[node["InstanceId"]])

    def whole() -> bool:
        try:
            return attempt(lab_laptop.login(node), "nvidia-smi -L").status == 0
        except (OSError, EOFError, paramiko.SSHException):
            return False

    until(whole)
