"""Subnets without addresses, and AWS calls that are throttled or lose their answer."""

from __future__ import annotations

from collections.abc import Callable

from support.teardown_account import Account


def test_calls_that_are_throttled_or_lose_their_answer_are_repeated(
    account: Account, limits: Callable[..., None]
) -> None:
    """The launch is not made twice, and a subnet without addresses is not chosen."""
    limits(scale=1)
    wanted = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    (subnet,) = account.ec2.describe_subnets(Filters=wanted)["Subnets"]
    account.conditions(
        throttle={"CreateSecurityGroup": 1, "DescribeSubnets": 1},
        lose={"RunInstances": 2},
        free_addresses={subnet["SubnetId"]: 1},
    )
    nodes = account.up(nodes=2)
    assert [account.faults.count(one) for one in ("CreateSecurityGroup", "RunInstances")] == [2, 3]
    answer = account.ec2.describe_instances(InstanceIds=nodes)["Reservations"]
    zones = [i["Placement"]["AvailabilityZone"] for r in answer for i in r["Instances"]]
    assert zones == ["us-east-1b"] * 2
    assert sorted(one for one in account.listed() if one.startswith("i-")) == sorted(nodes)
    account.conditions(lose={"TerminateInstances": 2, "DeleteSecurityGroup": 1, "DeleteKeyPair": 1})
    account.down()
    assert account.listed() == []


def test_launch_without_any_answer_leaves_nothing(account: Account, limits: Callable[..., None]) -> None:
    limits(scale=0.1)
    account.conditions(lose={"RunInstances": 99})
    assert account.failed_up().exit_code == 1
    assert account.listed() == []


def test_launch_above_the_request_rate_is_made_once(account: Account) -> None:
    """EC2 Developer Guide, "Request throttling for the Amazon EC2 API". The dry run takes the only token, and
    the launch is refused until there are more; boto3 repeats it at random intervals, 7.5 s in all on
    average."""
    some = {"bucket": 1, "refill": 2}
    none = {"bucket": 1, "refill": 0.001}
    account.conditions(
        request_rate={"RunInstances": none, "DescribeInstances": some, "TerminateInstances": some}
    )

    def more_tokens(body: bytes) -> bytes:
        if account.faults.count("RunInstances") == 2:  # the launch, its first repetition
            account.conditions(request_rate={"RunInstances": None})
        return body

    account.faults.rewrite("RunInstances", more_tokens)
    nodes = account.up(nodes=3)
    account.conditions(request_rate={"DescribeInstances": None})  # what this test itself asks
    assert account.faults.count("RunInstances") == 3
    assert sorted(one for one in account.listed() if one.startswith("i-")) == sorted(nodes)
    account.down()
