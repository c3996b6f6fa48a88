"""`run` on nodes that are lost, and after a job that fails."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, finished, instances_of, remaining, wait_for
from support.jobs import written

TOML = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nheartbeat = 4\nscratch = ["enough"]\n'
NODES = ("-n", "2", "-t", "g5.12xlarge")
# Runs until `enough` exists on its node; writes a result then.
COUNT = """
import os, pathlib, time
print('began', os.environ['RANK'], flush=True)
while not os.path.exists('enough'): time.sleep(0.05)
pathlib.Path('runs').mkdir(exist_ok=True)
pathlib.Path('runs/done-' + os.environ['RANK']).touch()
"""


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("count.py", COUNT)
    return lab_cli


def jobs(cli: CommandLine) -> list[dict[str, Any]]:
    return list(json.loads(cli("jobs", "--json").stdout or "[]"))


def test_nodes_end_by_themselves_after_the_keep_time(cli: CommandLine, ec2: Any) -> None:
    cli.write("script.py", "raise SystemExit(7)")
    words = ("run", *NODES, "--keep-on-failure", "3", "script.py")
    err = cli.fails(7, *words, CLOUDDDP_TIME_SCALE="0.1")
    assert re.search("end by themselves once unused for 3 min 00 s, at .* an hour", err), err
    assert len(instances_of(ec2, cli.cluster)) == 2
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def test_detached_run_whose_terminal_is_closed_during_the_setup_leaves_no_node(
    cli: CommandLine, ec2: Any
) -> None:
    cli.write("cloudddp.toml", f"{TOML}[setup]\nrun = ['echo begins; sleep 600']\n")
    process = cli.start("run", "-d", *NODES, "count.py")
    wait_for(lambda: "sleep 600" in cli("exec", "ps ax").stdout, "the setup runs")
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "was not started" not in err  # they are removed at once
    assert remaining(ec2, cli.cluster).nothing


def lose_a_node(cli: CommandLine, process: subprocess.Popen[str]) -> str:
    """End a node of the first job; return the job that continues it, once it runs."""
    written(cli, "began")
    cli.ok("sim", "fault", "kill", "1")

    def resumed() -> bool:
        assert process.poll() is None, process.communicate()
        return len(jobs(cli)) == 2 and jobs(cli)[-1]["state"] == "running"

    wait_for(resumed, "the job was resumed")
    return str(jobs(cli)[-1]["id"])


def test_lost_node_is_replaced_once_and_the_results_are_those_of_the_last_job(
    cli: CommandLine, ec2: Any
) -> None:
    """`watch` follows the same job: only one of the two commands can resume it."""
    process = cli.start("run", *NODES, "--retries", "2", "count.py")
    written(cli, "began")
    first = set(instances_of(ec2, cli.cluster))
    watch = cli.start("watch")
    wait_for(lambda: "waiting for the first output" in watch.stderr.readline(), "`watch` follows the job")
    lose_a_node(cli, process)
    assert len(set(instances_of(ec2, cli.cluster)) - first) == 1
    cli.ok("exec", "--", "touch enough")
    _, err = finished(process, 0)
    assert "next:" not in err  # `run` pulls by itself
    assert "node 1 has ended, and its files are lost" in err
    # It would have waited for the answer of a machine that is gone.
    assert "node 1: its logs were not pulled" not in err
    finished(watch, 0)
    assert {path.name for path in Path(cli.cwd, "results").rglob("done-*")} == {"done-0", "done-1"}
    assert remaining(ec2, cli.cluster).nothing
