"""Nodes that end and boot again: reliably, and without following links that root of the node has left on the
disk."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, inside, reachable, reboot, reconnect, shell

from cloudddp.simulator import control
from cloudddp.simulator.linux import processes

LISTEN = """
import socket, time
line = socket.create_connection(("{address}", 22), 10)
print(line.recv(4).decode(), flush=True)
line.settimeout(0.2)
end = time.monotonic() + 4
received = "nothing"
while time.monotonic() < end and received == "nothing":
    try:
        line.sendall(b"x")
        received = {{b"": "EOF"}}.get(line.recv(99), "nothing")
    except TimeoutError:
        pass
    except OSError as error:
        received = str(error)
print(received, flush=True)
"""


def pids(laptop: LabLaptop, node: dict[str, Any]) -> list[int]:
    return [process.pid for process in processes.belonging(laptop.sim.home, node["InstanceId"])]


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


# -- files left by root of a node --------------------------------------------------------------------------


def test_reboot_follows_nothing_that_root_has_left(lab_laptop: LabLaptop, tmp_path: Path) -> None:
    """Links in place of folders, a file in place of one, links and pipes in place of the log, a full state
    folder."""
    linked, renamed = lab_laptop.launch(2)
    outside = tmp_path / "of this computer"
    outside.mkdir()
    (outside / "kept").touch()
    ssh = lab_laptop.login(linked)
    shell(ssh, "sudo touch /run/before; sudo mkdir -p /run/cloudddp/a/b; sudo touch /run/cloudddp/a/c")
    for folder in ("/opt", "/etc/ssl", "/srv", "/tmp"):
        shell(ssh, f"sudo mv {folder} {folder}.old && sudo ln -s {shlex.quote(str(outside))} {folder}")
    shell(ssh, "sudo rm /var/log/init.log; sudo ln -s /etc/hostname /var/log/init.log")
    other = lab_laptop.login(renamed)
    shell(other, "sudo touch /run/before; sudo mv /etc/ssl /etc/x; sudo touch /etc/ssl")
    shell(other, "sudo rm /var/log/init.log; sudo mkfifo /var/log/init.log")
    for client in (ssh, other):
        attempt(client, "sudo reboot")
    for node in (linked, renamed):
        again = reconnect(lab_laptop, node)
        assert shell(again, "readlink -e /opt /etc/ssl/certs") == "/opt\n/etc/ssl/certs"
        assert shell(again, "test -w /tmp; test -s /etc/hosts; ls /opt/pytorch/bin/python") != ""
        assert attempt(again, "test -e /run/cloudddp/a").status == 1
        assert shell(again, "sudo readlink /proc/2/fd/1") == "/var/log/init.log"
        assert shell(again, "sudo stat -c %F /var/log/init.log").startswith("regular")
        assert lab_laptop.state(node["InstanceId"]) == "running"
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_node_cannot_forge_how_it_ended(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch()
    shell(lab_laptop.login(node), "echo poweroff | sudo tee /run/cloudddp/power")
    (first,) = [p for p in pids(lab_laptop, node) if comm(p) == "init"]
    os.kill(first, signal.SIGKILL)  # from the host: signals of the node do not reach it
    until(lambda: lab_laptop.state(node["InstanceId"]) == "terminated")
    shown = lab_laptop.describe(node["InstanceId"])[0]
    assert shown["StateReason"]["Code"] == "Server.InternalError"


def test_init_of_a_node(lab_laptop: LabLaptop) -> None:
    """It ignores signals, reaps orphans, and controls sshd."""
    (node,), unit = lab_laptop.launch(), "sshd.service"
    ssh = lab_laptop.login(node)
    for name in ("TERM", "INT", "HUP", "KILL", "STOP", "USR1", "PIPE"):
        shell(ssh, f"sudo kill -{name} 1")
    assert shell(ssh, "sudo systemctl is-system-running") == "running"
    shell(ssh, "for n in $(seq 20); do (sleep 0.2 &); done; sudo sh -c '(sleep 0.2 &) ; (sleep 0.3 &)'")
    codes = "for n in $(seq 40); do (sleep 0.01 &); sudo sh -c 'exit 7' || echo $?; done"
    assert shell(ssh, codes).split() == ["7"] * 40
    until(lambda: attempt(ssh, "ps -e -o stat= | grep -q Z").status == 1)
    before = shell(ssh, "pgrep -f '^sshd: .*listener'")
    shell(ssh, f"sudo systemctl reload {unit}; sudo systemctl start {unit}")
    # Still the same process; it has no title until it has read its configuration again.
    assert shell(ssh, "until pgrep -f '^sshd: .*listener'; do sleep 0.05; done") == before
    shell(ssh, f"sudo systemctl stop {unit}")
    assert attempt(ssh, f"systemctl is-active {unit}").out == b"inactive\n"
    assert not reachable(lab_laptop.sim, node["PublicIpAddress"], 22)
    assert attempt(ssh, f"sudo systemctl reload {unit}").status == 1
    shell(ssh, f"sudo systemctl start {unit}; systemctl is-active {unit}")
    assert shell(lab_laptop.login(node), "pgrep -f '^sshd: .*listener'") != before


def test_frozen_nodes_can_be_terminated_and_restarted(lab_laptop: LabLaptop) -> None:
    ending, stopping = lab_laptop.launch(2)
    away = "sudo env -i setsid sh -c 'sleep 54321 > /dev/null 2>&1 &' > /dev/null 2>&1"
    shell(lab_laptop.login(ending), f"{away}; until pgrep -x sleep && ! pgrep -x sh; do sleep 0.05; done")

    def states() -> dict[bytes, str]:
        """The states of the node's processes, by command line."""
        lines = {Path(f"/proc/{pid}/cmdline").read_bytes(): pid for pid in pids(lab_laptop, ending)}
        return {
            line: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1]
            for line, pid in lines.items()
            if b"cloudddp.simulator.hosts.namespaces.boot" not in line
        }

    for node in (ending, stopping):
        control.fault(lab_laptop.sim, "freeze", [node["InstanceId"]])
    until(lambda: set(states().values()) == {"T"})
    assert any(b"54321" in line for line in states())
    lab_laptop.terminate(ending["InstanceId"])
    lab_laptop.ec2.stop_instances(InstanceIds=[stopping["InstanceId"]])
    until(lambda: lab_laptop.state(stopping["InstanceId"]) == "stopped")
    lab_laptop.ec2.start_instances(InstanceIds=[stopping["InstanceId"]])
    until(lambda: lab_laptop.state(stopping["InstanceId"]) == "running")
    (again,) = lab_laptop.describe(stopping["InstanceId"])
    assert shell(lab_laptop.login(again), "echo alive") == "alive"


