"""FSDP with torch.distributed.checkpoint on two nodes, one of which is lost between two saves: the training
goes on with weights equal to those of an uninterrupted one, or is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, clean_environment
from support.jobs import written
from test_resume import TOML, kill, live

# Saves after each epoch, all ranks into one folder. Waits before or after a save where ~ has such a file.
TRAIN = """
import os, sys, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

def wait(where):
    while os.path.exists(os.path.expanduser(f"~/wait-{where}")): time.sleep(0.1)

dist.init_process_group("gloo")
rank, epochs, epoch = dist.get_rank(), int(sys.argv[1]), 0
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if os.path.exists("ckpt/latest/.metadata"):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": torch.zeros(1)}
    dcp.load(state, checkpoint_id="ckpt/latest")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    epoch = int(state["epoch"])
print("begins after", epoch, flush=True)
while epoch < epochs:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(5):
        inputs = torch.randn(2, 16, 8, generator=generator)[rank]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    epoch += 1
    wait("before")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": torch.tensor([epoch])}
    dcp.save(state, checkpoint_id="ckpt/latest")
    print("saved", epoch, flush=True)
    wait("after")
total = sum(p.full_tensor().double().abs().sum().item() for p in model.parameters())
print(f"weights {total!r}", flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo now and then aborts at the exit of a process, also under plain torchrun
"""


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("train.py", TRAIN)
    return lab_cli


def plain(folder: Path, epochs: int) -> str:
    """Train with plain torchrun in a folder; return what it prints of the weights."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
    ]
    done = subprocess.run(
        [*command, str(epochs)],
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return weights(done.stdout)


def weights(text: str) -> str:
    return text.rpartition("weights ")[2].split()[0]


def test_lost_half_of_a_save_is_never_completed(cli: CommandLine, tmp_path: Path, ec2: Any) -> None:
    for name in ("whole", "continued"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN)
    expected = plain(tmp_path / "whole", 4)

    cli.nodes(2)
    job = cli.ok("launch", "-d", "train.py", "2").strip()
    assert cli("logs", "-f").returncode == 0
    cli.ok("pull", "--all-nodes")
    pulled = cli.cwd / "results" / job / "ckpt" / "latest"
    assert {path.name for path in pulled.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    (tmp_path / "continued" / "ckpt").mkdir()
    pulled.rename(tmp_path / "continued" / "ckpt" / "latest")
    assert plain(tmp_path / "continued", 4) == expected

    # Node 1 is lost before the first save of the second job: node 0 has copies of all that it had written.
    cli.ok("exec", "--", "touch ~/wait-before")
    job = cli.ok("launch", "-d", "train.py", "4").strip()
    written(cli, "begins after 2", job=job)
    kill(cli, 1)
    cli.ok("exec", "--node", "0", "--", "rm ~/wait-before")
    out = cli.ok("resume")
    assert "begins after 2" in out
    assert weights(out) == expected

    # It is lost after a save: node 0 has half of it, and had copies of the other half of the save before.
    cli.ok("exec", "--", "touch ~/wait-after")
    job = cli.ok("launch", "-d", "train.py", "6").strip()
    written(cli, "saved 5", job=job)
    kill(cli, 1)
    names = "__1_0.distcp of job " + job
    assert f"ckpt/latest is not a complete checkpoint: {names} is missing" in cli.fails(1, "pull")
    results = cli.cwd / "results" / job
    assert not (results / "ckpt" / "latest").exists()
    assert {path.name for path in (results / "cloudddp-incomplete/ckpt/latest").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
    }
    refused = cli.fails(1, "resume")
    assert f"{names} is missing; no other one can replace it. No job was started" in refused
    assert len(live(cli)) == 1  # nothing was bought
    assert "exec -- rm -rf ckpt/latest" in refused
    cli.ok("exec", "--", "rm", "-rf", "ckpt/latest")
    cli.ok("exec", "--", "rm ~/wait-after")
    out = cli.ok("resume")
    assert weights(out) == plain(tmp_path / "whole", 6)
    assert "begins after 0" in out
