"""Nodes that are about to end, with the metadata service of namespace nodes: notices, maintenance, `down`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, finished, instances_of, lines_until, wait_for
from support.jobs import newest

SAVE = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    time.sleep(0.5)
    pathlib.Path("runs").mkdir(exist_ok=True)
    pathlib.Path(f"runs/snapshot-{rank}").write_text(rank)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("began", rank, flush=True)
while True: time.sleep(0.05)
"""


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    # The grace of a notice is not stop_grace.
    lab_cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nstop_grace = 0\n')
    lab_cli.write("save.py", SAVE)
    return lab_cli


def up(cli: CommandLine, *options: str) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", *options)  # of its own: a notice stays with its node


def pulled(cli: CommandLine) -> set[str]:
    return {path.name for path in Path(cli.cwd, "results").rglob("snapshot-*")}


def test_scheduled_maintenance_preempts_a_job(cli: CommandLine) -> None:
    up(cli)
    process = cli.start("launch", "save.py", CLOUDDDP_SAVE_MINUTES="1")
    lines_until(process.stdout, "began", count=2)
    cli.ok("sim", "maintenance", "1", "--code", "instance-retirement", "--seconds", "75")
    _, err = finished(process, 143)
    assert re.search(
        r"preempted: node 1 is about to end: AWS retires it at [0-9:]{8} UTC "
        r"\(scheduled maintenance: instance-retirement\)",
        err,
    ), err
    assert pulled(cli) == {"snapshot-0", "snapshot-1"}


def test_watch_replaces_a_node_that_aws_is_about_to_end(cli: CommandLine, ec2: Any) -> None:
    up(cli, "--spot")
    job = cli.ok("launch", "-d", "save.py").strip()
    first = set(instances_of(ec2, cli.cluster))
    process = cli.start("watch", "--times", "1", job)
    lines_until(process.stdout, "began", count=2)
    cli.ok("sim", "interrupt", "1", "--seconds", "60")
    wait_for(lambda: len(json.loads(cli("jobs", "--json").stdout or "[]")) == 2, "the job was resumed")
    wait_for(lambda: newest(cli)["state"] == "running", "it runs")
    nodes = set(instances_of(ec2, cli.cluster))
    assert len(nodes) == 2
    assert len(nodes & first) == 1
    assert pulled(cli) == {"snapshot-0", "snapshot-1"}
    cli.ok("cancel")
    _, err = process.communicate(timeout=300)
    assert f"job {job} is about to lose node 1; resuming it" in err
    assert "node 1 is about to end: it is replaced now" in err
