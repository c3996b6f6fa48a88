"""Ending a job on a node: real signals, daemons, processes with a cleared environment, killed supervisors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.agentnode import FOREVER, Node, Refused, alive, processes_of, until

from cloudddp.agent.protocol.jobs import Cause, Failure, KillReply, KillRequest, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

AGENT_ENDED = Verdict(JobPhase.FAILED, 1, 0, Failure(0, Cause.AGENT))


def test_cancel_ends_the_ranks_and_is_recorded(node: Node) -> None:
    node.start(FOREVER, FOREVER)
    pids = [node.rank_pid(0), node.rank_pid(1)]
    answer = node.cancel()
    assert (answer.ranks, answer.left, answer.phase) == (2, 0, JobPhase.CANCELLED)
    assert not any(map(alive, pids))
    found = node.follow().state
    assert (found.phase, found.exit_code) == (JobPhase.CANCELLED, 130)


def test_sigterm_reaches_a_rank_once_and_not_its_workers(node: Node) -> None:
    worker = node.script(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('worker-received', "
        "'w').close())\n"
        "open('worker-ready', 'w').close()\nwhile True: time.sleep(0.02)\n"
    )
    node.start(
        "import os, signal, subprocess, sys, time\n"
        "received = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: received.append(1))\n"
        f"worker = subprocess.Popen([sys.executable, {worker!r}])\n"
        "while not os.path.exists('worker-ready'): time.sleep(0.02)\n"
        "print('ready', flush=True)\n"
        "while not received: time.sleep(0.02)\n"
        "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
        "print('received', len(received), 'worker', os.path.exists('worker-received'), flush=True)\n"
        "worker.kill()\n"
        "raise SystemExit(0)\n"
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    assert node.cancel().left == 0
    assert log.read_bytes() == b"ready\nreceived 1 worker False\n"


COUNTING = (
    "import os, signal, time\n"
    "received = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: (received.append(1), print('received', flush=True)))\n"
    "print('ready', flush=True)\n"
    "while not received: time.sleep(0.02)\n"
    "while not os.path.exists('go'): time.sleep(0.02)\n"
    "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
)


def test_rank_gets_sigterm_once_when_launcher_and_agent_both_send_it(node: Node) -> None:
    node.start(COUNTING)
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    wrapper = int(Path(f"/proc/{node.rank_pid()}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(wrapper, signal.SIGTERM)
    until(lambda: b"received" in log.read_bytes())
    os.kill(wrapper, signal.SIGTERM)
    (node.project / "go").touch()
    assert node.follow().state.ranks[0].exit_code == 0
    assert log.read_bytes() == b"ready\nreceived\n"


def test_launcher_gets_sigterm_once(node: Node) -> None:
    node.start(processes=[Process((sys.executable, node.script(COUNTING)), (), {})])
    (node.project / "go").touch()
    log = node.folder() / "launcher.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    assert node.cancel().left == 0
    assert log.read_bytes() == b"ready\nreceived\n"


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(node: Node) -> None:
    node.start(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n" + FOREVER
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes())
    assert node.cancel(grace=0.3).left == 0
    assert node.state().ranks[0].exit_code == 137


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


def test_daemons_of_a_rank_end_with_the_job(node: Node) -> None:
    node.start(DAEMON, grace=0.2)
    assert node.follow().state.phase is JobPhase.SUCCEEDED
    assert not alive(int((node.project / "daemon").read_text()))


def test_daemon_without_environment_ends_with_the_job(node: Node) -> None:
    """It carries no mark: only the supervisor, which adopts it, leads to it."""
    daemon = "echo $$ > daemon.tmp; mv daemon.tmp daemon; exec sleep 600"
    node.start(
        "import os, subprocess, time\n"
        f"subprocess.run(['sh', '-c', 'exec setsid sh -c \"$0\" &', {daemon!r}], env={{'PATH': "
        f"os.environ['PATH']}})\n"
        "while not os.path.exists('daemon'): time.sleep(0.02)\n",
        grace=0.2,
    )
    assert node.follow().state.phase is JobPhase.SUCCEEDED
    pid = int((node.project / "daemon").read_text())
    try:
        assert not alive(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_daemons_of_a_rank_are_ended_by_cancel(node: Node) -> None:
    node.start(DAEMON + FOREVER)
    pid = int(until(lambda: (node.project / "daemon").exists() and (node.project / "daemon").read_text()))
    answer = node.cancel(grace=0.3)
    assert (answer.left, answer.phase) == (0, JobPhase.CANCELLED)
    assert not alive(pid)


def test_rank_is_killed_with_its_wrapper(node: Node) -> None:
    node.start(FOREVER, grace=1.0)
    pid = node.rank_pid()
    wrapper = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(wrapper, signal.SIGKILL)
    assert node.follow().state.phase is JobPhase.FAILED
    assert not alive(pid)


def test_guard_ends_the_ranks_of_a_killed_supervisor(node: Node) -> None:
    node.start(FOREVER)
    pid = node.rank_pid()
    os.kill(node.supervisor_pid(), signal.SIGKILL)
    found = node.follow().state
    assert (found.phase, found.verdict) == (JobPhase.FAILED, AGENT_ENDED)
    assert not alive(pid)
    assert node.cancel() == KillReply(0, 0, phase=JobPhase.FAILED)


def test_supervisor_of_a_killed_guard_ends_the_ranks(node: Node) -> None:
    guard = node.start(FOREVER)
    pid = node.rank_pid()
    os.kill(guard, signal.SIGKILL)
    found = node.follow().state
    assert found.verdict is not None
    assert found.verdict.first is not None
    assert (found.phase, found.verdict.first.cause) == (JobPhase.FAILED, Cause.AGENT)
    assert "parent was killed" in found.verdict.first.detail
    assert not alive(pid)


def test_ranks_end_without_guard_and_supervisor_and_the_job_is_lost(node: Node) -> None:
    guard = node.start(FOREVER)
    pid, supervisor = node.rank_pid(), node.supervisor_pid()
    os.kill(guard, signal.SIGSTOP)  # it must not end the ranks in between
    os.kill(supervisor, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    until(lambda: not processes_of(node.home))
    assert not alive(pid)
    assert node.state().phase is JobPhase.LOST
    assert node.follow().ended
    assert node.cancel() == KillReply(0, 0, 1, phase=JobPhase.CANCELLED)


def test_ranks_of_a_frozen_supervisor_are_asked_to_end_by_cancel(node: Node) -> None:
    node.start(FOREVER)
    pid, supervisor = node.rank_pid(), node.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    try:
        assert node.cancel().left == 0
        assert not alive(pid)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    found = node.follow().state
    assert (found.phase, found.ranks[0].signal) == (JobPhase.CANCELLED, signal.SIGTERM)


def test_node_runs_one_job_at_a_time(node: Node) -> None:
    node.start(FOREVER, job="job-1")
    pid = node.rank_pid(job="job-1")
    with pytest.raises(Refused, match="still running on this node"):
        node.start(FOREVER, job="job-10")
    assert alive(pid)
    node.cancel()
    node.start("pass", job="job-10")
    assert node.follow("job-10").state.phase is JobPhase.SUCCEEDED
    assert {one.job: one.phase for one in node.jobs()} == {
        node.id("job-1"): JobPhase.CANCELLED,
        node.id("job-10"): JobPhase.SUCCEEDED,
    }


def test_cancel_of_an_ended_job_changes_nothing(node: Node) -> None:
    node.start("pass")
    before = node.follow().state
    answer = node.cancel()
    assert answer == KillReply(0, 0, phase=JobPhase.SUCCEEDED)
    assert node.follow().state == before


def test_kill_of_an_unknown_job_is_not_an_error(node: Node) -> None:
    assert node.cancel("never-seen") == KillReply(ended=0, left=0)


def test_lingering_launcher_is_ended_and_the_job_succeeds(node: Node) -> None:
    launcher = ("sh", "-c", '"$@"; sleep 1000', "sh")
    node.start(processes=[Process(launcher, ("true",), {"RANK": "0"})])
    record = node.folder() / "ranks" / "0.json"
    until(lambda: record.exists() and json.loads(record.read_text())["exit_code"] == 0)
    assert node.state().phase is JobPhase.RUNNING
    found = node.follow().state
    assert (found.phase, found.verdict) == (JobPhase.SUCCEEDED, Verdict(JobPhase.SUCCEEDED, 0, 0))


def test_job_id_is_used_once(node: Node) -> None:
    node.start("pass")
    node.follow()
    with pytest.raises(Refused, match="FileExistsError"):
        node.start("pass")


@pytest.mark.parametrize("job", ["../x", "a/b", "", "a b", "job\n"])
def test_invalid_job_id_is_refused(node: Node, job: str) -> None:
    request = json.dumps({"job": job, "grace": 1, "token": ""})
    done = node.send(KillRequest.STEP, request.encode())
    assert done.returncode != 0
    assert b"not a job id" in done.stderr


def test_process_name_that_is_not_utf8_is_ignored(node: Node, tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes, possibly in the middle of a character."""
    program = tmp_path / "学習プログラム"
    shutil.copy("/bin/sleep", program)
    stranger = subprocess.Popen([program, "60"])
    try:
        node.start(FOREVER)
        pid = node.rank_pid()
        assert node.cancel().left == 0
        assert not alive(pid)
        assert node.state().phase is JobPhase.CANCELLED
    finally:
        stranger.kill()
        stranger.wait()


def test_job_cancelled_before_its_start_does_not_start(node: Node) -> None:
    assert node.cancel() == KillReply(ended=0, left=0)
    with pytest.raises(Refused, match="cancelled before it started"):
        node.start(FOREVER)
    assert node.jobs() == ()


@pytest.mark.parametrize("late", [0.0, 0.02, 0.05, 0.1])
def test_cancel_right_after_start_leaves_no_process(node: Node, late: float) -> None:
    """The supervisor may be in the middle of starting ranks when the kill looks for them."""
    node.start(*[FOREVER] * 4)
    time.sleep(late)
    answer = node.cancel(grace=0.0)
    assert (answer.left, answer.phase) == (0, JobPhase.CANCELLED)
    until(lambda: not processes_of(node.home))
