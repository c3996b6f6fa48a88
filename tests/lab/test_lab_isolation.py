"""Isolation of a node from the host and from other nodes, for root and for the login user: system calls,
capabilities, host information, files, processes and network."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.labnode import LabLaptop, attempt, inside, shell

from cloudddp.simulator import control
from cloudddp.simulator.linux import kernel, processes

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


def errno_of(client: paramiko.SSHClient, call: str, *, prefix: str = "") -> int:
    """Return the errno of a Python expression run on the node (`c` is the C library), or 0."""
    library = "import ctypes; c = ctypes.CDLL(None, use_errno=True)"
    code = f"{library}; print(ctypes.get_errno() if {call} < 0 else 0)"
    return int(shell(client, f"{prefix} {PYTHON} -c {shlex.quote(code)}"))


@pytest.mark.parametrize("prefix", ["", "sudo"])
def test_calls_that_lead_out_of_the_node_are_refused(client: paramiko.SSHClient, prefix: str) -> None:
    for kind in ("U", "Ur", "m", "n", "p --fork", "i", "u", "C"):
        assert attempt(client, f"{prefix} unshare -{kind} true").status != 0, kind
    keyctl = "{'x86_64': 250, 'aarch64': 219}[__import__('os').uname().machine]"
    for name, call, errno in (
        ("setns", "c.setns(0, 0)", 1),
        ("clone3", "c.syscall(435, 0, 0)", 38),
        ("io_uring_setup", "c.syscall(425, 0, 0)", 1),
        ("mount_setattr", "c.syscall(442, -1, 0, 0, 0, 0)", 1),
        ("fsopen", "c.syscall(430, 0, 0)", 1),
        ("keyctl", f"c.syscall({keyctl}, 0, -3, 0)", 1),
        ("AF_VSOCK", "c.socket(40, 1, 0)", 97),
        ("AF_ALG", "c.socket(38, 5, 0)", 97),
    ):
        assert errno_of(client, call, prefix=prefix) == errno, name


def test_calls_of_x86_64_are_refused_to_root(client: paramiko.SSHClient) -> None:
    """With invalid arguments: the result is EPERM (1) only if the caller is checked first. A kernel that was
    built without the call returns ENOSYS (38)."""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    for name, number in {"init_module": 175, "reboot": 169, "swapoff": 168, "kexec_load": 246}.items():
        assert errno_of(client, f"c.syscall({number}, 0, 0, 0, 0)", prefix="sudo") in (1, 38), name
    assert errno_of(client, "c.syscall(0x40000000 | 39)") == 1  # x32


def test_root_of_a_node_may_not_change_the_host(client: paramiko.SSHClient) -> None:
    """None of the calls would change anything if it were allowed, so that a defect does no harm."""
    for command in (
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
    ):
        assert attempt(client, f"sudo {command}").status != 0, command


def test_programs_of_users_work(client: paramiko.SSHClient) -> None:
    code = """
