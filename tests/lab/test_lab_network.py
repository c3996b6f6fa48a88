"""The lab's network: addresses, faults and routes."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.account import post_conditions
from support.harness import until
from support.labnode import LabLaptop, call, inside, reachable, seen_by, serve, shell
from support.vpcs import EVERYWHERE, Vpc

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


# -- which nodes answer at a public address, and which reach public addresses --------------------------------


def on(subnet: str, group: str, *, public: bool) -> dict[str, Any]:
    interface = {"DeviceIndex": 0, "SubnetId": subnet, "Groups": [group], "AssociatePublicIpAddress": public}
    return {"NetworkInterfaces": [interface]}


def test_public_address_answers_only_with_a_route_to_an_internet_gateway(lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "10.41.0.0/16")
    group = vpc.group(EVERYWHERE)
    (public,) = lab_laptop.launch(1, **on(vpc.public, group, public=True))
    (private,) = lab_laptop.launch(1, **on(vpc.private, group, public=True))
    until(lambda: reachable(lab_laptop.sim, public["PublicIpAddress"], 22))
    assert not reachable(lab_laptop.sim, private["PublicIpAddress"], 22)
    route = {"RouteTableId": vpc.private_table, "DestinationCidrBlock": EVERYWHERE}
    lab_laptop.ec2.create_route(**route, GatewayId=vpc.gateway)
    assert until(lambda: reachable(lab_laptop.sim, private["PublicIpAddress"], 22))
    ssh = lab_laptop.login(private)
    lab_laptop.ec2.delete_route(**route)
    ssh.get_transport().set_keepalive(0)
    channel = ssh.get_transport().open_session  # an established connection loses its route, too
    with pytest.raises((paramiko.SSHException, EOFError)):
        channel(timeout=2)
    assert not reachable(lab_laptop.sim, private["PublicIpAddress"], 22)


def test_nat_gateway_is_a_way_out_and_no_way_in(lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "10.43.0.0/16", nat=True)
    group = vpc.group(EVERYWHERE)
    (private,) = lab_laptop.launch(1, **on(vpc.private, group, public=False))
    (public,) = lab_laptop.launch(1, **on(vpc.public, group, public=True))
    serve(lab_laptop.login(public))
    assert "PublicIpAddress" not in private
    assert until(lambda: seen_by(lab_laptop, private, public["PublicIpAddress"])) == vpc.address
    assert seen_by(lab_laptop, private, public["PrivateIpAddress"]) == private["PrivateIpAddress"]
    assert not reachable(lab_laptop.sim, vpc.address, 22)
    lab_laptop.ec2.delete_nat_gateway(NatGatewayId=vpc.nat)
    assert seen_by(lab_laptop, private, public["PublicIpAddress"]) == ""


def test_vpn_reaches_the_private_addresses_of_one_vpc(lab_laptop: LabLaptop) -> None:
    vpc, other = Vpc(lab_laptop.ec2, "10.44.0.0/16"), Vpc(lab_laptop.ec2, "10.45.0.0/16")
    sees = {one: one.group("10.8.0.10/32") for one in (vpc, other)}
    (node,) = lab_laptop.launch(1, **on(vpc.private, sees[vpc], public=False))
    (stranger,) = lab_laptop.launch(1, **on(other.private, sees[other], public=False))
    assert not reachable(lab_laptop.sim, node["PrivateIpAddress"], 22)
    status, _ = post_conditions(lab_laptop.sim.endpoint, {"vpn": {vpc.id: "10.8.0.10"}})
    assert status == 200
    assert until(lambda: reachable(lab_laptop.sim, node["PrivateIpAddress"], 22))
    assert not reachable(lab_laptop.sim, stranger["PrivateIpAddress"], 22)
    post_conditions(lab_laptop.sim.endpoint, {"vpn": {vpc.id: None}})
    assert not reachable(lab_laptop.sim, node["PrivateIpAddress"], 22)
