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
from support.impostor import in_place_of_receive
from support.localsync import LocalCluster, put, same

from agent.node import link, store
from agent.sync.project_writer import ProjectWriter
from cloudddp.agent import program
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import DONE, LISTING, Record, end, frame
from cloudddp.config.spec import Config, SyncSpec
from cloudddp.errors import NodeError, UsageError
from cloudddp.job import transfer


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "small").write_bytes(b"x")
    (folder / "large").write_bytes(os.urandom(3 << 20))
    return folder


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENCE", 8.0)


def attacked(tmp_path: Path, attack: str, node: int, count: int = 3) -> LocalCluster:
    cluster = LocalCluster(tmp_path / "nodes", count)
    cluster.runner.wrap[node] = in_place_of_receive(attack)
    return cluster


@pytest.mark.parametrize(
    ("attack", "node"), [("alive", 0), ("stderr", 1), ("never reads", 0), ("done, and goes on", 1)]
)
def test_node_without_progress_is_given_up_and_the_others_are_served(
    here: Path, tmp_path: Path, attack: str, node: int
) -> None:
    """Their steps end with the sync: otherwise they would hold the lock of the project."""
    cluster = attacked(tmp_path, attack, node)
    with pytest.raises(NodeError, match=f"node {node}: it made no progress for 8 s") as caught:
        cluster.sync(here)
    assert caught.value.hint
    others = [one for number, one in enumerate(cluster.nodes) if number != node]
    assert all(same(here, one.project) for one in others)
    assert [one.processes[-1].wait(10) for one in others] == [0, 0]


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ('{"wants": {}}\n{"wants": {}}', "it says twice what it lacks"),
        ('{"wants": {}, "lost": "x"}', "it says twice what it lacks"),
        ('{"wants": {"files": [2]}}', "there is no such file"),
    ],
)
def test_more_than_a_node_may_ask_for_ends_its_step(
    here: Path, tmp_path: Path, reports: str, why: str
) -> None:
    cluster = attacked(tmp_path, reports, 1, 2)
    with pytest.raises(NodeError, match=f"node 1 sent an answer that cloudddp cannot read.*{why}"):
        cluster.sync(here)
    assert same(here, cluster.nodes[0].project)


def test_size_limit_holds_for_each_node(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes")
    cluster.sync(here)
    before = cluster.sent
    cluster.add()
    with pytest.raises(UsageError, match=r"3 MiB to node 1, more than sync\.max_mb = 1"):
        cluster.sync(here, Config(sync=SyncSpec(max_mb=1)))
    assert cluster.sent - before < 100_000
    assert not cluster.nodes[1].project.exists() or not any(cluster.nodes[1].project.iterdir())


# -- a stream that no laptop sends ---------------------------------------------------------------------------


SECRET = "s" * 64


@pytest.mark.parametrize(
    ("project", "key", "why"),
    [
        ("project", SECRET, b"leaves the folder"),
        ("project", "another", b"no valid seal"),
        ("..", SECRET, b"is not the name of a project"),
    ],
)
def test_stream_that_no_laptop_sends_is_refused(
    synced: LocalCluster, project: str, key: str, why: bytes
) -> None:
    """tests/node/test_receiving.py has the order of frames, and tests/node/test_transfer_frames.py names."""
    put(synced.home, {"out": "precious"})
    body = zlib.compress(json.dumps({"files": {"../out": Entry("f", 0o644, 3, 5, "")}}).encode())
    listing = frame(key.encode(), LISTING, sha256(body).digest(), body)
    record = Record(0, 3, 5, False, sha256(b"new").digest()[:16])
    sent = listing + end(key.encode(), record, b"new") + frame(key.encode(), DONE)
    done = subprocess.run(
        [sys.executable, "-IS", str(synced.home / program.agent_path()), "receive"],
        input=json.dumps({"project": project, "secret": SECRET}).encode() + b"\n" + sent,
        env={"HOME": str(synced.home)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert why in done.stderr
    assert b"Traceback" not in done.stderr
    assert (synced.home / "out").read_text() == "precious"


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
    synced: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may put a link in the place of a file while the sync compares its listing with what is there."""
    monkeypatch.setattr(store, "ROOT", tmp_path / ".cloudddp")
    outside, project = tmp_path / "id_key", tmp_path / "project"
    put(tmp_path, {"id_key": "secret", "project/f": "x"})
    outside.chmod(0o600)
    before = outside.stat()
    (tmp_path / ".cloudddp").mkdir()
    writer = ProjectWriter(project)
    writer.touch("f", 0o755, 2000)
    assert ((project / "f").stat().st_mode & 0o777, (project / "f").stat().st_mtime_ns) == (0o755, 2000)
    (project / "f").unlink()
    (project / "f").symlink_to(outside)
    with pytest.raises(SystemExit, match="was replaced"):
        writer.touch("f", 0o755, 2000)
    assert (outside.stat().st_mode, outside.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
