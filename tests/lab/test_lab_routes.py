"""Routes of the lab: which nodes answer at a public address, and which reach public addresses.

"Enable internet access for a VPC using an internet gateway":
https://docs.aws.amazon.com/vpc/latest/userguide/VPC_Internet_Gateway.html. NAT gateways:
https://docs.aws.amazon.com/vpc/latest/userguide/vpc-nat-gateway.html.
"""

from __future__ import annotations

from typing import Any

import paramiko
import pytest
from support.account import post_conditions
from support.harness import until
from support.labnode import LabLaptop, reachable, seen_by, serve
from support.vpcs import EVERYWHERE, Vpc


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
