"""The condition `link`: latency, bandwidth and loss between the laptop and the nodes. Times are lower bounds
only."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import until
from support.labnode import LabLaptop, inside, serve, shell

from cloudddp.simulator import control
from cloudddp.simulator.linux import processes
from cloudddp.ssh.target import open_socket

SetLink = Callable[[Any], dict[str, Any]]


@pytest.fixture
def link(lab: control.Simulator) -> Iterator[SetLink]:
    """Set the link and return the condition; afterwards there is none."""
    yield lambda settings: control.conditions(lab, {"link": settings})["link"]
    control.conditions(lab, {"link": None})


@pytest.fixture(scope="module")
def pair(shared_lab_laptop: LabLaptop) -> Iterator[tuple[Any, Any]]:
    """Two nodes that accept SSH and UDP from the laptop, the second one with a server on port 4000."""
    nodes = shared_lab_laptop.launch(2)
    rule = {"IpProtocol": "udp", "FromPort": 5000, "ToPort": 5000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    shared_lab_laptop.ec2.authorize_security_group_ingress(
        GroupId=shared_lab_laptop.group, IpPermissions=[rule]
    )
    serve(shared_lab_laptop.login(nodes[1]))
    shared_lab_laptop.login(nodes[0])
    yield nodes[0], nodes[1]


def connect_seconds(lab: control.Simulator, address: str) -> float:
    """Return how long the laptop takes to connect to a node: one round trip."""
    with inside(lab):
        started = time.monotonic()
        socket.create_connection((address, 22), timeout=300).close()
        return time.monotonic() - started


def test_round_trip_takes_the_latency(shared_lab_laptop: LabLaptop, pair: Any, link: SetLink) -> None:
    """Also on connections that are open. A connection knows it: from that follows how far a node may send
    ahead."""
    lab, client = shared_lab_laptop.sim, shared_lab_laptop.login(pair[0])
    assert link({"latency": 0.2}) == {"latency": 0.2}
    assert connect_seconds(lab, pair[0]["PublicIpAddress"]) >= 0.2
    with inside(lab):
        connected = open_socket(pair[1]["PublicIpAddress"], 22, 30.0, 45.0)
    try:
        assert 0.2 <= (connected.round_trip() or 0.0) < 20  # as microseconds it would be 200,000
    finally:
        connected.close()
    link({"latency": 0.5})
    started = time.monotonic()
    assert shell(client, "echo here") == "here"
    assert time.monotonic() - started >= 0.5
    link(None)
    assert shell(client, "echo here") == "here"


def own_processes(lab: control.Simulator) -> list[int]:
    """Return the pids of the simulator that belong to no node."""
    return [process.pid for process in processes.belonging(lab.home) if not process.node]


def test_process_of_the_link(home: Path) -> None:
    """It ends with the link and with the simulator, and is replaced if it was killed."""
    sim = control.start(home, nodes="namespace")
    laptop = LabLaptop(sim, "key")
    (node,) = laptop.launch()
    laptop.login(node)
    control.conditions(sim, {"link": {"latency": 0.1}})
    (pid,) = set(own_processes(sim)) - {sim.pid}
    os.kill(pid, signal.SIGKILL)
    until(lambda: own_processes(sim) == [sim.pid])
    control.conditions(sim, {"link": {"latency": 0.2}})
    assert connect_seconds(sim, node["PublicIpAddress"]) >= 0.2
    assert control.conditions(sim, {"clear": True})["link"] == {}
    assert own_processes(sim) == [sim.pid]
    control.conditions(sim, {"link": {"latency": 0.1}})
    control.stop(home)
    assert processes.belonging(home) == []
