"""Isolation of a node from the host and from other nodes, for root and for the login user."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import paramiko
import pytest
from support.labnode import LabLaptop, attempt, inside, shell

from cloudddp.sim import control
from cloudddp.sim.linux import kernel

PYTHON = "/opt/pytorch/bin/python"


@pytest.fixture(scope="module")
def client(shared_lab_laptop: LabLaptop) -> paramiko.SSHClient:
    return shared_lab_laptop.login(shared_lab_laptop.launch()[0])


@pytest.mark.parametrize(
    "command",
    [
        "date -s @$(date +%s)",
        "mount -t tmpfs none /mnt",
        f"mount -o remount,bind,rw {sys.prefix}",
        "umount /usr",
        "sh -c 'cat /proc/sys/vm/swappiness > /proc/sys/vm/swappiness'",
        "sh -c 'cat /proc/sys/kernel/hostname > /proc/sys/kernel/hostname'",
        "hostname other",
        "mknod /tmp/disk b 254 0",
        "chmod 666 /dev/null",
        "touch -d 2001-01-01 /dev/full",
        "touch /usr/bin/x",
        f"touch {sys.prefix}/x",  # the packages of all nodes
        "ip link set ens5 down",
        "ip addr add 172.31.0.99/20 dev ens5",
        "nft list ruleset",
        "dmesg --clear",
    ],
)
def test_root_of_a_node_may_not(client: paramiko.SSHClient, command: str) -> None:
    """None of the calls would change anything if it were allowed, so that a defect does no harm."""
    assert attempt(client, f"sudo {command}").status != 0


@pytest.mark.parametrize(
    ("name", "number"), [("init_module", 175), ("reboot", 169), ("swapoff", 168), ("kexec_load", 246)]
)
def test_kernel_refuses_root_of_a_node(client: paramiko.SSHClient, name: str, number: int) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    # With invalid arguments: the result is EPERM (1) only if the caller is checked first. A kernel that was
    # built without the call returns ENOSYS (38).
    code = (
        f"import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall({number}, 0, 0, 0, 0), "
        "ctypes.get_errno())"
    )
    assert shell(client, f"sudo {PYTHON} -c {shlex.quote(code)}") in ("-1 1", "-1 38"), name


def test_capabilities_are_limited(client: paramiko.SSHClient) -> None:
    status = dict(line.split(":\t", 1) for line in shell(client, "sudo cat /proc/self/status").splitlines())
    allowed = sum(1 << number for number in kernel.NODE_CAPABILITIES)
    assert [int(status[name], 16) & ~allowed for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")] == [
        0,
        0,
        0,
        0,
    ]
    assert status["NoNewPrivs"] == "1"


def test_node_sees_only_its_own_processes(client: paramiko.SSHClient) -> None:
    stranger = subprocess.Popen(["sleep", "98765"])
    try:
        assert "98765" not in shell(client, "sudo ps -e -o args")
        assert shell(client, "ps -o comm= -p 1").strip() == "init"
        inside = {int(pid) for pid in shell(client, "ps -e -o pid=").split()}
        if stranger.pid not in inside:
            assert attempt(client, f"sudo kill -0 {stranger.pid}").status != 0
    finally:
        stranger.kill()
        stranger.wait()


def test_node_reaches_no_host_listener_and_no_outside_address(
    lab: control.Simulator, client: paramiko.SSHClient
) -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as outside,  # noqa: S104
        inside(lab),
        socket.create_server(("0.0.0.0", 0)) as listener,  # noqa: S104
    ):
        ports = [outside.getsockname()[1], listener.getsockname()[1], lab.endpoint.rpartition(":")[2]]
        addresses = ["127.0.0.1", "203.0.113.10", "169.254.169.254", "172.31.0.1"]
        targets = [(address, port) for address in addresses for port in ports]
        for address, number in [*targets, ("192.0.2.1", 80)]:
            assert attempt(client, f"timeout 1 bash -c '</dev/tcp/{address}/{number}'").status != 0, address
        for one in (outside, listener):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.accept()


def test_node_reads_no_file_of_the_host_or_of_other_nodes(
    lab: control.Simulator, lab_laptop: LabLaptop, client: paramiko.SSHClient, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    other = lab_laptop.launch()[0]
    shell(lab_laptop.login(other), "echo theirs > /home/ubuntu/theirs")
    for path in (
        secret,
        lab.home / "sim",
        lab.home / "sim/nodes" / other["InstanceId"],
        Path("/home/ubuntu/theirs"),
    ):
        assert attempt(client, f"sudo ls -d {shlex.quote(str(path))}").status != 0, path
    assert shell(client, "sudo ls -A /home") == "ubuntu"
    shown = shell(client, "sudo find /root -mindepth 1 -maxdepth 1").splitlines()
    assert all(any(str(prefix).startswith(one) for prefix in _pythons()) for one in shown)
    assert (
        attempt(client, "sudo sh -c 'ls /dev/sd* /dev/vd* /dev/nvme* /dev/mem /dev/kmsg 2>/dev/null'").out
        == b""
    )


def test_host_python_is_read_only(
    client: paramiko.SSHClient,
) -> None:
    """/proc/PID/exe is the file as it was mounted when it was executed."""
    change = "import os, sys; os.chmod(sys.argv[1], os.stat(sys.argv[1]).st_mode)"  # to its current mode
    pids = shell(client, "ls /proc").split()
    attempts = 0
    for pid in filter(str.isdecimal, pids):
        exe = shell(client, f"sudo readlink /proc/{pid}/exe || true")
        if "python" in exe:
            attempts += 1
            done = attempt(client, f"sudo {PYTHON} -c {shlex.quote(change)} /proc/{pid}/exe")
            assert b"Read-only file system" in done.err, exe
    assert attempts  # at least the node's init


def _pythons() -> list[str]:
    return [sys.prefix, sys.base_prefix]


def test_state_folder_is_not_on_a_host_disk(lab: control.Simulator, client: paramiko.SSHClient) -> None:
    shell(client, "sudo touch /run/cloudddp/left")
    assert list((lab.home / "sim").rglob("left")) == []
    assert (
        attempt(
            client,
            "sudo sh -c 'cp /usr/bin/id /run/cloudddp/id && chmod 4755 /run/cloudddp/id && /run/cloudddp/id'",
        ).status
        != 0
    )
