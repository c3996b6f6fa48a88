"""Processes that a rank has detached from itself (a daemon with an empty environment): they end with the job,
whoever ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import Node, alive, until
from support.gangs import Processes, kill, parent_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

# Nothing in its environment names the job, and its parents have ended.
DAEMON = """
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


def test_guard_ends_them_after_its_supervisor_was_killed(node: Node, project: Path) -> None:
    node.start(DAEMON + "time.sleep(600)\n", grace=0.2)
    found, pid = Processes(node), daemon(project)
    assert alive(pid)
    kill(found.supervisor)
    until(lambda: not alive(found.guard))
    assert not alive(pid)
    assert node.state().phase.ended


def test_supervisor_ends_them_although_its_record_is_damaged(node: Node, project: Path) -> None:
    end = "while not os.path.exists('go'): time.sleep(0.02)\n"
    node.start(DAEMON + DAMAGE.format(job=node.id()) + end, grace=0.2)
    pid = daemon(project)
    guard = until(lambda: parent_of(parent_of(parent_of(node.rank_pid()))))
    (project / "go").touch()
    until(lambda: not alive(guard))
    assert not alive(pid)
