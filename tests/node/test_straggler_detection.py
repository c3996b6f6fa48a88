"""Stragglers: real agents on two nodes, whose ranks report their steps as train/ and the scripts of users
do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import Node, until
from support.gangs import Make

from agent.watch.stragglers import Detector, step_report
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import Pace, StepReport, current_stragglers

WINDOW = 1.0  # seconds
# The ranks of a synchronous job: a step takes 0.05 s on all of them, however long each one works in it.
STEPS = """
import json, os, sys, time
rank = int(os.environ["RANK"])
def work(step):
    return float(open("slow").read()) if rank == 3 and os.path.exists("slow") else 0.02
def report(step):
    path = os.environ["CLOUDDDP_STEP_FILE"]
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "work_seconds": work(step)}, file)
    os.replace(path + ".tmp", path)
step = 0
while not os.path.exists("done"):
    step += 1
    report(step)
    time.sleep(0.05)
"""


def test_straggler_is_named_on_all_nodes_and_noted_once_in_its_log_until_it_catches_up(gangs: Make) -> None:
    job = gangs(2, silence=5.0)
    slow = job[1].project / "slow"
    slow.write_text("0.05")
    job.start([STEPS] * 2, [STEPS] * 2, grace=1.0, straggler_seconds=WINDOW)
    for node in job.nodes:
        (found,) = until(lambda node=node: node.state().stragglers)  # type: ignore[misc]
        assert (found.rank, found.node, found.own, found.until) == (3, 1, True, None)
        assert found.ratio == pytest.approx(2.5)
    note = b"rank 3 takes 2.5 x as long as the median rank (0.05 s of its own work per step, median 0.02 s)"
    until(lambda: note in job.log(1, 3))
    slow.unlink()
    for node in job.nodes:
        until(lambda node=node: not current_stragglers(node.state().stragglers))  # type: ignore[misc]
    until(lambda: b"rank 3 has caught up" in job.log(1, 3))
    assert job.log(1, 3).count(b"straggler") == 2
    assert [job.log(rank // 2, rank) for rank in range(3)] == [b""] * 3
    for node in job.nodes:
        (node.project / "done").touch()
    assert job.verdict().phase is JobPhase.SUCCEEDED
    (kept,) = job[0].state().stragglers
    assert (kept.rank, kept.until is not None) == (3, True)


def test_each_rank_has_a_file_of_its_own_for_its_steps(node: Node) -> None:
    show = "import os\nprint(os.environ['CLOUDDDP_STEP_FILE'])\n"
    node.start(show, show)
    logs = node.follow().logs
    assert logs == {rank: f"{node.folder() / 'steps' / str(rank)}.json\n".encode() for rank in (0, 1)}


def one(rank: int, step: int, seconds: float, *, own: bool = True) -> Pace:
    return Pace(rank, step, seconds, own)


def stragglers_of(*paces: Callable[[int], list[Pace]], turns: int = 40) -> list[int]:
    """Compare the ranks every 0.1 s, each with a further step; return the stragglers in the end."""
    detector = Detector(WINDOW)
    for turn in range(turns):
        detector.look({0: [one for make in paces for one in make(turn)]}, turn / 10, 1e9 + turn / 10)
    return [straggler.rank for straggler in current_stragglers(detector.all())]


def steady(rank: int, seconds: float, *, own: bool = True, steps: int = 1) -> Callable[[int], list[Pace]]:
    return lambda turn: [one(rank, turn * steps, seconds, own=own)]


FAST = [steady(rank, 0.02) for rank in range(3)]


@pytest.mark.parametrize(
    ("paces", "expected"),
    [
        pytest.param([*FAST, steady(3, 0.02)], [], id="equal"),
        pytest.param([*FAST, steady(3, 0.03)], [3], id="slow"),
        pytest.param([*FAST, steady(3, 0.029)], [], id="less than 1.5 x"),
        pytest.param([*FAST, steady(3, 5.0, steps=0)], [], id="not for 5 steps"),
        pytest.param([steady(0, 0.1, own=False), steady(1, 0.3, own=False)], [1], id="intervals"),
        pytest.param([steady(3, 9.0)], [], id="alone"),
    ],
)
def test_ranks_that_stay_slow_are_stragglers(
    paces: list[Callable[[int], list[Pace]]], expected: list[int]
) -> None:
    assert stragglers_of(*paces) == expected


def test_straggler_is_one_until_it_has_stayed_below_a_lower_limit() -> None:
    limits = [(0.03, [3]), (0.026, [3]), (0.024, [])]
    detector, turn = Detector(WINDOW), 0
    for seconds, expected in limits:
        for _ in range(20):
            turn += 1
            paces = [one(rank, turn, 0.02) for rank in range(3)]
            detector.look({0: [*paces, one(3, turn, seconds)]}, turn / 10, 1e9)
        assert [straggler.rank for straggler in current_stragglers(detector.all())] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"step": 7, "work_seconds": 0.5}', StepReport(7, 0.5)),
        *((text, None) for text in ("", "[1]", '{"step": true}', '{"step": 1.5}')),
        ('{"step": 1, "x": "' + "x" * 20000 + '"}', None),
        *[
            (f'{{"step": 7, "work_seconds": {value}}}', StepReport(7))
            for value in ("NaN", "Infinity", "-1", "0", "1e300", '"1"', "true", "[]", "null")
        ],
    ],
    ids=itertools.count(),
)
def test_what_a_rank_reports_is_in_range(tmp_path: Path, text: str, expected: StepReport | None) -> None:
    (tmp_path / "0.json").write_text(text)
    assert step_report(tmp_path / "0.json") == expected
    os.mkfifo(tmp_path / "1.json")  # a pipe does not block the agent
    assert step_report(tmp_path / "1.json") is None


# -- ranks that train on each node alone: such a job succeeds, and costs as much as all its nodes ------------


NOTE = "node 1: no rank has connected to another node"
ADDRESSES = ("127.0.0.3", "127.0.0.2")
# A group of its own, as that of mp.spawn with MASTER_ADDR=localhost.
LOCAL = (
    "import socket, time\nserver = socket.create_server(('127.0.0.1', 0))\nclient = "
    "socket.create_connection(server.getsockname())\ntime.sleep(8)\n"
)


def test_node_that_trains_alone_is_named_once(gangs: Make) -> None:
    """In a gang of two nodes with different addresses."""
    job = gangs(2)
    peers = tuple(replace(p, address=where) for p, where in zip(job.gang.peers, ADDRESSES, strict=True))
    job.gang = replace(job.gang, peers=peers)
    job.start(LOCAL, LOCAL, alone_seconds=6.0)
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert [job.log(rank, rank).decode().count(NOTE) for rank in range(2)] == [0, 1]
