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

TYPE, ZONE = "p4d.24xlarge", "us-east-1b"
BLOCK = "cr-0123456789abcdef0"
INTERRUPTIBLE = b"<interruptible>true</interruptible><ephemeralStorage>"
Conditions = Callable[..., dict[str, Any]]


@pytest.fixture
def reserve(ec2: Any, cli: Any) -> Iterator[Callable[..., str]]:
    """Create an on-demand reservation, cancelled after the test."""
    made = []

    def create(count: int = 2, **more: Any) -> str:
        request = {"InstanceType": "g5.12xlarge", "InstancePlatform": "Linux/UNIX", "AvailabilityZone": ZONE}
        answer = ec2.create_capacity_reservation(
            **{**request, "InstanceCount": count, "InstanceMatchCriteria": "targeted", **more}
        )
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


@pytest.mark.parametrize(
    ("words", "more", "messages"),
    [
        ("-t g5.xlarge", {}, ("is for g5.12xlarge, and g5.xlarge was", "--instance-type g5.12xlarge")),
        ("--zones us-east-1a", {}, ("is in zone us-east-1b, not in us-east-1a", "--zones us-east-1b")),
        ("-n 3", {}, ("is for 2 instances, and 3 were requested", "--nodes 2")),
        ("", {"InstancePlatform": "Windows"}, ("is for platform Windows, and the image is for Linux/UNIX",)),
        ("", {"Tenancy": "dedicated"}, ("has tenancy dedicated",)),
    ],
)
def test_reservation_that_nodes_cannot_use(
    cli: Any, faults: Any, reserve: Any, words: str, more: dict[str, Any], messages: tuple[str, ...]
) -> None:
    err = cli.fails(2, "up", "-t", "g5.12xlarge", *words.split(), "--reservation", reserve(**more))
    assert all(message in err for message in messages)
    assert not [call for call in faults.calls if not call.startswith(("Describe", "Get"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_value("state", "assessing"), "is assessing, not active -> repeat the command when it is"),
        (with_value("state", "delayed"), "is delayed, not active -> repeat the command when it is"),
        (lambda body: body.replace(b"<ephemeralStorage>", INTERRUPTIBLE),
         "is interruptible: its instances need a market type that cloudddp does not support"),
    ],
)  # fmt: skip
def test_reservation_in_another_state(cli: Any, faults: Any, reserve: Any, change: Any, message: str) -> None:
    faults.rewrite("DescribeCapacityReservations", change)
    done = cli("up", "-t", "g5.12xlarge", "--reservation", reserve())
    assert done.returncode in (1, 2), done.stderr
    assert message in " ".join(done.stderr.split())
    assert faults.count("ImportKeyPair") == 0


def test_subnet_in_another_zone_than_the_reservation(cli: Any, ec2: Any, faults: Any, reserve: Any) -> None:
    where = [{"Name": "availability-zone", "Values": ["us-east-1a"]}]
    subnet = ec2.describe_subnets(Filters=where)["Subnets"][0]["SubnetId"]
    err = cli.fails(2, "up", "-t", "g5.12xlarge", "--subnets", subnet, "--reservation", reserve())
    assert "is in zone us-east-1b" in err
    assert subnet in err
    assert faults.count("ImportKeyPair") == 0


def test_unknown_reservation_is_refused(cli: Any, faults: Any) -> None:
    err = cli.fails(2, "up", "-t", "g5.12xlarge", "--reservation", "cr-00000000")
    assert "there is no capacity reservation cr-00000000 in us-east-1" in err
    assert faults.count("ImportKeyPair") == 0


def test_full_reservation_is_refused_before_anything_is_created(
    cli: Any, ec2: Any, faults: Any, reserve: Any
) -> None:
    name = reserve()
    (image,) = {
        image["ImageId"]
        for image in ec2.describe_images(Filters=[{"Name": "name", "Values": ["*PyTorch 2.12*"]}])["Images"]
        if image["Architecture"] == "x86_64"
    }
    answer = ec2.run_instances(
        ImageId=image,
        InstanceType="g5.12xlarge",
        MinCount=1,
        MaxCount=1,
        Placement={"AvailabilityZone": ZONE},
        CapacityReservationSpecification={"CapacityReservationTarget": {"CapacityReservationId": name}},
    )
    done = cli("up", "-n", "2", "-t", "g5.12xlarge", "--reservation", name)
    ec2.terminate_instances(InstanceIds=[answer["Instances"][0]["InstanceId"]])
    assert done.returncode == 1
    assert "has 1 of 2 instances available, and 2 were requested" in done.stderr
    assert faults.count("ImportKeyPair") == 0


