"""Syncing a real folder to a real agent: the files on the node equal those on this computer."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
from pathlib import Path

import pytest
from support.localsync import LocalCluster
from support.syncednode import UP_TO_DATE, UPDATED, SyncedNode, put, tree

from cloudddp.agent.protocol.manifest import MAX_FILES
from cloudddp.agent.protocol.transfer import BATCH, MAX_BATCH
from cloudddp.errors import CloudDDPError, NodeError, UsageError

NOT_UTF8 = os.fsdecode(b"caf\xe9 \xff.bin")


@pytest.fixture
def node(tmp_path: Path) -> SyncedNode:
    return SyncedNode(tmp_path / "nodes")


def test_any_file_name_and_content_arrives(here: Path, node: SyncedNode) -> None:
    put(
        here,
        {
            "train.py": "print(1)\n",
            "empty": b"",
            "block": b"b" * 512,
            "big.bin": os.urandom(700_001),
            "with space/and more .txt": "x",
            "new\nline": "x",
            "-rf": "x",
            "--": "x",
            " leading": "x",
            "trailing ": "x",
            "back\\slash": "x",
            "quote'\"$(id)`;": "x",
            "\u65e5\u672c/\u00e9.txt": "x",
            NOT_UTF8: b"\xff",
            "deep/" * 30 + "file": "x",
            "long-" + "n" * 240: "x",
            "\u00e9" * 100: "x",
        },
    )
    script = here / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o750)
    (here / "to-file").symlink_to("train.py")
    (here / "to-folder").symlink_to("with space")
    (here / "dangling").symlink_to("nowhere/at all")
    (here / "to-odd").symlink_to(NOT_UTF8)
    (here / "long-link").symlink_to("t" * 200)
    times = [-1_000_000_000_000_000_001, 1, 1_600_000_000_123_456_789, 4_102_444_800_000_000_007]
    for name, nanoseconds in zip(("empty", "block", "train.py", "big.bin"), times, strict=True):
        (here / name).chmod(0o755 if name == "big.bin" else 0o640)
        os.utime(here / name, ns=(nanoseconds, nanoseconds))
    said = node.sync(here)
    assert tree(node.project) == tree(here)
    modes = {
        name: stat.S_IMODE((node.project / name).stat().st_mode) for name in ("run.sh", "big.bin", "empty")
    }
    assert modes == {"run.sh": 0o755, "big.bin": 0o755, "empty": 0o644}  # as git keeps them
    links = 5
    assert f"sending {len(tree(here)) - links} files" in said
    sent = node.cluster.sent
    assert node.sync(here) == f"{UP_TO_DATE} on every node ({len(tree(here))} files)"
    assert node.cluster.sent == sent


def test_only_changes_are_sent_and_files_of_jobs_are_kept(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b": "2", "c": "3", "pkg/b": "2", "gone/c": "3"})
    node.sync(here)
    of_job = {"runs/1/model.pt": "weights", "pkg/cache": "x", "gone/log": "y"}
    put(node.project, of_job)
    put(here, {"b": "changed", "d": "new"})
    (here / "c").unlink()
    shutil.rmtree(here / "gone")
    assert "sending 2 files, 10 bytes, to 1 node; deleting 2" in node.sync(here)
    (here / "a").chmod(0o755)
    assert node.sync(here) == UPDATED
    (node.project / "a").write_text("other")
    (node.project / "b").unlink()
    assert "sending 2 files" in node.sync(here)
    found = tree(node.project)
    for name in ("pkg/cache", "gone/log"):
        found.pop(name)
    assert found == tree(here)
    assert {name: (node.project / name).read_text() for name in of_job} == of_job


def file_to_folder(here: Path) -> None:
    (here / "x").unlink()
    put(here, {"x/inner/y": "1"})


def folder_to_file(here: Path) -> None:
    shutil.rmtree(here / "f")
    put(here, {"f": "now a file"})


def folder_to_link(here: Path) -> None:
    shutil.rmtree(here / "f")
    (here / "f").symlink_to("g")


def link_to_file(here: Path) -> None:
    (here / "l").unlink()
    put(here, {"l": "now a file"})


def link_to_folder(here: Path) -> None:
    (here / "lf").unlink()
    put(here, {"lf/g1": "not g's"})


def file_to_link(here: Path) -> None:
    (here / "x").unlink()
    (here / "x").symlink_to("g/g1")


def link_moves(here: Path) -> None:
    (here / "l").unlink()
    (here / "l").symlink_to("g/g1")


def folder_empties(here: Path) -> None:
    shutil.rmtree(here / "f" / "deep")


CHANGES = [
    file_to_folder,
    folder_to_file,
    folder_to_link,
    link_to_file,
    link_to_folder,
    file_to_link,
    link_moves,
    folder_empties,
]


def test_path_may_change_its_kind(here: Path, node: SyncedNode) -> None:
    for change in CHANGES:
        folder = here / change.__name__
        put(folder, {"x": "1", "f/a": "2", "f/deep/er/b": "3", "g/g1": "4"})
        (folder / "l").symlink_to("x")
        (folder / "lf").symlink_to("g")
    node.sync(here)
    for change in CHANGES:
        change(here / change.__name__)
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert UP_TO_DATE in node.sync(here)
    kept = {folder.relative_to(here) for folder in here.rglob("*") if folder.is_dir()}
    assert {f.relative_to(node.project) for f in node.project.rglob("*") if f.is_dir()} == kept


def test_file_that_changed_since_it_was_listed_arrives_as_it_is(here: Path, node: SyncedNode) -> None:
    """The probe takes time: a file that is saved meanwhile is neither cut nor padded."""
    put(here, {"grows": "1" * 2000, "shrinks": "2" * 2000, "large": b"3" * 3_000_000, "z": "last"})
    node.cluster.runner.on_probed = lambda: put(
        here, {"grows": "1" * 9000, "shrinks": "2", "large": b"4" * 2_500_000}
    )
    node.sync(here)
    assert tree(node.project) == tree(here)
    node.cluster.runner.on_probed = lambda: None
    assert UP_TO_DATE in node.sync(here)


def test_file_that_changes_while_it_is_read_is_named_and_sent_again(here: Path, node: SyncedNode) -> None:
    log = here / "train.log"
    put(here, {"a.py": "1", "train.log": b"x" * 2_000_000})

    def write(_node: int, _sent: int) -> None:
        with log.open("ab") as file:
            file.write(b"y")

    node.cluster.runner.on_sent = write  # called after each of the two parts
    said = node.sync(here)
    node.cluster.runner.on_sent = lambda _node, _sent: None
    assert "warning: train.log was changing while it was sent; the next sync sends it again" in said
    assert (node.project / "a.py").read_text() == "1"
    content = (node.project / "train.log").read_bytes()
    assert log.read_bytes().startswith(content)
    assert len(content) >= 2_000_000
    assert "sending 1 file," in node.sync(here)
    assert tree(node.project) == tree(here)


def test_file_that_disappears_before_it_is_sent_counts_as_deleted(here: Path, tmp_path: Path) -> None:
    """As an editor's temporary files, and what a build replaces."""
    cluster = LocalCluster(tmp_path / "nodes", 2)
    put(here, {"a": "1", "gone.tmp": "2", "d/large": b"3" * 2_000_000})
    cluster.sync(here)
    put(here, {"a": "changed", "gone.tmp": "22", "d/large": b"4" * 2_000_000, "d/e": "44"})

    def delete() -> None:
        (here / "gone.tmp").unlink(missing_ok=True)
        shutil.rmtree(here / "d", ignore_errors=True)

    cluster.runner.on_probed = delete
    said = cluster.sync(here)
    assert not any("warning" in line for line in said), said
    assert [tree(node.project) for node in cluster.nodes] == [tree(here)] * 2
    assert UP_TO_DATE in cluster.sync(here)[0]


