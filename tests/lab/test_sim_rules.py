"""Validation and normalization of security group rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from support.account import Account, refused

from cloudddp.simulator.aws import CONDITIONS, rehearse
from cloudddp.simulator.net.nftables import ruleset
from cloudddp.simulator.net.policy import Faults
from cloudddp.simulator.net.security_groups import policy_for

ANYONE = [{"CidrIp": "0.0.0.0/0"}]


@pytest.fixture
def group(account: Account) -> Iterator[str]:
    """A group without ingress rules."""
    made = account.ec2.create_security_group(GroupName="ruled", Description="d")["GroupId"]
    yield made
    account.ec2.delete_security_group(GroupId=made)


def rule(protocol: Any, first: int | None = None, last: int | None = None, **more: Any) -> dict[str, Any]:
    ports = {"FromPort": first, "ToPort": last}
    given = {name: port for name, port in ports.items() if port is not None}
    return {"IpProtocol": protocol, **given, "IpRanges": ANYONE, **more}


def shown(account: Account, group: str) -> list[dict[str, Any]]:
    return account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]


@pytest.mark.parametrize(
    ("permission", "message"),
    [
        (rule("tcp", 90, 9), "Invalid TCP/UDP port range (90:9)"),
        (rule("tcp", 22, 70000), "port (70000) out of range"),
        (rule("udp", -1, -1), "port (-1) out of range"),
        (rule("tcp", 22), "Must specify both from and to ports with TCP/UDP."),
        (rule("icmp"), "Must specify both from and to ports with ICMP."),
        (rule("icmp", 8, 65535), "ICMP code (65535) out of range"),
        (rule("warp", 1, 2), "Invalid value 'warp' for IP protocol. Unknown protocol."),
        (rule("tcp", 1, 2, IpRanges=[{"CidrIp": "10.0.0.0/33"}]), "CIDR block 10.0.0.0/33 is malformed"),
        (rule("-1", IpRanges=[], Ipv6Ranges=[{"CidrIpv6": "::/129"}]), "CIDR block ::/129 is malformed"),
    ],
)
def test_invalid_rule_is_rejected(
    account: Account, group: str, permission: dict[str, Any], message: str
) -> None:
    for authorize in (
        account.ec2.authorize_security_group_ingress,
        account.ec2.authorize_security_group_egress,
    ):
        with refused("InvalidParameterValue") as answer:
            authorize(GroupId=group, IpPermissions=[permission])
        assert message in answer.message
        assert answer.status == 400
    with refused("MissingParameter"):
        account.ec2.authorize_security_group_ingress(
            GroupId=group, IpPermissions=[rule("tcp", 1, 2, IpRanges=[])]
        )
    assert shown(account, group) == []


def test_rules_are_normalized(account: Account, group: str) -> None:
    for given, kept in (
        (("6", 1, 2), ("tcp", 1, 2)),
        (("1", 8, -1), ("icmp", 8, -1)),
        (("50", 0, 0), ("50", None, None)),
        (("58",), ("icmpv6", -1, -1)),
        (("-1", 22, 22), ("-1", None, None)),
    ):
        ranges = [{"CidrIp": "100.68.0.18/18"}]
        request = {"GroupId": group, "IpPermissions": [rule(*given, IpRanges=ranges)]}
        account.ec2.authorize_security_group_ingress(**request)
        (permission,) = shown(account, group)
        assert (permission["IpProtocol"], permission.get("FromPort"), permission.get("ToPort")) == kept
        assert permission["IpRanges"] == [{"CidrIp": "100.68.0.0/18"}]
        account.ec2.revoke_security_group_ingress(**request)
        assert shown(account, group) == []


@pytest.mark.over_http
def test_authorize_is_all_or_none(account: Account, group: str) -> None:
    one, two, three = (rule("tcp", port, port) for port in (1, 2, 3))
    authorize = account.ec2.authorize_security_group_ingress
    authorize(GroupId=group, IpPermissions=[one, two])
    with refused("InvalidPermission.Duplicate"):
        authorize(GroupId=group, IpPermissions=[three, two])
    with refused("InvalidParameterValue") as refusal:
        authorize(GroupId=group, IpPermissions=[three, three])
    assert "must not appear multiple times" in refusal.message
    assert [r["FromPort"] for r in shown(account, group)] == [1, 2]


def test_rules_with_unknown_groups_are_rejected(account: Account, group: str) -> None:
    account.ec2.create_security_group(GroupName="odd; name", Description="d")
    for named in ("sg-0123456789abcdef0", "sg-00; bogus", "odd; name"):
        pairs = [{"GroupId": named}]
        with refused("InvalidGroup.NotFound"):
            account.ec2.authorize_security_group_ingress(
                GroupId=group, IpPermissions=[rule("50", IpRanges=[], UserIdGroupPairs=pairs)]
            )


@pytest.mark.parametrize(
    "change",
    [
        {"source_group": {"GroupId": "sg-00; bogus"}},
        {"ip_range": {"CidrIp": "10.0.0.0/8 bogus"}},
        {"ip_protocol": "bogus"},
        {"ip_protocol": "tcp", "from_port": "1 bogus", "to_port": "2"},
    ],
)
def test_malformed_rule_does_not_reach_the_firewall(change: dict[str, Any]) -> None:
    """Another service of moto could store such a rule without any check."""
    from moto.ec2.models import ec2_backends

    with rehearse():
        account = Account(boto3.client, lambda body: CONDITIONS.update(body).to_json())
        group = account.ec2.create_security_group(GroupName="ruled", Description="d")["GroupId"]
        account.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule("50"), rule("51")])
        account.launch(SecurityGroupIds=[group])
        backend = ec2_backends["123456789012"][account.ec2.meta.region_name]
        first = backend.get_security_group_from_id(group).ingress_rules[0]
        for name, value in change.items():
            setattr(first, name, value)
        policy = policy_for(backend.all_instances())
    assert [kept.protocol for kept in policy.ingress[group]] == ["51"]
    assert "bogus" not in ruleset(policy, Faults())
