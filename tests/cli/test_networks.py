"""Where `up` launches nodes: VPCs and subnets by id and by tag, routes, and accounts without a default VPC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.faults import without_element
from support.networks import Vpc

CREATING = ("RunInstances", "CreateSecurityGroup", "ImportKeyPair")


@pytest.fixture
def vpc(ec2: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Vpc]]:
    """Create VPCs with address blocks of their own; the test's end removes them."""
    created: list[Vpc] = []

    def create(**tags: str) -> Vpc:
        created.append(Vpc(ec2, f"10.{90 + len(created)}.0.0/16", **tags))
        return created[-1]

    yield create
    for one in created:
        one.close()


def refused(cli: Any, faults: Any, *flags: str) -> str:
    """Return the message of an `up` that is refused before anything is created."""
    done = cli("up", "-n", "2", *flags)
    assert done.returncode == 2, done.stderr
    assert not set(faults.calls) & set(CREATING)
    return str(done.stderr)


def plan_of(cli: Any, *flags: str) -> str:
    """Return the plan of an `up` that cannot ask for confirmation, and so creates nothing."""
    cli.env.pop("CLOUDDDP_YES", None)
    done = cli("up", "-n", "2", *flags)
    assert "price" in done.stderr, done.stderr
    return str(done.stderr)


def test_subnet_without_internet_gateway_is_refused(cli: Any, faults: Any, vpc: Any) -> None:
    """A public address is unreachable unless the subnet's route table has a route to an internet gateway (Amazon VPC
    User Guide, "Enable internet access for a VPC using an internet gateway")."""
    own = vpc()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a", Name="private-a")
    message = refused(cli, faults, "--subnets", subnet)
    assert "no subnet has a route to an internet gateway" in message
    assert f"{subnet} ({own.id}, us-east-1a, 251 free addresses, private-a)" in message
    assert "no route to other addresses" in message


def test_blackhole_route_is_not_a_way_out(cli: Any, faults: Any, ec2: Any, vpc: Any) -> None:
    """A route whose gateway was deleted has the state `blackhole` (EC2 API reference, "Route")."""
    own = vpc()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a")
    own.open()
    faults.rewrite(
        "DescribeRouteTables",
        lambda body: body.replace(b"<state>active</state>", b"<state>blackhole</state>"),
    )
    message = refused(cli, faults, "--subnets", subnet)
    assert re.search(r"0\.0\.0\.0/0 goes to igw-[0-9a-f]+ \(blackhole\)", message)


def test_public_subnet_of_a_custom_vpc_is_chosen(cli: Any, vpc: Any) -> None:
    """The subnet's own route table counts, before the main one of the VPC."""
    own = vpc(Name="training")
    own.open()
    private, public = (own.subnet(f"10.90.{k}.0/24", "us-east-1a") for k in (1, 2))
    own.table_without_gateway(private)
    for flags in (("--vpc", own.id), ("--vpc", "tag:Name=training"), ("--subnets", f"{private},{public}")):
        assert "us-east-1: us-east-1a" in plan_of(cli, *flags), flags


def test_subnets_are_tried_in_the_given_order(cli: Any, vpc: Any) -> None:
    own = vpc()
    own.open()
    first = own.subnet("10.90.1.0/24", "us-east-1c", Team="b")
    own.subnet("10.90.2.0/24", "us-east-1a", Team="a")
    own.subnet("10.90.3.0/24", "us-east-1b", Team="a")
    assert "us-east-1: us-east-1c, else us-east-1a or us-east-1b" in plan_of(
        cli, "--subnets", f"{first},tag:Team=a"
    )


def test_vpc_and_subnets_must_exist(cli: Any, faults: Any) -> None:
    assert "there is no VPC vpc-0abc in us-east-1" in refused(cli, faults, "--vpc", "vpc-0abc")
    assert "there is no VPC tag:Name=none" in refused(cli, faults, "--vpc", "tag:Name=none")
    message = refused(cli, faults, "--subnets", "subnet-0abc")
    assert "there is no subnet subnet-0abc in us-east-1" in message
    assert "available: subnet-" in message


def test_subnets_of_two_vpcs_are_refused(cli: Any, faults: Any, vpc: Any) -> None:
    one, two = vpc(), vpc()
    subnets = one.subnet("10.90.1.0/24", "us-east-1a"), two.subnet("10.91.1.0/24", "us-east-1b")
    message = refused(cli, faults, "--subnets", ",".join(subnets))
    assert "the subnets are in 2 VPCs" in message


def test_ambiguous_vpc_tag_is_refused(cli: Any, faults: Any, vpc: Any) -> None:
    names = {vpc(Name="both").id, vpc(Name="both").id}
    message = refused(cli, faults, "--vpc", "tag:Name=both")
    assert "selects 2 VPCs" in message
    assert all(name in message for name in names)


def test_subnet_outside_the_vpc_is_refused(cli: Any, faults: Any, ec2: Any, vpc: Any) -> None:
    own = vpc()
    own.subnet("10.90.1.0/24", "us-east-1a")
    (default,) = ec2.describe_subnets(
        Filters=[
            {"Name": "default-for-az", "Values": ["true"]},
            {"Name": "availability-zone", "Values": ["us-east-1a"]},
        ]
    )["Subnets"]
    message = refused(cli, faults, "--vpc", own.id, "--subnets", default["SubnetId"])
    assert f"there is no subnet {default['SubnetId']} in VPC {own.id}" in message


def test_account_without_default_vpc_lists_its_subnets(cli: Any, faults: Any) -> None:
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    done = cli("up")
    assert done.returncode == 1
    assert "this account has no default VPC in us-east-1; its subnets: subnet-" in done.stderr
    assert re.search(r"--vpc vpc-[0-9a-f]+, or --subnets subnet-", done.stderr)
    assert not set(faults.calls) & set(CREATING)
