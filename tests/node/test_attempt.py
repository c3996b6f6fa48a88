"""What a look at the ranks of an attempt finds, whatever happens during the look."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.agentnode import Node, until

from agent.node import store
from agent.ranks import attempt
from agent.ranks.attempt import Attempt, Look
from cloudddp.agent.protocol.jobs import RankRecord

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")


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
    """If it had just ended, the ranks of the other nodes would run for ever."""
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
