"""States of instances, and the loopback nodes behind them."""

from __future__ import annotations

import base64
import gzip
import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.harness import until
from support.simlab import Laptop, cloud_config, execute, make_key

from cloudddp.sim import control
from cloudddp.sim.linux import processes

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
    laptop.leave()


def _answers(laptop: Laptop, address: str) -> bool:
    try:
        return bool(laptop.connect(address))
    except OSError:
        return False


def test_running_instance_responds_and_is_ok(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    laptop.connect(instance["PublicIpAddress"])
    (status,) = laptop.ec2.describe_instance_status(InstanceIds=[instance["InstanceId"]])["InstanceStatuses"]
    assert status["InstanceStatus"]["Status"] == "ok"


@pytest.mark.parametrize("ending", ["heal", "reboot"])
def test_frozen_instance_fails_its_status_check(laptop: Laptop, ending: str) -> None:
    (instance,) = laptop.launch()
    ids = [instance["InstanceId"]]

    def check() -> Any:
        return laptop.ec2.describe_instance_status(InstanceIds=ids)["InstanceStatuses"][0]["InstanceStatus"]

    control.fault(laptop.sim, "freeze", ids)
    assert check()["Status"] == "impaired"
    assert abs(datetime.now(UTC) - check()["Details"][0]["ImpairedSince"]) < timedelta(minutes=1)
    if ending == "heal":
        control.fault(laptop.sim, "heal", ids)
    else:
        laptop.ec2.reboot_instances(InstanceIds=ids)
    until(lambda: check()["Status"] == "ok")


def test_64_nodes_have_their_own_addresses_and_homes(laptop: Laptop) -> None:
    nodes = laptop.launch(64)
    assert [node["AmiLaunchIndex"] for node in nodes] == list(range(64))
    assert (
        len({node["PrivateIpAddress"] for node in nodes} | {node["PublicIpAddress"] for node in nodes}) == 128
    )
    with ThreadPoolExecutor(8) as pool:
        homes = list(pool.map(lambda n: execute(laptop.connect(n["PublicIpAddress"]), "pwd").out, nodes))
    assert len(set(homes)) == 64


def test_concurrent_launches_have_unique_addresses(laptop: Laptop) -> None:
    with ThreadPoolExecutor(8) as pool:
        launches = list(pool.map(lambda _: laptop.run(2), range(8)))
    addresses = [instance["PrivateIpAddress"] for launch in launches for instance in launch]
    assert len(set(addresses)) == 16


def test_regions_have_unique_addresses(laptop: Laptop) -> None:
    (here,) = laptop.launch()
    elsewhere = laptop.client("ec2", region_name="eu-west-1")
    answer = elsewhere.run_instances(ImageId=laptop.image, InstanceType="g5.xlarge", MinCount=1, MaxCount=1)
    instance_id = answer["Instances"][0]["InstanceId"]

    def there() -> dict[str, Any]:
        return elsewhere.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]

    until(lambda: there()["State"]["Name"] == "running")
    assert there()["PrivateIpAddress"] != here["PrivateIpAddress"]
    elsewhere.terminate_instances(InstanceIds=[instance_id])
    until(lambda: there()["State"]["Name"] == "terminated")


