"""A sync that follows one that was interrupted: it sends what is missing, and leaves nothing that is not
wanted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.localsync import UP_TO_DATE, LocalCluster, put, tree

from cloudddp.errors import NodeError


def breaks(synced: LocalCluster, here: Path, sent: int) -> None:
    """Begin a sync whose connection breaks once so many bytes have been sent."""
    synced.runner.limits[0] = sent
    with pytest.raises(NodeError, match="node 0: the connection to the computer"):
        synced.sync(here)
    synced.runner.limits.clear()


def begun(synced: LocalCluster) -> list[Path]:
    """Return the files that have no name yet."""
    return [*(synced.home / ".cloudddp").glob("begun-*/*")]


def test_next_sync_repairs_a_broken_one(here: Path, synced: LocalCluster) -> None:
    """It continues a large file, and deletes one that is no longer wanted."""
    put(here, {"a": "old", "dropped": "x", **{f"many/{k}": os.urandom(3000) for k in range(40)}})
    synced.sync(here)
    (here / "dropped").unlink()
    many = {f"many/{k}": os.urandom(300_000) for k in range(10)}
    put(here, {"a": "new", "short-lived": "x" * 5000, "unwanted": os.urandom(8_000_000), **many})
    before = {**tree(synced.project)}
    breaks(synced, here, 6_500_000)
    assert begun(synced)
    whole = {**tree(here), **before}
    for name, found in tree(synced.project).items():  # a file is the old one or the new one
        assert found in (whole[name], tree(here).get(name))
    (here / "short-lived").unlink()
    (here / "unwanted").unlink()
    put(here, {"large": os.urandom(8_000_000)})
    breaks(synced, here, 6_500_000)
    sent = synced.sent
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert not begun(synced)
    assert synced.sent - sent < 5_000_000


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(("call", "number"), [("renameat", 1), ("utimensat", 8)])
def test_killed_sync_leaves_nothing(
    here: Path, synced: LocalCluster, tmp_path: Path, call: str, number: int
) -> None:
    """Killed while a link (the first) or a file has a temporary name."""
    put(here, {name: name for name in ("top", "a/x", "a/b/y", "c/z", "c/y", "d/x", "d/y", "e", "f")})
    (here / "link").symlink_to("top")
    killed = f"-e trace={call} -e inject={call}:signal=SIGKILL:when={number}"
    synced.runner.wrap[0] = f"strace -f -qq -o {tmp_path / 'trace'} {killed}"
    with pytest.raises(NodeError):
        synced.sync(here)
    assert begun(synced)
    assert not {*tree(synced.project)} - {*tree(here)}
    synced.runner.wrap.clear()
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert not begun(synced)


def test_file_of_an_interrupted_sync_that_is_no_longer_wanted_is_deleted(
    here: Path, synced: LocalCluster
) -> None:
    """The manifest is written at the end; what is being written is recorded in a file of its own. Also one
    that is as the sync before has written it, and one that gets its former contents and another time."""
    put(here, {"a": "1", "b/c": "2", "z": "1"})
    synced.sync(here)
    manifest, pending = (
        synced.home / ".cloudddp" / f"{name}-project.json" for name in ("manifest", "pending")
    )
    before = manifest.read_bytes()
    assert not pending.exists()
    put(here, {"a": "3", "e": "4", "m": os.urandom(900_000), "n": os.urandom(900_000), "z": "22"})
    breaks(synced, here, 1_200_000)
    assert (synced.project / "e").exists()
    assert (synced.project / "z").read_text() == "1"
    assert manifest.read_bytes() == before
    assert set(json.loads(pending.read_text())["files"]) == {"a", "e", "m", "n", "z"}
    for name in ("e", "n", "z"):
        (here / name).unlink()
    put(here, {"a": "1"})
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert not pending.exists()
    assert UP_TO_DATE in synced.sync(here)


def test_file_that_an_interrupted_sync_wrote_before_a_crash_of_the_node_is_sent_again(
    here: Path, synced: LocalCluster
) -> None:
    """After a crash a file may have its size and time, and zeros instead of its contents."""
    put(here, {"a": "1"})
    synced.sync(here)
    put(here, {"a": "234", "m": os.urandom(900_000), "n": os.urandom(900_000)})
    breaks(synced, here, 1_200_000)
    written = (synced.project / "a").stat()
    (synced.project / "a").write_bytes(bytes(3))
    os.utime(synced.project / "a", ns=(written.st_mtime_ns, written.st_mtime_ns))
    pending = synced.home / ".cloudddp" / "pending-project.json"
    pending.write_text(json.dumps({**json.loads(pending.read_text()), "boot": "another"}))
    synced.sync(here)
    assert tree(synced.project) == tree(here)
