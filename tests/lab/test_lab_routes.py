"""Routes of the lab: which nodes answer at a public address, and which reach public addresses.

"Enable internet access for a VPC using an internet gateway":
https://docs.aws.amazon.com/vpc/latest/userguide/VPC_Internet_Gateway.html. NAT gateways:
https://docs.aws.amazon.com/vpc/latest/userguide/vpc-nat-gateway.html.
"""

from __future__ import annotations

from typing import Any

import paramiko
import pytest
from support.account import Account, post_conditions, refused
from support.harness import until
from support.labnode import LabLaptop, call, reachable, seen_by, serve
from support.vpcs import EVERYWHERE, Vpc


def test_default_vpc_has_an_internet_gateway_and_a_route_to_it(account: Account) -> None:
    (vpc,) = account.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    of_vpc = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    (table,) = account.ec2.describe_route_tables(Filters=of_vpc)["RouteTables"]
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc["VpcId"]]}]
    (gateway,) = account.ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
    (out,) = [route for route in table["Routes"] if route["DestinationCidrBlock"] == EVERYWHERE]
    assert (out["GatewayId"], out["State"]) == (gateway["InternetGatewayId"], "active")


def test_gateway_of_another_vpc_is_refused(account: Account) -> None:
    ec2 = account.ec2
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    vpc = ec2.create_vpc(CidrBlock="10.40.0.0/16")["Vpc"]["VpcId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    route = {"RouteTableId": table, "DestinationCidrBlock": EVERYWHERE, "GatewayId": gateway}
    with refused("InvalidParameterValue") as refusal:
        ec2.create_route(**route)
    assert "belong to different networks" in refusal.message
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    ec2.create_route(**route)
    ec2.detach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = ec2.describe_route_tables(RouteTableIds=[table])["RouteTables"]
    assert [r["State"] for r in table["Routes"] if r["DestinationCidrBlock"] == EVERYWHERE] == ["blackhole"]


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


def test_route_to_one_network_is_for_that_network_only(lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "10.42.0.0/16")
    route = {"RouteTableId": vpc.private_table, "GatewayId": vpc.gateway}
    lab_laptop.ec2.create_route(**route, DestinationCidrBlock="203.0.113.0/24")  # that of the laptop
    group = vpc.group(EVERYWHERE)
    (node,) = lab_laptop.launch(1, **on(vpc.private, group, public=True))
    (other,) = lab_laptop.launch(1, **on(vpc.public, group, public=True))
    serve(lab_laptop.login(other))
    until(lambda: reachable(lab_laptop.sim, node["PublicIpAddress"], 22))
    assert call(lab_laptop, node, other["PublicIpAddress"], seconds=1) == ""


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


def test_public_access_that_is_blocked(lab_laptop: LabLaptop) -> None:
    """Amazon VPC User Guide, "Block public access to VPCs and subnets"."""
    ec2, vpc = lab_laptop.ec2, Vpc(lab_laptop.ec2, "10.46.0.0/16", nat=True)
    group = vpc.group(EVERYWHERE)
    (public,) = lab_laptop.launch(1, **on(vpc.public, group, public=True))
    (private,) = lab_laptop.launch(1, **on(vpc.private, group, public=False))
    outside = Vpc(ec2, "10.47.0.0/16")
    (server,) = lab_laptop.launch(1, **on(outside.public, outside.group(EVERYWHERE), public=True))
    serve(lab_laptop.login(server))
    until(lambda: reachable(lab_laptop.sim, public["PublicIpAddress"], 22))

    def excluded(mode: str, **of: str) -> str:
        answer = ec2.create_vpc_block_public_access_exclusion(InternetGatewayExclusionMode=mode, **of)
        return str(answer["VpcBlockPublicAccessExclusion"]["ExclusionId"])

    def open_ways() -> str:
        found = {
            "in": reachable(lab_laptop.sim, public["PublicIpAddress"], 22),
            "out": seen_by(lab_laptop, public, server["PublicIpAddress"]) == public["PublicIpAddress"],
            "nat": seen_by(lab_laptop, private, server["PublicIpAddress"]) == vpc.address,
        }
        return " ".join(way for way, is_open in found.items() if is_open)

    subnet, whole = {"SubnetId": vpc.public}, {"VpcId": vpc.id}
    excluded("allow-bidirectional", VpcId=outside.id)
    assert open_ways() == "in out nat"
    try:
        for mode, exclusion, of, expected in (
            ("block-bidirectional", "", {}, ""),
            ("block-bidirectional", "allow-bidirectional", subnet, "in out nat"),
            ("block-bidirectional", "allow-bidirectional", whole, "in out nat"),
            ("block-bidirectional", "allow-egress", subnet, "out nat"),
            ("block-ingress", "", {}, "nat"),
            ("block-ingress", "allow-egress", whole, "nat"),
            ("block-ingress", "allow-bidirectional", subnet, "in out nat"),
        ):
            ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode=mode)
            name = excluded(exclusion, **of) if exclusion else ""
            assert open_ways() == expected, (mode, exclusion, of)
            if name:
                ec2.delete_vpc_block_public_access_exclusion(ExclusionId=name)
    finally:
        ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode="off")
    assert open_ways() == "in out nat"


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
