"""Stragglers: real agents on two nodes, whose ranks report their steps as train/ and the scripts of users
do."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import FOREVER, Node, free_port, until
from support.gangs import Gangs

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import Straggler, current
from cloudddp.agent.protocol.start import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

ROOT = Path(__file__).resolve().parents[2]
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


class Pair(Gangs):
    """Two nodes with two ranks each, all of which run the same script."""

    def run(self, code: str, *, retries: int = 0, window: float = WINDOW) -> None:
        requests = {}
        for node in self.nodes:
            (node.project / "script.py").write_text(code)
            ranks = [
                Process((), (sys.executable, "script.py"), {"RANK": str(2 * node.number + k)})
                for k in range(2)
            ]
            request = node.starting(processes=ranks, gang=self.gang, grace=1.0)
            requests[node] = replace(request, retries=retries, straggler_seconds=window)
        assert not any(reply.unreachable for reply in self.start_requests(requests).values())

    def stragglers(self, node: int) -> tuple[Straggler, ...]:
        return self.nodes[node].state().stragglers

    def slow(self, seconds: float | None) -> None:
        path = self.nodes[1].project / "slow"
        if seconds is None:
            path.unlink()
        else:
            path.write_text(str(seconds))

    def done(self) -> None:
        for node in self.nodes:
            (node.project / "done").touch()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path, 2, silence=5.0)
    yield found
    assert found.end() == []


def test_straggler_is_named_on_all_nodes_and_noted_once_in_its_log_until_it_catches_up(pair: Pair) -> None:
    pair.slow(0.05)
    pair.run(STEPS)
    for node in range(2):
        until(functools.partial(pair.stragglers, node))
        (found,) = pair.stragglers(node)
        assert (found.rank, found.node, found.own, found.until) == (3, 1, True, None)
        assert found.ratio == pytest.approx(2.5)
    note = b"rank 3 takes 2.5 x as long as the median rank (0.05 s of its own work per step, median 0.02 s)"
    until(lambda: note in pair.log(1, 3))
    pair.slow(None)
    for node in range(2):
        until(lambda node=node: not current(pair.stragglers(node)))  # type: ignore[misc]
    until(lambda: b"rank 3 has caught up" in pair.log(1, 3))
    assert pair.log(1, 3).count(b"straggler") == 2
    assert [pair.log(rank // 2, rank) for rank in range(3)] == [b""] * 3
    pair.done()
    assert pair.verdict().phase is JobPhase.SUCCEEDED
    (kept,) = pair.stragglers(0)
    assert (kept.rank, kept.until is not None) == (3, True)


def test_straggler_of_a_job_that_has_ended_is_kept_with_it(pair: Pair) -> None:
    pair.slow(0.05)
    pair.run(STEPS)
    until(lambda: pair.stragglers(1))
    pair.done()
    pair.verdict()
    for node in range(2):
        assert [one.rank for one in current(pair.stragglers(node))] == [3]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("equal", {}),
        (
            "a slow step now and then",
            {"return float": "return 5.0 if step % 20 == 0 else 0.02\n    return float"},
        ),
        ("less than 1.5 x", {"else 0.02": "else 0.02 + 0.009 * (rank == 1)"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_do_not_stay_slow_are_no_stragglers(pair: Pair, name: str, change: dict[str, str]) -> None:
    code = STEPS
    for before, after in change.items():
        code = code.replace(before, after)
    pair.run(code)
    for node in pair.nodes:
        until(lambda node=node: steps(node) > 80)  # type: ignore[misc]
    assert [pair.stragglers(node) for node in range(2)] == [(), ()]
    pair.done()
    assert pair.verdict().phase is JobPhase.SUCCEEDED


def steps(node: Node) -> int:
    path = node.folder() / "steps" / f"{2 * node.number}.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def test_ranks_that_report_steps_only_are_compared_by_the_interval(pair: Pair) -> None:
    code = STEPS.replace(', "work_seconds": work(step)', "").replace(
        "time.sleep(0.05)", "time.sleep(0.1 + work(step))"
    )
    pair.slow(0.2)
    pair.run(code)
    until(lambda: pair.stragglers(0))
    (found,) = pair.stragglers(0)
    assert (found.rank, found.own) == (3, False)
    assert "s per step" in found.text


def test_a_whole_slow_node_is_named(pair: Pair) -> None:
    pair.run(
        STEPS.replace("rank == 3 and os.path.exists('slow')", "False").replace(
            "else 0.02", "else 0.02 + 0.02 * (rank > 1)"
        )
    )
    until(lambda: len(pair.stragglers(0)) == 2)
    assert [one.rank for one in pair.stragglers(0)] == [2, 3]


def test_restart_forgets_what_the_last_attempt_reported(pair: Pair) -> None:
    pair.slow(0.05)
    code = STEPS.replace(
        "step = 0", "step = 0\nif os.environ['CLOUDDDP_ATTEMPT'] == '1': time.sleep(600)"
    ) + ("if os.path.exists('slow'): sys.exit(7)\n")
    pair.run(code, retries=1)
    until(lambda: pair.stragglers(0))
    pair.done()
    until(lambda: pair.nodes[0].state().restarts == 1)
    for node in range(2):
        until(lambda node=node: [one.until is not None for one in pair.stragglers(node)] == [True])  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[1]",
        "[" * 16000,
        '{"step": true}',
        '{"step": "1"}',
        '{"step": 1.5}',
        '{"step": 1' + "0" * 400 + "}",
        '{"step": 1, "x": "' + "x" * 20000 + '"}',
        '{"work_seconds": 1}',
    ],
    ids=itertools.count(),
)
def test_invalid_reports_of_steps_do_no_harm(pair: Pair, text: str) -> None:
    code = STEPS.replace(
        'json.dump({"step": step, "work_seconds": work(step)}, file)', f"file.write({text!r})"
    )
    pair.run(code.replace("while not", "while step < 10 and not"))
    assert pair.verdict().phase is JobPhase.SUCCEEDED
    assert pair.stragglers(0) == ()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "0", "1e300", '"1"', "true", "[]", "null"])
def test_invalid_times_leave_the_steps(node: Node, value: str) -> None:
    """The interval between two reports is then the pace."""
    write = f"""
