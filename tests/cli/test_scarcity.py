"""An account without capacity, quota or addresses, and AWS calls that are throttled or lose their answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Conditions = Callable[..., dict[str, Any]]


def test_lost_launch_answer_does_not_launch_twice(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(lose={"RunInstances": 2})
    assert "is ready" in cli.ok("up", "-n", "2")
    assert conditions()["lose"] == {}
    assert len(remains().instances) == 2


def test_launch_without_any_answer_leaves_nothing(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(lose={"RunInstances": 99})
    done = cli("up", "-n", "2", CLOUDDDP_TIME_SCALE="0.1")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert remains().nothing


def test_throttled_calls_are_repeated(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(throttle={"RunInstances": 1, "CreateSecurityGroup": 1, "DescribeSubnets": 1})
    assert "is ready" in cli.ok("up", "-n", "1")
    assert conditions()["throttle"] == {}
    assert len(remains().instances) == 1


def test_zone_without_capacity_names_other_zones(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(capacity={"us-east-1a": {"g5.xlarge": 1}})
    done = cli("up", "-n", "2", "-t", "g5.xlarge", "--zones", "us-east-1a")
    assert done.returncode == 1
    assert "InsufficientInstanceCapacity" in done.stderr
    assert "us-east-1b" in done.stderr
    assert "--zones" in done.stderr
    assert remains().nothing


def test_insufficient_quota_leaves_nothing(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(quota={"on-demand-g": 4})
    done = cli("up", "-n", "2", "-t", "g5.xlarge")
    assert done.returncode == 1
    assert "VcpuLimitExceeded" in done.stderr
    assert "aws service-quotas request-service-quota-increase" in done.stderr
    assert remains().nothing


def test_down_with_lost_answers_is_complete(cli: Any, conditions: Conditions, remains: Any) -> None:
    cli.ok("up", "-n", "2")
    conditions(lose={"TerminateInstances": 2, "DeleteSecurityGroup": 1, "DeleteKeyPair": 1})
    cli.ok("down", "-y")
    assert remains().nothing


def test_subnet_without_addresses_is_not_chosen(
    cli: Any, conditions: Conditions, ec2: Any, remains: Any
) -> None:
    wanted = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    (subnet,) = ec2.describe_subnets(Filters=wanted)["Subnets"]
    conditions(free_addresses={subnet["SubnetId"]: 1})
    cli.ok("up", "-n", "2", "-t", "g5.xlarge")
    answer = ec2.describe_instances(InstanceIds=remains().instances)
    zones = {i["Placement"]["AvailabilityZone"] for r in answer["Reservations"] for i in r["Instances"]}
    assert zones == {"us-east-1b"}