def test_file_that_cannot_be_read_is_named(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b": "2"})

    def replaced() -> None:
        (here / "b").unlink()
        (here / "b").mkdir()

    node.cluster.runner.on_probed = replaced
    with pytest.raises(CloudDDPError, match="cannot read b, which the nodes need"):
        node.sync(here)


def test_sparse_file_of_a_terabyte_is_named_before_anything_is_sent(here: Path, node: SyncedNode) -> None:
    put(here, {"train.py": "1"})
    with (here / "disk.img").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"more than sync\.max_mb = 512: disk\.img 1048576 MiB"):
        node.sync(here)
    assert not (node.project / "train.py").exists()


def test_second_sync_waits_for_the_first_one_and_then_refuses(here: Path, node: SyncedNode) -> None:
    put(here, {"train.py": "1"})
    with (node.node.home / ".cloudddp" / "sync-project.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NodeError, match="another sync writes to this node; wait for its end, and repeat"):
            node.sync(here)
    node.sync(here)
    assert tree(node.project) == tree(here)


def test_file_that_was_touched_renamed_or_copied_is_not_sent_again(here: Path, node: SyncedNode) -> None:
    """As after `git checkout` of another branch and back, or in a new clone. A renamed one is not read."""
    put(here, {"data/large": os.urandom(3_000_000), "data/deep/small": os.urandom(300_000), "b": "1"})
    node.sync(here)
    sent = node.cluster.sent
    for name in ("data/large", "data/deep/small"):
        os.utime(here / name, ns=(1_700_000_000_000_000_001,) * 2)
    node.sync(here)
    assert tree(node.project) == tree(here)
    for name in ("corpus", "again"):  # known under each new name
        (here / ("data" if name == "corpus" else "corpus")).rename(here / name)
        there = [path for path in here.rglob("*") if path.is_file()]
        for path in there:
            os.utime(path, ns=(0, path.stat().st_mtime_ns))  # any read changes the first one
        assert node.sync(here) == UPDATED
        assert {path.stat().st_atime_ns for path in there} == {0}
        assert tree(node.project) == tree(here)
    assert node.cluster.sent - sent < 20_000
    assert not (node.project / "data").exists()
    shutil.copy2(here / "again/large", here / "copy")
    (here / "b").rename(here / "c")
    node.sync(here)
    assert tree(node.project) == tree(here)
    (here / "again/large").write_bytes(os.urandom(3_000_000))
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert UP_TO_DATE in node.sync(here)


MOVES = [
    [("a", "t"), ("b", "a"), ("t", "b")],  # exchanged
    [("a", "t"), ("t", "a/inner")],  # into a folder of its own name
    [("d/x", "t"), ("d/y", "gone/y"), ("t", "d")],  # instead of its folder
    [("a", "b")],  # over another one
    [("d", "t"), ("a", "d"), ("t/x", "a")],
    [("d/x", "x"), ("d/y", "y"), ("a", "d/a")],
]


def test_renamed_files_in_the_way_of_each_other(here: Path, node: SyncedNode) -> None:
    for number in range(len(MOVES)):
        put(here / f"m{number}", {name: os.urandom(2000) for name in ("a", "b", "d/x", "d/y", "gone/z")})
    put(here, {"big": os.urandom(1_500_000)})
    node.sync(here)
    put(node.project, {"runs/log": "a result"})
    for number, moves in enumerate(MOVES):
        for old, new in ((here / f"m{number}" / one, here / f"m{number}" / other) for one, other in moves):
            if new.is_dir():
                shutil.rmtree(new)
            new.parent.mkdir(exist_ok=True)
            old.rename(new)
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert (node.project / "runs" / "log").read_text() == "a result"
    assert UP_TO_DATE in node.sync(here)


def test_renamed_file_behind_a_link_on_the_node_is_sent(here: Path, node: SyncedNode, tmp_path: Path) -> None:
    """A job may have replaced a folder by a link: what is behind it is not the project's."""
    put(here, {"d/a": os.urandom(2000)})
    node.sync(here)
    (node.project / "d").rename(tmp_path / "outside")
    (node.project / "d").symlink_to(tmp_path / "outside")
    (here / "d" / "a").rename(here / "a")
    node.sync(here)
    assert (tmp_path / "outside" / "a").exists()
    assert (node.project / "a").read_bytes() == (here / "a").read_bytes()


def test_file_of_a_job_with_the_name_and_time_of_one_that_was_synced_is_kept(
    here: Path, node: SyncedNode
) -> None:
    """As a command of [job] setup extracts it from an archive."""
    put(here, {"train.py": "1", "data/x": "contents"})
    node.sync(here)
    former = (here / "data" / "x").stat()
    shutil.rmtree(node.project / "data")
    shutil.rmtree(here / "data")
    put(here, {"train.py": "22"})
    node.sync(here)
    put(node.project, {"data/x": "contents"})
    os.utime(node.project / "data" / "x", ns=(former.st_mtime_ns, former.st_mtime_ns))
    put(here, {"train.py": "333"})
    node.sync(here)
    assert (node.project / "data" / "x").exists()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_file_that_a_sync_only_deletes_needs_no_record_before(
    here: Path, node: SyncedNode, tmp_path: Path
) -> None:
    """So that it makes room on a full disk."""
    put(here, {"a": "1", "b": os.urandom(5000)})
    node.sync(here)
    (here / "b").unlink()
    trace = tmp_path / "trace"
    node.cluster.runner.wrap[0] = f"strace -f -qq -o {trace} -e trace=/rename"
    node.sync(here)
    assert "manifest-project" in trace.read_text()
    assert "pending-project" not in trace.read_text()
    assert tree(node.project) == tree(here)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_files_are_brought_to_the_disk_once_and_before_the_manifest(
    here: Path, node: SyncedNode, tmp_path: Path
) -> None:
    put(here, {f"d{number % 5}/{number}": os.urandom(3000) for number in range(200)})
    trace = tmp_path / "trace"
    calls = "trace=fsync,fdatasync,sync,syncfs,/rename"
    node.cluster.runner.wrap[0] = f"strace -f -qq -o {trace} -e {calls}"
    node.sync(here)
    lines = trace.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if "sync" in line.split("(")[0]]
    files = [number for number, line in enumerate(lines) if '"d' in line or ".cloudddp-tmp" in line]
    (manifest,) = [number for number, line in enumerate(lines) if "/manifest-" in line][-1:]
    assert len(files) == 200
    assert max(files) < at < manifest


def test_folder_of_the_most_files(here: Path, node: SyncedNode) -> None:
    """What a file costs: its name in the listing, and a record in one of few frames. The agent's memory is
    bounded."""
    for number in range(MAX_FILES):
        (here / f"{number:06}.txt").touch()
    frames: list[bytes] = []
    node.cluster.runner.on_piece = lambda _node, piece: frames.append(piece[:1])
    limit = shlex.quote('ulimit -v 800000 && exec "$@"')
    node.cluster.runner.wrap[0] = f"sh -c {limit} sh"
    assert f"sending {MAX_FILES} files, 0 bytes" in node.sync(here)
    assert {path.name for path in node.project.iterdir()} == {path.name for path in here.iterdir()}
    assert frames.count(bytes((BATCH,))) <= MAX_FILES / MAX_BATCH + 1
    assert node.cluster.sent < 60 * MAX_FILES
