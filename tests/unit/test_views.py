"""What the console shows: the screen of `top`, the waterfall of `--timings`, and wide characters."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.instances import inventory_instance
from support.jobstates import job

from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.frames import Heartbeat
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.progress import Straggler, TrainingStatus
from cloudddp.agent.protocol.readings import GpuReading, RankReading, Reading
from cloudddp.cli.views.top import lines, sparkline, top_json
from cloudddp.cluster.model import Cluster
from cloudddp.formats import table, wrapped
from cloudddp.job.readings import HISTORY, LatestReadings, NodeReadings
from cloudddp.tags import Tags
from cloudddp.text import columns
from cloudddp.timings import Row, Span, rows, waterfall

NOW = 1_800_000_000.0


def cluster(count: int, *, nodes: int | None = None, **fields: Any) -> Cluster:
    launched = datetime.now(UTC) - timedelta(hours=1)
    names = {"cluster": "demo", "cluster_id": "c-0123456789"}
    expires = datetime.now(UTC) + timedelta(hours=5, seconds=30)
    tags = Tags(**names, nodes=nodes or count, price=10.0, expires=expires)  # type: ignore[arg-type]
    members = [
        inventory_instance(f"i-{rank}", tags, launch_index=rank, **{"launched": launched, **fields})
        for rank in range(count)
    ]
    return Cluster.of(members, name="demo", cluster_id="c-0123456789", region="us-east-1")


def reading(node: int = 0, *, ranks: int = 8, gpus: int = 8, at: float = NOW, **metrics: float) -> Reading:
    first = node * ranks
    return Reading(
        at,
        tuple(GpuReading(k, 90 + k, 71_012, 81_559, 61, 651.3, 40) for k in range(gpus)),
        tuple(RankReading(first + k, 1.23, 1200, 0.2134) for k in range(ranks)),
        metrics,
    )


def known(node: int = 0, *, state: JobState | None = None, **fields: Any) -> NodeReadings:
    return NodeReadings(state, (reading(node, **fields),))


def view(nodes: dict[int, NodeReadings], of: Cluster | None = None) -> LatestReadings:
    return LatestReadings(of or cluster(len(nodes)), nodes)


RUNNING = job("running", started=1.0)


def test_table_of_gpus_and_ranks() -> None:
    state = replace(RUNNING, started=time.time() - 90.5, training=TrainingStatus(NOW, step=1200, steps=3000))
    metrics = {"step": 1200.0, "steps": 3000.0, "loss": 0.21341, "samples_per_second": 812.0}
    shown = lines(view({0: known(state=state, ranks=2, gpus=2, **metrics)}), width=200)
    assert shown[0].startswith("demo: $10.00 an hour, $10.")
    assert shown[0].endswith(" so far; terminates in 5 h 00 min")
    assert shown[1:3] == ["ready: node 0", "job j: running for 1 min 30 s, step 1200 of 3000"]
    assert shown[3] == "loss 0.2134  samples_per_second 812"
    assert [line.split() for line in shown[4:]] == [
        "NODE RANK GPU TREND MEM-GIB MEM-USE TEMP POWER CORES STEP S/STEP SLOW".split(),
        "0 0 90% █ 69.3/80 40% 61C 651W 1.2 1200 0.213".split(),
        "0 1 91% █ 69.3/80 40% 61C 651W 1.2 1200 0.213".split(),
    ]


def test_script_that_reports_nothing_shows_scalars_and_its_last_line() -> None:
    ended = job("failed", started=NOW - 90, ended=NOW, exit_code=1)
    metrics: dict[str, float | None] = {"train/loss": None} | {
        f"a/rather/long/name/{n}": n / 3 for n in range(4)
    }
    line = "epoch 3:  45%|####      | 45/100 [00:03<00:04, 12.9it/s]" + " x" * 40
    shown = view({0: NodeReadings(ended, (replace(reading(gpus=1, ranks=1), metrics=metrics, line=line),))})
    narrow, wide = lines(shown, 80), lines(shown, 120)
    assert narrow[2] == "job j: failed after 1 min 30 s"
    metrics_line = "train/loss nan/inf  a/rather/long/name/0 0  a/rather/long/name/1 0.3333  a/rather/"
    assert (narrow[3][:77], wide[3][:80]) == (metrics_line[:77], metrics_line[:80])
    assert narrow[4].startswith("rank 0: epoch 3:  45%")
    assert all(len(one) > len(other) for one, other in zip(wide[3:6], narrow[3:6], strict=True))
    assert (len(narrow[4]), len(wide[4])) == (80, 120)


def test_slow_ranks_are_first() -> None:
    slow = Straggler(37, 4, 0.5, 0.2, 10, NOW)
    state = job("running", started=1.0, stragglers=(slow,))
    nodes = {node: known(node, state=state) for node in range(8)}
    nodes[6] = replace(nodes[6], problem="no answer")
    shown = lines(view(nodes), 80)
    assert max(map(columns, shown)) <= 80
    assert shown[1:3] == ["ready: nodes 0, 1, 2, 3, 4, 5, 7", "not responding: node 6: no answer"]
    first = shown[5].split()
    assert (first[:3], first[-2:]) == (["4", "37", "95%"], ["2.5", "x"])
    assert [text.split()[1] for text in shown[6:8]] == ["0", "1"]
    assert len(shown) == 5 + 56


def test_what_a_node_sent_is_escaped_and_cut_by_columns() -> None:
    metrics = {"日本語" * 20: 1.0, "\x1b[2Jlr": 2.0, "a\nb": 3.0}
    shown = lines(view({0: known(ranks=1, gpus=0, **metrics)}), 80)
    assert max(map(columns, shown)) <= 80
    assert shown[2] == "日本語日本語日本語日... 1  \\x1b[2Jlr 2  a\\nb 3"
    assert not any("\x1b" in line or "\n" in line for line in lines(view({0: known(**metrics)}), width=0))
    problem = NodeReadings(problem="\x1b]0;title\x07" + "x" * 100)
    assert max(map(len, lines(view({0: problem}), 80))) <= 80


@pytest.mark.parametrize(
    ("fields", "node", "state"),
    [
        ({}, known(), "ready"),
        ({}, replace(known(), problem="broken"), "not responding"),
        ({}, NodeReadings(), "connecting"),
        ({}, NodeReadings(problem="no answer"), "not responding"),
        ({"state": "pending"}, NodeReadings(problem="no answer"), "pending"),
        ({"state": "stopped"}, known(), "stopped"),
    ],
)
def test_state_of_a_node(fields: dict[str, Any], node: NodeReadings, state: str) -> None:
    assert view({0: node}, cluster(1, **fields)).states == {0: state}


def test_node_that_has_ended_is_lost() -> None:
    shown = view({0: known()}, cluster(1, nodes=2))
    assert shown.states == {0: "ready", 1: "lost"}
    assert lines(shown, 80)[2] == "lost: node 1"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(0, 0.0), (15, 50.0), (30, 100.0)], "     ▁▅█"),
        ([(0, 0.0), (15, None), (30, 40.0), (44, 60.0)], "     ▁ ▅"),
        ([(30, 1000.0), (29, 20.0), (30, 200.0)], "       █"),
        ([], " " * 8),
    ],
)
def test_sparkline(values: list[tuple[float, float | None]], expected: str) -> None:
    assert sparkline(values) == expected


def test_json_of_a_reading() -> None:
    shown = top_json(view({0: known(state=RUNNING, ranks=1, gpus=1, loss=0.5), 1: NodeReadings()}))
    assert (shown["job"]["id"], shown["job"]["state"]) == ("j", "running")
    del shown["job"], shown["time"], shown["expires"], shown["usd_so_far"]
    expected = """{"cluster": "demo", "cluster_id": "c-0123456789", "usd_per_hour": 20.0,
        "metrics": {"loss": 0.5}, "last_line": null, "nodes": [
        {"node": 0, "instance_id": "i-0", "state": "ready", "problem": null,
         "gpus": [{"index": 0, "utilization": 90, "memory": 71012, "memory_total": 81559, "temperature": 61,
                   "power": 651.3, "memory_utilization": 40}],
         "ranks": [{"rank": 0, "cores": 1.23, "step": 1200, "seconds": 0.2134}]},
        {"node": 1, "instance_id": "i-1", "state": "connecting", "problem": null, "gpus": [], "ranks": []}]}
        """
    assert json.loads(json.dumps(shown)) == json.loads(expected)


def test_history_is_bounded() -> None:
    found = NodeReadings(problem="no answer")
    for at in range(HISTORY + 5):
        found = found.received(reading(at=float(at)))
    assert (len(found.readings), found.readings[-1].at, found.problem) == (HISTORY, HISTORY + 4, "")
    with pytest.raises(ProtocolError):
        found.received(Heartbeat())


def test_spans_of_several_nodes_are_one_line_each_time() -> None:
    spans = [Span("probe", 1.0, 2.0, 0), Span("probe", 1.1, 3.0, 1), Span("start", 3.0, 3.5, 0)]
    assert rows([*spans, Span("probe", 4.0, 5.0, 0), Span("AWS", 0.0, 0.5)]) == [
        Row("AWS", 0.0, 0.5),
        Row("probe", 1.0, 3.0, nodes=2, slowest=1),
        Row("start", 3.0, 3.5, nodes=1, slowest=0),
        Row("probe", 4.0, 5.0, nodes=1, slowest=0),
    ]
    # A pause lies between those of two nodes.
    spans = [Span("pack", 0.0, 9.0, 0), Span("pulled", 1.0, 1.2, 1), Span("pulled", 9.0, 9.1, 0)]
    assert rows(spans) == [Row(one.name, one.began, one.ended, nodes=1, slowest=one.node) for one in spans]


# -- the waterfall of `--timings`, from spans ----------------------------------------------------------------


def test_lines_have_begin_length_name_and_a_bar_to_scale() -> None:
    head, first, second, last = waterfall(
        [Row("a", 10.0, 11.0), Row("b", 11.0, 14.0, nodes=2, slowest=1), Row("first line", 14.0, 14.0)]
    ).splitlines()
    assert head.split() == ["begin", "took", "(seconds)"]
    assert first.split() == ["0.000", "1.000", "a", "#" * 5]
    assert second.startswith(" 1.000  3.000  b (2 nodes, slowest 1)")
    assert second.endswith(f" {'#' * 15}")
    assert second.index("#") - first.index("#") == 5
    assert len(second) == 80
    assert last.split() == ["4.000", "0.000", "first", "line", "#"]
    assert waterfall([Row("call", float(k), k + 1.0) for k in range(1000)]).splitlines()[-1] == "and 800 more"


# -- characters that take two columns, or none, are counted as a terminal shows them -------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("\u65e5\u672c", 4), ("e\u0301", 1), ("\U0001f600", 2), ("", 0)]
)
def test_columns_of_a_text(text: str, width: int) -> None:
    assert columns(text) == width


@pytest.mark.parametrize("width", [20, 33, 80])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    words = "\u65e5\u672c\u8a9e and other words " * 9
    assert max(map(columns, wrapped(words, Terminal()).splitlines())) <= width
    shown = table(("JOB", "STATE", "SCRIPT"), [("20261127", "up", words)], elastic=("SCRIPT",))
    assert max(map(columns, shown.splitlines())) <= max(width, 8 + 2 + 5 + 2 + 8)
