"""The whole way of a job for each kind of capacity: up, launch, pull, down, and nothing is left in the account."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.harness import CommandLine, remaining
from support.simlab import client_of

from cloudddp.sim import control

BLOCK = "cr-0123456789abcdef0"
ZONE = "us-east-1b"
REDUCE = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
pathlib.Path("runs").mkdir(exist_ok=True)
pathlib.Path(f"runs/{dist.get_rank()}").write_text(f"{int(x)} {os.environ.get('NCCL_NET')}")
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort the interpreter's shutdown
"""


@pytest.fixture
def ec2(lab: control.Simulator) -> Any:
    return client_of(lab, "ec2")


def train(cli: CommandLine, ec2: Any, *options: str) -> list[dict[str, Any]]:
    """Run a job of 2 x 2 ranks on two nodes, pull its results, and remove the cluster. Return the nodes."""
    done = cli("up", "-n", "2", *options)
    assert done.returncode == 0, done.stderr
    where = [
        {"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]},
        {"Name": "instance-state-name", "Values": ["running"]},
    ]
    nodes = [i for r in ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]]
    assert len(nodes) == 2
    cli.write("reduce.py", REDUCE)
    cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    cli.ok("pull", "--node", "0", "--to", "of0")
    cli.ok("pull", "--node", "1", "--to", "of1")
    results = {path.name: path.read_text() for path in sorted(cli.cwd.glob("of?/**/[0-3]"))}
    assert set(results) == {"0", "1", "2", "3"}
    assert {text.split()[0] for text in results.values()} == {"6"}
    net = "Libfabric" if "--require-efa" in options else "None"
    assert {text.split()[1] for text in results.values()} == {net}
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing
    return nodes


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
        InstanceType="g5.12xlarge", InstancePlatform="Linux/UNIX", AvailabilityZone=ZONE,
        InstanceCount=2, InstanceMatchCriteria="targeted",
    )  # fmt: skip
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
