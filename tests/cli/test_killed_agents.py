"""Jobs whose agent (guard and supervisor) was killed on a node: every later client gets the verdict of the
other nodes."""

from __future__ import annotations

import json
from typing import Any

from support.gangs import kill
from support.harness import wait_for
from support.jobs import direct, newest, processes, written

WAIT = "import time\nprint('began', flush=True)\ntime.sleep(600)\n"


def agent(cli: Any, job: str, node: int) -> list[int]:
    """Return the guard and the supervisor of a job on a node."""
    shown = cli.ok("exec", "--node", str(node), f"cat ~/.cloudddp/jobs/{job}/state.json").split("] ", 1)[1]
    state = json.loads(shown)
    return [state["guard"], state["pid"]]


def test_verdict_stays_when_the_node_that_gave_it_is_gone(cli: Any, ec2: Any) -> None:
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\nstop_grace = 1\n')
    cli.write("wait.py", WAIT)
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    job = cli.ok("launch", "-d", "wait.py").strip()
    written(cli, "began")
    kill(*agent(cli, job, 1))
    wait_for(lambda: processes(cli) == 0, "no process is left")
    before, logs = newest(cli), cli("logs", "-f")
    assert (before["state"], before["exit_code"], logs.returncode) == ("failed", 1, 1)
    assert "node 1: the agent of cloudddp has ended there" in logs.stderr
    nodes = json.loads(cli.ok("status", "--json"))[0]["nodes"]
    ec2.terminate_instances(InstanceIds=[nodes[0]["instance_id"]])
    wait_for(lambda: newest(cli)["nodes"] == [1], "the other node has terminated")
    after, logs_after = newest(cli), cli("logs", "-f")
    same = ("state", "exit_code", "started", "ended")
    assert [after[key] for key in same] == [before[key] for key in same]
    assert logs_after.stderr.splitlines()[-1:] == logs.stderr.splitlines()[-1:]
    assert (logs_after.returncode, "the agent of cloudddp has ended there" in logs_after.stderr) == (1, True)


def test_rank_that_was_killed_with_its_agent_is_not_the_cause(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    job = cli.ok("launch", "-d", "wait.py").strip()
    written(cli, "began", 1)
    shown = cli.ok("exec", "--node", "0", f"cat ~/.cloudddp/jobs/{job}/ranks/0.json").split("] ", 1)[1]
    kill(*agent(cli, job, 0), json.loads(shown)["pid"])
    wait_for(lambda: processes(cli) == 0, "no process is left")
    done = cli("logs", "-f")
    assert (done.returncode, "node 0: the agent of cloudddp has ended there" in done.stderr) == (1, True)
    assert newest(cli)["state"] == "failed"