def test_simulator_with_frozen_nodes_stops(home: Path) -> None:
    laptop = LabLaptop(control.start(home, nodes="namespace"), "key")
    for node in laptop.launch(2):
        control.fault(laptop.sim, "freeze", [node["InstanceId"]])
    assert control.stop(home) > 0


def test_killed_node_sends_no_packet_to_its_peers(lab_laptop: LabLaptop) -> None:
    failing, peer = lab_laptop.launch(2)
    ssh = lab_laptop.login(peer)
    code = shlex.quote(LISTEN.format(address=failing["PrivateIpAddress"]))
    shell(ssh, f"nohup python3 -c {code} > received 2>&1 & until [ -s received ]; do sleep 0.05; done")
    with inside(lab_laptop.sim):
        line = socket.create_connection((failing["PublicIpAddress"], 22), timeout=10)
    with line:
        assert line.recv(4) == b"SSH-"
        time.sleep(0.2)
        line.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            line.recv(1 << 16)
        control.fault(lab_laptop.sim, "kill", [failing["InstanceId"]])
        line.settimeout(2)
        with pytest.raises(TimeoutError):
            line.recv(1)
    assert until(lambda: len(lines := shell(ssh, "cat received").split("\n")) == 2 and lines) == [
        "SSH-",
        "nothing",
    ]
    until(lambda: lab_laptop.state(failing["InstanceId"]) == "terminated")
    assert lab_laptop.describe(failing["InstanceId"])[0]["StateReason"]["Code"] == "Server.InternalError"
    assert pids(lab_laptop, failing) == []


def test_handle_never_signals_a_reused_pid() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    held = processes.Handle(child, parent=os.getpid())
    held.kill()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    held.kill()
    held.close()
    held.close()
    held.kill()
    with pytest.raises(ProcessLookupError):
        processes.Handle(os.getppid(), parent=os.getpid())


# -- faults --------------------------------------------------------------------------------------------------


def test_network_fault_outlives_a_reboot_but_not_the_node(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch()
    lab_laptop.login(node)
    control.fault(lab_laptop.sim, "cut", [node["InstanceId"]])
    reboot(lab_laptop, node)
    lab_laptop.launch()  # replaces the firewall rules
    assert not reachable(lab_laptop.sim, node["PublicIpAddress"], 22)
    lab_laptop.terminate(node["InstanceId"])
    (other,) = lab_laptop.launch(PrivateIpAddress=node["PrivateIpAddress"])
    assert other["PrivateIpAddress"] == node["PrivateIpAddress"]
    until(lambda: reachable(lab_laptop.sim, other["PublicIpAddress"], 22))
