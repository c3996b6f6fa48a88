"""Stopping and starting instances: EC2's checks, capacity, and the reasons of states."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.account import Account, refused
from support.harness import until
from support.simlab import Laptop
from test_sim_lifecycle import timer

from cloudddp.simulator import control


def stop(account: Account, *ids: str) -> None:
    account.ec2.stop_instances(InstanceIds=list(ids))
    until(lambda: {account.describe(one)["State"]["Name"] for one in ids} == {"stopped"})


def start(account: Account, *ids: str) -> None:
    account.ec2.start_instances(InstanceIds=list(ids))
    until(lambda: {account.describe(one)["State"]["Name"] for one in ids} == {"running"})


def states(account: Account, *ids: str) -> list[str]:
    return [account.describe(one)["State"]["Name"] for one in ids]


def spot(kind: str) -> dict[str, Any]:
    return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": kind}}}


def test_only_persistent_spot_instances_can_be_stopped(account: Account) -> None:
    (on_demand,), (spot_instance,) = account.running(), account.running(**spot("one-time"))
    ids = [on_demand["InstanceId"], spot_instance["InstanceId"]]
    with refused("UnsupportedOperation") as refusal:
        account.ec2.stop_instances(InstanceIds=ids)
    assert refusal.message.startswith(
        f"You can't stop the Spot Instance '{ids[1]}' because it is associated with"
    )
    assert states(account, *ids) == ["running", "running"]
    (persistent,) = account.running(**spot("persistent"))
    stop(account, persistent["InstanceId"])
    start(account, persistent["InstanceId"])


def test_start_needs_capacity_and_quota(account: Account) -> None:
    here = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    account.conditions(capacity={"us-east-1a": {"g5.xlarge": 2}})
    ids = [instance["InstanceId"] for instance in account.running(2, **here)]
    stop(account, *ids)
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 2}}
    (other,) = account.running(**here)
    with refused("InsufficientInstanceCapacity") as refusal:
        account.ec2.start_instances(InstanceIds=ids)
    assert refusal.status == 500
    assert states(account, *ids) == ["stopped", "stopped"]
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 1}}
    account.end(other["InstanceId"])
    account.conditions(quota={"on-demand-g": 4})
    with refused("VcpuLimitExceeded"):
        account.ec2.start_instances(InstanceIds=ids)
    account.conditions(quota={"on-demand-g": None})
    start(account, *ids)
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 0}}
    stop(account, ids[0])
    account.end(*ids)
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 2}}


def test_reason_of_a_stopped_instance(account: Account) -> None:
    (instance,) = account.running()
    stop(account, instance["InstanceId"])
    shown = account.describe(instance["InstanceId"])
    assert shown["StateReason"] == {
        "Code": "Client.UserInitiatedShutdown",
        "Message": "Client.UserInitiatedShutdown: User initiated shutdown",
    }
    assert shown["StateTransitionReason"].startswith("User initiated (")
    start(account, instance["InstanceId"])
    shown = account.describe(instance["InstanceId"])
    assert not shown.get("StateReason", {}).get("Code")
    assert shown["StateTransitionReason"] == ""


@pytest.mark.parametrize(("behaviour", "end"), [("terminate", "terminated"), ("stop", "stopped")])
def test_reason_after_poweroff(laptop: Laptop, behaviour: str, end: str) -> None:
    data = laptop.user_data(write_files=[timer(datetime.now(UTC) + timedelta(seconds=1))])
    (instance,) = laptop.run(UserData=data, InstanceInitiatedShutdownBehavior=behaviour)
    until(lambda: laptop.state(instance["InstanceId"]) == end)
    (shown,) = laptop.describe(instance["InstanceId"])
    assert shown["StateReason"] == {
        "Code": "Client.InstanceInitiatedShutdown",
        "Message": "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
    }
    assert shown["StateTransitionReason"] == ""
    laptop.terminate(instance["InstanceId"])
    (shown,) = laptop.describe(instance["InstanceId"])
    by_user = shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert by_user == (end == "stopped")  # a stopped instance was ended by the user


def test_stopped_spot_instance_can_be_interrupted(laptop: Laptop) -> None:
    (instance,) = laptop.launch(**spot("persistent"))
    laptop.ec2.stop_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.state(instance["InstanceId"]) == "stopped")
    control.interrupt(laptop.sim, instance["InstanceId"], seconds=0)
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    (shown,) = laptop.describe(instance["InstanceId"])
    assert shown["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert shown["StateTransitionReason"] == ""


def test_start_needs_stopped_instances(account: Account) -> None:
    instance_id, ended = (instance["InstanceId"] for instance in account.running(2))
    stop(account, instance_id)
    account.end(ended)
    with refused("IncorrectInstanceState"):
        account.ec2.start_instances(InstanceIds=[instance_id, ended])
    assert states(account, instance_id, ended) == ["stopped", "terminated"]
