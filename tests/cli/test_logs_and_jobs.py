"""`logs`, `jobs`, `cancel` and `exec`: jobs that other commands started."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, wait_for
from support.jobs import SLEEPERS, direct, lines_by_rank, processes, still_running, written


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
        busy = cli(*words)
        assert (busy.returncode, f"job {job} is still running" in busy.stderr) == (1, True), busy
        assert "waiting" not in busy.stderr
    assert "changed" not in cli.ok("exec", "cat wait.py")
    other = cli("logs", "19990101")
    assert (other.returncode, f"jobs: {job}; `cloudddp jobs` lists all" in other.stderr) == (1, True)
    follower = cli.start("logs", "-f", job)
    assert "4 ranks stopped" in cli.ok("cancel", job)
    follower.communicate(timeout=TIMEOUT)
    assert follower.returncode == 130
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")
    assert "had already ended" in cli.ok("cancel", job)
    assert len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 2  # the cluster stays


def test_detached_job_that_fails_on_one_node_ends_on_all(cli: Any) -> None:
    """Nobody follows it: the agents end the rank on the other node, and a cancel finds nothing to do."""
    direct(cli, nodes=2)
    cli.write(
        "half.py",
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\nprint('on', "
        "flush=True)\ntime.sleep(600)",
    )
    cli.ok("launch", "-d", "half.py")
    wait_for(lambda: processes(cli) == 0, "the supervisors end")
    assert "it had already ended (failed)" in cli.ok("cancel")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 9)
    assert job["cause"] == "rank 1 on node 1 exited with code 9"
    assert f"job {job['id']} failed: rank 1 on node 1 exited with code 9\n" in cli("jobs").stderr
    done = cli("logs", "-f")
    assert (done.returncode, "failed: rank 1 on node 1 exited with code 9\n" in done.stderr) == (9, True)


def test_following_does_not_end_a_job_that_restarts(cli: Any) -> None:
    """torchrun restarts the rank that failed."""
    pytest.importorskip("torch")
    cli.env.update(CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_MAX_RESTARTS="1", CLOUDDDP_RENDEZVOUS="static")
    cli.nodes(1)
    cli.write(
        "twice.py",
        "import os, sys, time\ntime.sleep(1)\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' "
        "else 0)",
    )
    cli.ok("launch", "-d", "twice.py")
    assert cli("logs", "-f").returncode == 0


def test_killed_supervisor_ends_the_job_and_is_named(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("launch", "wait.py")
    assert "began" in process.stdout.readline()
    (job,) = json.loads(cli.ok("jobs", "--json"))
    state = cli.ok("exec", f"cat ~/.cloudddp/jobs/{job['id']}/state.json")
    os.kill(json.loads(state)["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, "node 0: the agent of cloudddp has ended there" in err) == (1, True)
    wait_for(lambda: processes(cli) == 0, "nothing of the job is left")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 1)
    later = cli("logs", "-f")
    assert (later.returncode, "node 0: the agent of cloudddp has ended there" in later.stderr) == (1, True)


def test_exec_runs_on_all_nodes_and_returns_the_highest_code(cli: Any) -> None:
    direct(cli, nodes=2)
    done = cli("exec", "--", "sh", "-c", "echo $0 here; exit $CODE", "two words")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[node 0] two words here", "[node 1] two words here"]
    assert cli("exec", "--node", "1", "exit 4").returncode == 4
    assert cli("exec", "--node", "2", "true").returncode == 1


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
