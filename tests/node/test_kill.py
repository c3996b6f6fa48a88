"""Ending a job on a node: real signals, daemons, processes with a cleared environment, killed supervisors."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import FOREVER, Node, Refused, alive, first_of, gone, until
from support.gangs import Processes, kill, parent_of

from cloudddp.agent.protocol.jobs import Cause, KillReply, KillRequest, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process


def test_sigterm_reaches_a_rank_once_and_not_its_workers(node: Node) -> None:
    """Although its launcher and the agent both send it to the wrapper."""
    worker = node.script(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('worker-received', "
        "'w').close())\n"
        "open('worker-ready', 'w').close()\nwhile True: time.sleep(0.02)\n"
    )
    node.start(
        "import os, signal, subprocess, sys, time\n"
        "received = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: (received.append(1), print('received', flush=True)))\n"
        f"worker = subprocess.Popen([sys.executable, {worker!r}])\n"
        "while not os.path.exists('worker-ready'): time.sleep(0.02)\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
        "print('worker', os.path.exists('worker-received'), flush=True)\n"
        "worker.kill()\n"
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    wrapper = parent_of(node.rank_pid())
    os.kill(wrapper, signal.SIGTERM)
    until(lambda: b"received" in log.read_bytes())
    os.kill(wrapper, signal.SIGTERM)
    (node.project / "go").touch()
    assert node.cancel().left == 0
    assert log.read_bytes() == b"ready\nreceived\nworker False\n"


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


def test_daemons_of_a_rank_are_ended_by_cancel(node: Node) -> None:
    node.start(DAEMON + FOREVER, FOREVER)
    pid = int(until(lambda: (node.project / "daemon").exists() and (node.project / "daemon").read_text()))
    pids = [pid, node.rank_pid(0), node.rank_pid(1)]
    answer = node.cancel(grace=0.3)
    assert (answer.ranks, answer.left, answer.phase) == (2, 0, JobPhase.CANCELLED)
    assert not any(map(alive, pids))
    found = node.follow().state
    assert (found.phase, found.exit_code) == (JobPhase.CANCELLED, 130)


def test_supervisor_of_a_killed_guard_ends_the_ranks(node: Node) -> None:
    guard = node.start(FOREVER)
    pid = node.rank_pid()
    os.kill(guard, signal.SIGKILL)
    found = node.follow().state
    assert (found.phase, first_of(found).cause) == (JobPhase.FAILED, Cause.AGENT)
    assert "parent was killed" in first_of(found).detail
    assert not alive(pid)


def test_ranks_end_without_guard_and_supervisor_and_the_job_is_lost(node: Node) -> None:
    guard = node.start(FOREVER)
    pid, supervisor = node.rank_pid(), node.supervisor_pid()
    os.kill(guard, signal.SIGSTOP)  # it must not end the ranks in between
    os.kill(supervisor, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    gone(node.home)
    assert not alive(pid)
    assert node.state().phase is JobPhase.LOST
    assert node.follow().ended
    assert node.cancel() == KillReply(0, 0, 1, phase=JobPhase.CANCELLED)


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_ranks_of_a_frozen_supervisor_are_asked_to_end_by_cancel(node: Node, then: signal.Signals) -> None:
    """Also where its guard decides: the command has said that the job is cancelled."""
    node.start(FOREVER)
    pid, supervisor = node.rank_pid(), node.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    try:
        assert node.cancel().left == 0
        assert not alive(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a slow computer: its guard has killed it
            os.kill(supervisor, then)
    found = node.follow().state
    assert (found.verdict and found.verdict.phase, found.phase) == (JobPhase.CANCELLED, JobPhase.CANCELLED)
    assert found.ranks[0].signal == signal.SIGTERM


def test_node_runs_one_job_at_a_time(node: Node) -> None:
    node.start(FOREVER, job="job-1")
    pid = node.rank_pid(job="job-1")
    with pytest.raises(Refused, match="still running on this node"):
        node.start(FOREVER, job="job-10")
    assert alive(pid)
    node.cancel()
    node.start("pass", job="job-10")
    assert node.follow("job-10").state.phase is JobPhase.SUCCEEDED
    found = {one.job: one.phase for one in node.jobs()}
    assert found == {node.id("job-1"): JobPhase.CANCELLED, node.id("job-10"): JobPhase.SUCCEEDED}


def test_lingering_launcher_is_ended_and_the_job_succeeds(node: Node) -> None:
    """And a cancel of a job that has ended changes nothing."""
    launcher = ("sh", "-c", '"$@"; sleep 1000', "sh")
    node.start(processes=[Process(launcher, ("true",), {"RANK": "0"})])
    record = node.folder() / "ranks" / "0.json"
    until(lambda: record.exists() and json.loads(record.read_text())["exit_code"] == 0)
    assert node.state().phase is JobPhase.RUNNING
    found = node.follow().state
    assert (found.phase, found.verdict) == (JobPhase.SUCCEEDED, Verdict(JobPhase.SUCCEEDED, 0, 0))
    assert node.cancel() == KillReply(0, 0, phase=JobPhase.SUCCEEDED)
    assert node.follow().state == found
    with pytest.raises(Refused, match="File exists"):
        node.start("pass")


def test_job_cancelled_before_its_start_does_not_start(node: Node) -> None:
    assert node.cancel() == KillReply(ended=0, left=0)
    with pytest.raises(Refused, match="cancelled before it started"):
        node.start(FOREVER)
    assert node.jobs() == ()


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_cancel_right_after_start_leaves_no_process(node: Node, late: float) -> None:
    """The supervisor may be in the middle of starting ranks when the kill looks for them."""
    node.start(*[FOREVER] * 4)
    time.sleep(late)
    answer = node.cancel(grace=0.0)
    assert (answer.left, answer.phase) == (0, JobPhase.CANCELLED)
    gone(node.home)


# -- daemons that lost their environment and parents: they end with the job, whoever ends it -----------------


# Nothing in its environment names the job, and its parents have ended.
DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); open('daemon', 'w').write(str(__import__('os').getpid())); time.sleep(600)"
        os.execve(sys.executable, [sys.executable, "-c", code], {})
    os._exit(0)
os.wait()
while not os.path.exists("daemon") or not open("daemon").read():
    time.sleep(0.02)
open("ready", "w").close()
"""  # noqa: E501
DAMAGE = """
path = os.path.expanduser("~/.cloudddp/jobs/{job}/state.json")
open(path + ".x", "w").write("{{}}")
os.replace(path + ".x", path)
"""