def test_up_after_down_waits_for_the_clean_up(
    cli: Any, conditions: Conditions, faults: Any, reserve: Any, remains: Any
) -> None:
    words = ("up", "-n", "1", "-t", "g5.12xlarge", "--reservation", reserve(1))
    cli.ok(*words)
    conditions(cleanup={"reservations": 1000})
    cli.ok("down", "-y")
    before = faults.count("RunInstances")
    process = cli.start(*words, CLOUDDDP_TIME_SCALE="0.1")
    wait_for(lambda: faults.count("RunInstances") >= before + 3, "the launch is tried again")
    conditions(cleanup={"reservations": 0})
    assert "the capacity reservation is full; trying again" in finished(process, 0)[1]
    assert len(remains().instances) == 1


def test_wait_for_the_clean_up_that_ends_early_leaves_nothing(
    cli: Any, conditions: Conditions, faults: Any, reserve: Any, remains: Any
) -> None:
    """By Ctrl-C, or since it takes too long."""
    words = ("up", "-n", "1", "-t", "g5.12xlarge", "--reservation", reserve(1))
    cli.ok(*words)
    conditions(cleanup={"reservations": 1000})
    cli.ok("down", "-y")
    before = faults.count("RunInstances")
    process = cli.start(*words, CLOUDDDP_TIME_SCALE="0.1")
    wait_for(lambda: faults.count("RunInstances") >= before + 2, "the launch is tried again")
    code, _, err = interrupt(process)
    assert code == 130, err
    assert "nothing was left running" in err
    assert remains().nothing
    assert "ReservationCapacityExceeded" in cli.fails(1, *words, CLOUDDDP_TIME_SCALE="0.02")
    assert remains().nothing


def test_reservation_in_a_placement_group_uses_that_group(
    cli: Any, ec2: Any, reserve: Any, remains: Any
) -> None:
    group = ec2.create_placement_group(GroupName="of-another", Strategy="cluster")["PlacementGroup"]
    name = reserve(PlacementGroupArn=group["GroupArn"])
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--reservation", name)
    assert {node["Placement"]["GroupName"] for node in running_instances(ec2, cli.cluster)} == {"of-another"}
    assert remains().placement_groups == []
    cli.ok("down", "-y")
    assert remains().nothing
    ec2.delete_placement_group(GroupName="of-another")


def test_placement_group_of_another_account_is_not_named(cli: Any, ec2: Any, reserve: Any) -> None:
    """EC2 knows names for their owner only; the reservation leads there."""
    name = reserve(PlacementGroupArn="arn:aws:ec2:us-east-1:210987654321:placement-group/theirs")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--reservation", name)
    assert {node["CapacityReservationId"] for node in running_instances(ec2, cli.cluster)} == {name}


def test_reservation_that_ends_while_its_launch_is_repeated(
    cli: Any, ec2: Any, conditions: Conditions, faults: Any, remains: Any, reserve: Any
) -> None:
    name = reserve(1)
    words = ("up", "-n", "1", "-t", "g5.12xlarge", "--reservation", name)
    cli.ok(*words)
    conditions(cleanup={"reservations": 1000})
    cli.ok("down", "-y")
    before = faults.count("RunInstances")
    process = cli.start(*words, CLOUDDDP_TIME_SCALE="0.1")
    wait_for(lambda: faults.count("RunInstances") >= before + 2, "the launch is tried again")
    faults.rewrite("DescribeCapacityReservations", with_value("state", "expired"))
    _, err = finished(process, 1)
    assert f"capacity reservation {name} is expired, not active" in err
    assert remains().nothing


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


def test_earlier_deadline_of_the_user_is_kept(cli: Any, block: Any) -> None:
    del cli.env["CLOUDDDP_YES"]  # the plan is shown, and nothing is created
    planned = cli("up", "-n", "2", "-t", TYPE, "--reservation", block(), "--max-hours", "2")
    assert "in 2 h 00 min" in planned.stderr, planned.stderr


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (timedelta(hours=2), timedelta(days=1), "is scheduled, not active; it starts at"),
        (-timedelta(days=2), -timedelta(hours=1), "is expired, not active"),
        (-timedelta(days=1), timedelta(minutes=45), "the capacity block ends too soon"),
    ],
)
def test_block_that_is_not_active_or_ends_soon(
    cli: Any, faults: Any, block: Any, starts: timedelta, ends: timedelta, message: str
) -> None:
    done = cli("up", "-n", "2", "-t", TYPE, "--reservation", block(starts=starts, ends=ends))
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert faults.count("ImportKeyPair") == 0
