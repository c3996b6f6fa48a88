"""`idle_minutes`: a node ends once it has neither a job nor a client that has logged in and is alive."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, remaining, wait_for

from cloudddp.simulator import control

SCALE = 0.12
LIMIT = 5 * 60 * SCALE  # seconds: the shortest


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write(
        "cloudddp.toml", '[cluster]\nidle_minutes = 5\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
    )
    lab_cli.env["CLOUDDDP_TIME_SCALE"] = str(SCALE)
    return lab_cli


def test_job_keeps_its_nodes_which_end_although_a_computer_vanished(
    cli: CommandLine, ec2: Any, lab: control.Simulator
) -> None:
    """The boot takes longer than the limit. A process that was stopped stands for a computer that vanished:
    its connection stays established, and nothing comes from it."""
    cli.write("busy.py", f"import time; time.sleep({3 * LIMIT})")
    control.conditions(lab, {"boot": {"ssh_seconds": 1.5 * LIMIT}})
    try:
        cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    finally:
        control.conditions(lab, {"boot": {"ssh_seconds": None}})
    (cluster,) = json.loads(cli.ok("status", "--json"))
    assert cluster["idle_minutes"] == 5
    assert "  or once unused for 5 min 00 s (idle_minutes)" in cli.ok("status")
    cli.ok("launch", "-d", "busy.py")
    process = cli.start("exec", "--", "sleep 1000")
    wait_for(lambda: cli.ok("exec", "--", "pgrep -x sleep || true").count("] ") == 2, "it is connected")
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(2 * LIMIT)
        assert len(instances_of(ec2, cli.cluster)) == 2
        wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")
    finally:
        process.send_signal(signal.SIGCONT)
    err = cli.fails(1, "status")
    for text in (f"the last one, {cluster['cluster_id']}, ended", "powered off by th", "idle_minutes = 5"):
        assert text in err, err
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing
