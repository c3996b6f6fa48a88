"""The lab's network: addresses and faults."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.harness import until
from support.labnode import LabLaptop, call, inside, reachable, serve, shell
from support.simlab import execute

from cloudddp.errors import UsageError
from cloudddp.simulator import control


@pytest.fixture(scope="module")
def pair(shared_lab_laptop: LabLaptop) -> Iterator[tuple[Any, Any]]:
    """Two nodes of one group, each with a server on port 4000 that returns the caller's address."""
    nodes = shared_lab_laptop.launch(2)
    for node in nodes:
        serve(shared_lab_laptop.login(node))
    yield nodes[0], nodes[1]


# -- addresses -----------------------------------------------------------------------------------------------


def test_node_has_its_ec2_address_and_mac(shared_lab_laptop: LabLaptop, pair: Any) -> None:
    for node in pair:
        shown = shell(
            shared_lab_laptop.login(node),
            "ip -o -4 addr show dev ens5; cat /sys/class/net/ens5/{address,mtu}",
        )
        assert f"inet {node['PrivateIpAddress']}/20" in shown
        assert node["NetworkInterfaces"][0]["MacAddress"] in shown
        assert shown.endswith("9001")
        assert shell(shared_lab_laptop.login(node), "hostname") == node["PrivateDnsName"].partition(".")[0]


def test_who_reaches_which_address(shared_lab_laptop: LabLaptop, lab: control.Simulator, pair: Any) -> None:
    first, second = pair
    until(lambda: call(shared_lab_laptop, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"])
    name = second["PrivateDnsName"].partition(".")[0]
    until(lambda: call(shared_lab_laptop, first, name) == first["PrivateIpAddress"])
    assert reachable(lab, first["PublicIpAddress"], 22)
    assert not reachable(lab, first["PrivateIpAddress"], 22)
    with inside(lab):
        routes = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout
    assert "default" not in routes


def test_cut_node_does_not_respond_but_runs(lab_laptop: LabLaptop) -> None:
    first, second = lab_laptop.launch(2)
    serve(lab_laptop.login(second))
    ssh = lab_laptop.login(first)
    beating = "nohup sh -c 'while true; do date +%s%N > beat; sleep 0.05; done' > /dev/null 2>&1 &"
    shell(ssh, f"{beating} until [ -s beat ]; do sleep 0.05; done")
    (record,) = [n for n in control.nodes(lab_laptop.sim) if n["instance_id"] == first["InstanceId"]]
    control.fault(lab_laptop.sim, "cut", [first["InstanceId"]])
    assert not reachable(lab_laptop.sim, first["PublicIpAddress"], 22)
    assert reachable(lab_laptop.sim, second["PublicIpAddress"], 22)
    assert lab_laptop.state(first["InstanceId"]) == "running"
    beat = Path(record["home"]) / "beat"
    before = beat.read_text()
    until(lambda: beat.read_text() not in ("", before))
    control.fault(lab_laptop.sim, "heal", [first["InstanceId"]])
    until(lambda: reachable(lab_laptop.sim, first["PublicIpAddress"], 22))
    control.fault(lab_laptop.sim, "drop-ssh", [second["InstanceId"]])
    assert not reachable(lab_laptop.sim, second["PublicIpAddress"], 22)
    assert call(lab_laptop, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"]


def test_cut_between_affects_two_nodes_only(lab_laptop: LabLaptop) -> None:
    a, b, c = lab_laptop.launch(3)
    for node in (a, b, c):
        lab_laptop.login(node)  # wait for each sshd
    control.fault(lab_laptop.sim, "cut-between", [a["InstanceId"], b["InstanceId"]])
    assert call(lab_laptop, a, b["PrivateIpAddress"], 22, seconds=1) == ""
    assert call(lab_laptop, b, a["PrivateIpAddress"], 22, seconds=1) == ""
    until(lambda: call(lab_laptop, a, c["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))
    control.fault(lab_laptop.sim, "heal", [a["InstanceId"]])
    until(lambda: call(lab_laptop, a, b["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))


def test_cut_from_drops_packets_in_one_direction(lab_laptop: LabLaptop) -> None:
    """Asymmetric routes and half-dead links exist: here a reply gets through, and what asks for it does
    not."""
    a, b = lab_laptop.launch(2)
    for node in (a, b):
        lab_laptop.login(node)  # wait for each sshd
    control.fault(lab_laptop.sim, "cut-from", [a["InstanceId"], b["InstanceId"]])
    sent = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('{}', 4242))"
    received = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 4242)); "
        "s.settimeout(3); print(s.recv(9).decode())"
    )
    for sender, receiver, arrives in ((a, b, True), (b, a, False)):
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(execute, lab_laptop.login(receiver), f'python3 -c "{received}"')
            while not waiting.done():
                execute(lab_laptop.login(sender), f'python3 -c "{sent.format(receiver["PrivateIpAddress"])}"')
        assert (waiting.result().out == b"x\n") is arrives
    control.fault(lab_laptop.sim, "heal", [a["InstanceId"]])
    until(lambda: call(lab_laptop, b, a["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))


def test_frozen_node_accepts_connections_without_response(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    lab_laptop.login(node)
    control.fault(lab_laptop.sim, "freeze", [node["InstanceId"]])
    with (
        inside(lab_laptop.sim),
        socket.create_connection((node["PublicIpAddress"], 22), timeout=2) as connection,
    ):
        with pytest.raises(TimeoutError):
            connection.recv(10)
        control.fault(lab_laptop.sim, "heal", [node["InstanceId"]])
        connection.settimeout(20)
        assert connection.recv(4) == b"SSH-"


def test_slow_ssh_works(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    ssh = lab_laptop.login(node)

    def seconds() -> float:
        began = time.monotonic()
        assert len(shell(ssh, "head -c 40000 /dev/zero | tr '\\0' x")) == 40000
        return time.monotonic() - began

    quick = min(seconds() for _ in range(3))
    control.fault(lab_laptop.sim, "slow-ssh", [node["InstanceId"]])
    assert seconds() > max(2.0, 5 * quick)  # limited to 4 kB/s: no machine is that slow by itself


def test_unknown_fault_or_node_is_rejected(lab: control.Simulator, pair: Any) -> None:
    for kind, nodes, message in (
        ("explode", ["0"], "faults: kill, cut"),
        ("cut", ["i-0nowhere"], "nodes: "),
        ("cut-between", ["0"], "two nodes"),
    ):
        with pytest.raises(UsageError, match=message):
            control.fault(lab, kind, nodes)
