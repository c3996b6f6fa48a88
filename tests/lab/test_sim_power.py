"""Stopping and starting instances: EC2's checks, capacity, and the reasons of states."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.account import Account, refused
from support.harness import until
from support.simlab import Laptop
from test_sim_lifecycle import timer

from cloudddp.sim import control

REPOSITORY = Path(control.__file__).parents[3]


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


def test_one_time_spot_instance_cannot_be_stopped(account: Account) -> None:
    (on_demand,), (spot_instance,) = account.running(), account.running(**spot("one-time"))
    ids = [on_demand["InstanceId"], spot_instance["InstanceId"]]
    with refused("UnsupportedOperation") as refusal:
        account.ec2.stop_instances(InstanceIds=ids)
    assert refusal.message.startswith(
        f"You can't stop the Spot Instance '{ids[1]}' because it is associated with"
    )
    assert states(account, *ids) == ["running", "running"]


def test_persistent_spot_instance_can_be_stopped_and_started(account: Account) -> None:
    (instance,) = account.running(**spot("persistent"))
    stop(account, instance["InstanceId"])
    start(account, instance["InstanceId"])


def test_start_needs_capacity(account: Account) -> None:
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
    start(account, *ids)
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 0}}
    stop(account, ids[0])
    account.end(*ids)
    assert account.conditions()["capacity"] == {"us-east-1a": {"g5.xlarge": 2}}


def test_start_counts_against_the_quota(account: Account) -> None:
    ids = [instance["InstanceId"] for instance in account.running(2)]
    stop(account, *ids)
    account.conditions(quota={"on-demand-g": 4})
    with refused("VcpuLimitExceeded"):
        account.ec2.start_instances(InstanceIds=ids)
    assert states(account, *ids) == ["stopped", "stopped"]
    start(account, ids[0])
    with refused("VcpuLimitExceeded"):
        account.ec2.start_instances(InstanceIds=ids)


def test_start_is_all_or_none(account: Account) -> None:
    ids = [instance["InstanceId"] for instance in account.running(2)]
    stop(account, ids[0])
    account.end(ids[1])
    with refused("IncorrectInstanceState"):
        account.ec2.start_instances(InstanceIds=ids)
    assert states(account, *ids) == ["stopped", "terminated"]


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


def test_one_time_spot_instance_terminates_at_poweroff(laptop: Laptop) -> None:
    data = laptop.user_data(write_files=[timer(datetime.now(UTC) + timedelta(seconds=1))])
    (instance,) = laptop.run(UserData=data, InstanceInitiatedShutdownBehavior="stop", **spot("one-time"))
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")


def test_stopped_spot_instance_can_be_interrupted(laptop: Laptop) -> None:
    (instance,) = laptop.launch(**spot("persistent"))
    laptop.ec2.stop_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.state(instance["InstanceId"]) == "stopped")
    control.interrupt(laptop.sim, instance["InstanceId"], seconds=0)
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    (shown,) = laptop.describe(instance["InstanceId"])
    assert shown["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert shown["StateTransitionReason"] == ""


def test_change_type_of_a_stopped_instance(account: Account) -> None:
    instance_id = account.running()[0]["InstanceId"]
    change = account.ec2.modify_instance_attribute
    with refused("IncorrectInstanceState"):
        change(InstanceId=instance_id, InstanceType={"Value": "g5.2xlarge"})
    stop(account, instance_id)
    for invalid in (
        {"InstanceType": {"Value": "bogus.huge"}},
        {"Attribute": "instanceType", "Value": "bogus.huge"},
    ):
        with refused("InvalidParameterValue") as refusal:
            change(InstanceId=instance_id, **invalid)
        assert "'bogus.huge'" in refusal.message
    with refused("InvalidParameterValue"):
        change(InstanceId=instance_id, Attribute="nics", Value="none")
    change(InstanceId=instance_id, InstanceType={"Value": "g5.2xlarge"})
    start(account, instance_id)
    assert account.describe(instance_id)["InstanceType"] == "g5.2xlarge"


# Hosts whose second boot raises an unexpected exception.
FAILED_REBOOT = """
import time, boto3, sys
from cloudddp.sim import aws
from cloudddp.sim.ec2 import install
from cloudddp.sim.hosts.lifecycle import Lifecycle, Timing

class Hosts:
    runs_timers = True
    on_end = None
    boots = 0

    def boot(self, spec):
        self.boots += 1
        if self.boots > 1:
            raise RuntimeError("unexpected error")

    def halt(self, instance_id): pass
    def remove(self, instance_id): pass
    def describe(self, instance_ids): return [{} for _ in instance_ids]

install.install()
Lifecycle(Hosts(), Timing()).install()
with aws.rehearse():
    ec2 = boto3.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ids = [ec2.run_instances(ImageId=image, InstanceType="m5.large", MinCount=1, MaxCount=1)
           ["Instances"][0]["InstanceId"]]

    def until(state):
        for _ in range(600):
            found = ec2.describe_instances(InstanceIds=ids)["Reservations"][0]["Instances"][0]
            if found["State"]["Name"] == state:
                return found
            time.sleep(0.05)
        sys.exit(f"never {state}, but {found['State']['Name']}")

    until("running")
    ec2.reboot_instances(InstanceIds=ids)
    print(until("terminated")["StateReason"]["Message"])
"""

# Prolongs the moment in which an instance's state has changed and its reason has not.
STATE_BEFORE_REASON = """
import time, boto3, sys
from cloudddp.sim import aws
from cloudddp.sim.ec2 import install
from cloudddp.sim.hosts import lifecycle
from moto.ec2.models.instances import Instance

class Hosts:
    runs_timers = True
    on_end = None
    def boot(self, spec): raise RuntimeError("no such machine")
    def halt(self, instance_id): pass
    def remove(self, instance_id): pass
    def describe(self, instance_ids): return [{} for _ in instance_ids]

install.install()
instances = lifecycle.Lifecycle(Hosts(), lifecycle.Timing())
instances.install()
ended = instances._moto_terminate
instances._moto_terminate = lambda instance: (ended(instance), time.sleep(0.3))
with aws.rehearse():
    ec2 = boto3.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    instance_id = ec2.run_instances(ImageId=image, InstanceType="m5.large", MinCount=1, MaxCount=1)["Instances"][0][
        "InstanceId"]
    for _ in range(600):
        found = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]
        if found["State"]["Name"] == "terminated":
            break
        time.sleep(0.01)
    print(found["State"]["Name"], found["StateReason"]["Message"])
"""  # noqa: E501


def printed(script: str) -> str:
    """Run a script in an interpreter of its own, because it patches moto; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_state_and_reason_change_together() -> None:
    reason = "terminated Server.InternalError: Internal error on launch (no such machine)"
    assert reason in printed(STATE_BEFORE_REASON)


def test_failed_reboot_ends_the_instance() -> None:
    assert "unexpected error" in printed(FAILED_REBOOT)
