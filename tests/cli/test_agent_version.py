"""A job of another version of cloudddp: commands name it and do not modify it; `down` still works."""

from __future__ import annotations

import json
from typing import Any

from support.harness import wait_for

from cloudddp.agent.protocol import VERSION

WAIT_FOR_GO = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"


def test_job_of_another_agent_version_is_not_modified(cli: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    cli.ok("up", "-n", "1")
    cli.write("work.py", WAIT_FOR_GO)
    cli.ok("launch", "-d", "work.py")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    cli.ok("exec", "rm ~/.cloudddp/version")  # version 1 recorded none
    for command in (("jobs",), ("cancel",), ("logs",), ("pull",), ("sync",), ("launch", "work.py")):
        done = cli(*command)
        assert done.returncode == 1, command
        assert (
            f"node 0: job {job['id']} runs under agent version 1, this cloudddp has version {VERSION}"
            in done.stderr
        )
        assert "cancel it with the cloudddp that started it" in done.stderr
        assert "`cloudddp down`" in done.stderr
    cli.ok("exec", "touch ~/project/go")
    wait_for(lambda: cli("jobs").returncode == 0, "the job has ended")
    (ended,) = json.loads(cli.ok("jobs", "--json"))
    assert (ended["id"], ended["state"], ended["exit_code"]) == (job["id"], "succeeded", 0)
    assert cli("launch", "work.py").returncode == 0


def test_down_reports_the_job_of_another_agent_version(cli: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    cli.ok("up", "-n", "1")
    cli.write("work.py", WAIT_FOR_GO)
    cli.ok("launch", "-d", "work.py")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    cli.ok("exec", "rm ~/.cloudddp/version")
    done = cli("down", "-y")
    assert done.returncode == 0, done.stderr
    assert f"job {job['id']} is running on node 0" in done.stdout + done.stderr
