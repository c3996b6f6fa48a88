"""`up` into capacity reservations and capacity blocks: checks before anything is created, deadline, price,
retries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.faults import with_value
from support.harness import finished, interrupt, running_instances, wait_for
from support.teardown_account import Account

from cloudddp.cluster import offers
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import CloudDDPError

TYPE, ZONE = "p4d.24xlarge", "us-east-1b"
BLOCK = "cr-0123456789abcdef0"
INTERRUPTIBLE = b"<interruptible>true</interruptible><ephemeralStorage>"
RESERVATION = {
    "InstanceType": "g5.12xlarge",
    "InstancePlatform": "Linux/UNIX",
    "AvailabilityZone": ZONE,
    "InstanceCount": 2,
    "InstanceMatchCriteria": "targeted",
}
Conditions = Callable[..., dict[str, Any]]


@pytest.fixture
def reserve(ec2: Any, cli: Any) -> Iterator[Callable[..., str]]:
    """Create an on-demand reservation, cancelled after the test."""
    made = []

    def create(count: int = 2, **more: Any) -> str:
        answer = ec2.create_capacity_reservation(**{**RESERVATION, "InstanceCount": count, **more})
        made.append(answer["CapacityReservation"]["CapacityReservationId"])
        return made[-1]

    yield create
    cli.remove(ec2)
    for name in made:
        ec2.cancel_capacity_reservation(CapacityReservationId=name)


@pytest.fixture
def block(conditions: Conditions) -> Callable[..., str]:
    """Add a capacity block to the account: cloudddp never buys one."""

    def add(
        *, ends: timedelta = timedelta(days=1), starts: timedelta = -timedelta(hours=1), **more: Any
    ) -> str:
        now = datetime.now(UTC)
        times = {"start": (now + starts).isoformat(), "end": (now + ends).isoformat()}
        conditions(blocks={BLOCK: {"zone": ZONE, "type": TYPE, "count": 2, **times, **more}})
        return BLOCK

    return add


def available(ec2: Any, name: str) -> int:
    (found,) = ec2.describe_capacity_reservations(CapacityReservationIds=[name])["CapacityReservations"]
    return int(found["AvailableInstanceCount"])


def test_up_launches_into_the_reservation(cli: Any, ec2: Any, reserve: Any, remains: Any) -> None:
    """The zone is that of the reservation, without --zone. A placement group might not hold all of its
    instances, which were reserved without one."""
    name = reserve()
    err = cli.messages("up", "-n", "2", "-t", "g5.12xlarge", "--reservation", name)
    assert f"capacity reservation {name} in {ZONE}" in err
    assert "placement group of the cluster: none, as the reservation might not fill it" in err
    found = running_instances(ec2, cli.cluster)
    assert {node["CapacityReservationId"] for node in found} == {name}
    assert {node["Placement"]["AvailabilityZone"] for node in found} == {ZONE}
    assert remains().placement_groups == []
    assert available(ec2, name) == 0
    cli.ok("down", "-y")
    assert remains().nothing
    assert available(ec2, name) == 2


GROUP = {"PlacementGroupArn": "arn:aws:ec2:us-east-1:210987654321:placement-group/theirs"}


@pytest.mark.parametrize(
    ("settings", "more", "code", "messages"),
    [
        ({"instance_type": "g5.xlarge"}, {}, 2,
         ("is for g5.12xlarge, and g5.xlarge was", "--instance-type g5.12xlarge")),
        ({"zones": ("us-east-1a",)}, {}, 2,
         ("is in zone us-east-1b, not in us-east-1a", "--zones us-east-1b")),
        ({"reservation": "cr-00000000"}, {}, 2,
         ("there is no capacity reservation cr-00000000 in us-east-1",)),
        ({"nodes": 3}, {}, 2, ("is for 2 instances, and 3 were requested", "--nodes 2")),
        ({}, {"InstancePlatform": "Windows"}, 2,
         ("is for platform Windows, and the image is for Linux/UNIX",)),
        ({}, {"Tenancy": "dedicated"}, 2, ("has tenancy dedicated",)),
        ({}, with_value("state", "assessing"), 1,
         ("is assessing, not active", "repeat the command when it is")),
        ({}, with_value("state", "expired"), 1, ("is expired, not active",)),
        ({}, lambda body: body.replace(b"<ephemeralStorage>", INTERRUPTIBLE), 2,
         ("is interruptible: its instances need a market type that cloudddp does not support",)),
        ({}, with_value("availableInstanceCount", "1"), 0, ()),  # clean-up: the launch waits
    ],
)  # fmt: skip
def test_reservation_that_nodes_cannot_use(
    account: Account, settings: dict[str, Any], more: Any, code: int, messages: tuple[str, ...]
) -> None:
    """Refused before anything is created."""
    changed = callable(more)
    request = {**RESERVATION, **({} if changed else more)}
    answer = account.ec2.create_capacity_reservation(**request)["CapacityReservation"]
    if changed:
        account.faults.rewrite("DescribeCapacityReservations", more)
    found = refusal(account, **{"reservation": answer["CapacityReservationId"], **settings})
    assert (found.exit_code if found else 0) == code
    assert all(message in f"{found.message} {found.hint}" for message in messages if found)
    assert not {"ImportKeyPair", "CreateSecurityGroup", "RunInstances"} & {*account.faults.calls}


def refusal(account: Account, **settings: Any) -> CloudDDPError | None:
    """Return why `up` would not create a cluster with these settings."""
    spec = ClusterSpec(**{"name": account.name, "instance_type": "g5.12xlarge", **settings})
    try:
        offers.resolve([account.aws], spec, lambda *_: ("127.0.0.1/32",))
    except CloudDDPError as error:
        return error
    return None


def test_places_of_a_reservation(account: Account) -> None:
    """Those that run elsewhere, and those of another zone than the subnet."""
    answer = account.ec2.create_capacity_reservation(**RESERVATION)["CapacityReservation"]
    name = answer["CapacityReservationId"]
    where = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    subnet = account.ec2.describe_subnets(Filters=where)["Subnets"][0]["SubnetId"]
    found = refusal(account, reservation=name, subnets=(subnet,))
    assert found and f"is in zone {ZONE}" in found.message and subnet in found.message
    (node,) = account.launch(
        InstanceType="g5.12xlarge",
        Placement={"AvailabilityZone": ZONE},
        CapacityReservationSpecification={"CapacityReservationTarget": {"CapacityReservationId": name}},
    )
    found = refusal(account, reservation=name)
    account.ec2.terminate_instances(InstanceIds=[node])
    assert found and "has 1 of 2 instances available, and 2 were requested" in found.message


def test_up_after_down_waits_for_the_clean_up(
    cli: Any, conditions: Conditions, faults: Any, reserve: Any, remains: Any
) -> None:
    """By Ctrl-C the wait ends and leaves nothing. EC2 knows the names of placement groups for their owner
    only: to that of another account the reservation leads."""
    name = reserve(1, **GROUP)
    words = ("up", "-n", "1", "-t", "g5.12xlarge", "--reservation", name)
    cli.ok(*words)
    conditions(cleanup={"reservations": 1000})
    cli.ok("down", "-y")

    def again() -> Any:
        before = faults.count("RunInstances")
        process = cli.start(*words, CLOUDDDP_TIME_SCALE="0.1")
        wait_for(lambda: faults.count("RunInstances") >= before + 2, "the launch is tried again")
        return process

    code, _, err = interrupt(again())
    assert code == 130, err
    assert "nothing was left running" in err
    assert remains().nothing
    process = again()
    conditions(cleanup={"reservations": 0})
    assert "the capacity reservation is full; trying again" in finished(process, 0)[1]
    assert len(remains().instances) == 1


# -- capacity blocks -----------------------------------------------------------------------------------------


def test_up_launches_into_a_block(cli: Any, ec2: Any, block: Any, remains: Any) -> None:
    """Prepaid, no placement group, and a deadline 40 minutes before the end of the block."""
    before = datetime.now(UTC)
    name = block(ends=timedelta(hours=3))
    err = cli.messages("up", "-n", "1", "-t", TYPE, "--reservation", name)
    assert f"capacity block {name} is prepaid" in err
    assert f"capacity block {name} in {ZONE}, until" in err
    price = next(line for line in err.splitlines() if line.startswith("  price"))
    hourly, _, extras = price.removeprefix("  price     ").partition(" an hour: ")
    assert extras.endswith(f"is prepaid, {hourly} for disks and addresses")
    found = running_instances(ec2, cli.cluster)
    assert {node["InstanceLifecycle"] for node in found} == {"capacity-block"}
    assert remains().placement_groups == []
    expires = datetime.fromisoformat(json.loads(cli.ok("status", "--json"))[0]["expires"])
    assert abs((expires - before - timedelta(hours=3, minutes=-40)).total_seconds()) < 60
    cli.ok("down", "-y")
    assert remains().nothing


def test_block_that_is_not_active_creates_nothing(cli: Any, faults: Any, block: Any) -> None:
    """tests/unit/test_costs.py has one that ends too soon, and an earlier deadline of the user."""
    name = block(starts=timedelta(hours=2))
    err = cli.fails(1, "up", "-n", "2", "-t", TYPE, "--reservation", name)
    assert "is scheduled, not active; it starts at" in err
    assert faults.count("ImportKeyPair") == 0
