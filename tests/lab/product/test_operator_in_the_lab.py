"""A whole training as a user who has nothing but infra/iam/operator.json."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import CommandLine, cannot, remaining
from support.permissions import FOLDER, KEY, granted
from support.simlab import client_of

from cloudddp.sim import control
from cloudddp.sim.hosts import lab_namespaces

SUM = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
if dist.get_rank() == 0:
    pathlib.Path("runs").mkdir(exist_ok=True)
    pathlib.Path("runs/sum").write_text(str(int(x)))
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort the interpreter's shutdown
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    yield control.start(home, nodes="namespace", policies={"policy": FOLDER / "operator.json"})
    control.stop(home)


@pytest.mark.torch
def test_training_as_the_operator(lab: control.Simulator, lab_cli: CommandLine) -> None:
    pytest.importorskip("torch")
    lab_cli.write("sum.py", SUM)
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    lab_cli.ok("launch", "--nproc-per-node", "2", "sum.py")
    lab_cli.ok("pull")
    (brought,) = (lab_cli.cwd / "results").rglob("runs/sum")
    assert brought.read_text() == "6"
    lab_cli.ok("down", "-y")
    assert remaining(client_of(lab, "ec2"), lab_cli.cluster).nothing
    assert set(control.permissions(lab)[KEY]) <= granted("operator.json") | {"sts:GetCallerIdentity"}
