"""Stopping and starting instances: EC2's checks, capacity, and the reasons of states."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.account import Account, refused
from support.harness import until
from support.simlab import Laptop
from test_sim_lifecycle import timer


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


def test_reason_after_poweroff(laptop: Laptop) -> None:
    data = laptop.user_data(write_files=[timer(datetime.now(UTC) + timedelta(seconds=1))])
    (instance,) = laptop.run(UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    (shown,) = laptop.describe(instance["InstanceId"])
    assert shown["StateReason"] == {
        "Code": "Client.InstanceInitiatedShutdown",
        "Message": "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
    }
    assert shown["StateTransitionReason"] == ""
    laptop.terminate(instance["InstanceId"])
    (shown,) = laptop.describe(instance["InstanceId"])
    assert shown["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
