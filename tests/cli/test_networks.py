"""Where `up` launches nodes: VPCs and subnets by id and by tag, routes, and accounts without a default
VPC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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


@pytest.fixture
def block(ec2: Any) -> Iterator[Callable[[str], None]]:
    """Set the mode of VPC Block Public Access; the test's end sets it to off."""
    yield lambda mode: ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode=mode)
    ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode="off")


def refused(cli: Any, faults: Any, *flags: str) -> str:
    """Return the message of an `up` that is refused before anything is created."""
    err = cli.fails(2, "up", "-n", "2", *flags)
    assert not set(faults.calls) & set(CREATING)
    return str(err)


def plan_of(cli: Any, *flags: str) -> str:
    """Return the plan of an `up` that cannot ask for confirmation, and so creates nothing."""
    cli.env.pop("CLOUDDDP_YES", None)
    done = cli("up", "-n", "2", *flags)
    assert "price" in done.stderr, done.stderr
    return str(done.stderr)


def test_subnet_without_internet_gateway_is_refused(cli: Any, faults: Any, vpc: Any) -> None:
    """A public address is unreachable unless the subnet's route table has a route to an internet gateway
    (Amazon VPC User Guide, "Enable internet access for a VPC using an internet gateway")."""
    own = vpc()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a", Name="private-a")
    message = refused(cli, faults, "--subnets", subnet)
    assert "no subnet has a route to an internet gateway" in message
    assert f"{subnet} ({own.id}, us-east-1a, 251 free addresses, private-a)" in message
    assert "private-a): no default route (0.0.0.0/0)" in message
    assert "docs/connections.md" in message
    own.open()
    faults.rewrite(
        "DescribeRouteTables",
        lambda body: body.replace(b"<state>active</state>", b"<state>blackhole</state>"),
    )
    message = refused(cli, faults, "--subnets", subnet)
    assert re.search(r"0\.0\.0\.0/0 goes to igw-[0-9a-f]+ \(blackhole\)", message)


def test_subnet_that_the_account_blocks_is_refused(cli: Any, faults: Any, vpc: Any, block: Any) -> None:
    """Both modes block connections from outside, whatever the routes are (Amazon VPC User Guide, "VPC BPA
    basics"); test_subnet_that_is_suggested_without_a_default_vpc_is_public has the other one."""
    own = vpc()
    own.open()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a")
    block("block-bidirectional")
    message = refused(cli, faults, "--subnets", subnet)
    blocked = (
        "VPC Block Public Access is block-bidirectional in us-east-1, so SSH cannot reach public addresses"
    )
    assert f"{blocked} in {subnet} (" in message
    assert "--connect private" in message
    command = (
        f"aws ec2 create-vpc-block-public-access-exclusion --region us-east-1 --subnet-id {subnet} "
        "--internet-gateway-exclusion-mode allow-bidirectional"
    )
    assert command in " ".join(message.split())
    faults.rewrite(
        "DescribeVpcBlockPublicAccessOptions",
        lambda body: body.replace(b">allowed<", b">not-allowed<"),
    )
    message = refused(cli, faults, "--subnets", subnet)
    assert "your organization allows no exclusions" in message
    assert "create-vpc-block-public-access-exclusion" not in message


def test_subnet_that_is_excluded_from_the_block_is_chosen(
    cli: Any, ec2: Any, faults: Any, vpc: Any, block: Any
) -> None:
    """By an exclusion of its own or of its VPC that allows both directions, as long as it exists."""
    own = vpc()
    own.open()
    first, second = (own.subnet(f"10.90.{k}.0/24", f"us-east-1{zone}") for k, zone in ((1, "a"), (2, "b")))
    flags = ("--subnets", f"{first},{second}")
    block("block-bidirectional")

    def exclude(mode: str, **of: str) -> str:
        made = ec2.create_vpc_block_public_access_exclusion(InternetGatewayExclusionMode=mode, **of)
        return str(made["VpcBlockPublicAccessExclusion"]["ExclusionId"])

    exclude("allow-egress", SubnetId=first)
    refused(cli, faults, *flags)
    exclusion = exclude("allow-bidirectional", SubnetId=second)
    assert "us-east-1: us-east-1b" in plan_of(cli, *flags)
    cli.env["CLOUDDDP_YES"] = "1"
    ec2.delete_vpc_block_public_access_exclusion(ExclusionId=exclusion)
    refused(cli, faults, *flags)
    exclude("allow-bidirectional", VpcId=own.id)
    assert "us-east-1: us-east-1a" in plan_of(cli, *flags)


def test_block_that_cannot_be_asked_about_is_no_obstacle(cli: Any, block: Any, conditions: Any) -> None:
    """The policy may be older than the call, and another partition or endpoint may not have it."""
    block("block-ingress")
    for part, code in (("Options", "UnauthorizedOperation"), ("Exclusions", "InvalidAction")):
        rule = {"code": code, "status": 400, "calls": 9}
        conditions(clear=True, reject={f"DescribeVpcBlockPublicAccess{part}": rule})
        message = plan_of(cli)
        assert "BlockPublicAccess" not in message
        assert "Block Public Access" not in message


def test_block_does_not_concern_nodes_without_a_public_route(cli: Any, faults: Any, block: Any) -> None:
    block("block-bidirectional")
    shown = plan_of(cli, "--connect", "private", "--ssh-from", "10.8.0.10/32")
    assert faults.count("DescribeVpcBlockPublicAccessOptions") == 0
    assert "a NAT gateway is billed per GB" in shown


