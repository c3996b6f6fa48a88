"""Syncing to nodes of which one runs another program in the place of the agent: the sync ends, and the other
nodes are served."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.agentnode import HANG_GUARD
from support.localsync import LocalCluster, put, same

from agent.node import link, store
from agent.sync.project_writer import ProjectWriter, remove
from cloudddp.agent import program
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import DONE, LISTING, FileHead, end, frame
from cloudddp.config.spec import Config, SyncSpec
from cloudddp.errors import NodeError, UsageError
from cloudddp.job import transfer
from cloudddp.job.project_files import of_config


@pytest.fixture(autouse=True)
def _files(here: Path) -> None:
    put(here, {"small": "x", "large": os.urandom(3 << 20)})


def short_limit(monkeypatch: pytest.MonkeyPatch, attacker: int) -> None:
    """Let two seconds without progress end a node's step, while the nodes of the agent have nothing to do:
    these may need longer on a busy machine."""
    usual, watch = transfer.SILENCE, transfer.Transfer._watch

    def watched(self: transfer.Transfer) -> dict[int, Exception]:
        has_work = any(
            rank != attacker
            and not one.has_ended
            and (self._is_over or not (one.reply or self._distribution.is_waiting(rank)))
            for rank, one in self._nodes.items()
        )
        monkeypatch.setattr(transfer, "SILENCE", usual if has_work else 2.0)
        return watch(self)

    monkeypatch.setattr(transfer.Transfer, "_watch", watched)


DRAIN = "cat < /dev/stdin > /dev/null 2>&1 & "
ALIVE = "while echo {}; do sleep 0.2; done"


def attacked(tmp_path: Path, attack: str, node: int, count: int = 3) -> LocalCluster:
    """A shell script runs in the place of the agent's `receive` on a node."""
    cluster = LocalCluster(tmp_path / "nodes", count)
    script = f'case "$3" in *" receive") read request; {attack};; *) exec "$@";; esac'
    cluster.runner.wrap[node] = f"sh -c {shlex.quote(script)} sh"
    return cluster


@pytest.mark.parametrize(
    ("attack", "node"),
    [
        (DRAIN + ALIVE, 0),
        (DRAIN + "while printf x >&2; do sleep 0.2; done", 1),
        ("""echo '{"wants": {"files": [0, 1]}}'; """ + ALIVE, 0),  # it never reads
        (DRAIN + """echo '{"wants": {}}\n{"complete": true}\n{"done": {}}'; """ + ALIVE, 1),
    ],
    ids=["alive", "stderr", "never reads", "done, and goes on"],
)
def test_node_without_progress_is_given_up_and_the_others_are_served(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, node: int
) -> None:
    """Their steps end with the sync: otherwise they would hold the lock of the project."""
    short_limit(monkeypatch, node)
    cluster = attacked(tmp_path, attack, node)
    with pytest.raises(NodeError, match=f"node {node}: it made no progress for 2 s") as caught:
        cluster.sync(here)
    assert caught.value.hint
    others = [one for number, one in enumerate(cluster.nodes) if number != node]
    assert all(same(here, one.project) for one in others)
    assert [one.processes[-1].wait(HANG_GUARD) for one in others] == [0, 0]


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
    cluster = attacked(tmp_path, f"{DRAIN}echo '{reports}'; {ALIVE}", 1, 2)
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
    """tests/node/test_receiving.py has the order of frames, and tests/node/test_protocol.py names."""
    put(synced.home, {"out": "precious"})
    body = zlib.compress(json.dumps({"files": {"../out": Entry("f", 0o644, 3, 5, "")}}).encode())
    listing = frame(key.encode(), LISTING, sha256(body).digest(), body)
    record = FileHead(0, 3, 5, False, sha256(b"new").digest()[:16])
    sent = listing + end(key.encode(), record, b"new") + frame(key.encode(), DONE)
    words = [sys.executable, "-IS", str(synced.home / program.agent_path()), "receive"]
    request = json.dumps({"project": project, "secret": SECRET}).encode() + b"\n"
    env = {"HOME": str(synced.home)}
    done = subprocess.run(words, input=request + sent, env=env, capture_output=True, check=False, timeout=300)
    assert (done.returncode != 0, why in done.stderr, b"Traceback" in done.stderr) == (True, True, False)
    assert (synced.home / "out").read_text() == "precious"


@pytest.mark.parametrize("read", [lambda one: one.accept(1.0), lambda one: one.read_all(1000)])
def test_what_comes_byte_by_byte_has_a_limit(read: Callable[[link.Link], object]) -> None:
    """The line of a stranger, or a file."""
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
        one.patience = 1.0
        with pytest.raises(OSError, match=r"has ended|timed out"):
            read(one)
    finally:
        ended.set()
        thread.join()
        one.close()
        stranger.close()


def test_file_that_cannot_be_deleted_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    put(project, {"f": "x"})
    (entry,) = of_config(project, Config()).manifest.values()
    remove(project, {"f": entry._replace(size=2), "gone": entry, "f/x": entry})  # a job has changed these
    assert (project / "f").exists()
    error = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "unlink", Mock(side_effect=error))  # as for a file that is immutable
    with pytest.raises(SystemExit, match="cannot delete 'f': Operation not permitted"):
        remove(project, {"f": entry})


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
