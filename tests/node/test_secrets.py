"""Values of variables reach the ranks, but neither the node's disk nor a command line, for every end of the
job."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

from support.agentnode import FOREVER, Node, alive, environ, until
from support.exposed import command_lines, files_with

SECRET = "hunter2-the-value-of-a-variable"
CHECK = "import os\nassert os.environ['TOKEN'][:7] + os.environ['V99'] == 'hunter2' + 'x' * 4000\n"


def test_secret_is_in_no_file_and_no_command_line(node: Node) -> None:
    node.start(FOREVER, env={"TOKEN": SECRET})
    rank = node.rank_pid()
    lines = command_lines()
    assert Path(f"/proc/{node.supervisor_pid()}/cmdline").read_bytes() in lines
    assert not any(SECRET.encode() in line for line in lines)
    assert f"TOKEN={SECRET}".encode() in environ(rank).split(b"\0")
    assert files_with(SECRET, node.home) == []
    for path in (node.folder() / "job.json", node.folder() / "state.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.folder().stat().st_mode) == 0o700
    node.cancel()
    assert files_with(SECRET, node.home) == []
    values = {f"V{k}": "x" * 4000 for k in range(100)}  # larger than a pipe
    node.start(CHECK, CHECK, env={**values, "TOKEN": SECRET}, job="job-2")
    assert node.follow("job-2").state.exit_code == 0
    reply = node.set_up('case "$TOKEN" in hunter2*) ;; *) exit 9 ;; esac', env={"TOKEN": SECRET}, job="job-3")
    assert reply.exit_code == 0
    assert files_with(SECRET, node.home) == []


def test_secret_is_in_no_file_after_the_supervisor_was_killed(node: Node) -> None:
    guard = node.start(FOREVER, env={"TOKEN": SECRET})
    node.rank_pid()
    os.kill(node.supervisor_pid(), signal.SIGKILL)
    until(lambda: not alive(guard))
    assert files_with(SECRET, node.home) == []
    assert node.cancel(grace=0).left == 0
    assert files_with(SECRET, node.home) == []
