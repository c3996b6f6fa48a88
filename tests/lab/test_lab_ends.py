"""Nodes that end and boot again: reliably, and without following links that root of the node has left on the
disk."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

from support.harness import until
from support.labnode import LabLaptop, attempt, reachable, reconnect, shell

from cloudddp.simulator.linux import processes


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
    pids = [process.pid for process in processes.belonging(lab_laptop.sim.home, node["InstanceId"])]
    (first,) = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "init\n"]
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
