"""What `top` shows of the readings of a cluster: tables, states of nodes, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.instances import inventory_instance
from support.jobstates import job

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import Heartbeat
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.progress import Straggler
from cloudddp.agent.protocol.readings import GpuReading, RankReading, Reading
from cloudddp.cli.views import top
from cloudddp.cli.views.top import ASCII, BLOCKS, Snapshot, lines, sparkline, top_json
from cloudddp.cluster.model import Cluster
from cloudddp.job.readings import HISTORY, NodeReadings
from cloudddp.tags import Tags
from cloudddp.text import columns

NOW = 1_800_000_000.0
CLOCK = 1000.0


def cluster(count: int, *, nodes: int | None = None, **fields: Any) -> Cluster:
    launched = datetime.fromtimestamp(NOW, UTC) - timedelta(hours=1)
    tags = Tags(
        cluster="demo",
        cluster_id="c-0123456789",
        nodes=nodes or count,
        price=10.0,
        expires=datetime.now(UTC) + timedelta(hours=5, seconds=30),
    )
    members = [
        inventory_instance(f"i-{rank}", tags, launch_index=rank, **{"launched": launched, **fields})
        for rank in range(count)
    ]
    return Cluster.of(members, name="demo", cluster_id="c-0123456789", region="us-east-1")


def reading(node: int = 0, *, ranks: int = 8, gpus: int = 8, at: float = NOW, **metrics: float) -> Reading:
    first = node * ranks
    return Reading(
        at,
        tuple(GpuReading(k, 90 + k, 71_012, 81_559, 61, 651.3) for k in range(gpus)),
        tuple(RankReading(first + k, 1.23, 1200, 0.2134, True) for k in range(ranks)),
        metrics,
    )


def known(node: int = 0, *, age: float = 1.0, state: JobState | None = None, **fields: Any) -> NodeReadings:
    return NodeReadings(state, (reading(node, **fields),), CLOCK - age)


def view(nodes: dict[int, NodeReadings], of: Cluster | None = None, **fields: Any) -> Snapshot:
    return Snapshot(of or cluster(len(nodes)), nodes, 2.0, NOW, CLOCK, **fields)


def texts(shown: Snapshot, width: int = 80, height: int = 24) -> list[str]:
    return [text for text, _ in lines(shown, width, height)]


RUNNING = job("running", started=1.0)


def test_table_of_gpus_and_ranks() -> None:
    metrics = {"step": 1200.0, "steps": 3000.0, "lr": 1e-4, "loss": 0.21341, "samples_per_second": 812.0}
    shown = texts(view({0: known(state=RUNNING, ranks=2, gpus=2, **metrics)}), width=200)
    assert shown[0].startswith("demo: $10.00 so far, $10.00 an hour; terminates in 5 h 00 min")
    assert shown[1:3] == ["nodes: 1 ready", "job j: running, step 1200 of 3000"]
    assert shown[3] == "loss 0.2134  samples_per_second 812  lr 0.0001"
    assert [line.split() for line in shown[4:]] == [
        "NODE RANK GPU TREND MEM-GIB TEMP POWER CORES STEP S/STEP STEPS".split(),
        "0 0 90% █ 69.3/80 61C 651W 1.2 1200 0.213 █".split(),
        "0 1 91% █ 69.3/80 61C 651W 1.2 1200 0.213 █".split(),
    ]


def test_ranks_without_gpu_are_marked() -> None:
    shown = texts(view({0: known(ranks=1, gpus=0)}))
    assert [line.split() for line in shown[2:]] == [
        "NODE RANK GPU CORES STEP S/STEP STEPS".split(),
        "0 0 no GPU 1.2 1200 0.213 █".split(),
    ]
    assert [line.split() for line in texts(view({0: known(ranks=0, gpus=0)}))[2:]] == [
        "NODE GPU".split(),
        "0 no GPU".split(),
    ]


def test_slow_ranks_are_first_where_not_all_fit() -> None:
    slow = Straggler(37, 4, 0.5, 0.2, 10, NOW)
    state = job("running", started=1.0, stragglers=(slow,))
    nodes = {node: known(node, state=state) for node in range(8)}
    nodes[6] = replace(nodes[6], problem="no answer")
    shown = lines(view(nodes), 80, 24)
    assert len(shown) == 24
    assert max(columns(text) for text, _ in shown) <= 80
    assert shown[1] == ("nodes: 7 ready, 1 not responding", "bold")
    assert shown[3] == ("node 6: not responding, the last reading was 1 s ago: no answer", "red")
    first, style = shown[5]
    assert (first.split()[:3], first.split()[-2:], style) == (["4", "37", "95%"], ["2.5", "x"], "yellow")
    assert [text.split()[2] for text, _ in shown[6:10]] == ["90%"] * 4  # then the GPUs that do least
    assert shown[-1] == ("... and 38 more", "")
    assert len(lines(view(nodes), 80, 0)) == 5 + 56  # no limit
    assert len(lines(view(nodes), 40, 10)) <= 10


def test_many_silent_nodes_leave_room_for_the_others() -> None:
    nodes = {0: known(), **{node: NodeReadings(problem="no answer") for node in range(1, 40)}}
    shown = texts(view(nodes))
    assert len(shown) <= 24
    assert sum(line.startswith("node ") for line in shown) == 7
    assert "... and 32 more" in shown
    assert any(line.split()[:2] == ["0", "0"] for line in shown)


def test_what_a_node_sent_is_escaped_and_cut_by_columns() -> None:
    metrics = {"日本語" * 20: 1.0, "\x1b[2Jlr": 2.0, "a\nb": 3.0}
    shown = texts(view({0: known(ranks=1, gpus=0, **metrics)}))
    assert max(map(columns, shown)) <= 80
    assert not any("\x1b" in line or "\n" in line for line in texts(view({0: known(**metrics)}), width=200))
    problem = NodeReadings(problem="\x1b]0;title\x07" + "x" * 100)
    assert max(map(len, texts(view({0: problem})))) <= 80


@pytest.mark.parametrize(
    ("fields", "node", "state"),
    [
        ({}, known(), "ready"),
        ({}, known(age=30.0), "not responding"),
        ({}, replace(known(), problem="broken"), "not responding"),
        ({}, NodeReadings(), "connecting"),
        ({}, NodeReadings(problem="no answer"), "not responding"),
        ({"launched": datetime.fromtimestamp(NOW - 60, UTC)}, NodeReadings(problem="no answer"), "booting"),
        ({"state": "pending"}, NodeReadings(), "booting"),
        ({"state": "stopped"}, known(), "stopped"),
        ({"state": "stopping"}, NodeReadings(), "stopping"),
    ],
)
def test_state_of_a_node(fields: dict[str, Any], node: NodeReadings, state: str) -> None:
    assert view({0: node}, cluster(1, **fields)).state(0) == state


def test_node_that_has_ended_is_lost() -> None:
    shown = view({0: known()}, cluster(1, nodes=2), problem="expired")
    assert [shown.state(node) for node in shown.ranks] == ["ready", "lost"]
    assert texts(shown)[2:4] == ["AWS cannot be asked: expired", "node 1: lost"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(0, 0.0), (20, 50.0), (40, 100.0)], " ▁▅█"),
        ([(0, 0.0), (20, None), (40, 40.0), (59, 60.0)], " ▁ ▅"),
        ([(30, 1000.0), (29, 20.0), (30, -5.0)], "   █"),
        ([], "    "),
    ],
)
def test_sparkline(values: list[tuple[float, float | None]], expected: str) -> None:
    assert sparkline(values, 20.0, 4, 100.0, BLOCKS) == expected
    assert sparkline(values, 20.0, 4, 100.0, ASCII).isascii()


def test_time_left_is_at_the_pace_of_the_readings() -> None:
    found = NodeReadings(RUNNING, (), CLOCK)
    for at, step in ((0, 100), (10, 120), (20, 140)):
        found = found.received(reading(at=NOW + at, step=float(step), steps=340.0), CLOCK)
    assert top.progress(view({0: found})) == (140.0, 340.0, 100.0)
    assert "step 140 of 340, about 1 min 40 s left" in texts(view({0: found}))[2]
    huge = found.received(reading(at=NOW + 30, step=141.0, steps=1e308), CLOCK)
    assert top.progress(view({0: huge}))[2] is None
    assert max(map(len, texts(view({0: huge})))) <= 80
    assert top.progress(view({0: known()})) == (1200, None, None)  # from the ranks' own reports


def test_json_of_a_reading() -> None:
    shown = top_json(view({0: known(state=RUNNING, ranks=1, gpus=1, step=3.0, loss=0.5), 1: NodeReadings()}))
    assert json.loads(json.dumps(shown)) == {
        "time": "2027-01-15T08:00:00+00:00",
        "cluster": "demo",
        "cluster_id": "c-0123456789",
        "expires": shown["expires"],
        "usd_per_hour": 20.0,
        "usd_so_far": 20.0,
        "job": {
            "id": "j",
            "state": "running",
            "exit_code": None,
            "step": 3,
            "steps": None,
            "seconds_left": None,
            "metrics": {"step": 3.0, "loss": 0.5},
            "stragglers": [],
        },
        "nodes": [
            {
                "node": 0,
                "instance_id": "i-0",
                "state": "ready",
                "silent_seconds": 1.0,
                "problem": None,
                "gpus": [
                    {
                        "index": 0,
                        "utilization": 90,
                        "memory": 71012,
                        "memory_total": 81559,
                        "temperature": 61,
                        "power": 651.3,
                    }
                ],
                "ranks": [{"rank": 0, "cores": 1.23, "step": 1200, "seconds": 0.2134, "own": True}],
            },
            {
                "node": 1,
                "instance_id": "i-1",
                "state": "connecting",
                "silent_seconds": None,
                "problem": None,
                "gpus": [],
                "ranks": [],
            },
        ],
    }


def test_history_is_bounded_and_begins_again_with_a_job() -> None:
    found = NodeReadings(problem="no answer")
    for at in range(HISTORY + 5):
        found = found.received(reading(at=float(at)), float(at))
    assert (len(found.readings), found.at, found.problem) == (HISTORY, HISTORY + 4, "")
    found = found.received(RUNNING, 0.0).received(reading(), 1.0)
    assert len(found.received(replace(RUNNING, restarts=1), 2.0).readings) == 1
    assert found.received(replace(RUNNING, job="k"), 2.0).readings == ()
    with pytest.raises(ProtocolError):
        found.received(Heartbeat(), 0.0)
