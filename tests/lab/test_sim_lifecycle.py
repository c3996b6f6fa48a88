"""States of instances, and the loopback nodes behind them."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.account import Account, refused
from support.harness import until
from support.networks import create_subnet
from support.simlab import Laptop, cloud_config, execute

from cloudddp.simulator import control
from cloudddp.simulator.linux import processes

DAEMON = """python3 -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        open("daemon.pid.new", "w").write(str(os.getpid()))
        os.rename("daemon.pid.new", "daemon.pid")
        time.sleep(3600)
'
"""


def timer(moment: datetime) -> dict[str, Any]:
    unit = f"[Timer]\nOnCalendar={moment:%Y-%m-%d %H:%M:%S} UTC\nAccuracySec=1s\n"
    return {"path": "/etc/systemd/system/cloudddp-deadline.timer", "content": unit}


def start_daemon(laptop: Laptop, instance: dict[str, Any]) -> int:
    client = laptop.connect(instance["PublicIpAddress"])
    execute(client, DAEMON)
    return int(until(lambda: execute(client, "cat daemon.pid 2>/dev/null").out))


def test_frozen_instance_fails_its_status_check(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    ids = [instance["InstanceId"]]

    def check() -> Any:
        return laptop.ec2.describe_instance_status(InstanceIds=ids)["InstanceStatuses"][0]["InstanceStatus"]

    assert check()["Status"] == "ok"
    for end in (
        lambda: control.fault(laptop.sim, "heal", ids),
        lambda: laptop.ec2.reboot_instances(InstanceIds=ids),
    ):
        control.fault(laptop.sim, "freeze", ids)
        assert check()["Status"] == "impaired"
        assert abs(datetime.now(UTC) - check()["Details"][0]["ImpairedSince"]) < timedelta(minutes=1)
        end()
        until(lambda: check()["Status"] == "ok")


def test_terminate_ends_every_process_of_one_node(laptop: Laptop) -> None:
    first, second = laptop.launch(2)
    pid, other = (start_daemon(laptop, instance) for instance in (first, second))
    client = laptop.connect(first["PublicIpAddress"])
    client.exec_command("env -i /bin/sh -c 'echo $$ > pid; while :; do /bin/sleep 3600; done'; true")
    without_environment = int(until(lambda: execute(client, "cat pid 2>/dev/null").out))
    (record,) = [n for n in control.nodes(laptop.sim) if n["instance_id"] == first["InstanceId"]]
    assert pid in record.pop("processes")
    home = Path(record.pop("home"))
    assert home.is_dir()
    assert record == {
        "instance_id": first["InstanceId"],
        "state": "running",
        "private_ip": first["PrivateIpAddress"],
        "public_ip": first["PublicIpAddress"],
        "ssh_port": laptop.sim.ssh_port,
        "deadline": None,
        "cluster": None,
        "rank": 0,
        "faults": [],
        "interruption": None,
    }
    laptop.terminate(first["InstanceId"])
    assert processes.read(pid) is None
    assert processes.read(without_environment) is None
    assert not home.parent.exists()
    with pytest.raises(OSError):
        laptop.connect(first["PublicIpAddress"])
    assert processes.read(other)
    again = laptop.ec2.terminate_instances(InstanceIds=[first["InstanceId"]])
    assert again["TerminatingInstances"][0]["PreviousState"]["Name"] == "terminated"
    with pytest.raises(ClientError, match="IncorrectInstanceState"):
        laptop.ec2.start_instances(InstanceIds=[first["InstanceId"]])


def test_stopped_or_rebooted_node_keeps_its_files(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    ids = [instance["InstanceId"]]
    pid = start_daemon(laptop, instance)
    laptop.ec2.reboot_instances(InstanceIds=ids)
    until(lambda: processes.read(pid) is None)
    client = until(lambda: _connected(laptop, instance))
    assert int(execute(client, "cat daemon.pid; rm daemon.pid").out) == pid
    pid = start_daemon(laptop, instance)
    laptop.ec2.stop_instances(InstanceIds=ids)
    until(lambda: laptop.state(*ids) == "stopped")
    assert processes.read(pid) is None
    with pytest.raises(OSError):
        laptop.connect(instance["PrivateIpAddress"])
    laptop.ec2.start_instances(InstanceIds=ids)
    until(lambda: laptop.state(*ids) == "running")
    (after,) = laptop.describe(*ids)
    assert after["PrivateIpAddress"] == instance["PrivateIpAddress"]
    client = laptop.connect(after["PublicIpAddress"])
    assert int(execute(client, "cat daemon.pid").out) == pid


def _connected(laptop: Laptop, instance: dict[str, Any]) -> Any:
    try:
        return laptop.connect(instance["PublicIpAddress"])
    except (OSError, EOFError):
        return None


def test_deadline_after_reboot_and_without_processes(laptop: Laptop) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=8)
    data = laptop.user_data(write_files=[timer(moment)])
    nodes = laptop.launch(2, UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    laptop.ec2.reboot_instances(InstanceIds=[nodes[0]["InstanceId"]])
    os.kill(start_daemon(laptop, nodes[1]), signal.SIGKILL)
    code = "Client.InstanceInitiatedShutdown"
    reason = {"Code": code, "Message": f"{code}: Instance initiated shutdown"}
    for node in nodes:
        until(lambda name=node["InstanceId"]: laptop.state(name) == "terminated")
        (shown,) = laptop.describe(node["InstanceId"])
        assert (shown["StateReason"], shown["StateTransitionReason"]) == (reason, "")
    assert datetime.now(UTC) >= moment.replace(microsecond=0)
    laptop.terminate(nodes[0]["InstanceId"])  # an end that has an own reason keeps it
    assert laptop.describe(nodes[0]["InstanceId"])[0]["StateReason"] == reason


def test_deadline_passed_while_stopped_ends_the_instance_at_start(laptop: Laptop) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=4)
    (instance,) = laptop.launch(
        UserData=laptop.user_data(write_files=[timer(moment)]), InstanceInitiatedShutdownBehavior="terminate"
    )
    laptop.ec2.stop_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.state(instance["InstanceId"]) == "stopped")
    until(lambda: datetime.now(UTC) > moment)
    assert laptop.state(instance["InstanceId"]) == "stopped"
    laptop.ec2.start_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")


def test_user_data_is_not_executed(laptop: Laptop, tmp_path: Path) -> None:
    touched, written = tmp_path / "touched", tmp_path / "written"
    data = laptop.user_data(
        bootcmd=[f"touch {touched}"],
        runcmd=[["touch", str(touched)]],
        write_files=[{"path": str(written), "content": "x"}],
    )
    script = f"#!/bin/sh\ntouch {touched}\n"
    laptop.launch(UserData=data)
    laptop.launch(UserData=script)
    time.sleep(0.5)  # time for a shell to run
    assert not touched.exists()
    assert not written.exists()


def test_node_that_cannot_start_fails_the_launch_with_the_reason(laptop: Laptop) -> None:
    vpc = laptop.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    elsewhere = create_subnet(laptop.ec2, vpc, "10.9.1.0/24", "us-east-1a")
    for request, reason in (
        ({"UserData": cloud_config(ssh_keys={"ed25519_private": "not a key"})}, "host key"),
        ({"SubnetId": elsewhere}, "default VPC"),
    ):
        (instance,) = laptop.run(**request)
        until(lambda name=instance["InstanceId"]: laptop.state(name) == "terminated")
        (after,) = laptop.describe(instance["InstanceId"])
        assert after["StateReason"]["Code"] == "Server.InternalError"
        assert reason in after["StateReason"]["Message"]


def test_only_persistent_spot_instances_can_be_stopped(account: Account) -> None:
    def spot(kind: str) -> str:
        options = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": kind}}
        return str(account.running(InstanceMarketOptions=options)[0]["InstanceId"])

    def states(*ids: str) -> set[str]:
        return {account.describe(one)["State"]["Name"] for one in ids}

    ids = [str(account.running()[0]["InstanceId"]), spot("one-time")]
    with refused("UnsupportedOperation") as refusal:
        account.ec2.stop_instances(InstanceIds=ids)
    cannot_stop = f"You can't stop the Spot Instance '{ids[1]}' because it is associated with"
    assert refusal.message.startswith(cannot_stop)
    assert states(*ids) == {"running"}
    persistent = spot("persistent")
    for call, state in ((account.ec2.stop_instances, "stopped"), (account.ec2.start_instances, "running")):
        call(InstanceIds=[persistent])
        until(lambda state=state: states(persistent) == {state})
