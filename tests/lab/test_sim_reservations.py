"""Capacity reservations and capacity blocks: created, described, used by launches, and ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.account import Account, refused
from support.harness import until

TYPE, ZONE = "p4d.24xlarge", "us-east-1a"
BLOCK = "cr-0123456789abcdef0"


def reserve(account: Account, count: int = 2, **more: Any) -> str:
    request = {
        "InstanceType": TYPE,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": ZONE,
        "InstanceCount": count,
        "InstanceMatchCriteria": "targeted",
    }
    answer = account.ec2.create_capacity_reservation(**{**request, **more})
    return answer["CapacityReservation"]["CapacityReservationId"]


def block(account: Account, **more: Any) -> None:
    """Add a capacity block to the account: buying one is not simulated."""
    now = datetime.now(UTC)
    entry = {
        "zone": ZONE,
        "type": TYPE,
        "count": 2,
        "start": (now - timedelta(hours=1)).isoformat(),
        "end": (now + timedelta(days=1)).isoformat(),
    }
    account.conditions(blocks={BLOCK: {**entry, **more}})


def shown(account: Account, name: str) -> dict[str, Any]:
    (found,) = account.ec2.describe_capacity_reservations(CapacityReservationIds=[name])[
        "CapacityReservations"
    ]
    return found


def into(name: str, zone: str = ZONE, instance_type: str = TYPE, **more: Any) -> dict[str, Any]:
    target = {"CapacityReservationTarget": {"CapacityReservationId": name}}
    return {
        "InstanceType": instance_type,
        "Placement": {"AvailabilityZone": zone, **more.pop("Placement", {})},
        "CapacityReservationSpecification": target,
        **more,
    }


AS_BLOCK = {"InstanceMarketOptions": {"MarketType": "capacity-block"}}


@pytest.fixture
def reservation(account: Account) -> Any:
    """An on-demand reservation for two instances, cancelled after the test."""
    name = reserve(account)
    yield name
    if shown(account, name)["State"] == "active":
        account.ec2.cancel_capacity_reservation(CapacityReservationId=name)


def test_launches_use_the_places_of_a_reservation(account: Account, reservation: str) -> None:
    """EC2 User Guide, "Launch instances into an existing Capacity Reservation": reduces its available
    capacity by the number of instances launched. Error: hashicorp/terraform-provider-aws, pull request
    35745."""
    ids = [i["InstanceId"] for i in account.running(2, **into(reservation))]
    assert shown(account, reservation)["AvailableInstanceCount"] == 0
    assert {account.describe(one)["CapacityReservationId"] for one in ids} == {reservation}
    assert len(account.instances(capacity_reservation_id=reservation)) == 2
    with refused("ReservationCapacityExceeded") as refusal:
        account.launch(**into(reservation))
    assert refusal.status == 400
    assert "sufficient compatible and available capacity" in refusal.message
    account.end(*ids)
    assert shown(account, reservation)["AvailableInstanceCount"] == 2


def test_capacity_returns_after_clean_up(account: Account, reservation: str) -> None:
    """EC2 User Guide, "Launch instances using Capacity Blocks": after termination it takes several minutes to
    clean up before another instance can be launched."""
    account.conditions(cleanup={"reservations": 1.5})
    ids = [i["InstanceId"] for i in account.running(2, **into(reservation))]
    account.end(*ids)
    with refused("ReservationCapacityExceeded"):
        account.launch(2, **into(reservation))
    until(lambda: shown(account, reservation)["AvailableInstanceCount"] == 2)
    account.launch(2, **into(reservation))


def test_launch_that_does_not_match_the_reservation(account: Account, reservation: str) -> None:
    """EC2 User Guide: matching attributes (instance type, platform, Availability Zone, and tenancy)."""
    windows = reserve(account, InstancePlatform="Windows")
    for request, code in (
        (into(reservation, zone="us-east-1b"), "ReservationCapacityExceeded"),
        (into(reservation, instance_type="g5.xlarge"), "ReservationCapacityExceeded"),
        (into(reservation, Placement={"Tenancy": "dedicated"}), "ReservationCapacityExceeded"),
        (into(windows), "ReservationCapacityExceeded"),
        (into(reservation, InstanceMarketOptions={"MarketType": "spot"}), "InvalidParameterCombination"),
        (into(reservation, **AS_BLOCK), "InvalidParameterCombination"),
        (into("cr-00000000"), "InvalidCapacityReservationId.NotFound"),
    ):
        with refused(code):
            account.launch(**request)
    assert account.instances() == []
    with refused("InvalidCapacityReservationId.NotFound"):
        shown(account, "cr-00000000")


def test_block_requires_its_market_type(account: Account) -> None:
    """EC2 User Guide, "Launch instances using Capacity Blocks": MarketType capacity-block and the
    reservation's id."""
    block(account)
    with refused("InvalidParameterCombination"):
        account.launch(**into(BLOCK))
    with refused("InvalidParameterCombination"):
        account.launch(InstanceType=TYPE, **AS_BLOCK)
    account.ec2.create_placement_group(GroupName="near", Strategy="cluster")
    with refused("InvalidParameterCombination"):
        account.launch(**into(BLOCK, Placement={"GroupName": "near"}), **AS_BLOCK)
    account.conditions(quota={"on-demand-p": 0}, capacity={ZONE: {TYPE: 0}})
    instances = account.running(2, **into(BLOCK), **AS_BLOCK)
    assert {i["InstanceLifecycle"] for i in instances} == {"capacity-block"}
    assert shown(account, BLOCK)["AvailableInstanceCount"] == 0


@pytest.mark.parametrize(("start", "end", "state"), [(1, 25, "scheduled"), (-25, -1, "expired")])
def test_block_has_no_capacity_before_and_after(account: Account, start: int, end: int, state: str) -> None:
    now = datetime.now(UTC)
    times = {"start": now + timedelta(hours=start), "end": now + timedelta(hours=end)}
    block(account, **{key: time.isoformat() for key, time in times.items()})
    assert (shown(account, BLOCK)["State"], shown(account, BLOCK)["AvailableInstanceCount"]) == (state, 0)
    with refused("ReservationCapacityExceeded"):
        account.launch(**into(BLOCK), **AS_BLOCK)


def test_instances_end_30_minutes_before_their_block(remote: Account) -> None:
    """EC2 User Guide, "Monitor Capacity Blocks using EventBridge": 40 minutes before the end, the event says
    that instances begin to terminate in 10 minutes."""
    block(remote, end=(datetime.now(UTC) + timedelta(minutes=30, seconds=3)).isoformat())
    (instance,) = remote.running(**into(BLOCK), **AS_BLOCK)
    until(lambda: remote.describe(instance["InstanceId"])["State"]["Name"] == "terminated")
    ended = remote.describe(instance["InstanceId"])
    assert ended["StateReason"]["Code"] == "Server.CapacityBlockExpired"
