"""A job whose agent was killed on a node: every later client gets the verdict of the other nodes."""

from __future__ import annotations

import json
from typing import Any

from support.gangs import kill
from support.harness import wait_for
from support.jobs import direct, newest, processes, written


def record(cli: Any, job: str, path: str) -> dict[str, Any]:
    """Return a record of the agent about a job on node 1."""
    shown = cli.ok("exec", "--node", "1", f"cat ~/.cloudddp/jobs/{job}/{path}")
    return dict(json.loads(shown))


def test_verdict_stays_when_the_node_that_gave_it_is_gone(cli: Any, ec2: Any) -> None:
    """A rank that was killed with its agent is not the cause."""
    direct(cli, nodes=2)
    cli.write("wait.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    job = cli.ok("launch", "-d", "wait.py").strip()
    written(cli, "began")
    state = record(cli, job, "state.json")
    kill(state["guard"], state["pid"], record(cli, job, "ranks/1.json")["pid"])
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
