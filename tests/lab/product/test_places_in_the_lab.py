"""Whole jobs in places that are short of capacity: the default VPC, zones without capacity, a region without
the type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.account import post_conditions
from support.harness import CommandLine, remaining
from support.simlab import client_of
from support.whole_job import train

from cloudddp.sim import control

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


@pytest.fixture
def ec2(lab: control.Simulator) -> Iterator[Any]:
    yield client_of(lab, "ec2")
    post_conditions(lab.endpoint, {"clear": True})


@pytest.mark.torch
def test_default_vpc(lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    assert {node["VpcId"] for node in train(lab_cli, ec2, "-t", "g5.12xlarge")} == {vpc["VpcId"]}


@pytest.mark.torch
def test_two_zones_of_three_without_capacity(lab: control.Simulator, lab_cli: CommandLine, ec2: Any) -> None:
    pytest.importorskip("torch")
    full = {zone: {"g5.12xlarge": 1} for zone in ZONES[:2]}
    post_conditions(lab.endpoint, {"capacity": full})
    nodes = train(lab_cli, ec2, "-t", "g5.12xlarge", "--zones", ",".join(ZONES))
    assert {node["Placement"]["AvailabilityZone"] for node in nodes} == {ZONES[2]}
    assert control.conditions(lab, {})["capacity"] == full  # the one free place of each was not used


@pytest.mark.torch
def test_region_without_the_type(lab: control.Simulator, lab_cli: CommandLine, ec2: Any) -> None:
    """us-west-1 offers no G6. Every command after `up` finds the cluster in the region that has it."""
    pytest.importorskip("torch")
    oregon = client_of(lab, "ec2", region_name="us-west-2")
    flags = ("-t", "g6.12xlarge", "--regions", "us-west-1,us-west-2")
    nodes = train(lab_cli, oregon, *flags)
    assert {node["Placement"]["AvailabilityZone"][:-1] for node in nodes} == {"us-west-2"}
    assert remaining(ec2, lab_cli.cluster).nothing
