"""`cloudddp` in an account where capacity, quotas, addresses or answers are missing, as the simulator's conditions have it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Conditions = Callable[..., dict[str, Any]]


@pytest.fixture
def conditions(simulator: Any, cli: Any) -> Iterator[Conditions]:
    """Set what goes wrong; after the test nothing does."""

    def post(**body: Any) -> dict[str, Any]:
        page = urllib.request.Request(
            f"{simulator.endpoint}/_cloudddp/conditions", data=json.dumps(body).encode()
        )
        with urllib.request.urlopen(page, timeout=30) as answer:
            return dict(json.load(answer))

    yield post
    post(clear=True)


def test_a_launch_whose_answer_is_lost_is_not_paid_twice(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(lose={"RunInstances": 2})
    assert "is ready" in cli.ok("up", "-n", "2")
    assert conditions()["lose"] == {}
    assert len(remains().instances) == 2


def test_a_launch_whose_answers_are_all_lost_leaves_nothing(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(lose={"RunInstances": 99})
    done = cli("up", "-n", "2")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert remains().nothing


def test_throttled_calls_are_repeated(cli: Any, conditions: Conditions, remains: Any) -> None:
    conditions(throttle={"RunInstances": 1, "CreateSecurityGroup": 1, "DescribeSubnets": 1})
    assert "is ready" in cli.ok("up", "-n", "1")
    assert conditions()["throttle"] == {}
    assert len(remains().instances) == 1


def test_a_zone_without_capacity_names_the_zones_that_have_some_and_leaves_nothing(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(capacity={"us-east-1a": {"g5.xlarge": 1}})
    done = cli("up", "-n", "2", "-t", "g5.xlarge", "--zone", "us-east-1a")
    assert done.returncode == 1
    assert "InsufficientInstanceCapacity" in done.stderr
    assert "us-east-1b" in done.stderr
    assert "--zone" in done.stderr
    assert remains().nothing


def test_a_quota_that_is_too_small_is_said_and_nothing_is_left(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    conditions(quota={"on-demand-g": 4})
    done = cli("up", "-n", "2", "-t", "g5.xlarge")
    assert done.returncode == 1
    assert "VcpuLimitExceeded" in done.stderr
    assert "Service Quotas" in done.stderr
    assert remains().nothing


def test_a_teardown_whose_answers_are_lost_is_complete(
    cli: Any, conditions: Conditions, remains: Any
) -> None:
    cli.ok("up", "-n", "2")
    conditions(lose={"TerminateInstances": 2, "DeleteSecurityGroup": 1, "DeleteKeyPair": 1})
    cli.ok("down", "-y")
    assert remains().nothing


def test_a_subnet_without_addresses_is_not_chosen(
    cli: Any, conditions: Conditions, ec2: Any, remains: Any
) -> None:
    wanted = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    (subnet,) = ec2.describe_subnets(Filters=wanted)["Subnets"]
    conditions(free_addresses={subnet["SubnetId"]: 1})
    cli.ok("up", "-n", "2", "-t", "g5.xlarge")
    answer = ec2.describe_instances(InstanceIds=remains().instances)
    zones = {i["Placement"]["AvailabilityZone"] for r in answer["Reservations"] for i in r["Instances"]}
    assert zones == {"us-east-1b"}