def test_terminate_ends_daemons(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    pid = start_daemon(laptop, instance)
    home = Path(
        next(n["home"] for n in control.nodes(laptop.sim) if n["instance_id"] == instance["InstanceId"])
    )
    assert processes.read(pid)
    laptop.terminate(instance["InstanceId"])
    assert processes.read(pid) is None
    assert not home.parent.exists()
    with pytest.raises(OSError):
        laptop.connect(instance["PublicIpAddress"])


def test_terminate_does_not_affect_other_nodes(laptop: Laptop) -> None:
    first, second = laptop.launch(2)
    pid = start_daemon(laptop, second)
    laptop.terminate(first["InstanceId"])
    assert processes.read(pid)


def test_terminate_ends_a_process_without_environment(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    client = laptop.connect(instance["PublicIpAddress"])
    client.exec_command("env -i /bin/sh -c 'echo $$ > pid; while :; do /bin/sleep 3600; done'; true")
    pid = int(until(lambda: execute(client, "cat pid 2>/dev/null").out))
    laptop.terminate(instance["InstanceId"])
    assert processes.read(pid) is None


def test_terminate_while_pending(home: Path) -> None:
    laptop = Laptop(control.start(home, nodes="process", timing={"pending": 3600}), "key")
    (launched,) = laptop.run()
    laptop.terminate(launched["InstanceId"])
    assert control.nodes(laptop.sim) == []


def test_terminate_twice(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    laptop.terminate(instance["InstanceId"])
    again = laptop.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    assert again["TerminatingInstances"][0]["PreviousState"]["Name"] == "terminated"
    assert laptop.state(instance["InstanceId"]) == "terminated"


def test_stopped_node_keeps_its_files(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    pid = start_daemon(laptop, instance)
    ids = [instance["InstanceId"]]
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


def test_reboot_ends_processes(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    pid = start_daemon(laptop, instance)
    laptop.ec2.reboot_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: processes.read(pid) is None)
    client = until(lambda: _connected(laptop, instance))
    assert int(execute(client, "cat daemon.pid").out) == pid


def _connected(laptop: Laptop, instance: dict[str, Any]) -> Any:
    try:
        return laptop.connect(instance["PublicIpAddress"])
    except (OSError, EOFError):
        return None


def test_terminated_instance_cannot_be_started(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    laptop.terminate(instance["InstanceId"])
    with pytest.raises(ClientError, match="IncorrectInstanceState"):
        laptop.ec2.start_instances(InstanceIds=[instance["InstanceId"]])


@pytest.mark.parametrize(("behaviour", "end"), [("terminate", "terminated"), ("stop", "stopped")])
def test_deadline_in_user_data_ends_the_instance(laptop: Laptop, behaviour: str, end: str) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=2)
    (instance,) = laptop.run(
        UserData=laptop.user_data(write_files=[timer(moment)]), InstanceInitiatedShutdownBehavior=behaviour
    )
    until(lambda: laptop.state(instance["InstanceId"]) == end)
    assert datetime.now(UTC) >= moment.replace(microsecond=0)


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


@pytest.mark.parametrize("ending", ["reboot", "kill processes"])
def test_deadline_after_reboot_and_without_processes(laptop: Laptop, ending: str) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=6)
    (instance,) = laptop.launch(
        UserData=laptop.user_data(write_files=[timer(moment)]), InstanceInitiatedShutdownBehavior="terminate"
    )
    if ending == "reboot":
        laptop.ec2.reboot_instances(InstanceIds=[instance["InstanceId"]])
    else:
        os.kill(start_daemon(laptop, instance), signal.SIGKILL)
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    assert datetime.now(UTC) >= moment.replace(microsecond=0)
    assert laptop.describe(instance["InstanceId"])[0]["StateReason"]["Code"] == (
        "Client.InstanceInitiatedShutdown"
    )


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


@pytest.mark.parametrize("packing", ["yaml", "base64", "gzip"])
def test_deadline_in_every_user_data_format(laptop: Laptop, packing: str) -> None:
    entry = timer(datetime(2031, 11, 21, 12, 0, 0, tzinfo=UTC))
    data: str | bytes
    if packing == "yaml":
        indented = entry["content"].replace("\n", "\n    ")
        data = f"#cloud-config\nwrite_files:\n- path: {entry['path']}\n  content: |\n    {indented}\n"
    elif packing == "base64":
        packed = {**entry, "encoding": "b64", "content": base64.b64encode(entry["content"].encode()).decode()}
        data = laptop.user_data(write_files=[packed])
    else:
        data = gzip.compress(laptop.user_data(write_files=[entry]).encode())
    (instance,) = laptop.launch(UserData=data)
    (record,) = [n for n in control.nodes(laptop.sim) if n["instance_id"] == instance["InstanceId"]]
    assert record["deadline"] == "2031-11-21T12:00:00Z"


def test_timer_shows_the_deadline(laptop: Laptop) -> None:
    moment = datetime(2031, 11, 21, 12, 0, 0, tzinfo=UTC)
    (instance,) = laptop.launch(UserData=laptop.user_data(write_files=[timer(moment)]))
    client = laptop.connect(instance["PublicIpAddress"])
    unit = "cloudddp-deadline.timer"
    assert execute(client, f"systemctl is-active {unit}").out == b"active\n"
    shown = execute(client, f"systemctl show -p ActiveState,NextElapseUSecRealtime {unit}").out.decode()
    assert shown.splitlines() == ["ActiveState=active", "NextElapseUSecRealtime=Fri 2031-11-21 12:00:00 UTC"]
    value = execute(client, f"systemctl show --property=NextElapseUSecRealtime --value {unit}").out.decode()
    assert value == "Fri 2031-11-21 12:00:00 UTC\n"
    assert unit.encode() in execute(client, "systemctl list-timers").out
    (record,) = [n for n in control.nodes(laptop.sim) if n["instance_id"] == instance["InstanceId"]]
    assert record["deadline"] == "2031-11-21T12:00:00Z"


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


def test_login_keys_in_user_data(laptop: Laptop) -> None:
    other = make_key()
    (instance,) = laptop.launch(
        UserData=laptop.user_data(ssh_authorized_keys=[other.public, "no key at all"])
    )
    laptop.connect(instance["PublicIpAddress"], key=other)
    laptop.connect(instance["PublicIpAddress"])


@pytest.mark.parametrize(
    "data", ["", "#!/bin/sh\nexit 1\n", "#cloud-config\n{broken: [", "#cloud-config\n7\n"]
)
def test_generated_host_key(laptop: Laptop, data: str) -> None:
    import paramiko

    (instance,) = laptop.launch(UserData=data)
    transport = paramiko.Transport((instance["PublicIpAddress"], laptop.sim.ssh_port))
    transport.start_client(timeout=30)
    assert transport.get_remote_server_key().get_base64() != laptop.host_key.public.split()[1]
    transport.close()


def test_invalid_host_key_fails_the_launch(laptop: Laptop) -> None:
    (instance,) = laptop.run(UserData=cloud_config(ssh_keys={"ed25519_private": "not a key"}))
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    (after,) = laptop.describe(instance["InstanceId"])
    assert after["StateReason"]["Code"] == "Server.InternalError"
    assert "host key" in after["StateReason"]["Message"]


def test_non_loopback_address_fails_the_launch(laptop: Laptop) -> None:
    vpc = laptop.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = laptop.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone="us-east-1a")[
        "Subnet"
    ]["SubnetId"]
    (instance,) = laptop.run(SubnetId=subnet)
    until(lambda: laptop.state(instance["InstanceId"]) == "terminated")
    (after,) = laptop.describe(instance["InstanceId"])
    assert "default VPC" in after["StateReason"]["Message"]


def test_nodes_page(laptop: Laptop) -> None:
    (instance,) = laptop.launch()
    pid = start_daemon(laptop, instance)
    (record,) = [n for n in control.nodes(laptop.sim) if n["instance_id"] == instance["InstanceId"]]
    assert pid in record.pop("processes")
    assert Path(record.pop("home")).is_dir()
    assert record == {
        "instance_id": instance["InstanceId"],
        "state": "running",
        "private_ip": instance["PrivateIpAddress"],
        "public_ip": instance["PublicIpAddress"],
        "ssh_port": laptop.sim.ssh_port,
        "deadline": None,
        "cluster": None,
        "rank": 0,
        "faults": [],
        "interruption": None,
    }
    assert json.dumps(record)
