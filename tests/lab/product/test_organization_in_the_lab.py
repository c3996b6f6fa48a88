"""A whole job of torch where most is demanded: tags and encryption by an organization, a capacity block, and
EFA of four network cards, whose nodes have Elastic IPs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from support import organization
from support.harness import TIMEOUT, CommandLine, cannot, clean_environment, remaining, running_instances

from cloudddp.simulator import control
from cloudddp.simulator.hosts import lab_namespaces

BLOCK = "cr-0123456789abcdef0"
REDUCE = """\
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
pathlib.Path('runs').mkdir(exist_ok=True)
pathlib.Path(f'runs/{dist.get_rank()}').write_text(f"{int(x)} {os.environ.get('NCCL_NET')}")
dist.barrier()
os._exit(0)
"""  # gloo's threads sometimes abort the interpreter's shutdown


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[control.Simulator]:
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    policies = {"scp": organization.write(tmp_path)}
    yield control.start(tmp_path / "home", nodes="namespace", policies=policies, timeout=TIMEOUT)
    control.stop(tmp_path / "home")


@pytest.mark.torch
def test_whole_job_in_an_organization_with_a_capacity_block_and_efa(
    lab: control.Simulator, project: Path
) -> None:
    pytest.importorskip("torch")
    keys = {"aws_access_key_id": "administrator", "aws_secret_access_key": "x"}
    where = {"endpoint_url": lab.endpoint, "region_name": lab.region}
    env = {
        "CLOUDDDP_HOME": str(lab.home),
        "CLOUDDDP_SIM": "1",
        "CLOUDDDP_YES": "1",
        "CLOUDDDP_CLUSTER": "whole",
    }
    cli = CommandLine(project, "whole", clean_environment(**env))
    kms, ec2 = (boto3.client(service, **where, **keys) for service in ("kms", "ec2"))
    key = kms.create_key()["KeyMetadata"]["Arn"]
    now = datetime.now(UTC)
    times = {"start": now - timedelta(hours=1), "end": now + timedelta(hours=5)}
    entry = {"zone": "us-east-1b", "type": "p4d.24xlarge", "count": 2}
    entry |= {name: time.isoformat() for name, time in times.items()}
    cli.ok("sim", "conditions", json.dumps({"blocks": {BLOCK: entry}}))
    cli.write(
        "cloudddp.toml",
        f"[cluster]\nkms_key = '{key}'\nimds_hop_limit = 2\ntags = {{{organization.TAG} = '42'}}\n",
    )
    cli.write("reduce.py", REDUCE)
    cli.ok("up", "-n", "2", "-t", "p4d.24xlarge", "--reservation", BLOCK, "--require-efa")
    nodes = running_instances(ec2, cli.cluster)
    assert [len(node["NetworkInterfaces"]) for node in nodes] == [5, 5]
    assert {node["InstanceLifecycle"] for node in nodes} == {"capacity-block"}
    assert not any(node["Placement"].get("GroupName") for node in nodes)
    cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    cli.ok("pull", "--all-nodes")
    found = {path.name: path.read_text() for path in (cli.cwd / "results").rglob("runs/*")}
    assert found == {str(rank): "6 Libfabric" for rank in range(4)}
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing
    with_tag = [{"Name": "tag-key", "Values": [organization.TAG]}]
    assert ec2.describe_network_interfaces(Filters=with_tag)["NetworkInterfaces"] == []
