"""A job that does nothing, on two nodes whose agents nobody watches: real agents, ranks and stacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node, Refused, alive, first_of, until
from support.gangs import Gangs
from support.programs import first_on_path, program

from agent.ranks import launchers
from agent.watch import py_spy
from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.stacks import StacksRequest, summary
from cloudddp.agent.protocol.start import OnStall, Process

pytestmark = pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")

STALL_MINUTES = 0.05
LOOKS = "sudo -n systemctl start cloudddp-idle.service"  # the timer of root, which ends the node
# Ranks that wait for a byte of rank 2, which sleeps in another function.
HANG = """
import os, time
def load_batch():
    while True:
        time.sleep(600)
def all_reduce(pipe):
    os.read(pipe, 1)
print('began', flush=True)
if os.environ["RANK"] == "2":
    load_batch()
pipe, _ = os.pipe()
all_reduce(pipe)
"""


ELSEWHERE = "ranks 0, 1 and 3 are in all_reduce (script.py:7); rank 2 is in load_batch (script.py:5)"


class Pair(Gangs):
    """Two nodes with two ranks each, all of which run the same script."""

    def run(
        self,
        code: str,
        *,
        on_stall: OnStall = OnStall.KILL,
        minutes: float = STALL_MINUTES,
        retries: int = 0,
        **env: str,
    ) -> None:
        requests = {}
        watch: dict[str, Any] = {"retries": retries, "stall_minutes": minutes, "on_stall": on_stall}
        for node in self.nodes:
            (node.project / "script.py").write_text(code)
            ranks = [{"RANK": str(2 * node.number + k), **env} for k in range(2)]
            processes = [Process((), (sys.executable, "script.py"), one) for one in ranks]
            requests[node] = node.starting(processes=processes, gang=self.gang, grace=1.0, **watch)
        assert not any(reply.unreachable for reply in self.start_requests(requests).values())

    def rank_pids(self) -> list[int]:
        return [self.pid(rank // 2, rank) for rank in range(4)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path, 2)
    yield found
    assert found.end() == []


def test_stalled_job_ends_on_all_nodes_and_names_the_rank_that_is_elsewhere(pair: Pair) -> None:
    pair.run(HANG)
    pids = pair.rank_pids()
    first = first_of(pair.verdict())
    assert (first.cause, first.rank, first.node) == (Cause.STALL, 2, 1)
    assert ELSEWHERE in first.detail
    assert not any(map(alive, pids))
    for rank in range(4):
        text = (pair.nodes[rank // 2].folder() / "stacks" / f"{rank}.txt").read_text()
        assert ("load_batch" if rank == 2 else "all_reduce") in text


def test_stall_that_is_left_alone_is_kept_on_all_nodes_until_a_rank_does_something(pair: Pair) -> None:
    # At every moment the ranks are in line 3, and in no function of Python's library. They use no processor
    # time: a single tick in one of the 0.15 s between two looks would be activity.
    code = "import os, time\n\nopen('go').close()\n"
    code += "while not os.access('done', os.F_OK): print('x', flush=True); time.sleep(0.2)\n"
    for node in pair.nodes:
        os.mkfifo(node.project / "go")
    pair.run(code, on_stall=OnStall.LEAVE)
    for node in pair.nodes:
        stall = until(lambda node=node: node.state().stall)  # type: ignore[misc]
        assert stall is not None
        assert stall.until is None
        assert "ranks 0-3 are in <module> (script.py:3)" in stall.detail
    for node in pair.nodes:
        (node.project / "go").write_text("")
    for node in pair.nodes:
        until(lambda node=node: node.state().stall.until)  # type: ignore[misc]
        (node.project / "done").touch()
    assert pair.verdict().phase is JobPhase.SUCCEEDED
    assert pair.log(0, 0).count(b"stalled") == 1


def calls(node: Node) -> list[str]:
    """Return the calls of sudo on a node."""
    log = node.home / "sudo.log"
    return log.read_text().splitlines() if log.exists() else []


def test_all_nodes_are_unused_after_the_job(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_on_path(monkeypatch, tmp_path / "bin" / "sudo", 'echo "sudo $@" >> ~/sudo.log')
    pair.run("import time; time.sleep(600)", on_stall=OnStall.DOWN)
    for node in pair.nodes:
        until(lambda node=node: LOOKS in calls(node))  # type: ignore[misc]
        assert json.loads((node.store / "poweroff.json").read_text())["seconds"] == 0
    assert first_of(pair.verdict()).cause is Cause.STALL


def test_stacks_of_a_running_job_at_any_time(pair: Pair) -> None:
    pair.run(HANG, minutes=0.0)
    pair.rank_pids()
    for rank in range(4):
        until(lambda rank=rank: b"began" in pair.log(rank // 2, rank))  # type: ignore[misc]
    found = [one for node in pair.nodes for one in node.call(StacksRequest(node.id())).ranks]
    assert summary(one.position for one in found) == ELSEWHERE
    assert all(one.phase is JobPhase.RUNNING for one in map(Node.state, pair.nodes))
    with pytest.raises(Refused, match="no job"):
        pair.nodes[0].call(StacksRequest("20260101-000000-beef"))


def test_variables_of_the_flight_recorder_are_set_and_those_of_the_user_win(node: Node) -> None:
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k[:6] == 'TORCH_'}))"
    node.start(code, env={"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}, stall_minutes=STALL_MINUTES)
    found = json.loads(node.follow().logs[0])
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/mine"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in found
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == found["TORCH_FR_DUMP_ON_TIMEOUT"] == "1"
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith(str(node.folder()))


@pytest.mark.parametrize(
    ("torch", "count"), [("", 3), ("2.7.1", 3), ("2.10.0+cu128", 2), ("2.12.0", 1), ("2.15.0a0", 0)]
)
def test_flight_recorder_has_the_old_names_that_its_torch_needs(
    tmp_path: Path, torch: str, count: int
) -> None:
    """torch warns of each other one in each rank."""
    old = ("NCCL_DUMP_ON_TIMEOUT", "NCCL_TRACE_BUFFER_SIZE", "NCCL_DEBUG_INFO_TEMP_FILE")[:count]
    new = ("FR_BUFFER_SIZE", "FR_DUMP_TEMP_FILE", "FR_DUMP_ON_TIMEOUT", "NCCL_DEBUG_INFO_PIPE_FILE")
    found = launchers.flight_recorder(tmp_path, torch, {}).keys()
    assert found == {f"TORCH_{name}" for name in (*old, *new)}


def test_rank_that_waits_for_a_file_server_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-spy would stop it, and wait for that; a second attempt would outlast the time for all stacks."""
    tool = program(tmp_path / "py-spy", f"echo >> {tmp_path}/calls\nexec sleep 600")
    monkeypatch.setattr(py_spy, "DUMP_SECONDS", 0.2)
    code = "import ctypes, time; ctypes.CDLL(None).vfork() or time.sleep(600)"  # state D until its child ends
    with subprocess.Popen([sys.executable, "-ISc", code], start_new_session=True) as stuck:
        until(lambda: ") D " in Path(f"/proc/{stuck.pid}/stat").read_text())
        assert py_spy.dump(str(tool), stuck.pid) == ([], py_spy.STUCK)
        os.killpg(stuck.pid, signal.SIGKILL)
    assert (tmp_path / "calls").read_text() == "\n"
