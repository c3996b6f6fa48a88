"""An organization that demands tags and encryption: a whole job, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
from support import organization
from support.harness import TIMEOUT, CommandLine, cannot, remaining

from cloudddp.sim import control
from cloudddp.sim.hosts import lab_namespaces

REDUCE = """\
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
pathlib.Path('runs').mkdir(exist_ok=True)
pathlib.Path(f'runs/{dist.get_rank()}').write_text(str(int(x)))
dist.barrier()
os._exit(0)
"""  # gloo's threads sometimes abort the interpreter's shutdown


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    policies = {"scp": organization.write(home)}
    yield control.start(home, nodes="namespace", policies=policies, timeout=TIMEOUT)
    control.stop(home)


@pytest.mark.torch
def test_whole_job_in_an_organization(lab: control.Simulator, lab_cli: CommandLine) -> None:
    pytest.importorskip("torch")
    keys = {"aws_access_key_id": "administrator", "aws_secret_access_key": "x"}
    where = {"endpoint_url": lab.endpoint, "region_name": lab.region}
    kms, ec2 = (boto3.client(service, **where, **keys) for service in ("kms", "ec2"))
    key = kms.create_key()["KeyMetadata"]["Arn"]
    lab_cli.write(
        "cloudddp.toml",
        f"[cluster]\nkms_key = '{key}'\nimds_hop_limit = 2\ntags = {{{organization.TAG} = '42'}}\n",
    )
    lab_cli.write("reduce.py", REDUCE)
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    lab_cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    lab_cli.ok("pull", "--all-nodes")
    found = {path.name: path.read_text() for path in (lab_cli.cwd / "results").rglob("runs/*")}
    assert found == {str(rank): "6" for rank in range(4)}
    lab_cli.ok("down", "-y")
    assert remaining(ec2, lab_cli.cluster).nothing
    with_tag = [{"Name": "tag-key", "Values": [organization.TAG]}]
    assert ec2.describe_network_interfaces(Filters=with_tag)["NetworkInterfaces"] == []
