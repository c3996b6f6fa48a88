"""`idle_minutes`: a node ends by itself once it has neither a job nor an SSH connection."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.harness import CommandLine, remaining, wait_for
from support.simlab import client_of

from cloudddp.sim import control

LIMIT = 6.0  # seconds


@pytest.fixture
def ec2(lab: control.Simulator) -> Any:
    return client_of(lab, "ec2")


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write(
        "cloudddp.toml",
        f'[cluster]\nidle_minutes = {LIMIT / 60}\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n',
    )
    return lab_cli


def test_idle_cluster_ends_by_itself(cli: CommandLine, ec2: Any) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    assert len(remaining(ec2, cli.cluster).instances) == 2
    wait_for(lambda: not remaining(ec2, cli.cluster).instances, "the nodes have terminated")
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_job_keeps_its_nodes(cli: CommandLine, ec2: Any) -> None:
    cli.write("busy.py", f"import time; time.sleep({4 * LIMIT})")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    cli.ok("launch", "-d", "busy.py")
    time.sleep(3 * LIMIT)
    assert len(remaining(ec2, cli.cluster).instances) == 2
    wait_for(lambda: not remaining(ec2, cli.cluster).instances, "the nodes have terminated")


def test_ssh_connection_keeps_its_node(cli: CommandLine, ec2: Any) -> None:
    cli.ok("up", "-n", "1", "-t", "g5.12xlarge")
    assert "done" in cli.ok("exec", "--", f"sleep {3 * LIMIT:g}; echo done")
    wait_for(lambda: not remaining(ec2, cli.cluster).instances, "the node has terminated")


def test_boot_is_not_idle(cli: CommandLine, lab: control.Simulator) -> None:
    """It takes longer than the limit."""
    control.conditions(lab, {"boot": {"ssh_seconds": 2 * LIMIT}})
    try:
        cli.ok("up", "-n", "1", "-t", "g5.12xlarge")
    finally:
        control.conditions(lab, {"boot": {"ssh_seconds": None}})
    cli.ok("exec", "--", "true")