def daemon(project: Path) -> int:
    until((project / "ready").exists)
    return int((project / "daemon").read_text())


@pytest.fixture
def project(node: Node) -> Iterator[Path]:
    yield node.project
    if (node.project / "daemon").exists():
        pid = int((node.project / "daemon").read_text())
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("is_full", [False, True])
def test_guard_ends_them_after_its_supervisor_was_killed(node: Node, project: Path, is_full: bool) -> None:
    """Also where it can write to no file, as on a full disk."""
    node.start(DETACHED + "time.sleep(600)\n", grace=0.2)
    found, pid = Processes(node), daemon(project)
    assert alive(pid)
    if is_full:
        resource.prlimit(found.guard, resource.RLIMIT_FSIZE, (0, 0))
    kill(found.supervisor)
    until(lambda: not alive(found.guard))
    assert not alive(pid)
    assert node.state().phase.ended


def test_supervisor_ends_them_although_its_record_is_damaged(node: Node, project: Path) -> None:
    end = "while not os.path.exists('go'): time.sleep(0.02)\n"
    node.start(DETACHED + DAMAGE.format(job=node.id()) + end, grace=0.2)
    pid = daemon(project)
    guard = until(lambda: parent_of(parent_of(parent_of(node.rank_pid()))))
    (project / "go").touch()
    until(lambda: not alive(guard))
    assert not alive(pid)


def test_job_is_forgotten_once_it_has_ended(node: Node) -> None:
    node.start(FOREVER)
    node.rank_pid()
    request = KillRequest(node.id(), 1.0, "a-token", forget=True)
    assert node.call(request).phase is JobPhase.CANCELLED
    assert not node.folder().exists()
    assert node.jobs() == ()
    node.start("", job="job-2")
    node.ended("job-2")
    node.cancel("job-2")
    assert node.folder("job-2").exists()
