"""Subnets without addresses, and AWS calls that are throttled or lose their answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.harness import TIMEOUT, until

Conditions = Callable[..., dict[str, Any]]


def test_calls_that_are_throttled_or_lose_their_answer_are_repeated(
    cli: Any, conditions: Conditions, ec2: Any, remains: Any
) -> None:
    """The launch is not made twice, and a subnet without addresses is not chosen."""
    wanted = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    (subnet,) = ec2.describe_subnets(Filters=wanted)["Subnets"]
    conditions(
        throttle={"CreateSecurityGroup": 1, "DescribeSubnets": 1},
        lose={"RunInstances": 2},
        free_addresses={subnet["SubnetId"]: 1},
    )
    assert "is ready" in cli.ok("up", "-n", "2")
    found = conditions()
    assert (found["throttle"], found["lose"]) == ({}, {})
    answer = ec2.describe_instances(InstanceIds=remains().instances)
    zones = [i["Placement"]["AvailabilityZone"] for r in answer["Reservations"] for i in r["Instances"]]
    assert zones == ["us-east-1b"] * 2
    conditions(lose={"TerminateInstances": 2, "DeleteSecurityGroup": 1, "DeleteKeyPair": 1})
    cli.ok("down", "-y")
    assert remains().nothing


def test_launch_without_any_answer_leaves_nothing(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(lose={"RunInstances": 99})
    cli.fails(1, "up", "-n", "2", CLOUDDDP_TIME_SCALE="0.1")
    assert remains().nothing


def test_launch_above_the_request_rate_is_made_once(
    cli: Any, faults: Any, conditions: Conditions, remains: Any
) -> None:
    """EC2 Developer Guide, "Request throttling for the Amazon EC2 API". The dry run takes the only token, and
    the launch is refused until there are more; boto3 repeats it at random intervals, 7.5 s in all on
    average."""
    some = {"bucket": 1, "refill": 2}
    none = {"bucket": 1, "refill": 0.001}
    conditions(request_rate={"RunInstances": none, "DescribeInstances": some, "TerminateInstances": some})
    process = cli.start("up", "-n", "3")
    until(lambda: faults.count("RunInstances") > 2)  # the dry run, the launch, its first repetition
    conditions(request_rate={"RunInstances": None})
    out, err = process.communicate(timeout=TIMEOUT)
    assert "is ready" in out, err
    conditions(request_rate={"DescribeInstances": None})  # what this test itself asks
    assert len(remains().instances) == 3
    cli.ok("down", "-y")
    assert remains().nothing
