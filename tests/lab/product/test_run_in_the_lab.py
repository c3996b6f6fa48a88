"""`run` on nodes that are lost, and after a job that fails."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, interrupt, no_capacity, remaining, wait_for
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


def test_nodes_of_a_failed_job_stay_and_end_by_themselves(cli: CommandLine, ec2: Any) -> None:
    cli.write("fails.py", "raise SystemExit(7)\n")
    done = cli("run", *NODES, "--keep-on-failure", "3", "fails.py", CLOUDDDP_TIME_SCALE="0.1")
    assert done.returncode == 7, done.stderr
    assert re.search(
        r"the job has failed: its nodes stay for 3 min.* at .*an hour, and end by themselves", done.stderr
    ), done.stderr
    assert len(instances_of(ec2, cli.cluster)) == 2
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def test_nodes_with_files_terminate_after_the_keep_time(cli: CommandLine, ec2: Any) -> None:
    cli.write("writes.py", "open('cloudddp.toml', 'w').write('x')\n")  # a name that `pull` never writes
    done = cli("run", *NODES, "--keep", "3", "writes.py", CLOUDDDP_TIME_SCALE="0.1")
    assert done.returncode == 3, done.stderr
    assert re.search(r"is kept for 3 min 00 s, until .* an hour, at most \$", done.stderr), done.stderr
    assert len(instances_of(ec2, cli.cluster)) == 2
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def test_detached_run_ends_its_nodes_after_the_job(cli: CommandLine, ec2: Any) -> None:
    done = cli("run", "-d", *NODES, "--keep", "3", "count.py", CLOUDDDP_TIME_SCALE="0.1")
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    assert "the nodes end by themselves 3 min 00 s after the job" in done.stderr
    cli.ok("exec", "touch enough")
    wait_for(lambda: jobs(cli)[-1]["state"] == "succeeded", "the job succeeds")
    cli.ok("pull")
    assert (cli.cwd / "results" / job / "runs/done-0").exists()
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


@pytest.mark.parametrize("moment", ["setup", "interrupt", "closed terminal"])
def test_detached_run_that_starts_no_job_leaves_no_node(cli: CommandLine, ec2: Any, moment: str) -> None:
    wait = "exit 3" if moment == "setup" else "echo begins; sleep 600"
    cli.write("cloudddp.toml", f"{TOML}[setup]\nrun = ['{wait}']\n")
    process = cli.start("run", "-d", *NODES, "count.py")
    if moment != "setup":
        wait_for(lambda: "sleep 600" in cli("exec", "ps ax").stdout, "the setup runs")
    if moment == "interrupt":
        code, _, err = interrupt(process)
    else:
        if moment == "closed terminal":
            process.send_signal(signal.SIGHUP)
        _, err = process.communicate()
        code = process.returncode
    assert code == (1 if moment == "setup" else 130), err
    assert "end by themselves" not in err  # they are removed at once
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


def test_interrupt_of_the_job_that_was_resumed_keeps_its_results(cli: CommandLine, ec2: Any) -> None:
    cli.write("count.py", "import pathlib\npathlib.Path('runs').mkdir(exist_ok=True)\n" + COUNT)
    process = cli.start("run", *NODES, "--retries", "1", "count.py")
    job = lose_a_node(cli, process)
    cli.ok("exec", "--", "echo weights > runs/model.pt")
    code, _, err = interrupt(process)
    assert code == 130, err
    assert Path(cli.cwd, "results", job, "runs", "model.pt").read_text() == "weights\n"
    assert remaining(ec2, cli.cluster).nothing


def test_lost_node_is_replaced_once_and_the_results_are_those_of_the_last_job(
    cli: CommandLine, ec2: Any
) -> None:
    """`watch` follows the same job: only one of the two commands can resume it."""
    process = cli.start("run", *NODES, "--retries", "2", "count.py")
    written(cli, "began")
    first = set(instances_of(ec2, cli.cluster))
    watch = cli.start("watch")
    lose_a_node(cli, process)
    assert len(set(instances_of(ec2, cli.cluster)) - first) == 1
    cli.ok("exec", "--", "touch enough")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "next:" not in err  # `run` pulls by itself
    assert "node 1 has ended, and its files are lost" in err
    # It would have waited for the answer of a machine that is gone.
    assert "node 1: its logs were not pulled" not in err
    assert watch.wait(timeout=120) == 0
    assert {path.name for path in Path(cli.cwd, "results").rglob("done-*")} == {"done-0", "done-1"}
    assert remaining(ec2, cli.cluster).nothing


def test_no_capacity_for_a_lost_node_suggests_another_run(cli: CommandLine, ec2: Any) -> None:
    process = cli.start("run", *NODES, "--retries", "1", "count.py", "--epochs", "3")
    written(cli, "began")
    with no_capacity(cli):
        cli.ok("sim", "fault", "kill", "1")
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "node 1 could not be replaced" in err
    assert "run --wait-capacity 2h count.py --epochs 3`" in err
    assert "resume" not in err.splitlines()[-1]
    assert remaining(ec2, cli.cluster).nothing
