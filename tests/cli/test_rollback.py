"""A failed `up` removes also what AWS does not list yet, and what AWS creates after the client has given
up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import until
from support.interrupts import interrupted_at_call
from support.teardown_account import Account

TYPE = "p4d.24xlarge"
UNLISTED = dict.fromkeys(("elastic-ip", "instance", "security-group", "placement-group", "key-pair"), 1.0)
Conditions = Callable[..., dict[str, Any]]


def listed_everything(ec2: Any, cluster: str) -> list[str]:
    """Return what exists of a cluster, also what a filter by tag omits."""
    addresses = ec2.describe_addresses()["Addresses"]
    groups = ec2.describe_security_groups()["SecurityGroups"]
    placements = ec2.describe_placement_groups()["PlacementGroups"]
    keys = ec2.describe_key_pairs()["KeyPairs"]
    every = [*addresses, *groups, *placements, *keys]
    of_cluster = {"Key": "cloudddp:cluster", "Value": cluster}
    return [str(one) for one in every if of_cluster in one.get("Tags", [])]


def test_interrupt_removes_what_is_not_listed_yet(
    cli: Any, ec2: Any, faults: Any, conditions: Conditions
) -> None:
    conditions(unlisted=UNLISTED)
    interrupted_at_call(cli, faults, "AllocateAddress", "up", "-n", "2", "-t", TYPE)
    assert listed_everything(ec2, cli.cluster) == []


@pytest.fixture
def scaled(limits: Callable[..., None]) -> None:
    """AWS has 3 s to list a new resource, and the late calls are made after 1 s."""
    limits(scale=0.2)


@pytest.mark.usefixtures("scaled")
def test_address_that_was_allocated_twice_and_is_not_listed_is_released(account: Account) -> None:
    """AllocateAddress has no idempotency token, so a call that botocore repeats may leave an address of
    unknown id."""
    account.conditions(unlisted=UNLISTED)
    account.faults.lose_answer("AllocateAddress")
    account.faults.fail("AssociateAddress", "UnauthorizedOperation", times=9, status=403)
    assert account.failed_up(instance_type=TYPE).exit_code == 1
    assert listed_everything(account.ec2, account.name) == []


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize(("action", "times"), [("AllocateAddress", 10), ("RunInstances", 5)])
def test_call_that_aws_completes_after_the_client_has_given_up(
    account: Account, action: str, times: int
) -> None:
    """A connection that breaks, or a read timeout, does not end the call at AWS."""
    account.faults.complete_late(action, 1.0, times=times)
    assert account.failed_up(instance_type=TYPE).exit_code == 1
    assert any("without confirming it" in line for line in account.progress)
    assert account.listed() == []
    assert listed_everything(account.ec2, account.name) == []


def test_down_after_a_killed_up_removes_what_is_not_listed_yet(
    cli: Any, ec2: Any, conditions: Conditions
) -> None:
    conditions(unlisted=dict.fromkeys(UNLISTED, 6.0), boot={"ssh_seconds": 60})

    def states() -> list[str]:
        every = [one for part in ec2.describe_instances()["Reservations"] for one in part["Instances"]]
        own = {"Key": "cloudddp:cluster", "Value": cli.cluster}
        return [one["State"]["Name"] for one in every if own in one.get("Tags", [])]

    process = cli.start("up", "-n", "2", "-t", TYPE)
    until(lambda: "running" in states())
    process.kill()
    process.communicate(timeout=300)
    cli.ok("down", "-y")
    assert states() == ["terminated"] * 2
    assert listed_everything(ec2, cli.cluster) == []


# -- credentials that expire ---------------------------------------------------------------------------------


def test_expired_credentials_before_anything_was_created(account: Account) -> None:
    def confirm(*_: Any) -> None:
        for action in ("ImportKeyPair", *READS):
            account.faults.fail(action, "RequestExpired", times=99)

    error = account.failed_up(options={"confirm": confirm})
    account.faults.clear()
    assert error.exit_code == 1
    assert "may still be running" not in error.message
    assert "RequestExpired" in error.message
    assert listed_everything(account.ec2, account.name) == []


@pytest.mark.usefixtures("scaled")
def test_expired_credentials_before_a_node_was_requested(account: Account) -> None:
    def expire(body: bytes) -> bytes:
        for action in ("AllocateAddress", "RunInstances", *READS):
            account.faults.fail(action, "RequestExpired", times=99)
        return body

    account.faults.rewrite("CreatePlacementGroup", expire)
    error = account.failed_up(instance_type=TYPE)
    assert error.exit_code == 3
    assert "still be running" not in error.message
    assert "no node was requested" in error.message
    kinds = ("key pair key-", "security group sg-", "placement group pg-")
    assert all(kind in error.message for kind in kinds)
    account.faults.clear()
    account.down()
    assert listed_everything(account.ec2, account.name) == []


READS = (
    "DescribeInstances",
    "DescribeKeyPairs",
    "DescribeSecurityGroups",
    "DescribeAddresses",
    "DescribePlacementGroups",
    "DescribeVolumes",
    "DescribeNetworkInterfaces",
)
