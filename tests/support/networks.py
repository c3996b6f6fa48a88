"""VPCs of one's own: subnets, gateways and routes, created with plain boto3 and removed again."""

from __future__ import annotations

from typing import Any


def open_to_the_internet(ec2: Any, vpc: str) -> str:
    """Attach a new internet gateway to a VPC, and route its main table to it. Return the gateway's id."""
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    main = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "association.main", "Values": ["true"]}]
    (table,) = ec2.describe_route_tables(Filters=main)["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    return str(gateway)


def create_subnet(ec2: Any, vpc: str, block: str, zone: str, **tags: str) -> str:
    """Return the id of a new subnet."""
    content = [{"ResourceType": "subnet", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}]
    made = ec2.create_subnet(
        VpcId=vpc, CidrBlock=block, AvailabilityZone=zone, **({"TagSpecifications": content} if tags else {})
    )
    return str(made["Subnet"]["SubnetId"])


class Vpc:
    """A VPC of one's own. `close` removes it with its subnets, gateways and route tables."""

    def __init__(self, ec2: Any, block: str, **tags: str) -> None:
        self._ec2 = ec2
        self.id = str(ec2.create_vpc(CidrBlock=block)["Vpc"]["VpcId"])
        if tags:
            ec2.create_tags(Resources=[self.id], Tags=[{"Key": k, "Value": v} for k, v in tags.items()])

    def subnet(self, block: str, zone: str, **tags: str) -> str:
        return create_subnet(self._ec2, self.id, block, zone, **tags)

    def open(self) -> str:
        """Route the main table to the internet. Return the gateway's id."""
        return open_to_the_internet(self._ec2, self.id)

    def table_without_gateway(self, *subnets: str) -> str:
        """Give subnets a route table of their own that reaches the VPC only. Return its id."""
        table = self._ec2.create_route_table(VpcId=self.id)["RouteTable"]["RouteTableId"]
        for subnet in subnets:
            self._ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
        return str(table)

    def close(self) -> None:
        mine = [{"Name": "vpc-id", "Values": [self.id]}]
        for table in self._ec2.describe_route_tables(Filters=mine)["RouteTables"]:
            associations = table["Associations"]
            for one in associations:
                if not one["Main"]:
                    self._ec2.disassociate_route_table(AssociationId=one["RouteTableAssociationId"])
            if not any(one["Main"] for one in associations):
                self._ec2.delete_route_table(RouteTableId=table["RouteTableId"])
        attached = [{"Name": "attachment.vpc-id", "Values": [self.id]}]
        for gateway in self._ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]:
            self._ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=self.id)
            self._ec2.delete_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"])
        for subnet in self._ec2.describe_subnets(Filters=mine)["Subnets"]:
            self._ec2.delete_subnet(SubnetId=subnet["SubnetId"])
        self._ec2.delete_vpc(VpcId=self.id)
