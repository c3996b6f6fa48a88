"""Confinement of a node's processes: system calls, capabilities, host information, memory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.labnode import LabLaptop, attempt, shell

from cloudddp.sim import control
from cloudddp.sim.linux import kernel, processes

PYTHON = "/opt/pytorch/bin/python"
BOOTCMD = "for one in /proc/[0-9]*/fd/*; do readlink $one; done > /var/log/descriptors; true"


@pytest.fixture(scope="module")
def instance(shared_lab_laptop: LabLaptop) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 16000}}
    data = shared_lab_laptop.user_data(bootcmd=[BOOTCMD])
    return shared_lab_laptop.launch(UserData=data, BlockDeviceMappings=[disk])[0]


@pytest.fixture(scope="module")
def client(shared_lab_laptop: LabLaptop, instance: dict[str, Any]) -> paramiko.SSHClient:
    return shared_lab_laptop.login(instance)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def errno_of(client: paramiko.SSHClient, call: str, *, prefix: str = "") -> int:
    """Return the errno of a Python expression run on the node (`c` is the C library), or 0."""
    code = (
        f"import ctypes; c = ctypes.CDLL(None, use_errno=True); print(ctypes.get_errno() if {call} < 0 "
        "else 0)"
    )
    return int(shell(client, f"{prefix} {PYTHON} -c {shlex.quote(code)}"))


# -- calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "sudo"])
@pytest.mark.parametrize("kind", ["U", "Ur", "m", "n", "p --fork", "i", "u", "C"])
def test_namespaces_cannot_be_created(client: paramiko.SSHClient, prefix: str, kind: str) -> None:
    assert attempt(client, f"{prefix} unshare -{kind} true").status != 0


@pytest.mark.parametrize("prefix", ["", "sudo"])
@pytest.mark.parametrize(
    ("name", "call", "errno"),
    [
        ("setns", "c.setns(0, 0)", 1),
        ("clone3", "c.syscall(435, 0, 0)", 38),
        ("io_uring_setup", "c.syscall(425, 0, 0)", 1),
        ("mount_setattr", "c.syscall(442, -1, 0, 0, 0, 0)", 1),
        ("fsopen", "c.syscall(430, 0, 0)", 1),
        (
            "keyctl",
            "c.syscall({'x86_64': 250, 'aarch64': 219}[__import__('os').uname().machine], 0, -3, 0)",
            1,
        ),
        ("AF_VSOCK", "c.socket(40, 1, 0)", 97),
        ("AF_ALG", "c.socket(38, 5, 0)", 97),
    ],
)
def test_calls_without_namespaces_are_refused(
    client: paramiko.SSHClient, prefix: str, name: str, call: str, errno: int
) -> None:
    assert errno_of(client, call, prefix=prefix) == errno, name


def test_x32_calls_are_refused(client: paramiko.SSHClient) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is x86_64's")
    assert errno_of(client, "c.syscall(0x40000000 | 39)") == 1


def test_threads_and_processes_can_be_created(client: paramiko.SSHClient) -> None:
    code = """
import concurrent.futures as f, multiprocessing, os, socket, subprocess
print(sum(f.ThreadPoolExecutor(8).map(int, "1234")))
print(sum(multiprocessing.get_context("fork").Pool(2).map(int, "1234")))
print(subprocess.run(["echo", "sub"], capture_output=True, text=True, preexec_fn=os.setsid).stdout.strip())
print(os.waitstatus_to_exitcode(os.system("exit 3")))
socket.socketpair(); socket.socket(socket.AF_INET6); socket.if_nameindex()
"""
    assert shell(client, f"python3 -c {shlex.quote(code)}").split() == ["10", "10", "sub", "3"]


def test_torch_data_loader_workers(client: paramiko.SSHClient) -> None:
    pytest.importorskip("torch")
    code = (
        "import torch.utils.data as d; print(sum(int(b.sum()) for b in d.DataLoader(range(100), 10, "
        "num_workers=2)))"
    )
    assert shell(client, f"{PYTHON} -c {shlex.quote(code)}") == "4950"


# -- processes -----------------------------------------------------------------------------------------------


def test_all_processes_are_confined_and_killed_first_on_oom(
    lab: control.Simulator, instance: dict[str, Any], client: paramiko.SSHClient
) -> None:
    shell(client, "sudo sh -c 'setsid sleep 1000 > /dev/null 2>&1 &'")
    allowed = sum(1 << number for number in kernel.NODE_CAPABILITIES)
    found = processes.belonging(lab.home, instance["InstanceId"])
    assert len(found) >= 4
    for process in found:
        status = status_of(process.pid)
        powers = [int(status[name], 16) & ~allowed for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")]
        assert (powers, status["NoNewPrivs"], status["Seccomp"]) == ([0] * 4, "1", "2"), status["Name"]
        assert int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) == 500, status["Name"]


def test_node_sees_only_its_own_cgroup(client: paramiko.SSHClient) -> None:
    groups = shell(client, "cat /proc/self/cgroup").splitlines()
    assert {line.rpartition(":")[2] for line in groups} <= {"/"}
    theirs = shell(client, "readlink /proc/self/ns/cgroup")
    assert theirs != str(Path("/proc/self/ns/cgroup").readlink())


def test_no_host_file_is_open_on_the_node(lab: control.Simulator, client: paramiko.SSHClient) -> None:
    opened = shell(client, "sudo cat /var/log/descriptors").splitlines()
    assert "/dev/null" in opened
    assert not [path for path in opened if "boot.log" in path or str(lab.home) in path]


# -- files and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/proc/keys",
        "/proc/key-users",
        "/proc/kcore",
        "/proc/timer_list",
        "/proc/interrupts",
        "/proc/kallsyms",
    ],
)
def test_host_information_is_hidden(client: paramiko.SSHClient, path: str) -> None:
    shown = attempt(client, f"sudo head -c 100 {path}")
    assert shown.out == b""
    assert attempt(client, "sudo ls -A /sys/firmware /sys/block 2>/dev/null").out.count(b"\n") <= 3


def test_disk_size_is_bounded_by_memory(
    shared_lab_laptop: LabLaptop, instance: dict[str, Any], client: paramiko.SSHClient
) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shown = shell(client, "df -B1 --output=size,itotal / /dev/shm /run /root").splitlines()[1:]
    sizes = [tuple(map(int, line.split())) for line in shown]
    assert len(sizes) == 4
    assert sum(size for size, _ in sizes) < memory / 2
    assert sum(files for _, files in sizes) * 1024 < memory / 16
    volume = instance["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    (volume_shown,) = shared_lab_laptop.ec2.describe_volumes(VolumeIds=[volume])["Volumes"]
    assert volume_shown["Size"] == 16000
