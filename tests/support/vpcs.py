"""A VPC of a test, with a public subnet, a private one, and on request a NAT gateway."""

from __future__ import annotations

import ipaddress
import itertools
from typing import Any

EVERYWHERE = "0.0.0.0/0"
_numbers = itertools.count()


class Vpc:
    """The public subnet has a route to an internet gateway. The private one has none, or one to a NAT
    gateway."""

    def __init__(self, ec2: Any, block: str, *, nat: bool = False) -> None:
        self._ec2 = ec2
        self.id = ec2.create_vpc(CidrBlock=block)["Vpc"]["VpcId"]
        self.public, self.private = (
            ec2.create_subnet(VpcId=self.id, CidrBlock=str(part), AvailabilityZone="us-east-1a")["Subnet"][
                "SubnetId"
            ]
            for part in list(ipaddress.ip_network(block).subnets(new_prefix=20))[:2]
        )
        self.gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=self.gateway, VpcId=self.id)
        self.table = self._table(self.public)
        self.private_table = self._table(self.private)
        ec2.create_route(RouteTableId=self.table, DestinationCidrBlock=EVERYWHERE, GatewayId=self.gateway)
        self.nat = self.address = ""
        if nat:
            self._create_nat()

    def _table(self, subnet: str) -> str:
        made = self._ec2.create_route_table(VpcId=self.id)["RouteTable"]["RouteTableId"]
        self._ec2.associate_route_table(RouteTableId=made, SubnetId=subnet)
        return str(made)

    def _create_nat(self) -> None:
        made = self._ec2.allocate_address(Domain="vpc")
        self.address = made["PublicIp"]
        request = {"SubnetId": self.public, "AllocationId": made["AllocationId"]}
        self.nat = self._ec2.create_nat_gateway(**request)["NatGateway"]["NatGatewayId"]
        route = {"RouteTableId": self.private_table, "DestinationCidrBlock": EVERYWHERE}
        self._ec2.create_route(**route, NatGatewayId=self.nat)

    def group(self, *blocks: str) -> str:
        """Create a security group that admits everything from these blocks."""
        made = self._ec2.create_security_group(
            GroupName=f"of a test {next(_numbers)}", Description="d", VpcId=self.id
        )["GroupId"]
        ranges = [{"CidrIp": block} for block in blocks]
        self._ec2.authorize_security_group_ingress(
            GroupId=made, IpPermissions=[{"IpProtocol": "-1", "IpRanges": ranges}]
        )
        return str(made)
