"""Values of variables reach the ranks and stay off the node's disk: while a job runs, after it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentnode import FOREVER, Node, alive, processes_of, until

SECRET = "hunter2-the-value-of-a-variable"
SAY = "import os, sys\nsys.exit(0 if os.environ['TOKEN'].startswith('hunter2') else 9)\n"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "home")
    yield made
    for pid in processes_of(made.home):
        with contextlib.suppress(ProcessLookupError):  # on its way out
            os.kill(pid, signal.SIGKILL)


def files_with_the_secret(home: Path) -> list[str]:
    found = [path for path in home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return [str(path.relative_to(home)) for path in found]


def test_the_rank_has_it_and_no_file_while_the_job_runs(node: Node) -> None:
    node.start(FOREVER, env={"TOKEN": SECRET})
    rank = node.rank_pid()
    assert f"TOKEN={SECRET}".encode() in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    assert files_with_the_secret(node.home) == []
    for path in (node.folder() / "job.json", node.folder() / "state.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    node.kill()
    assert files_with_the_secret(node.home) == []


def test_nor_does_a_file_have_it_after_the_end(node: Node) -> None:
    node.start(SAY, SAY, env={"TOKEN": SECRET})
    found = node.follow()
    assert found.state["exit_code"] == 0
    assert files_with_the_secret(node.home) == []


def test_nor_after_the_death_of_the_supervisor(node: Node) -> None:
    supervisor = node.start(FOREVER, env={"TOKEN": SECRET})
    node.rank_pid()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not alive(supervisor))
    assert files_with_the_secret(node.home) == []
    assert node.kill("job-1", grace=0)["left"] == 0
    assert files_with_the_secret(node.home) == []


def test_a_large_environment_reaches_the_ranks(node: Node) -> None:
    """More than a pipe holds at once."""
    values = {f"V{k}": "x" * 4000 for k in range(100)}
    node.start("import os, sys\nsys.exit(len(os.environ['V99']) != 4000)\n", env={**values, "TOKEN": SECRET})
    assert node.follow().state["exit_code"] == 0


def test_set_up_gets_it_and_leaves_none(node: Node) -> None:
    wanted = {
        "commands": ['case "$TOKEN" in hunter2*) ;; *) exit 9 ;; esac'],
        "inputs": [],
        "env": {"TOKEN": SECRET},
        "job": node.id(),
        "node": 0,
        "script": "script.py",
    }
    assert node.answer("setup", "--project=p", stdin=wanted)["exit_code"] == 0
    assert files_with_the_secret(node.home) == []
