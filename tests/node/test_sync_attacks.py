"""Syncing to nodes of which one runs another program in the place of the agent: the sync ends, and the other
nodes are served."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import zlib
from hashlib import sha256
from pathlib import Path

import pytest
from support.impostor import forged_probe, in_place_of_receive
from support.localsync import LocalCluster
from support.syncednode import SyncedNode, put, tree

from agent.node import link, store
from agent.sync.project_writer import ProjectWriter
from cloudddp.agent import program
from cloudddp.agent.protocol.codec import ProtocolError, encode
from cloudddp.agent.protocol.file_steps import ReceiveEvent
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import DONE, LISTING, Listing, Record, Wants, batch, frame
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


@pytest.mark.parametrize(("attack", "node"), [("empty reports", 0), ("stderr", 1), ("never reads", 0)])
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
    """Their steps end with the sync: otherwise they would hold the lock of the project forever."""
    cluster = attacked(tmp_path, attack, 0)
    with pytest.raises(NodeError, match="node 0: "):
        cluster.sync(here)
    assert [same(here, one.project) for one in cluster.nodes] == [False, True, True]
    assert any(line.endswith("another source") for line in cluster.lines)
    assert [one.processes[-1].wait(10) for one in cluster.nodes[1:]] == [0, 0]


def test_step_that_goes_on_after_the_end_of_the_transfer_is_named(here: Path, tmp_path: Path) -> None:
    cluster = attacked(tmp_path, "done, and goes on", 1)
    with pytest.raises(NodeError, match="node 1: its step did not end"):
        cluster.sync(here)
    assert [same(here, one.project) for one in cluster.nodes] == [True, False, True]


DIRECT = ReceiveEvent(direct="x")
EVERYTHING = ReceiveEvent(wants=Wants(everything=True))
AGAIN = ReceiveEvent(again=(0,))
CONTINUES = ReceiveEvent(wants=Wants(files=(0,), offsets={"0": 1}))


@pytest.mark.parametrize(
    ("node", "reports", "why"),
    [
        (0, [EVERYTHING, EVERYTHING], "not offered"),
        (1, [EVERYTHING], "not offered"),
        (1, [DIRECT, EVERYTHING, EVERYTHING], "not offered"),
        (1, [DIRECT, DIRECT], "asks again"),
        (0, [DIRECT], "asks again"),
        (0, [ReceiveEvent(wants=Wants(files=(0, 2)))], "no such file"),
        (0, [ReceiveEvent(wants=Wants(files=(0,), offsets={"7": 1}))], "no such file"),
        (0, [EVERYTHING, AGAIN], "sent as a whole"),
        (0, [CONTINUES, AGAIN, AGAIN], "sent as a whole"),
    ],
)
def test_more_than_a_node_may_ask_for_is_refused(node: int, reports: list[ReceiveEvent], why: str) -> None:
    state = transfer_state.TransferState([0, 1], [(name, Entry("f", 0o644, 5, 1, "")) for name in "ab"])
    state.offer(state.first, 0.0)
    for report in reports[:-1]:
        state.take(node, report, 0.0)
    with pytest.raises(ProtocolError, match=why):
        state.take(node, reports[-1], 0.0)


WANTS = encode(EVERYTHING).decode()


@pytest.mark.parametrize(
    ("node", "report", "why"),
    [(1, WANTS, "not offered"), (0, '{"wants": {"files": [1, 1]}}', "twice")],
    ids=["not offered", "twice"],
)
def test_more_than_a_node_may_ask_for_ends_its_step(
    here: Path, tmp_path: Path, node: int, report: str, why: str
) -> None:
    cluster = attacked(tmp_path, report, node, 2)
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
    [{"a/../b": "0" * 16}, {f"d{k}": "0" * 16 for k in range(60_000)}],
    ids=["dot-dot", "many"],
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


# -- a stream that no laptop sends ---------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> SyncedNode:
    return SyncedNode(tmp_path / "nodes")


SECRET = "s" * 64


def receive(node: SyncedNode, frames: bytes, project: str = "project") -> subprocess.CompletedProcess[bytes]:
    """Run the step with these frames."""
    first = {"node": 0, "address": "127.0.0.1", "port": 1}
    request = {"project": project, "secret": SECRET, "node": 0, "first": first, "nodes": 1}
    return subprocess.run(
        [sys.executable, "-IS", str(node.node.home / program.agent_path()), "receive"],
        input=json.dumps(request).encode() + b"\n" + frames,
        env={"HOME": str(node.node.home)},
        capture_output=True,
        check=False,
        timeout=60,
    )


def forged_listing(folders: dict[str, dict[str, Entry]], contents: dict[str, str] | None = None) -> bytes:
    """Return the frame of a listing that no laptop sends."""
    body = zlib.compress(json.dumps({"folders": folders, "contents": contents or {}}).encode())
    return frame(SECRET.encode(), LISTING, sha256(body).digest(), body)


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "."])
def test_name_that_leaves_the_project_is_refused(node: SyncedNode, name: str) -> None:
    put(node.node.home, {"out": "precious"})
    folder, _, base = name.rpartition("/")
    if name.startswith("/"):
        folder = "/tmp"
    record = Record(0, 3, 5, False, sha256(b"new").digest()[:16])
    key = SECRET.encode()
    listing = forged_listing({folder: {base: Entry("f", 0o644, 3, 5, "")}})
    done = receive(node, listing + batch(key, [record], b"new") + frame(key, DONE))
    assert done.returncode != 0
    assert b"leaves the folder" in done.stderr
    assert b"Traceback" not in done.stderr
    assert (node.node.home / "out").read_text() == "precious"


def test_invalid_project_name_is_refused(node: SyncedNode) -> None:
    done = receive(node, b"", project="..")
    assert done.returncode != 0
    assert b"is not the name of a project" in done.stderr


@pytest.mark.parametrize("changed", ["contents", "seal"])
def test_file_that_was_changed_on_the_way_is_refused(node: SyncedNode, changed: str) -> None:
    key = SECRET.encode()
    listing = Listing({"": {"a": Entry("f", 0o644, 3, 5, "")}})
    sent = bytearray(batch(key, [Record(0, 3, 5, False, sha256(b"new").digest()[:16])], b"new"))
    sent[-1 if changed == "contents" else 14] ^= 1
    done = receive(node, listing.frame(key) + sent + frame(key, DONE))
    assert done.returncode != 0
    assert (b"changed on the way" if changed == "contents" else b"no valid seal") in done.stderr
    assert not (node.project / "a").exists()


def test_line_of_a_stranger_that_comes_byte_by_byte_has_a_limit() -> None:
    own, stranger = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.1):
                stranger.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    one = link.Link(own, "secret", "sync")
    try:
        with pytest.raises(OSError, match=r"has ended|timed out"):
            one.accept(1.0)
    finally:
        ended.set()
        thread.join()
        one.close()
        stranger.close()


def test_mode_and_time_are_not_set_through_a_link(
    node: SyncedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may put a link in the place of a file while the sync compares its listing with what is there."""
    monkeypatch.setattr(store, "ROOT", tmp_path / ".cloudddp")
    outside, project = tmp_path / "id_key", tmp_path / "project"
    put(tmp_path, {"id_key": "secret", "project/f": "x"})
    outside.chmod(0o600)
    before = outside.stat()
    writer = ProjectWriter(project, lambda _size: None)
    entry = Entry("f", 0o755, 1, 2000, "")
    writer.touch("f", entry)
    assert ((project / "f").stat().st_mode & 0o777, (project / "f").stat().st_mtime_ns) == (0o755, 2000)
    (project / "f").unlink()
    (project / "f").symlink_to(outside)
    with pytest.raises(SystemExit, match="was replaced"):
        writer.touch("f", entry)
    assert (outside.stat().st_mode, outside.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_link_out_of_the_project_is_not_followed(here: Path, node: SyncedNode, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(here, {"d/file": "inside"})
    node.project.mkdir()
    (node.project / "d").symlink_to(outside)
    node.sync(here)
    assert list(outside.iterdir()) == []
    assert tree(node.project) == tree(here)
