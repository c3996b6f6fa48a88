"""What a command imports: each module takes time before the first call."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from support.harness import TIMEOUT
from support.jobs import direct


def imported(cli: Any, *words: str) -> set[str]:
    """Return the modules that a command imports, as Python itself reports them. The command has to
    succeed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cloudddp", *words],
        cwd=cli.cwd,
        env=cli.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_verbs_import_only_what_they_need(cli: Any) -> None:
    direct(cli)
    cli.write("hello.py", "print('hello')")
    cli.ok("launch", "hello.py")  # status reads the record of it
    neither = {"moto", "cloudddp.cluster.plan"}
    status = imported(cli, "status")
    assert {"boto3.session", "cloudddp.job.launch_record"} <= status
    assert not status & (neither | {"paramiko", "cloudddp.agent.client", "cloudddp.agent.protocol.start"})
    exec_ = imported(cli, "exec", "--", "true")
    assert "paramiko" in exec_
    assert not exec_ & (
        neither | {"cloudddp.job.sync", "cloudddp.job.launch", "cloudddp.agent.protocol.start"}
    )
