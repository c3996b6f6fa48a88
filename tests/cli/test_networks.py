"""Where `up` launches nodes: VPCs and subnets by id and by tag, routes, and accounts without a default
VPC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.faults import without_element
from support.networks import Vpc

from cloudddp.aws.client import AWS
from cloudddp.aws.networks import candidates
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import UsageError

CREATING = ("RunInstances", "CreateSecurityGroup", "ImportKeyPair")


@pytest.fixture
def vpc(ec2: Any) -> Iterator[Callable[..., Vpc]]:
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


def chosen(aws: AWS, **settings: Any) -> list[str]:
    """Return the zones of the subnets in which `up` would launch two nodes, in their order."""
    spec = replace(ClusterSpec(nodes=2), **settings)
    return [one.zone for one in candidates(aws, spec, reached_from=("203.0.113.7/32",))]


def refused(aws: AWS, **settings: Any) -> str:
    """Return the message and the hint of settings that exclude every subnet."""
    with pytest.raises(UsageError) as caught:
        chosen(aws, **settings)
    return f"{caught.value.message} {caught.value.hint}"


def test_subnet_without_internet_gateway_is_refused(aws: AWS, faults: Any, vpc: Any) -> None:
    """A public address is unreachable unless the subnet's route table has a route to an internet gateway
    (Amazon VPC User Guide, "Enable internet access for a VPC using an internet gateway")."""
    own = vpc()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a", Name="private-a")
    message = refused(aws, subnets=(subnet,))
    assert "no subnet has a route to an internet gateway" in message
    assert f"{subnet} ({own.id}, us-east-1a, 251 free addresses, private-a): no default route" in message
    assert "docs/connections.md" in message
    own.open()
    faults.rewrite(
        "DescribeRouteTables",
        lambda body: body.replace(b"<state>active</state>", b"<state>blackhole</state>"),
    )
    message = refused(aws, subnets=(subnet,))
    assert re.search(r"0\.0\.0\.0/0 goes to igw-[0-9a-f]+ \(blackhole\)", message)


def test_subnet_that_the_account_blocks_is_refused(aws: AWS, faults: Any, vpc: Any, block: Any) -> None:
    """Both modes block connections from outside, whatever the routes are (Amazon VPC User Guide, "VPC BPA
    basics"); test_subnet_that_is_suggested_without_a_default_vpc_is_public has the other one."""
    own = vpc()
    own.open()
    subnet = own.subnet("10.90.1.0/24", "us-east-1a")
    block("block-bidirectional")
    message = refused(aws, subnets=(subnet,))
    reason = (
        "VPC Block Public Access is block-bidirectional in us-east-1, so SSH cannot reach public addresses"
    )
    command = (
        f"aws ec2 create-vpc-block-public-access-exclusion --region us-east-1 --subnet-id {subnet} "
        "--internet-gateway-exclusion-mode allow-bidirectional"
    )
    for expected in (f"{reason} in {subnet} (", "--connect private", command):
        assert expected in message
    faults.rewrite(
        "DescribeVpcBlockPublicAccessOptions",
        lambda body: body.replace(b">allowed<", b">not-allowed<"),
    )
    message = refused(aws, subnets=(subnet,))
    assert "your organization allows no exclusions" in message
    assert "create-vpc-block-public-access-exclusion" not in message


def test_subnet_that_is_excluded_from_the_block_is_chosen(aws: AWS, ec2: Any, vpc: Any, block: Any) -> None:
    """By an exclusion of its own or of its VPC that allows both directions, as long as it exists."""
    own = vpc()
    own.open()
    both = first, second = [
        own.subnet(f"10.90.{k}.0/24", f"us-east-1{zone}") for k, zone in ((1, "a"), (2, "b"))
    ]
    block("block-bidirectional")

    def exclude(mode: str, **of: str) -> str:
        made = ec2.create_vpc_block_public_access_exclusion(InternetGatewayExclusionMode=mode, **of)
        return str(made["VpcBlockPublicAccessExclusion"]["ExclusionId"])

    exclude("allow-egress", SubnetId=first)
    refused(aws, subnets=tuple(both))
    exclusion = exclude("allow-bidirectional", SubnetId=second)
    assert chosen(aws, subnets=tuple(both)) == ["us-east-1b"]
    ec2.delete_vpc_block_public_access_exclusion(ExclusionId=exclusion)
    refused(aws, subnets=tuple(both))
    exclude("allow-bidirectional", VpcId=own.id)
    assert chosen(aws, subnets=tuple(both)) == ["us-east-1a", "us-east-1b"]


def test_block_that_cannot_be_asked_about_is_no_obstacle(aws: AWS, block: Any, conditions: Any) -> None:
    """The policy may be older than the call, and another partition or endpoint may not have it."""
    block("block-ingress")
    for part, code in (("Options", "UnauthorizedOperation"), ("Exclusions", "InvalidAction")):
        rule = {"code": code, "status": 400, "calls": 9}
        conditions(clear=True, reject={f"DescribeVpcBlockPublicAccess{part}": rule})
        assert "us-east-1a" in chosen(aws)


def test_block_does_not_concern_nodes_without_a_public_route(cli: Any, faults: Any, block: Any) -> None:
    block("block-bidirectional")
    del cli.env["CLOUDDDP_YES"]  # the plan is shown, and nothing is created
    shown = cli("up", "-n", "2", "--connect", "private", "--ssh-from", "10.8.0.10/32").stderr
    assert faults.count("DescribeVpcBlockPublicAccessOptions") == 0
    assert "a NAT gateway is billed per GB" in shown


def test_public_subnets_of_a_custom_vpc_are_chosen_in_the_given_order(aws: AWS, vpc: Any) -> None:
    """The subnet's own route table counts, before the main one of the VPC."""
    own = vpc(Name="training")
    own.open()
    private, public = (own.subnet(f"10.90.{k}.0/24", "us-east-1a", Team="a") for k in (1, 2))
    own.table_without_gateway(private)
    for given in ({"vpc": own.id}, {"vpc": "tag:Name=training"}, {"subnets": (private, public)}):
        assert chosen(aws, **given) == ["us-east-1a"], given
    first = own.subnet("10.90.3.0/24", "us-east-1c", Team="b")
    own.subnet("10.90.4.0/24", "us-east-1b", Team="a")
    assert chosen(aws, subnets=(first, "tag:Team=a")) == ["us-east-1c", "us-east-1a", "us-east-1b"]


def test_unknown_and_ambiguous_vpcs_subnets_and_zones_are_refused(aws: AWS, vpc: Any) -> None:
    """With the available ones. A misspelled zone would otherwise be dropped, and its capacity never be asked
    for."""
    one, two = vpc(Name="both"), vpc(Name="both")
    first, second = one.subnet("10.90.1.0/24", "us-east-1a"), two.subnet("10.91.1.0/24", "us-east-1b")
    message = refused(aws, vpc="tag:Name=corpo")
    assert "there is no VPC tag:Name=corpo in us-east-1" in message
    assert f"{one.id} (both)" in message
    assert re.search(r"vpc-[0-9a-f]+ \(default\)", message)
    message = refused(aws, subnets=("subnet-0abc",))
    assert "there is no subnet subnet-0abc in us-east-1" in message
    assert "available: subnet-" in message
    message = refused(aws, vpc="tag:Name=both")
    assert "selects 2 VPCs" in message
    assert one.id in message
    assert two.id in message
    assert "the subnets are in 2 VPCs" in refused(aws, subnets=(first, second))
    message = refused(aws, vpc=one.id, subnets=(second,))
    assert f"there is no subnet {second} in VPC {one.id}" in message
    message = refused(aws, zones=("us-east-1a", "us-east-1z", "eu-west-1b"))
    assert "is in zone us-east-1z or eu-west-1b" in message
    assert "zones: us-east-1a, us-east-1b" in message


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
    assert not set(faults.calls) & set(CREATING)


def test_subnet_that_is_suggested_without_a_default_vpc_is_public(
    aws: AWS, faults: Any, vpc: Any, block: Any
) -> None:
    """What the hint suggests must work: a private subnet would be refused by the next command."""
    own = vpc()
    own.open()
    private, public = (own.subnet(f"10.90.{k}.0/24", "us-east-1a") for k in (1, 2))
    own.table_without_gateway(private)
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    faults.rewrite("DescribeSubnets", only_subnets(private, public))
    message = refused(aws)
    assert "this account has no default VPC in us-east-1; its subnets: subnet-" in message
    where = f"({own.id}, us-east-1a, 251 free addresses)"
    assert f"{private} {where}: private, no default route" in message
    assert f"{public} {where}: public" in message
    assert f"--vpc {own.id}, or --subnets {public}" in message
    block("block-ingress")
    message = refused(aws)
    assert f"{public} {where}: blocked by VPC Block Public Access" in message
    assert "none of these subnets is public" in message
    block("off")
    faults.rewrite("DescribeSubnets", only_subnets(private))
    message = refused(aws)
    for expected in ("none of these subnets is public", "--proxy-jump USER@HOST", "docs/connections.md"):
        assert expected in message


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
