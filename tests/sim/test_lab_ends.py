"""How nodes of the lab end and begin again: always, in order, and without believing what their root left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from pathlib import Path
from typing import Any

import paramiko
import pytest
from lab import LabLaptop, attempt, inside, reachable, shell
from simlab import until

from cloudddp.sim import control, processes

LISTEN = """
import socket, time
line = socket.create_connection(("{address}", 22), 10)
print(line.recv(4).decode(), flush=True)
line.settimeout(0.2)
end = time.monotonic() + 4
heard = "silence"
while time.monotonic() < end and heard == "silence":
    try:
        line.sendall(b"x")
        heard = {{b"": "the end"}}.get(line.recv(99), "silence")
    except TimeoutError:
        pass
    except OSError as error:
        heard = str(error)
print(heard, flush=True)
"""


def record(laptop: LabLaptop, node: dict[str, Any]) -> dict[str, Any]:
    return next(n for n in control.nodes(laptop.sim) if n["instance_id"] == node["InstanceId"])


def pids(laptop: LabLaptop, node: dict[str, Any]) -> list[int]:
    return [process.pid for process in processes.belonging(laptop.sim.home, node["InstanceId"])]


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def reboot(laptop: LabLaptop, node: dict[str, Any]) -> None:
    """By EC2, which needs nothing of the node; returns when another one is up in its place."""
    before = record(laptop, node)["home"]
    laptop.ec2.reboot_instances(InstanceIds=[node["InstanceId"]])
    until(lambda: record(laptop, node)["home"] not in ("", before))


def back(laptop: LabLaptop, node: dict[str, Any]) -> paramiko.SSHClient:
    """A connection to a node that was told to reboot a moment ago."""

    def fresh() -> paramiko.SSHClient | None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            client = laptop.meet(node)
            return client if attempt(client, "test -e /run/before").status == 1 else None
        return None

    return until(fresh)


# -- what a node's root leaves behind --------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["/opt", "/tmp", "/etc/ssl", "/srv"])
def test_links_that_a_node_left_are_not_followed_when_it_boots_again(
    resident: LabLaptop, tmp_path: Path, link: str
) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    outside = tmp_path / "of this computer"
    outside.mkdir()
    (outside / "kept").touch()
    shell(ssh, "sudo touch /run/before")
    shell(ssh, f"sudo mv {link} {link}.old && sudo ln -s {shlex.quote(str(outside))} {link}")
    attempt(ssh, "sudo reboot")
    ssh = back(resident, node)
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert shell(ssh, "test -w /tmp; test -s /etc/hosts; ls /opt/pytorch/bin/python") != ""


def test_a_link_on_the_way_to_the_computers_python_is_not_followed(
    resident: LabLaptop, tmp_path: Path
) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    shell(ssh, f"sudo touch /run/before; sudo mkdir -p /opt.new; sudo mv /opt /x; sudo ln -s {tmp_path} /opt")
    shell(ssh, "sudo mv /etc/ssl /etc/x; sudo touch /etc/ssl")  # a file is in the way as much
    attempt(ssh, "sudo reboot")
    assert shell(back(resident, node), "readlink -e /opt /etc/ssl/certs") == "/opt\n/etc/ssl/certs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("planted", ["ln -s /etc/hostname", "mkfifo"])
def test_a_log_that_a_node_left_is_opened_with_no_more_power_than_the_node_has(
    resident: LabLaptop, planted: str
) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    shell(ssh, f"sudo touch /run/before; sudo rm /var/log/init.log; sudo {planted} /var/log/init.log")
    reboot(resident, node)
    again = back(resident, node)
    assert shell(again, "sudo readlink /proc/2/fd/1") == "/var/log/init.log"
    assert shell(again, "sudo stat -c %F /var/log/init.log").startswith("regular")


def test_a_node_boots_again_whatever_lies_where_it_talks_to_the_simulator(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    shell(ssh, "sudo touch /run/before; sudo mkdir -p /run/cloudddp/a/b; sudo touch /run/cloudddp/a/c")
    attempt(ssh, "sudo reboot")
    assert attempt(back(resident, node), "test -e /run/cloudddp/a").status == 1
    assert resident.state(node["InstanceId"]) == "running"


def test_no_file_of_a_node_says_how_it_ended(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    shell(resident.login(node), "echo poweroff | sudo tee /run/cloudddp/power")
    (first,) = [p for p in pids(resident, node) if comm(p) == "init"]
    os.kill(first, signal.SIGKILL)  # from outside: no signal of the node's own ends it
    until(lambda: resident.state(node["InstanceId"]) == "terminated")
    shown = resident.describe(node["InstanceId"])[0]
    assert shown["StateReason"]["Code"] == "Server.InternalError"


def test_no_signal_of_a_node_ends_or_stops_its_init(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    for name in ("TERM", "INT", "HUP", "KILL", "STOP", "USR1", "PIPE"):
        shell(ssh, f"sudo kill -{name} 1")
    assert shell(ssh, "sudo systemctl is-system-running") == "running"


# -- sshd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["ssh", "sshd.service"])
def test_sshd_is_a_service_that_can_be_stopped_started_and_reloaded(resident: LabLaptop, unit: str) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    before = shell(ssh, "pgrep -f '^sshd: .*listener'")
    shell(ssh, f"sudo systemctl reload {unit}; sudo systemctl start {unit}")
    # The process is the same one, which has no title until it has read its configuration again.
    assert shell(ssh, "until pgrep -f '^sshd: .*listener'; do sleep 0.05; done") == before
    shell(ssh, f"sudo systemctl stop {unit}")
    assert attempt(ssh, f"systemctl is-active {unit}").out == b"inactive\n"
    assert not reachable(resident.sim, node["PublicIpAddress"], 22)
    assert attempt(ssh, f"sudo systemctl reload {unit}").status == 1
    shell(ssh, f"sudo systemctl start {unit}; systemctl is-active {unit}")
    assert shell(resident.login(node), "pgrep -f '^sshd: .*listener'") != before


def test_orphans_of_a_node_are_reaped_and_the_exit_codes_of_commands_kept(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    shell(ssh, "for n in $(seq 20); do (sleep 0.2 &); done; sudo sh -c '(sleep 0.2 &) ; (sleep 0.3 &)'")
    codes = "for n in $(seq 40); do (sleep 0.01 &); sudo sh -c 'exit 7' || echo $?; done"
    assert shell(ssh, codes).split() == ["7"] * 40
    until(lambda: attempt(ssh, "ps -e -o stat= | grep -q Z").status == 1)


# -- ends ------------------------------------------------------------------------------------------------------


def test_a_frozen_node_is_terminated_and_another_one_stopped_and_started(resident: LabLaptop) -> None:
    ending, stopping = resident.launch(2)
    for node in (ending, stopping):
        control.fault(resident.sim, "freeze", [node["InstanceId"]])
    resident.terminate(ending["InstanceId"])
    resident.ec2.stop_instances(InstanceIds=[stopping["InstanceId"]])
    until(lambda: resident.state(stopping["InstanceId"]) == "stopped")
    resident.ec2.start_instances(InstanceIds=[stopping["InstanceId"]])
    until(lambda: resident.state(stopping["InstanceId"]) == "running")
    (again,) = resident.describe(stopping["InstanceId"])
    assert shell(resident.login(again), "echo alive") == "alive"


def test_freezing_a_node_stops_what_has_left_its_session_and_its_environment(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    away = "sudo env -i setsid sh -c 'sleep 54321 > /dev/null 2>&1 &' > /dev/null 2>&1"
    shell(resident.login(node), f"{away}; until pgrep -x sleep && ! pgrep -x sh; do sleep 0.05; done")

    def states() -> list[tuple[bytes, str]]:
        return [
            (Path(f"/proc/{p.pid}/cmdline").read_bytes(), Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2][1])
            for p in processes.belonging(resident.sim.home, node["InstanceId"])
        ]  # fmt: skip

    control.fault(resident.sim, "freeze", [node["InstanceId"]])
    until(lambda: {state for line, state in states() if b"cloudddp.sim.machine" not in line} == {"T"})
    assert [state for line, state in states() if b"54321" in line] == ["T"]


def test_a_lab_with_frozen_nodes_stops(home: Path) -> None:
    laptop = LabLaptop(control.start(home, nodes="namespace"), "key")
    for node in laptop.launch(2):
        control.fault(laptop.sim, "freeze", [node["InstanceId"]])
    assert control.stop(home) > 0


def test_a_machine_that_fails_says_nothing_to_those_it_talked_with(resident: LabLaptop) -> None:
    failing, peer = resident.launch(2)
    ssh = resident.login(peer)
    code = shlex.quote(LISTEN.format(address=failing["PrivateIpAddress"]))
    shell(ssh, f"nohup python3 -c {code} > heard 2>&1 & until [ -s heard ]; do sleep 0.05; done")
    with inside(resident.sim):
        line = socket.create_connection((failing["PublicIpAddress"], 22), timeout=10)
    with line:
        assert line.recv(4) == b"SSH-"
        time.sleep(0.2)
        line.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            line.recv(1 << 16)
        control.fault(resident.sim, "kill", [failing["InstanceId"]])
        line.settimeout(2)
        with pytest.raises(TimeoutError):
            line.recv(1)
    assert until(lambda: len(lines := shell(ssh, "cat heard").split("\n")) == 2 and lines) == ["SSH-", "silence"]  # fmt: skip
    until(lambda: resident.state(failing["InstanceId"]) == "terminated")


def test_a_process_that_is_held_is_no_other_one_that_gets_its_pid() -> None:
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


# -- faults ----------------------------------------------------------------------------------------------------


def test_a_fault_of_the_network_outlives_a_reboot_and_ends_with_heal(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    resident.login(node)
    control.fault(resident.sim, "cut", [node["InstanceId"]])
    reboot(resident, node)
    resident.launch()  # which has the whole firewall made anew
    assert not reachable(resident.sim, node["PublicIpAddress"], 22)
    control.fault(resident.sim, "heal", [node["InstanceId"]])
    until(lambda: reachable(resident.sim, node["PublicIpAddress"], 22))


def test_who_gets_the_address_of_a_node_that_was_cut_off_is_not(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    control.fault(resident.sim, "cut", [node["InstanceId"]])
    resident.terminate(node["InstanceId"])
    (other,) = resident.launch(PrivateIpAddress=node["PrivateIpAddress"])
    assert other["PrivateIpAddress"] == node["PrivateIpAddress"]
    until(lambda: reachable(resident.sim, other["PublicIpAddress"], 22))


# -- names -----------------------------------------------------------------------------------------------------

READER = """
import os, signal
seen, over = set(), []
signal.signal(signal.SIGTERM, lambda *_: over.append(1))
print("up", flush=True)
while not over:
    handle = os.open("/etc/hosts", os.O_RDONLY)
    seen.add(os.read(handle, 20))
    os.close(handle)
print(seen, flush=True)
"""


def test_the_names_of_the_nodes_can_be_read_while_others_come_and_go(resident: LabLaptop) -> None:
    (node,) = resident.launch()
    ssh = resident.login(node)
    shell(ssh, f"nohup python3 -c {shlex.quote(READER)} > seen 2>&1 & until [ -s seen ]; do sleep 0.05; done")
    for _ in range(2):
        resident.terminate(*(one["InstanceId"] for one in resident.launch(6)))
    shell(ssh, "pkill -TERM -f O_RDONLY")
    shown = until(lambda: len(lines := shell(ssh, "cat seen").splitlines()) == 2 and lines)
    assert shown == ["up", str({b"127.0.0.1 localhost\n"})]
