"""Syncing to nodes of which one runs another program in the place of the agent: the sync ends, and the other
nodes are served."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.impostor import forged_probe, in_place_of_receive
from support.localsync import LocalCluster

from cloudddp.agent.protocol.codec import MAX_PATH
from cloudddp.config.spec import Config, SyncSpec
from cloudddp.errors import NodeError, UsageError
from cloudddp.job import transfer_state

UNREADABLE = "node {} sent an answer that cloudddp cannot read"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "small").write_bytes(b"x")
    (folder / "large").write_bytes(os.urandom(3 << 20))
    return folder


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_state, "BYPASS", 4.0)
    monkeypatch.setattr(transfer_state, "STALLED", 8.0)
    monkeypatch.setattr(transfer_state, "CLOSING", 3.0)


def same(here: Path, there: Path) -> bool:
    return subprocess.run(["diff", "-r", here, there], check=False, capture_output=True).returncode == 0


def attacked(tmp_path: Path, attack: str, node: int, count: int = 3) -> LocalCluster:
    cluster = LocalCluster(tmp_path / "nodes", count)
    cluster.runner.wrap[node] = in_place_of_receive(attack)
    return cluster


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("attack", ["empty reports", "stderr", "never reads", "bytes one by one"])
def test_reports_without_progress_end_the_step_of_that_node(
    here: Path, tmp_path: Path, attack: str, node: int
) -> None:
    cluster = attacked(tmp_path, attack, node, 2)
    with pytest.raises(NodeError, match=f"node {node}: it made no progress") as caught:
        cluster.sync(here)
    assert caught.value.hint
    assert same(here, cluster.nodes[1 - node].project)


@pytest.mark.parametrize("attack", ["alive", "alive, done"])
def test_nodes_get_the_files_from_this_computer_if_the_first_one_is_only_alive(
    here: Path, tmp_path: Path, attack: str
) -> None:
    cluster = attacked(tmp_path, attack, 0)
    with pytest.raises(NodeError, match="node 0: "):
        cluster.sync(here)
    assert [same(here, one.project) for one in cluster.nodes] == [False, True, True]
    assert any(line.endswith("another source") for line in cluster.lines)


def test_node_that_gets_the_files_from_this_computer_instead_ends_with_the_sync(
    here: Path, tmp_path: Path
) -> None:
    """Otherwise its step would hold the lock of the project for ever."""
    cluster = attacked(tmp_path, "alive", 0, 2)
    with pytest.raises(NodeError, match="node 0: "):
        cluster.sync(here)
    assert same(here, cluster.nodes[1].project)
    assert cluster.nodes[1].processes[-1].wait(10) == 0


def test_step_that_goes_on_after_the_end_of_the_transfer_is_named(here: Path, tmp_path: Path) -> None:
    cluster = attacked(tmp_path, "done, and goes on", 1)
    with pytest.raises(NodeError, match="node 1: its step did not end"):
        cluster.sync(here)
    assert [same(here, one.project) for one in cluster.nodes] == [True, False, True]


WANTS = json.dumps({"wants": {"everything": True}})


@pytest.mark.parametrize(
    ("node", "reports", "why"),
    [
        (0, [WANTS, WANTS], "not offered"),
        (1, [WANTS], "not offered"),
        (1, ['{"direct": "x"}', WANTS, WANTS], "not offered"),
        (1, ['{"direct": "x"}', '{"direct": "x"}'], "asks again"),
        (0, ['{"direct": "x"}'], "asks again"),
        (0, ['{"wants": {"files": [1, 1]}}'], "twice"),
        (0, ['{"wants": {"files": [0, 2]}}'], "no such file"),
        (0, ['{"wants": {"files": [0], "offsets": {"7": 1}}}'], "no such file"),
        (0, [WANTS, '{"again": [0]}'], "sent as a whole"),
        (
            0,
            ['{"wants": {"files": [0], "offsets": {"0": 1}}}', '{"again": [0]}', '{"again": [0]}'],
            "sent as a whole",
        ),
        (1, ["{}\n" * 5000], "too many reports"),
        (1, ['{"note": "x"}\n' * 30], "too many notes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_than_a_node_may_ask_for_ends_its_step(
    here: Path, tmp_path: Path, node: int, reports: list[str], why: str
) -> None:
    cluster = attacked(tmp_path, "\n".join(reports), node, 2)
    with pytest.raises(NodeError, match=UNREADABLE.format(node) + ".*" + why):
        cluster.sync(here)
    assert same(here, cluster.nodes[1 - node].project)


def test_size_limit_holds_for_each_node_that_asks(here: Path, tmp_path: Path) -> None:
    """The first node has everything; the second one wants all of it from this computer."""
    cluster = LocalCluster(tmp_path / "nodes", 1)
    cluster.sync(here)
    before = cluster.sent
    cluster.add()
    cluster.runner.wrap[1] = in_place_of_receive(f'{{"direct": "x"}}\n{WANTS}')
    with pytest.raises(UsageError, match=r"more than sync\.max_mb = 1"):
        cluster.sync(here, Config(sync=SyncSpec(max_mb=1)))
    assert cluster.sent - before < 100_000


@pytest.mark.parametrize(
    "folders",
    [{"\u0100": "0" * 16}, {"a/../b": "0" * 16}, {f"d{k}": "0" * 16 for k in range(60_000)}],
    ids=["not bytes", "dot-dot", "many"],
)
def test_folders_that_no_project_has_are_an_error_of_that_node(
    here: Path, tmp_path: Path, folders: dict[str, str]
) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)
    for node in (1, 2):
        forged = tmp_path / f"folders-{node}.json"
        forged.write_text(json.dumps({f"{name}{node - 1 or ''}": digest for name, digest in folders.items()}))
        cluster.runner.wrap[node] = forged_probe(forged if node == 1 or len(folders) > 1 else None)
    with pytest.raises(NodeError, match=UNREADABLE.format(1)):
        cluster.sync(here)


def test_longest_folder_that_a_node_may_name_is_no_error(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 1)
    forged = tmp_path / "folders.json"
    forged.write_text(json.dumps({"a" * MAX_PATH: "0" * 16}))
    cluster.runner.wrap[0] = forged_probe(forged)
    cluster.sync(here)
    assert same(here, cluster.nodes[0].project)