import json, os, time
for step in range(1, 10**6):
    with open(os.environ["CLOUDDDP_STEP_FILE"] + ".tmp", "w") as file:
        file.write('{{"step": %d, "work_seconds": {value}}}' % step)
    os.replace(file.name, os.environ["CLOUDDDP_STEP_FILE"])
    time.sleep(0.3 if os.environ["RANK"] == "1" else 0.1)
"""
    node.start(write, write, straggler_seconds=1.0)
    until(lambda: node.state().stragglers)
    (found,) = node.state().stragglers
    assert (found.rank, found.own) == (1, False)


def test_each_rank_has_a_file_of_its_own_for_its_steps(node: Node) -> None:
    show = "import os\nprint(os.environ['CLOUDDDP_STEP_FILE'])\n"
    node.start(show, show)
    logs = node.follow().logs
    assert logs == {rank: f"{node.folder() / 'steps' / str(rank)}.json\n".encode() for rank in (0, 1)}


def test_file_of_steps_that_is_a_pipe_does_not_block_the_agent(node: Node) -> None:
    node.start(
        "import os\nos.mkfifo(os.environ['CLOUDDDP_STEP_FILE'])\nprint('x', flush=True)\n" + FOREVER,
        straggler_seconds=0.5,
    )
    until(lambda: node.follow(wait=False).logs.get(0))
    state: Any = node.cancel()
    assert state.ranks == 1


@pytest.mark.torch
def test_slow_rank_of_a_real_training_is_named(pair: Pair) -> None:
    """All four ranks of train/ take the same time per step, since they wait for the slow one."""
    pytest.importorskip("torch")
    for node in pair.nodes:
        shutil.copytree(ROOT / "train", node.project / "train", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "tests/support/training/checks/slow_rank.py", node.project / "slow_rank.py")
    port = str(free_port())
    flags = (
        "--dataset",
        "synthetic",
        "--synthetic-size",
        "4096",
        "--image-size",
        "8",
        "--batch-size",
        "8",
        "--epochs",
        "99",
        "--no-tensorboard",
        "--workers",
        "0",
    )
    requests = {}
    for node in pair.nodes:
        ranks = [
            Process(
                (),
                (sys.executable, "slow_rank.py", "2", "inside", "0.6", *flags),
                {
                    "RANK": str(2 * node.number + k),
                    "LOCAL_RANK": str(k),
                    "WORLD_SIZE": "4",
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "PYTHONPATH": str(node.project),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OTHERS": "0.15",
                },
            )
            for k in range(2)
        ]
        request = node.starting(processes=ranks, gang=pair.gang, grace=1.0)
        requests[node] = replace(request, straggler_seconds=3.0)
    pair.start_requests(requests)
    until(lambda: pair.stragglers(0))
    (found,) = pair.stragglers(0)
    assert (found.rank, found.node, found.own) == (2, 1, True)
    assert found.seconds >= 0.6
    until(lambda: b"rank 2 takes" in pair.log(1, 2))
