"""How a job ends on a node, in real processes: exit codes, the rank that failed first, launchers that
fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.agentnode import WAITING, Node, alive, until
from support.gangs import Processes, freeze, thaw

from agent.node import store
from agent.ranks import attempt
from agent.ranks.attempt import Attempt, Look
from cloudddp.agent.protocol.jobs import Cause, RankRecord
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

RANK_ZERO = {"RANK": "0"}


@pytest.mark.parametrize(
    ("code", "phase", "exit_code", "number"),
    [
        ("pass", JobPhase.SUCCEEDED, 0, None),
        ("raise SystemExit(7)", JobPhase.FAILED, 7, None),
        ("import os; os.abort()", JobPhase.FAILED, 134, 6),
    ],
)
def test_exit_code_is_that_of_the_rank(
    node: Node, code: str, phase: JobPhase, exit_code: int, number: int | None
) -> None:
    node.start(code)
    found = node.follow().state
    assert (found.phase, found.exit_code) == (phase, exit_code)
    (record,) = found.ranks
    assert (record.rank, record.exit_code, record.signal) == (0, exit_code, number)
    assert found.started is not None
    assert record.ended is not None
    assert found.ended is not None
    assert found.started <= record.ended <= found.ended


def test_rank_that_cannot_start_is_explained_in_its_log(node: Node) -> None:
    node.start(processes=[Process((), ("no-such-program",), RANK_ZERO)])
    found = node.follow()
    assert found.state.exit_code == 127
    assert b"no-such-program" in found.logs[0]


def test_launcher_that_cannot_start_is_the_cause(node: Node) -> None:
    node.start(processes=[Process(("/no/such/python",), ("x",), {})])
    assert (verdict := node.follow().state.verdict) is not None
    assert (first := verdict.first) is not None
    assert (verdict.exit_code, first.cause, "/no/such/python" in first.detail) == (127, Cause.START, True)


def test_launcher_failure_after_all_ranks_finished_is_ignored(node: Node) -> None:
    node.start(processes=[Process(("sh", "-c", '"$@"; exit 1', "sh"), ("true",), RANK_ZERO)])
    assert node.follow().state.phase is JobPhase.SUCCEEDED


def test_launcher_that_exits_0_without_its_ranks_is_a_failure(node: Node) -> None:
    node.start(processes=[Process(("sh", "-c", '"$@"', "sh"), ("true",), RANK_ZERO)], ranks=2)
    found = node.follow().state
    assert (found.phase, found.exit_code) == (JobPhase.FAILED, 1)


def test_signal_that_killed_the_launcher_is_the_exit_code(node: Node) -> None:
    node.start(processes=[Process(("sh", "-c", "kill -9 $$"), (), {})], ranks=1)
    found = node.follow().state
    assert (found.phase, found.exit_code) == (JobPhase.FAILED, 137)


def test_ranks_run_in_the_project_with_their_arguments_and_environment_and_no_input(node: Node) -> None:
    words = ["--", "-x", "--job", "other", "--", "", "a b", "$(id)", "@RANK@", "\u00e9"]
    code = (
        "import json, os, sys\nenv = os.environ\n"
        "print(json.dumps([os.getcwd(), env['MINE'], env['RANK'], sys.stdin.read(), sys.argv[1:]]))"
    )
    name, mine = node.script(code), "a b'\"$x"
    node.start(processes=[Process((), (sys.executable, name, *words), RANK_ZERO)], env={"MINE": mine})
    assert json.loads(node.follow().logs[0]) == [str(node.project), mine, "0", "", words]


def test_wrapper_that_is_slow_to_record_the_end_of_its_rank(node: Node) -> None:
    """The node is busy, or the rank has much memory to free: that is no failure."""
    node.start(WAITING)
    found = Processes(node)
    freeze(*found.wrappers)
    (node.project / "go").touch()
    until(lambda: not alive(found.ranks[0]))
    time.sleep(4)  # longer than a failure for want of another rank is left open
    thaw(*found.wrappers)
    until(lambda: node.state().phase.ended)
    assert node.state().phase is JobPhase.SUCCEEDED


# -- what a look at the ranks of an attempt finds, whatever happens during the look --------------------------


class EndsWhenAsked(subprocess.Popen[bytes]):
    """A launcher that ends right after it was asked `polls` times whether it has."""

    polls = 0

    def poll(self) -> int | None:
        if self.polls:
            self.polls -= 1
            return None
        self.wait()
        return self.returncode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job" / "ranks").mkdir(parents=True)
    return tmp_path / "job"


@pytest.fixture
def attempted(folder: Path, tmp_path: Path) -> Attempt:
    return Attempt(Node(tmp_path / "home").starting("", max_restarts=0), folder, 0)


@pytest.mark.parametrize("polls", range(4))
def test_launcher_that_fails_during_a_look_has_failed(attempted: Attempt, polls: int) -> None:
    """If it had just ended, the ranks of the other nodes would run forever."""
    with EndsWhenAsked([sys.executable, "-c", "raise SystemExit(1)"]) as child:
        child.polls = polls
        attempted._children.append(child)
        found = until(lambda: (look := attempted.look()) is not Look.RUNNING and look)
    assert found is Look.FAILED


def test_record_that_is_replaced_in_the_tick_in_which_it_was_read_is_read_again(
    attempted: Attempt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "TICK", 10**12)
    own = RankRecord(0, None, None, pid=os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        attempted._children.append(child)
        store.write(folder / "ranks" / "0.json", own)
        tick = (folder / "ranks").stat().st_mtime_ns
        assert attempted.look() is Look.RUNNING
        store.write(folder / "ranks" / "0.json", RankRecord(0, 3, 1.0, at=1.0))
        os.utime(folder / "ranks", ns=(tick, tick))
        assert attempted.look() is Look.FAILED
        child.communicate(b"\n")
