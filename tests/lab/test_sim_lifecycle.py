"""States of instances, and the loopback nodes behind them."""

from __future__ import annotations

import base64
import gzip
import os
import resource
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import paramiko
import pytest
from botocore.exceptions import ClientError
from support.harness import until
from support.networks import create_subnet
from support.simlab import Laptop, cloud_config, execute, make_key

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


def test_pending_time(home: Path) -> None:
    laptop = Laptop(control.start(home, nodes="process", timing={"pending": 3600}), "key")
    (launched,) = laptop.run()
    assert launched["State"]["Name"] == "pending"
    until(lambda: _answers(laptop, launched["PrivateIpAddress"]))
    assert laptop.state(launched["InstanceId"]) == "pending"
    assert laptop.ec2.describe_instance_status()["InstanceStatuses"] == []
    laptop.terminate(launched["InstanceId"])
    assert control.nodes(laptop.sim) == []


def _answers(laptop: Laptop, address: str) -> bool:
    try:
        return bool(laptop.connect(address))
    except OSError:
        return False


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


def test_deadline_with_full_host_disk(home: Path) -> None:
    sim = control.start(home, nodes="process")
    laptop = Laptop(sim, "key")
    moment = datetime.now(UTC) + timedelta(seconds=4)
    (instance,) = laptop.launch(
        UserData=laptop.user_data(write_files=[timer(moment)]), InstanceInitiatedShutdownBehavior="terminate"
    )
    # From here on, the server cannot write to any file, such as its log.
    resource.prlimit(sim.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    assert laptop.describe(instance["InstanceId"])[0]["StateReason"]["Code"] == (
        "Client.InstanceInitiatedShutdown"
    )


def test_deadline_after_reboot_and_without_processes(laptop: Laptop) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=8)
    data = laptop.user_data(write_files=[timer(moment)])
    nodes = laptop.launch(2, UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    laptop.ec2.reboot_instances(InstanceIds=[nodes[0]["InstanceId"]])
    os.kill(start_daemon(laptop, nodes[1]), signal.SIGKILL)
    for node in nodes:
        until(lambda name=node["InstanceId"]: laptop.state(name) == "terminated")
        reason = laptop.describe(node["InstanceId"])[0]["StateReason"]
        assert reason["Code"] == "Client.InstanceInitiatedShutdown"
    assert datetime.now(UTC) >= moment.replace(microsecond=0)


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


def test_deadline_in_every_user_data_format(laptop: Laptop) -> None:
    """The node shows it as systemd does, and the keys of the user data log in."""
    entry = timer(datetime(2031, 11, 21, 12, 0, 0, tzinfo=UTC))
    indented = entry["content"].replace("\n", "\n    ")
    encoded = {**entry, "encoding": "b64", "content": base64.b64encode(entry["content"].encode()).decode()}
    other = make_key()
    plain = laptop.user_data(write_files=[entry], ssh_authorized_keys=[other.public, "no key at all"])
    for data in (
        f"#cloud-config\nwrite_files:\n- path: {entry['path']}\n  content: |\n    {indented}\n",
        laptop.user_data(write_files=[encoded]),
        gzip.compress(plain.encode()),
    ):
        (instance,) = laptop.launch(UserData=data)
        (record,) = [n for n in control.nodes(laptop.sim) if n["instance_id"] == instance["InstanceId"]]
        assert record["deadline"] == "2031-11-21T12:00:00Z"
    laptop.connect(instance["PublicIpAddress"], key=other)
    client, unit = laptop.connect(instance["PublicIpAddress"]), "cloudddp-deadline.timer"
    assert execute(client, f"systemctl is-active {unit}").out == b"active\n"
    shown = execute(client, f"systemctl show -p ActiveState,NextElapseUSecRealtime {unit}").out.decode()
    assert shown.splitlines() == ["ActiveState=active", "NextElapseUSecRealtime=Fri 2031-11-21 12:00:00 UTC"]
    value = execute(client, f"systemctl show --property=NextElapseUSecRealtime --value {unit}").out.decode()
    assert value == "Fri 2031-11-21 12:00:00 UTC\n"
    assert unit.encode() in execute(client, "systemctl list-timers").out


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


def test_node_without_a_host_key_in_its_user_data_generates_one(laptop: Laptop) -> None:
    for data in ("", "#!/bin/sh\nexit 1\n", "#cloud-config\n{broken: ["):
        (instance,) = laptop.launch(UserData=data)
        transport = paramiko.Transport((instance["PublicIpAddress"], laptop.sim.ssh_port))
        transport.start_client(timeout=300)
        assert transport.get_remote_server_key().get_base64() != laptop.host_key.public.split()[1]
        transport.close()


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
