"""`logs`, `jobs`, `cancel` and `exec`: jobs that other commands started."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from support.harness import finished, wait_for
from support.jobs import SLEEPERS, direct, homes, lines_by_rank, nodes_of, processes, still_running, written

from cloudddp.agent.protocol import VERSION


def test_no_line_is_lost_at_the_end(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write(
        "flood.py",
        "for i in range(5000): print(i)\nimport sys; sys.stdout.write('the end'); sys.stdout.flush()",
    )
    expected = [str(i) for i in range(5000)] + ["the end"]
    assert lines_by_rank(cli.ok("launch", "flood.py")) == {0: expected, 1: expected}
    # following ends although a node does not know the job
    cli.ok("exec", "--node", "1", "rm -r ~/.cloudddp/jobs/*")
    assert lines_by_rank(cli.ok("logs", "-f"))[0] == expected


def test_detached_job_is_followed_and_cancelled_from_other_processes(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("wait.py", SLEEPERS)
    job = cli.ok("launch", "-d", "wait.py").strip()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-z]{4}", job)
    written(cli, "began", 4)
    (shown,) = json.loads(cli.ok("jobs", "--json"))
    assert (shown["id"], shown["state"], shown["nodes"]) == (job, "running", [0, 1])
    cli.write("wait.py", "print('changed')")
    for words in (("launch", "wait.py"), ("resume",)):
        busy = cli.fails(1, *words)
        assert f"job {job} is still running" in busy
        assert "waiting" not in busy
    assert {(home / "project/wait.py").read_text() for home in homes(cli)} == {SLEEPERS}
    assert f"jobs: {job}; `cloudddp jobs` lists all" in cli.fails(1, "logs", "19990101")
    assert f"nothing to pull yet: job {job} is running and has not written any" in cli.fails(1, "pull")
    follower = cli.start("logs", "-f", job)
    assert "4 ranks stopped" in cli.ok("cancel", job)
    finished(follower, 130)
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")
    assert "had already ended" in cli.ok("cancel", job)
    assert [node["state"] for node in nodes_of(cli)] == ["running"] * 2  # the cluster stays


def test_exec_passes_bytes_that_are_not_utf8(cli: Any, tmp_path: Path) -> None:
    direct(cli, nodes=1)
    word = os.fsdecode(b"bad\xff")
    for command, shown in (
        (("echo", word), b"bad\xff"),
        ((f"echo {word}; printf '\\033[2J\\xfe'",), b"bad\xff\n\\x1b[2J\xfe"),
    ):
        assert cli.to_files(tmp_path, "exec", "--", *command).returncode == 0
        assert (tmp_path / "out.txt").read_bytes() == shown + b"\n"
    assert cli.to_files(tmp_path, "exec", "--", f"echo {word} >&2").returncode == 0
    assert (tmp_path / "err.txt").read_bytes() == b"bad\\xff\n"


def test_job_of_another_agent_version_is_not_modified(cli: Any) -> None:
    """Commands name it; `down` still works."""
    direct(cli)
    cli.shared = None
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
