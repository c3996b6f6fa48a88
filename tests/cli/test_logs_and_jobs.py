"""`logs`, `jobs`, `cancel` and `exec`: jobs that other commands started."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, wait_for
from support.jobs import SLEEPERS, direct, lines_by_rank, processes, still_running, written


def test_no_line_is_lost_at_the_end(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write(
        "flood.py",
        "for i in range(20000): print(i)\nimport sys; sys.stdout.write('the end'); sys.stdout.flush()",
    )
    logs = lines_by_rank(cli.ok("launch", "flood.py"))
    expected = [str(i) for i in range(20000)] + ["the end"]
    assert sorted(logs) == [0, 1, 2, 3]
    for lines in logs.values():
        assert lines == expected


def test_unencodable_characters_are_replaced(cli: Any) -> None:
    direct(cli)
    cli.write("uni.py", "print('ok \\u2713')")
    done = cli("launch", "uni.py", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "ok ?" in done.stdout


def test_logs_can_be_limited_to_a_rank(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hi.py", "print('hi')")
    cli.ok("launch", "hi.py")
    assert sorted(lines_by_rank(cli.ok("logs", "--rank", "1"))) == [1]
    assert sorted(lines_by_rank(cli.ok("logs", "-f"))) == [0, 1]
    for words in (("--rank", "9"), ("-f", "--rank", "0", "--rank", "2")):
        done = cli("logs", *words)
        assert done.returncode == 2
        assert f"has no rank {words[-1]}" in done.stderr
        assert "its ranks are 0 to 1" in done.stderr


# A python3 before the node's own on PATH: it fails for the step `follow` of the agent.
BROKEN = """#!/bin/sh
[ "$5" = serve ] || exec %s "$@"
exec %s -IS -c "
import sys
sys.path.insert(0, sys.argv[1])
del sys.argv[0]
from agent import __main__ as agent
from agent.steps import follow
follow.step = lambda request: sys.stderr.write('disk error\\n') and 5
sys.exit(agent.main())
" "$4" "$5"
"""
BREAK = (
    "cd ~/../bin && { [ ! -e python3 ] || mv python3 whole; } && cp ~/project/broken.sh python3 && chmod "
    "+x python3"
)
REPAIR = "cd ~/../bin && rm python3 && { [ ! -e whole ] || mv whole python3; }"


def test_logs_name_a_node_that_cannot_be_read(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hi.py", "print('hi')")
    cli.write("broken.sh", BROKEN % (sys.executable, sys.executable))
    cli.ok("launch", "hi.py")
    cli.ok("exec", "--node", "1", BREAK)
    try:
        done = cli("logs")
    finally:
        cli.ok("exec", "--node", "1", REPAIR)
    assert lines_by_rank(done.stdout) == {0: ["hi"]}
    assert done.returncode == 1
    assert "cannot read all logs of node 1: disk error" in done.stderr


def test_detached_job_is_followed_and_cancelled_from_other_processes(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("wait.py", SLEEPERS)
    job = cli.ok("launch", "-d", "wait.py").strip()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-z]{4}", job)
    written(cli, "began", 4)
    (shown,) = json.loads(cli.ok("jobs", "--json"))
    assert (shown["id"], shown["state"], shown["nodes"]) == (job, "running", [0, 1])
    busy = cli("launch", "wait.py")
    assert busy.returncode == 1
    assert f"job {job} is still running" in busy.stderr
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


def test_logs_and_jobs_show_the_same_duration(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("done.py", "import time; time.sleep(1)")
    job = cli.ok("launch", "-d", "done.py").strip()
    (record,) = wait_for(
        lambda: [r for r in json.loads(cli.ok("jobs", "--json")) if r["ended"]], "the job has ended"
    )
    assert record["id"] == job
    time.sleep(2)  # must not be counted
    shown = next(line for line in cli.ok("jobs").splitlines() if job in line)
    messages = cli("logs", "-f").stderr
    assert f"job {job} finished: 4 ranks, {re.split('  +', shown)[3]}\n" in messages


def test_following_does_not_end_a_job_that_restarts(cli: Any) -> None:
    """torchrun restarts the rank that failed."""
    pytest.importorskip("torch")
    cli.env.update(CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_MAX_RESTARTS="1", CLOUDDDP_RENDEZVOUS="static")
    cli.ok("up", "-n", "1")
    cli.write(
        "twice.py",
        "import os, sys, time\ntime.sleep(1)\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' "
        "else 0)",
    )
    cli.ok("launch", "-d", "twice.py")
    assert cli("logs", "-f").returncode == 0


def test_following_ends_where_a_node_does_not_know_the_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "print('ran')")
    cli.ok("launch", "ok.py")
    cli.ok("exec", "--node", "1", "rm -r ~/.cloudddp/jobs/*")
    assert "ran" in cli.ok("logs", "-f")


def test_killed_supervisor_ends_the_job_and_is_named(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("launch", "wait.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()
    (job,) = json.loads(cli.ok("jobs", "--json"))
    state = cli.ok("exec", f"cat ~/.cloudddp/jobs/{job['id']}/state.json").split("] ", 1)[1]
    os.kill(json.loads(state)["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, "node 0: the agent of cloudddp has ended there" in err) == (1, True)
    wait_for(lambda: processes(cli) == 0, "nothing of the job is left")
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "failed"


def test_daemon_with_clean_environment_ends_with_the_job(cli: Any) -> None:
    direct(cli)
    cli.write(
        "daemon.py",
        "import subprocess, time\nprint(subprocess.Popen(['setsid', 'env', '-i', 'sleep', '601']).pid, "
        "flush=True)\ntime.sleep(600)",
    )
    process = cli.start("launch", "daemon.py")
    assert process.stdout is not None
    pid = int(process.stdout.readline().split("] ")[1])
    assert Path(f"/proc/{pid}").exists()
    interrupt(process)
    wait_for(lambda: "sleep" not in _program(pid), "the daemon has ended")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


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
        ((f"echo {word}; printf '\\033[2J\\xfe'",), b"bad\xff\n[node 0] \\x1b[2J\xfe"),
    ):
        assert cli.to_files(tmp_path, "exec", "--", *command).returncode == 0
        assert (tmp_path / "out.txt").read_bytes() == b"[node 0] " + shown + b"\n"
    assert cli.to_files(tmp_path, "exec", "--", f"echo {word} >&2").returncode == 0
    assert (tmp_path / "err.txt").read_bytes() == b"[node 0] bad\\xff\n"


def test_unknown_job_lists_the_newest_ones(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "")
    jobs = [
        cli.ok("launch", "-d", "ok.py").strip()
        for _ in range(4)
        if wait_for(lambda: processes(cli) == 0, "idle")
    ]
    done = cli("logs", "19990101")
    assert done.returncode == 1
    assert f"the newest jobs: {', '.join(jobs[1:])}; `cloudddp jobs` lists all" in " ".join(
        done.stderr.split()
    )


def test_resume_of_a_running_job_is_refused_without_waiting(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    job = cli.ok("launch", "-d", "wait.py").strip()
    done = cli("resume")
    assert done.returncode == 1
    assert f"job {job} is still running" in done.stderr
    assert "waiting" not in done.stderr
    cli.ok("cancel")
