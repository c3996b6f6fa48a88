"""Stopping a job on a node: real signals, processes that hide, supervisors that die, and nothing of others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agentnode import AGENT, FOREVER, Node, alive, processes_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")


# -- stopping --------------------------------------------------------------------------------------------------


def test_cancelling_ends_the_ranks_and_is_remembered(node: Node) -> None:
    node.start(FOREVER, FOREVER)
    pids = [node.rank_pid(0), node.rank_pid(1)]
    answer = node.kill("job-1", "--cancel")
    assert (answer["known"], answer["left"], answer["state"]) == (True, 0, "cancelled")
    assert answer["ended"] >= 2
    assert not any(map(alive, pids))
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("cancelled", 130)


def test_stopping_without_a_cancel_is_a_failure_with_the_signals_code(node: Node) -> None:
    node.start(FOREVER)
    node.rank_pid()
    assert node.kill()["state"] == "failed"
    assert node.state()["exit_code"] == 143


def test_sigterm_reaches_a_rank_once_and_its_workers_not_at_all(node: Node) -> None:
    worker = node.script(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('worker-told', 'w').close())\n"
        "open('worker-ready', 'w').close()\nwhile True: time.sleep(0.02)\n"
    )
    node.start(
        "import os, signal, subprocess, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        f"worker = subprocess.Popen([sys.executable, {worker!r}])\n"
        "while not os.path.exists('worker-ready'): time.sleep(0.02)\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.02)\n"
        "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
        "print('told', len(told), 'worker', os.path.exists('worker-told'), flush=True)\n"
        "worker.kill()\n"
        "raise SystemExit(0)\n"
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    assert node.kill()["left"] == 0
    assert log.read_bytes() == b"ready\ntold 1 worker False\n"


COUNTING = (
    "import os, signal, time\n"
    "told = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: (told.append(1), print('told', flush=True)))\n"
    "print('ready', flush=True)\n"
    "while not told: time.sleep(0.02)\n"
    "while not os.path.exists('go'): time.sleep(0.02)\n"
    "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
)


def test_a_rank_whose_launcher_and_agent_both_send_sigterm_gets_it_once(node: Node) -> None:
    node.start(COUNTING)
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    wrapper = int(Path(f"/proc/{node.rank_pid()}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(wrapper, signal.SIGTERM)
    until(lambda: b"told" in log.read_bytes())
    os.kill(wrapper, signal.SIGTERM)
    (node.project / "go").touch()
    assert node.follow().state["ranks"][0]["exit_code"] == 0
    assert log.read_bytes() == b"ready\ntold\n"


def test_a_launcher_gets_sigterm_once(node: Node) -> None:
    node.start(processes=[{"argv": [sys.executable, node.script(COUNTING)], "env": {}}])
    (node.project / "go").touch()
    log = node.folder() / "launcher.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    assert node.kill()["left"] == 0
    assert log.read_bytes() == b"ready\ntold\n"


def test_a_rank_that_will_not_stop_is_killed_after_the_grace(node: Node) -> None:
    node.start(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + FOREVER
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes())
    assert node.kill(grace=0.3)["left"] == 0
    assert node.state()["ranks"][0]["exit_code"] == 137


DAEMON = (
    "import os, signal, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    with open('daemon.tmp', 'w') as f: f.write(str(os.getpid()))\n"
    "    os.rename('daemon.tmp', 'daemon')\n"
    "    while True: time.sleep(0.05)\n"
    "while not os.path.exists('daemon'): time.sleep(0.02)\n"
)


def test_processes_that_hid_from_their_rank_end_with_the_job(node: Node) -> None:
    node.start(DAEMON, grace=0.2)
    assert node.follow().state["state"] == "succeeded"
    assert not alive(int((node.project / "daemon").read_text()))


def test_processes_that_hid_from_their_rank_are_found_when_it_is_stopped(node: Node) -> None:
    node.start(DAEMON + FOREVER)
    pid = int(until(lambda: (node.project / "daemon").exists() and (node.project / "daemon").read_text()))
    answer = node.kill("job-1", "--cancel", grace=0.3)
    assert (answer["left"], answer["state"]) == (0, "cancelled")
    assert not alive(pid)


def test_a_wrapper_that_is_killed_takes_its_rank_along(node: Node) -> None:
    node.start(FOREVER, grace=1.0)
    pid = node.rank_pid()
    wrapper = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(wrapper, signal.SIGKILL)
    assert node.follow().state["state"] == "failed"
    assert not alive(pid)


def test_a_job_whose_supervisor_was_killed_is_lost_and_can_still_be_ended(node: Node) -> None:
    supervisor = node.start(FOREVER)
    pid = node.rank_pid()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not alive(supervisor))
    assert node.state()["state"] == "lost"
    assert alive(pid)
    assert node.follow().ended
    answer = node.kill("job-1", "--cancel")
    assert (answer["left"], answer["state"]) == (0, "cancelled")
    assert not alive(pid)


def test_a_node_runs_one_job_at_a_time(node: Node) -> None:
    node.start(FOREVER, job="job-1")
    pid = node.rank_pid(job="job-1")
    with pytest.raises(AssertionError, match="still running on this node"):
        node.start(FOREVER, job="job-10")
    assert alive(pid)
    node.kill("job-1", "--cancel")
    node.start("pass", job="job-10")
    assert node.follow("job-10").state["state"] == "succeeded"
    assert {one["job"]: one["state"] for one in node.answer("jobs")} == {
        node.id("job-1"): "cancelled",
        node.id("job-10"): "succeeded",
    }


def test_stopping_a_job_that_has_ended_changes_nothing(node: Node) -> None:
    node.start("pass")
    before = node.follow().state
    answer = node.kill("job-1", "--cancel")
    nothing = {"known": True, "ended": 0, "ranks": 0, "left": 0}
    assert answer == {**nothing, "state": "succeeded", "standing": None}
    assert node.follow().state == before


def test_stopping_a_job_that_the_node_does_not_know_is_no_error(node: Node) -> None:
    assert node.kill("never-seen") == {"known": False, "ended": 0, "left": 0}


def test_a_launcher_that_lingers_after_its_ranks_can_be_ended_and_the_job_has_succeeded(node: Node) -> None:
    argv = ["sh", "-c", '"$@"; sleep 1000', "sh", "@RANK@", "true"]
    node.start(processes=[{"argv": argv, "env": {"RANK": "0"}}])
    record = node.folder() / "ranks" / "0.json"
    until(lambda: record.exists() and json.loads(record.read_text())["exit_code"] == 0)
    assert node.state()["state"] == "running"
    assert node.kill("job-1", "--finished")["state"] == "succeeded"


def test_a_job_id_is_used_once(node: Node) -> None:
    node.start("pass")
    node.follow()
    with pytest.raises(AssertionError, match="FileExistsError"):
        node.start("pass")


@pytest.mark.parametrize("job", ["../x", "a/b", "", "a b", "job\n"])
def test_a_job_id_that_is_not_one_plain_word_is_refused(node: Node, job: str) -> None:
    done = node.call("kill", "--job", job)
    assert done.returncode != 0
    assert b"not a job id" in done.stderr


# -- secrets ---------------------------------------------------------------------------------------------------


def test_variables_of_a_job_reach_its_ranks_and_nobody_elses_eyes(node: Node) -> None:
    node.start(
        "import os\nprint(os.environ['TOKEN'], flush=True)\n" + FOREVER, env={"TOKEN": "hunter2-of-this-test"}
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes() == b"hunter2-of-this-test\n")
    shown = []
    for entry in Path("/proc").iterdir():
        try:
            shown.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    assert any(str(AGENT).encode() in line and b"supervise" in line for line in shown)
    assert not any(b"hunter2-of-this-test" in line for line in shown)
    assert stat.S_IMODE(node.folder().stat().st_mode) == 0o700
    assert not (node.folder() / "job.json").stat().st_mode & 0o022


def test_a_process_whose_name_is_no_utf8_disturbs_nobody(node: Node, tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes, in the middle of a character if need be."""
    program = tmp_path / "学習プログラム"
    shutil.copy("/bin/sleep", program)
    stranger = subprocess.Popen([program, "60"])
    try:
        node.start(FOREVER)
        pid = node.rank_pid()
        assert node.kill("job-1", "--cancel")["left"] == 0
        assert not alive(pid)
        assert node.state()["state"] == "cancelled"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_job_that_was_cancelled_before_it_came_does_not_start(node: Node) -> None:
    assert node.kill("job-1", "--cancel") == {"known": False, "ended": 0, "left": 0}
    with pytest.raises(AssertionError, match="cancelled before it started"):
        node.start(FOREVER)
    assert node.answer("jobs") == []


@pytest.mark.parametrize("late", [0.0, 0.02, 0.05, 0.1])
def test_a_kill_right_after_the_start_leaves_nothing(node: Node, late: float) -> None:
    """The supervisor may be in the middle of starting ranks when the kill looks for them."""
    node.start(*[FOREVER] * 4)
    time.sleep(late)
    answer = node.kill("job-1", "--cancel", grace=0.0)
    assert (answer["left"], answer["state"]) == (0, "cancelled")
    until(lambda: not processes_of(node.home))
