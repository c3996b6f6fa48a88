"""`idle_minutes`: a node ends by itself once it has neither a job nor an SSH connection."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, remaining, wait_for

from cloudddp.sim import control

SCALE = 0.05
LIMIT = 5 * 60 * SCALE  # seconds: the shortest


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write(
        "cloudddp.toml", '[cluster]\nidle_minutes = 5\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
    )
    return lab_cli


def up(cli: CommandLine, nodes: int) -> None:
    cli.ok("up", "-n", str(nodes), "-t", "g5.12xlarge", CLOUDDDP_TIME_SCALE=str(SCALE))


def test_idle_cluster_ends_by_itself(cli: CommandLine, ec2: Any) -> None:
    up(cli, 1)  # an older cluster of the same name
    (older,) = json.loads(cli.ok("status", "--json"))
    cli.ok("down", "-y")
    up(cli, 2)
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert cluster["idle_minutes"] == 5
    assert len(instances_of(ec2, cli.cluster)) == 2
    assert "after 5 min 00 s without a job and an SSH connection (idle_minutes)" in cli.ok("status")
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")
    for verb in ("jobs", "status"):
        done = cli(verb)
        assert done.returncode == 1
        assert f"the last one, {cluster['cluster_id']}, ended" in done.stderr, done.stderr
        assert older["cluster_id"] not in done.stderr
        assert "powered off by themselves" in done.stderr, done.stderr
        assert "idle_minutes = 5" in done.stderr, done.stderr
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_job_keeps_its_nodes(cli: CommandLine, ec2: Any) -> None:
    cli.write("busy.py", f"import time; time.sleep({3 * LIMIT})")
    up(cli, 2)
    cli.ok("launch", "-d", "busy.py")
    time.sleep(2 * LIMIT)
    assert len(instances_of(ec2, cli.cluster)) == 2
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def test_ssh_connection_keeps_its_node(cli: CommandLine, ec2: Any) -> None:
    up(cli, 1)
    out = cli.ok("exec", "--", f"sleep {2 * LIMIT:g}; echo done", CLOUDDDP_TIME_SCALE=str(SCALE))
    assert "done" in out
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the node has terminated")


def test_quiet_session_keeps_its_node(cli: CommandLine, ec2: Any) -> None:
    """The client of `cloudddp ssh` sends something now and then."""
    up(cli, 1)
    out = cli.ok("ssh", "0", f"sleep {2 * LIMIT:g}; echo done", CLOUDDDP_TIME_SCALE=str(SCALE))
    assert "done" in out


def test_connection_of_a_computer_that_vanished_does_not_count(cli: CommandLine, ec2: Any) -> None:
    """A stopped process: its connection stays established, and nothing comes from it."""
    up(cli, 1)
    process = cli.start("exec", "--", "sleep 1000")
    wait_for(lambda: "sleep" in cli.ok("exec", "--", "pgrep -l sleep || true"), "it is connected")
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not instances_of(ec2, cli.cluster), "the node has terminated")
    finally:
        process.send_signal(signal.SIGCONT)


def test_boot_is_not_idle(cli: CommandLine, lab: control.Simulator) -> None:
    """It takes longer than the limit."""
    control.conditions(lab, {"boot": {"ssh_seconds": 1.5 * LIMIT}})
    try:
        up(cli, 1)
    finally:
        control.conditions(lab, {"boot": {"ssh_seconds": None}})
    cli.ok("exec", "--", "true")


@pytest.mark.parametrize("minutes", ["4.9", "0.1", "-1", "nan"])
def test_shorter_limit_is_refused(lab_cli: CommandLine, minutes: str) -> None:
    done = lab_cli("up", "--idle-minutes", minutes, "--dry-run")
    assert done.returncode == 2
    assert "allowed: 0, or a number from 5 to 20160" in done.stderr
