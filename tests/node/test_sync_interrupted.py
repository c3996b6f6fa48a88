"""A sync that follows one that was interrupted: it sends what is missing, and leaves nothing that is not
wanted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.syncednode import UP_TO_DATE, SyncedNode, put, tree

from cloudddp.errors import NodeError


@pytest.fixture
def node(tmp_path: Path) -> SyncedNode:
    return SyncedNode(tmp_path / "nodes")


def test_next_sync_repairs_a_broken_one(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "old", "dropped": "x", **{f"many/{k}": os.urandom(3000) for k in range(40)}})
    node.sync(here)
    (here / "dropped").unlink()
    many = {f"many/{k}": os.urandom(300_000) for k in range(10)}
    put(here, {"a": "new", "short-lived": "x" * 5000, **many})
    before = {**tree(node.project)}
    node.cluster.runner.limits[0] = 1_500_000
    with pytest.raises(NodeError, match="node 0: the connection to the computer"):
        node.sync(here)
    node.cluster.runner.limits.clear()
    whole = {**tree(here), **before}
    for name, found in tree(node.project).items():  # a file is the old one or the new one
        assert found in (whole[name], tree(here).get(name))
    (here / "short-lived").unlink()
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert not list(node.project.rglob("*.cloudddp-tmp"))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(("call", "number"), [("renameat", 1), ("utimensat", 8)])
def test_killed_sync_leaves_nothing_in_the_folder(
    here: Path, node: SyncedNode, tmp_path: Path, call: str, number: int
) -> None:
    """Killed while a link (the first) or a file has a temporary name."""
    put(here, {name: name for name in ("top", "a/x", "a/b/y", "c/z", "c/y", "d/x", "d/y", "e", "f")})
    (here / "link").symlink_to("top")
    killed = f"-e trace={call} -e inject={call}:signal=SIGKILL:when={number}"
    node.cluster.runner.wrap[0] = f"strace -f -qq -o {tmp_path / 'trace'} {killed}"
    with pytest.raises(NodeError):
        node.sync(here)
    assert list(node.project.rglob("*.cloudddp-tmp"))
    node.cluster.runner.wrap.clear()
    node.sync(here)
    assert tree(node.project) == tree(here)


def test_large_file_continues_after_a_broken_transfer_or_is_deleted(here: Path, node: SyncedNode) -> None:
    put(here, {"large.bin": os.urandom(8_000_000), "a": "1"})
    node.cluster.runner.limits[0] = 5_000_000
    with pytest.raises(NodeError):
        node.sync(here)
    assert not (node.project / "large.bin").exists()
    node.cluster.runner.limits.clear()
    sent = node.cluster.sent
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert node.cluster.sent - sent < 5_000_000
    put(here, {"unwanted.bin": os.urandom(8_000_000)})
    node.cluster.runner.limits[0] = 5_000_000
    with pytest.raises(NodeError):
        node.sync(here)
    node.cluster.runner.limits.clear()
    (here / "unwanted.bin").unlink()
    put(here, {"a": "2"})
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert not list(node.project.rglob("*.cloudddp-tmp"))


def test_contents_that_an_interrupted_sync_replaced_are_sent_again(here: Path, node: SyncedNode) -> None:
    """The file has the size that it had, and gets its former contents and another time."""
    put(here, {"a": "1" * 1000, "z": "z"})
    node.sync(here)
    put(here, {"a": "2" * 1000, "m": os.urandom(900_000), "n": os.urandom(900_000)})
    node.cluster.runner.limits[0] = 1_200_000
    with pytest.raises(NodeError):
        node.sync(here)
    assert (node.project / "a").read_text() == "2" * 1000
    node.cluster.runner.limits.clear()
    put(here, {"a": "1" * 1000})
    node.sync(here)
    assert tree(node.project) == tree(here)


def test_file_of_an_interrupted_sync_that_is_no_longer_wanted_is_deleted(
    here: Path, node: SyncedNode
) -> None:
    """The manifest is written at the end; what is being written is recorded in a file of its own. Also one
    that is as the sync before has written it."""
    put(here, {"a": "1", "b/c": "2", "z": "1"})
    node.sync(here)
    manifest, pending = (
        node.node.home / ".cloudddp" / f"{name}-project.json" for name in ("manifest", "pending")
    )
    before = manifest.read_bytes()
    assert not pending.exists()
    put(here, {"a": "3", "e": "4", "m": os.urandom(900_000), "n": os.urandom(900_000), "z": "22"})
    node.cluster.runner.limits[0] = 1_200_000
    with pytest.raises(NodeError):
        node.sync(here)
    node.cluster.runner.limits.clear()
    assert (node.project / "e").exists()
    assert (node.project / "z").read_text() == "1"
    assert manifest.read_bytes() == before
    assert set(json.loads(pending.read_text())["files"]) == {"a", "e", "m", "n", "z"}
    for name in ("e", "n", "z"):
        (here / name).unlink()
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert not pending.exists()
    assert UP_TO_DATE in node.sync(here)


def test_file_that_an_interrupted_sync_wrote_before_a_crash_of_the_node_is_sent_again(
    here: Path, node: SyncedNode
) -> None:
    """After a crash a file may have its size and time, and zeros instead of its contents."""
    put(here, {"a": "1"})
    node.sync(here)
    put(here, {"a": "234", "m": os.urandom(900_000), "n": os.urandom(900_000)})
    node.cluster.runner.limits[0] = 1_200_000
    with pytest.raises(NodeError):
        node.sync(here)
    node.cluster.runner.limits.clear()
    written = (node.project / "a").stat()
    (node.project / "a").write_bytes(bytes(3))
    os.utime(node.project / "a", ns=(written.st_mtime_ns, written.st_mtime_ns))
    pending = node.node.home / ".cloudddp" / "pending-project.json"
    pending.write_text(json.dumps({**json.loads(pending.read_text()), "boot": "another"}))
    node.sync(here)
    assert tree(node.project) == tree(here)


def test_wrong_beginning_of_a_file_is_sent_as_a_whole_once(here: Path, node: SyncedNode) -> None:
    """Another node may have sent the beginning in an earlier sync, which then broke."""
    put(here, {"large": os.urandom(4_000_000), "small": b"x"})
    node.cluster.runner.limits[0] = 2_500_000
    with pytest.raises(NodeError):
        node.sync(here)
    node.cluster.runner.limits.clear()
    (partial,) = node.project.glob(".*.cloudddp-tmp")
    with partial.open("r+b") as file:
        file.write(b"not what was sent")
    sent = node.cluster.sent
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert node.cluster.sent - sent < 4_000_000 + 4_000_000
    assert UP_TO_DATE in node.sync(here)