def test_public_subnets_of_a_custom_vpc_are_chosen_in_the_given_order(cli: Any, vpc: Any) -> None:
    """The subnet's own route table counts, before the main one of the VPC."""
    own = vpc(Name="training")
    own.open()
    private, public = (own.subnet(f"10.90.{k}.0/24", "us-east-1a", Team="a") for k in (1, 2))
    own.table_without_gateway(private)
    for flags in (("--vpc", own.id), ("--vpc", "tag:Name=training"), ("--subnets", f"{private},{public}")):
        assert "us-east-1: us-east-1a" in plan_of(cli, *flags), flags
    first = own.subnet("10.90.3.0/24", "us-east-1c", Team="b")
    own.subnet("10.90.4.0/24", "us-east-1b", Team="a")
    expected = "us-east-1: us-east-1c, else us-east-1a or us-east-1b"
    assert expected in plan_of(cli, "--subnets", f"{first},tag:Team=a")


def test_unknown_vpcs_and_subnets_are_refused_with_the_available_ones(
    cli: Any, faults: Any, vpc: Any
) -> None:
    own = vpc(Name="corp")
    message = refused(cli, faults, "--vpc", "tag:Name=corpo")
    assert "there is no VPC tag:Name=corpo in us-east-1" in message
    assert f"{own.id} (corp)" in message
    assert re.search(r"vpc-[0-9a-f]+ \(default\)", message)
    message = refused(cli, faults, "--subnets", "subnet-0abc")
    assert "there is no subnet subnet-0abc in us-east-1" in message
    assert "available: subnet-" in message


def test_ambiguous_or_mixed_vpcs_and_subnets_are_refused(cli: Any, faults: Any, vpc: Any) -> None:
    one, two = vpc(Name="both"), vpc(Name="both")
    first, second = one.subnet("10.90.1.0/24", "us-east-1a"), two.subnet("10.91.1.0/24", "us-east-1b")
    message = refused(cli, faults, "--vpc", "tag:Name=both")
    assert "selects 2 VPCs" in message
    assert one.id in message
    assert two.id in message
    assert "the subnets are in 2 VPCs" in refused(cli, faults, "--subnets", f"{first},{second}")
    message = refused(cli, faults, "--vpc", one.id, "--subnets", second)
    assert f"there is no subnet {second} in VPC {one.id}" in message


def test_account_without_subnets_gets_the_command_for_a_default_vpc_in_the_region(
    cli: Any, faults: Any, tmp_path: Path
) -> None:
    """The command acts on the account and region of this run, whatever the user's default profile is."""
    (tmp_path / "config").write_text("[profile work]\nregion = eu-central-1\n")
    (tmp_path / "keys").write_text("[work]\naws_access_key_id = x\naws_secret_access_key = x\n")
    files = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
    }
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    faults.rewrite("DescribeSubnets", without_element("subnetSet"))
    err = cli.fails(2, "--profile", "work", "--region", "us-west-2", "up", CLOUDDDP_PRICE="1", **files)
    command = "`aws ec2 create-default-vpc --region us-west-2 --profile work`"
    assert f"create a default VPC: {command}; or try another region" in err


def test_each_unknown_zone_is_refused(cli: Any, faults: Any) -> None:
    """A misspelled zone would otherwise be dropped, and its capacity never be asked for."""
    message = refused(cli, faults, "--zones", "us-east-1a,us-east-1z,eu-west-1b")
    assert "is in zone us-east-1z or eu-west-1b" in message
    assert "zones: us-east-1a, us-east-1b" in message


def test_account_without_default_vpc_lists_its_subnets(cli: Any, faults: Any) -> None:
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    message = refused(cli, faults)
    assert "this account has no default VPC in us-east-1; its subnets: subnet-" in message
    assert re.search(r"--vpc vpc-[0-9a-f]+, or --subnets subnet-", message)


def test_subnet_that_is_suggested_without_a_default_vpc_is_public(
    cli: Any, faults: Any, vpc: Any, block: Any
) -> None:
    """What the hint suggests must work: a private subnet would be refused by the next command."""
    own = vpc()
    own.open()
    private, public = (own.subnet(f"10.90.{k}.0/24", "us-east-1a") for k in (1, 2))
    own.table_without_gateway(private)
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    faults.rewrite("DescribeSubnets", only_subnets(private, public))
    message = refused(cli, faults)
    assert f"{private} ({own.id}, us-east-1a, 251 free addresses): private, no default route" in message
    assert f"{public} ({own.id}, us-east-1a, 251 free addresses): public" in message
    assert f"--subnets {public}" in message
    block("block-ingress")
    message = refused(cli, faults)
    assert (
        f"{public} ({own.id}, us-east-1a, 251 free addresses): blocked by VPC Block Public Access" in message
    )
    assert "none of these subnets is public" in message
    block("off")
    faults.rewrite("DescribeSubnets", only_subnets(private))
    message = refused(cli, faults)
    assert "none of these subnets is public" in message
    assert "--proxy-jump USER@HOST" in message
    assert "docs/connections.md" in message


def only_subnets(*ids: str) -> Callable[[bytes], bytes]:
    """Return a rewrite of DescribeSubnets that leaves these subnets."""

    def rewrite(body: bytes) -> bytes:
        root = ElementTree.fromstring(body)  # noqa: S314  the simulator's own answer
        namespace = root.tag.partition("}")[0] + "}"
        ElementTree.register_namespace("", namespace[1:-1])
        listed = root.find(f"{namespace}subnetSet")
        assert listed is not None
        for item in list(listed):
            if item.findtext(f"{namespace}subnetId") not in ids:
                listed.remove(item)
        return bytes(ElementTree.tostring(root))

    return rewrite
