"""The whole way of a job for each kind of capacity: up, launch, pull, down, and nothing is left in the
account."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.harness import CommandLine
from support.whole_job import train

BLOCK = "cr-0123456789abcdef0"
ZONE = "us-east-1b"


@pytest.mark.torch
def test_efa_of_four_cards_with_elastic_ips(lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    nodes = train(lab_cli, ec2, "-t", "p4d.24xlarge", "--require-efa")
    assert [len(node["NetworkInterfaces"]) for node in nodes] == [5, 5]
    assert all(node["Placement"]["GroupName"] for node in nodes)


@pytest.mark.torch
def test_spot(lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    nodes = train(lab_cli, ec2, "-t", "g5.12xlarge", "--spot")
    assert {node["InstanceLifecycle"] for node in nodes} == {"spot"}
    assert all(node["Placement"]["GroupName"] for node in nodes)


@pytest.mark.torch
def test_on_demand_reservation(lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    made = ec2.create_capacity_reservation(
        InstanceType="g5.12xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=ZONE,
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    name = made["CapacityReservation"]["CapacityReservationId"]
    nodes = train(lab_cli, ec2, "-t", "g5.12xlarge", "--reservation", name)
    assert {node["CapacityReservationId"] for node in nodes} == {name}
    ec2.cancel_capacity_reservation(CapacityReservationId=name)


@pytest.mark.torch
def test_capacity_block(lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    now = datetime.now(UTC)
    times = {"start": now - timedelta(hours=1), "end": now + timedelta(hours=5)}
    entry = {"zone": ZONE, "type": "p4d.24xlarge", "count": 2}
    entry |= {key: time.isoformat() for key, time in times.items()}
    lab_cli.ok("sim", "conditions", json.dumps({"blocks": {BLOCK: entry}}))
    nodes = train(lab_cli, ec2, "-t", "p4d.24xlarge", "--reservation", BLOCK, "--require-efa")
    assert {node["InstanceLifecycle"] for node in nodes} == {"capacity-block"}
    assert not any(node["Placement"].get("GroupName") for node in nodes)
    lab_cli.ok("sim", "conditions", "--clear")
