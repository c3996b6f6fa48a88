"""A launcher (torchrun) that was killed: by whom, and what the ranks wrote last."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from support.agentnode import Node, until
from support.gangs import Processes, kill

from agent.ranks import causes
from agent.ranks.causes import Kernel
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.start import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

SIGKILLED = -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "before", "cause"),
    [
        (SIGKILLED, -1, Cause.MEMORY),  # the kernel has counted a kill since
        (SIGKILLED, 1 << 40, Cause.LAUNCHER),
        (-int(signal.SIGSEGV), -1, Cause.LAUNCHER),
        (1, -1, Cause.LAUNCHER),
    ],
)
def test_oom_killer_is_named(tmp_path: Path, code: int, before: int, cause: Cause) -> None:
    (tmp_path / "ranks").mkdir()
    found = causes.of_launcher(tmp_path, 3, code, Kernel(before, 0.0))
    assert (found.failure.cause, found.failure.node, found.failure.rank) == (cause, 3, None)


def test_last_lines_are_those_of_a_rank(node: Node) -> None:
    script = node.script("import time\nprint('last words', flush=True)\ntime.sleep(600)\n")
    process = Process(("sh", "-c", '"$@"; exit $?', "sh"), (sys.executable, script), {"RANK": "0"})
    node.start(processes=[process])
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"last words" in log.read_bytes())
    time.sleep(0.1)
    kill(*Processes(node).launchers)
    until(lambda: node.state().phase.ended)
    verdict = node.state().verdict
    assert verdict is not None
    assert verdict.first == Failure(0, Cause.LAUNCHER, exit_code=137, signal=signal.SIGKILL)
    assert verdict.last_lines == ("last words",)
