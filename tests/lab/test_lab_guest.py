"""What a namespace node does with user data, units, deadlines, shutdown and sudo."""

from __future__ import annotations

import base64
import gzip
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, reconnect, shell
from support.simlab import make_key
from support.userdata import product_user_data

from cloudddp.simulator import control

OTHER = make_key()
GIVEN = {
    "ssh_authorized_keys": [OTHER.public],
    "bootcmd": ["pgrep -x sshd > /var/log/first-of-boot", ["sh", "-c", "echo $INSTANCE_ID > /var/log/who"]],
    "write_files": [
        {"path": "/srv/deep/er/plain", "content": "ü\n", "permissions": "0640"},
        {"path": "/srv/base64", "content": base64.b64encode(b"\x00\xff").decode(), "encoding": "b64"},
        {
            "path": "/srv/zipped",
            "content": base64.b64encode(gzip.compress(b"z")).decode(),
            "encoding": "gz+b64",
        },
        {"path": "/srv/plain", "content": "a"},
        {"path": "/srv/plain", "content": "b", "append": True},
        {"path": "/home/ubuntu/mine", "content": "m", "owner": "ubuntu:ubuntu", "defer": True},
        {"path": "/srv/broken", "content": "x", "encoding": "b64"},
    ],
    "runcmd": [
        "pgrep -x sshd > /var/log/first-of-runcmd",
        "cd /srv",
        ["touch", "with a space"],
        "echo ${HOME-none} > home; sleep 1; touch last",
    ],
    "packages": ["cowsay"],
}


@pytest.fixture(scope="module")
def client(shared_lab_laptop: LabLaptop) -> paramiko.SSHClient:
    """A node with the user data above, after cloud-init has finished."""
    ssh = shared_lab_laptop.login(shared_lab_laptop.launch(UserData=shared_lab_laptop.user_data(**GIVEN))[0])
    attempt(ssh, "cloud-init status --wait")
    return ssh


def ended(laptop: LabLaptop, node: dict[str, Any], state: str) -> None:
    until(lambda: laptop.state(node["InstanceId"]) == state)


def test_login_with_key_from_user_data(shared_lab_laptop: LabLaptop, client: paramiko.SSHClient) -> None:
    address = client.get_transport().getpeername()[0]
    assert shell(shared_lab_laptop.connect(address, key=OTHER), "id -un") == "ubuntu"
    with pytest.raises(paramiko.AuthenticationException):
        shared_lab_laptop.connect(address, key=make_key())


def test_user_data_is_applied(shared_lab_laptop: LabLaptop, client: paramiko.SSHClient) -> None:
    assert shell(client, "sudo cat /srv/deep/er/plain") == "ü"
    shown = shell(client, "stat -c '%a %U' /srv/deep/er/plain /srv/plain").splitlines()
    assert shown == ["640 root", "644 root"]
    assert shell(client, "base64 /srv/base64; cat /srv/zipped /srv/plain") == "AP8=\nzab"
    assert shell(client, "stat -c %U:%G /home/ubuntu/mine; cat /home/ubuntu/mine") == "ubuntu:ubuntu\nm"
    # bootcmd runs before sshd, and runcmd, which is one script without $HOME, after it.
    assert shell(client, "cat /var/log/first-of-boot") == ""
    assert shell(client, "cat /var/log/first-of-runcmd") != ""
    assert shell(client, "ls '/srv/with a space' /srv/last; cat /srv/home").splitlines()[-1] == "none"
    known = {node["instance_id"] for node in control.nodes(shared_lab_laptop.sim)}
    assert shell(client, "cat /var/log/who") in known
    done = attempt(client, "cloud-init status --long")
    assert done.status == 1
    for text in (b"status: error", b"ignored: ['packages']", b"write_files: "):
        assert text in done.out
    assert attempt(client, "test -e /srv/broken").status == 1


def test_reboot_keeps_the_disk_starts_enabled_units_and_runs_no_script_again(lab_laptop: LabLaptop) -> None:
    node = lab_laptop.launch(UserData="#!/bin/bash\necho run by $(id -un) >> /srv/runs; echo output\n")[0]
    ssh = lab_laptop.login_unverified(node)
    shown = shell(ssh, "cloud-init status --wait; cat /srv/runs /var/log/cloud-init-output.log")
    assert shown == "status: done\nrun by root\noutput"
    unit = "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=multi-user.target\n"
    shell(ssh, f"echo {shlex.quote(unit)} | sudo tee /etc/systemd/system/mine.service")
    shell(ssh, "sudo systemctl enable mine; sudo touch /run/before")
    assert attempt(ssh, "systemctl is-active mine").out == b"inactive\n"
    attempt(ssh, "sudo reboot")
    ssh = reconnect(lab_laptop, node)
    assert lab_laptop.state(node["InstanceId"]) == "running"
    assert shell(ssh, "cloud-init status --wait; cat /srv/runs") == "status: done\nrun by root"
    until(lambda: attempt(ssh, "systemctl is-active mine").out == b"active\n")


def test_node_booted_after_its_deadline_ends(lab_laptop: LabLaptop) -> None:
    expires = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=1)
    data = product_user_data(lab_laptop, expires=expires)
    (node,) = lab_laptop.run(UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    ended(lab_laptop, node, "terminated")


def test_poweroff_applies_the_shutdown_behavior(lab_laptop: LabLaptop) -> None:
    commands = ["poweroff", "shutdown now", "shutdown -h now", "systemctl poweroff", "halt"]
    ending = lab_laptop.launch(len(commands), InstanceInitiatedShutdownBehavior="terminate")
    (stopping,) = lab_laptop.launch()
    for node, command in zip([*ending, stopping], [*commands, "poweroff"], strict=True):
        attempt(lab_laptop.login(node), f"sudo {command}")
    for node in ending:
        ended(lab_laptop, node, "terminated")
    ended(lab_laptop, stopping, "stopped")


def test_poweroff_needs_root_and_can_be_cancelled(client: paramiko.SSHClient) -> None:
    for command in ("poweroff", "reboot", "shutdown now", "systemctl poweroff --force", "systemctl start x"):
        done = attempt(client, command)
        assert (done.status, b"Access denied" in done.err) == (1, True), command
    shell(client, "sudo shutdown -h +600; sudo shutdown -c")
    assert attempt(client, "sudo shutdown 23:59").status == 1
    assert shell(client, "echo alive") == "alive"


def test_sudo_passes_streams_signals_and_exit_code(client: paramiko.SSHClient) -> None:
    done = attempt(client, "echo in | sudo sh -c 'cat; echo err >&2; exit 7'")
    assert (done.status, done.out, done.err) == (7, b"in\n", b"err\n")
    assert shell(client, "X=1 sudo Y=2 sh -c 'echo $X $Y $HOME'") == "2 /root"
    assert shell(client, "sudo -u ubuntu id -un") == "ubuntu"
    assert attempt(client, "sudo -u nobody-here true").status == 1
    assert attempt(client, "sudo no-such-command").status == 1
    shell(client, "sudo sleep 4321 & sleep 1; kill -TERM $!; wait $!; true")
    until(lambda: attempt(client, "pgrep -f '[s]leep 4321'").status == 1)
