"""A job of another version of cloudddp: commands name it and do not modify it; `down` still works."""

from __future__ import annotations

from typing import Any

from cloudddp.agent.protocol import VERSION


def test_job_of_another_agent_version_is_not_modified(cli: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1")
    cli.ok("up", "-n", "1")
    cli.write("work.py", "import time; time.sleep(600)\n")
    job = cli.ok("launch", "-d", "work.py").strip()
    cli.ok("exec", "rm ~/.cloudddp/version")  # version 1 recorded none
    for command in (("jobs",), ("cancel",), ("launch", "work.py")):
        err = cli.fails(1, *command)
        assert f"node 0: job {job} runs under agent version 1, this cloudddp has version {VERSION}" in err
        assert "cancel it with the cloudddp that started it" in err
        assert "`cloudddp down`" in err
    done = cli.exits(0, "down", "-y")
    assert f"job {job} is running on node 0" in done.stdout + done.stderr
