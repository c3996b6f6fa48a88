"""`idle_minutes`: a node ends by itself once it has neither a job nor an SSH connection."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, remaining, wait_for

from cloudddp.simulator import control

SCALE = 0.05
LIMIT = 5 * 60 * SCALE  # seconds: the shortest


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write(
        "cloudddp.toml", '[cluster]\nidle_minutes = 5\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
    )
    return lab_cli


def up(cli: CommandLine) -> None:
    cli.env["CLOUDDDP_TIME_SCALE"] = str(SCALE)
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")


def test_job_keeps_its_nodes_which_end_by_themselves_after_it(cli: CommandLine, ec2: Any) -> None:
    cli.write("busy.py", f"import time; time.sleep({3 * LIMIT})")
    up(cli)
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert cluster["idle_minutes"] == 5
    assert "after 5 min 00 s without a job and an SSH connection (idle_minutes)" in cli.ok("status")
    cli.ok("launch", "-d", "busy.py")
    time.sleep(2 * LIMIT)
    assert len(instances_of(ec2, cli.cluster)) == 2
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")
    for verb in ("jobs", "status"):
        done = cli(verb)
        assert done.returncode == 1
        assert f"the last one, {cluster['cluster_id']}, ended" in done.stderr, done.stderr
        assert "powered off by themselves" in done.stderr, done.stderr
        assert "idle_minutes = 5" in done.stderr, done.stderr
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing


def test_boot_and_connections_keep_a_node_unless_the_computer_vanished(
    cli: CommandLine, ec2: Any, lab: control.Simulator
) -> None:
    """The boot takes longer than the limit; `ssh` sends something now and then. A process that was stopped
    stands for a computer that vanished: its connection stays established, and nothing comes from it."""
    control.conditions(lab, {"boot": {"ssh_seconds": 1.5 * LIMIT}})
    try:
        up(cli)
    finally:
        control.conditions(lab, {"boot": {"ssh_seconds": None}})
    busy = f"sleep {2 * LIMIT:g}; echo done"
    process = cli.start("exec", "--node", "0", "--", busy)
    assert "done" in cli.ok("ssh", "1", busy)
    assert "done" in process.communicate(timeout=60)[0]
    process = cli.start("exec", "--", "sleep 1000")
    wait_for(lambda: cli.ok("exec", "--", "pgrep -x sleep || true").count("] ") == 2, "it is connected")
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")
    finally:
        process.send_signal(signal.SIGCONT)