import concurrent.futures as f, multiprocessing, os, socket, subprocess
print(sum(f.ThreadPoolExecutor(8).map(int, "1234")))
print(sum(multiprocessing.get_context("fork").Pool(2).map(int, "1234")))
print(subprocess.run(["echo", "sub"], capture_output=True, text=True, preexec_fn=os.setsid).stdout.strip())
print(os.waitstatus_to_exitcode(os.system("exit 3")))
socket.socketpair(); socket.socket(socket.AF_INET6); socket.if_nameindex()
"""
    assert shell(client, f"python3 -c {shlex.quote(code)}").split() == ["10", "10", "sub", "3"]
    pytest.importorskip("torch")
    loader = "d.DataLoader(range(100), 10, num_workers=2)"
    code = f"import torch.utils.data as d; print(sum(int(b.sum()) for b in {loader}))"
    assert shell(client, f"{PYTHON} -c {shlex.quote(code)}") == "4950"


def test_all_processes_are_confined_and_killed_first_on_oom(
    lab: control.Simulator, instance: dict[str, Any], client: paramiko.SSHClient
) -> None:
    shell(client, "sudo sh -c 'setsid sleep 1000 > /dev/null 2>&1 &'")
    allowed = sum(1 << number for number in kernel.NODE_CAPABILITIES)
    found = processes.belonging(lab.home, instance["InstanceId"])
    assert len(found) >= 4
    for process in found:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        powers = [int(status[name], 16) & ~allowed for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")]
        assert (powers, status["NoNewPrivs"], status["Seccomp"]) == ([0] * 4, "1", "2"), status["Name"]
        assert int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) == 500, status["Name"]


def test_node_sees_only_its_own_processes_and_cgroup(client: paramiko.SSHClient) -> None:
    stranger = subprocess.Popen(["sleep", "98765"])
    try:
        assert "98765" not in shell(client, "sudo ps -e -o args")
        assert shell(client, "ps -o comm= -p 1").strip() == "init"
        seen = {int(pid) for pid in shell(client, "ps -e -o pid=").split()}
        if stranger.pid not in seen:
            assert attempt(client, f"sudo kill -0 {stranger.pid}").status != 0
    finally:
        stranger.kill()
        stranger.wait()
    groups = shell(client, "cat /proc/self/cgroup").splitlines()
    assert {line.rpartition(":")[2] for line in groups} <= {"/"}
    theirs = shell(client, "readlink /proc/self/ns/cgroup")
    assert theirs != str(Path("/proc/self/ns/cgroup").readlink())


def test_host_information_is_hidden(lab: control.Simulator, client: paramiko.SSHClient) -> None:
    for name in ("keys", "key-users", "kcore", "timer_list", "interrupts", "kallsyms"):
        assert attempt(client, f"sudo head -c 100 /proc/{name}").out == b"", name
    assert attempt(client, "sudo ls -A /sys/firmware /sys/block 2>/dev/null").out.count(b"\n") <= 3
    opened = shell(client, "sudo cat /var/log/descriptors").splitlines()
    assert "/dev/null" in opened
    assert not [path for path in opened if "boot.log" in path or str(lab.home) in path]


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
    nodes = lab.home / "sim/nodes"
    for path in (secret, lab.home / "sim", nodes / other["InstanceId"], Path("/home/ubuntu/theirs")):
        assert attempt(client, f"sudo ls -d {shlex.quote(str(path))}").status != 0, path
    assert shell(client, "sudo ls -A /home") == "ubuntu"
    shown = shell(client, "sudo find /root -mindepth 1 -maxdepth 1").splitlines()
    pythons = (sys.prefix, sys.base_prefix)
    assert all(any(prefix.startswith(one) for prefix in pythons) for one in shown)
    devices = "sudo sh -c 'ls /dev/sd* /dev/vd* /dev/nvme* /dev/mem /dev/kmsg 2>/dev/null'"
    assert attempt(client, devices).out == b""


def test_host_python_is_read_only(client: paramiko.SSHClient) -> None:
    """/proc/PID/exe is the file as it was mounted when it was executed."""
    change = "import os, sys; os.chmod(sys.argv[1], os.stat(sys.argv[1]).st_mode)"  # to its current mode
    attempts = 0
    for pid in filter(str.isdecimal, shell(client, "ls /proc").split()):
        exe = shell(client, f"sudo readlink /proc/{pid}/exe || true")
        if "python" in exe:
            attempts += 1
            done = attempt(client, f"sudo {PYTHON} -c {shlex.quote(change)} /proc/{pid}/exe")
            assert b"Read-only file system" in done.err, exe
    assert attempts  # at least the node's init


def test_state_folder_is_not_on_a_host_disk(lab: control.Simulator, client: paramiko.SSHClient) -> None:
    shell(client, "sudo touch /run/cloudddp/left")
    assert list((lab.home / "sim").rglob("left")) == []
    copied = "cp /usr/bin/id /run/cloudddp/id && chmod 4755 /run/cloudddp/id && /run/cloudddp/id"
    assert attempt(client, f"sudo sh -c '{copied}'").status != 0
