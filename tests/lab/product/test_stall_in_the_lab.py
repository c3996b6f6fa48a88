"""Ranks of torch with gloo that wait for each other, on hosts of their own: stacks, and a stall that nobody
watches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.harness import CommandLine, wait_for
from support.jobs import written

HANG = """
import time
import torch, torch.distributed as dist
def load_batch():
    time.sleep(600)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("began", flush=True)
if dist.get_rank() == 2:
    load_batch()
dist.all_reduce(total)
"""
SENTENCE = "ranks 0, 1 and 3 wait in all_reduce (hang.py:12); rank 2 is in load_batch (hang.py:5)"


@pytest.mark.torch
@pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")
def test_hang_of_one_rank_is_explained(lab_cli: CommandLine) -> None:
    pytest.importorskip("torch")
    cli = lab_cli
    cli.write("hang.py", HANG)
    cli.nodes(2)
    options = ("-d", "--nproc-per-node", "2", "--stall-minutes")
    cli.ok("launch", *options, "0", "hang.py")
    written(cli, "began", 4)
    assert cli.ok("stacks").splitlines()[0] == SENTENCE
    assert cli.ok("stacks").count("Work::wait") == 3, "native frames"
    cli.ok("cancel")

    cli.ok("launch", *options, "0.1", "hang.py", CLOUDDDP_HEARTBEAT="2")
    wait_for(
        lambda: json.loads(cli.ok("jobs", "--json"))[-1]["state"] == "failed", "the agents have ended the job"
    )
    done = cli("logs", "-f")
    assert done.returncode == 1
    assert (
        "the job has stalled at rank 2 on node 1: no output, CPU or GPU activity of any rank for 6 s; "
        f"{SENTENCE}" in done.stderr
    )
    job = json.loads(cli.ok("jobs", "--json"))[-1]["id"]
    assert "load_batch" in cli.ok("exec", "--node", "1", "--", f"cat ~/.cloudddp/jobs/{job}/stacks/2.txt")
