"""Syncing a real folder to a real agent: the files on the node equal those on this computer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.localsync import LocalCluster
from support.syncednode import UP_TO_DATE, UPDATED, SyncedNode, put, tree

from agent.node import link, store
from agent.sync.project_writer import ProjectWriter
from cloudddp.agent import steps
from cloudddp.agent.protocol.manifest import MAX_FILES, Entry
from cloudddp.agent.protocol.transfer import BATCH, DONE, LISTING, MAX_BATCH, Listing, Record, batch, frame
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
    os.utime(here / "train.py", ns=(1_600_000_000_123_456_789,) * 2)
    said = node.sync(here)
    assert tree(node.project) == tree(here)
    links = 5
    assert f"sending {len(tree(here)) - links} files" in said


def test_second_sync_sends_nothing(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b/c": "2", NOT_UTF8: "3"})
    (here / "link").symlink_to("b")
    node.sync(here)
    sent = node.cluster.sent
    assert node.sync(here) == f"{UP_TO_DATE} on every node (4 files)"
    assert node.cluster.sent == sent


def test_only_changes_are_sent(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b": "2", "c": "3"})
    node.sync(here)
    put(here, {"b": "changed", "d": "new"})
    (here / "c").unlink()
    assert "sending 2 files, 10 bytes, to 1 node; deleting 1" in node.sync(here)
    assert tree(node.project) == tree(here)


def test_mode_alone_is_a_change(here: Path, node: SyncedNode) -> None:
    put(here, {"run.sh": "x"})
    node.sync(here)
    (here / "run.sh").chmod(0o755)
    assert node.sync(here) == UPDATED
    assert tree(node.project) == tree(here)


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


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_path_may_change_its_kind(here: Path, node: SyncedNode, change: Any) -> None:
    put(here, {"x": "1", "f/a": "2", "f/deep/er/b": "3", "g/g1": "4"})
    (here / "l").symlink_to("x")
    (here / "lf").symlink_to("g")
    node.sync(here)
    change(here)
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert UP_TO_DATE in node.sync(here)
    kept = {folder.relative_to(here) for folder in here.rglob("*") if folder.is_dir()}
    assert {f.relative_to(node.project) for f in node.project.rglob("*") if f.is_dir()} == kept


def test_files_of_jobs_are_kept(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "pkg/b": "2", "gone/c": "3"})
    node.sync(here)
    put(node.project, {"runs/1/model.pt": "weights", "pkg/cache": "x", "gone/log": "y"})
    shutil.rmtree(here / "gone")
    put(here, {"a": "changed"})
    node.sync(here)
    for name, content in {
        "runs/1/model.pt": "weights",
        "pkg/cache": "x",
        "gone/log": "y",
        "a": "changed",
    }.items():
        assert (node.project / name).read_text() == content
    assert not (node.project / "gone" / "c").exists()


def test_file_changed_or_removed_on_the_node_is_restored(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b": "2", "c": "3"})
    node.sync(here)
    (node.project / "a").write_text("other")
    (node.project / "b").unlink()
    assert "sending 2 files" in node.sync(here)
    assert tree(node.project) == tree(here)


SECRET = "s" * 64


def receive(node: SyncedNode, frames: bytes, project: str = "project") -> subprocess.CompletedProcess[bytes]:
    """Run the step with these frames."""
    first = {"node": 0, "address": "127.0.0.1", "port": 1}
    request = {"project": project, "secret": SECRET, "node": 0, "first": first, "nodes": 1}
    return subprocess.run(
        [sys.executable, "-IS", str(node.node.home / steps.agent_path()), "receive"],
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


@pytest.mark.parametrize("name", ["../out", "a/../../out", "..", "/tmp/out", "a//b", "a/./b", "./out", "."])
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


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "p\n"])
def test_invalid_project_name_is_refused(node: SyncedNode, name: str) -> None:
    done = receive(node, b"", project=name)
    assert done.returncode != 0
    assert b"not a project name" in done.stderr


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


def test_link_out_of_the_project_is_not_followed(here: Path, node: SyncedNode, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(here, {"d/file": "inside"})
    node.project.mkdir()
    (node.project / "d").symlink_to(outside)
    node.sync(here)
    assert list(outside.iterdir()) == []
    assert tree(node.project) == tree(here)


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


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("was_sent", [True, False])
def test_file_that_disappears_before_it_is_sent_counts_as_deleted(
    here: Path, tmp_path: Path, nodes: int, was_sent: bool
) -> None:
    """As an editor's temporary files, and what a build replaces."""
    cluster = LocalCluster(tmp_path / "nodes", nodes)
    gone = {"gone.tmp": "2", "d/large": b"3" * 2_000_000, "d/e": "4"}
    put(here, {"a": "1"} | (gone if was_sent else {}))
    cluster.sync(here)
    put(here, {"a": "changed", "gone.tmp": "22", "d/large": b"4" * 2_000_000, "d/e": "44"})

    def delete() -> None:
        (here / "gone.tmp").unlink(missing_ok=True)
        shutil.rmtree(here / "d", ignore_errors=True)

    cluster.runner.on_probed = delete
    said = cluster.sync(here)
    assert not any("warning" in line for line in said), said
    assert [tree(node.project) for node in cluster.nodes] == [tree(here)] * nodes
    assert UP_TO_DATE in cluster.sync(here)[0]


def test_file_that_cannot_be_read_is_named(here: Path, node: SyncedNode) -> None:
    put(here, {"a": "1", "b": "2"})

    def replaced() -> None:
        (here / "b").unlink()
        (here / "b").mkdir()

    node.cluster.runner.on_probed = replaced
    with pytest.raises(CloudDDPError, match="cannot read b, which the nodes need"):
        node.sync(here)


def test_touched_file_is_not_sent_again(here: Path, node: SyncedNode) -> None:
    """As after `git checkout` of another branch and back, or in a new clone."""
    put(here, {"data/large": os.urandom(3_000_000), "data/small": os.urandom(300_000), "b": "1"})
    node.sync(here)
    sent = node.cluster.sent
    for name in ("data/large", "data/small"):
        os.utime(here / name, ns=(1_700_000_000_000_000_001,) * 2)
    node.sync(here)
    assert node.cluster.sent - sent < 10_000
    assert tree(node.project) == tree(here)
    (here / "data/large").write_bytes(os.urandom(3_000_000))
    node.sync(here)
    assert tree(node.project) == tree(here)


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


def test_renamed_file_is_neither_read_nor_sent_again(here: Path, node: SyncedNode) -> None:
    put(here, {"data/large": os.urandom(3_000_000), "data/deep/small": os.urandom(300_000), "b": "1"})
    node.sync(here)
    sent = node.cluster.sent
    (here / "data").rename(here / "corpus")
    there = [path for path in here.rglob("*") if path.is_file()]
    for path in there:
        os.utime(path, ns=(0, path.stat().st_mtime_ns))  # any read changes the first one
    assert node.sync(here) == UPDATED
    assert {path.stat().st_atime_ns for path in there} == {0}
    assert node.cluster.sent - sent < 10_000
    assert tree(node.project) == tree(here)
    assert not (node.project / "data").exists()
    assert UP_TO_DATE in node.sync(here)


def test_renamed_file_is_known_under_its_new_name(here: Path, node: SyncedNode) -> None:
    put(here, {"one": os.urandom(300_000)})
    node.sync(here)
    for name in ("two", "three"):
        (next(here.iterdir())).rename(here / name)
        os.utime(here / name)
        node.sync(here)
        sent = node.cluster.sent
    assert tree(node.project) == tree(here)
    assert node.cluster.sent == sent


@pytest.mark.parametrize(
    "moves",
    [
        [("a", "t"), ("b", "a"), ("t", "b")],  # exchanged
        [("a", "t"), ("t", "a/inner")],  # into a folder of its own name
        [("d/x", "t"), ("d/y", "gone/y"), ("t", "d")],  # instead of its folder
        [("a", "b")],  # over another one
        [("d", "t"), ("a", "d"), ("t/x", "a")],
        [("d/x", "x"), ("d/y", "y"), ("a", "d/a")],
    ],
)
def test_renamed_files_in_the_way_of_each_other(
    here: Path, node: SyncedNode, moves: list[tuple[str, str]]
) -> None:
    put(here, {name: os.urandom(2000) for name in ("a", "b", "d/x", "d/y", "gone/z")})
    put(here, {"big": os.urandom(1_500_000)})
    node.sync(here)
    (node.project / "runs").mkdir()
    (node.project / "runs" / "log").write_text("a result")
    for old, new in moves:
        if (here / new).is_dir() and not any((here / new).iterdir()):
            (here / new).rmdir()
        if (here / new).is_dir():
            shutil.rmtree(here / new)
        (here / new).parent.mkdir(exist_ok=True)
        (here / old).rename(here / new)
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert (node.project / "runs" / "log").read_text() == "a result"
    assert UP_TO_DATE in node.sync(here)


def test_copied_file_arrives(here: Path, node: SyncedNode) -> None:
    put(here, {"a": os.urandom(2000)})
    node.sync(here)
    shutil.copy2(here / "a", here / "b")
    (here / "a").rename(here / "c")
    node.sync(here)
    assert tree(node.project) == tree(here)


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
def test_one_changed_file_makes_the_node_look_at_its_folder_only(
    here: Path, node: SyncedNode, tmp_path: Path
) -> None:
    put(here, {f"d{number % 10}/{number}": f"{number}" for number in range(200)})
    node.sync(here)
    put(here, {"d3/3": "changed"})
    trace = tmp_path / "trace"
    only_receive = (
        f'case "$3" in *receive*) exec strace -f -qq -o {trace} -e trace=%file "$@"; esac; exec "$@"'
    )
    node.cluster.runner.wrap[0] = f"sh -c {shlex.quote(only_receive)} sh"
    node.sync(here)
    inside = (f'stat("{node.project}/d', f', "{node.project}/d')
    looked = [line for line in trace.read_text().splitlines() if any(text in line for text in inside)]
    paths = {Path(line.split('"')[1]).relative_to(node.project) for line in looked}
    assert {path.parent.name for path in paths if len(path.parts) > 1} == {"d3"}
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


def test_permissions_and_times_are_kept(here: Path, node: SyncedNode) -> None:
    put(here, {"small": "1", "tool": "2", "large": os.urandom(2_000_000), "program": os.urandom(2_000_000)})
    times = [-1_000_000_000_000_000_001, 1, 1_700_000_000_123_456_789, 4_102_444_800_000_000_007]
    for path, nanoseconds in zip(sorted(here.iterdir()), times, strict=True):
        path.chmod(0o755 if path.name in ("tool", "program") else 0o640)
        os.utime(path, ns=(nanoseconds, nanoseconds))
    node.sync(here)
    assert tree(node.project) == tree(here)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in node.project.iterdir()}
    assert modes == {"small": 0o644, "tool": 0o755, "large": 0o644, "program": 0o755}  # as git keeps them
    assert UP_TO_DATE in node.sync(here)


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


def test_line_of_a_stranger_that_comes_byte_by_byte_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER", 1.0)
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
        with pytest.raises(TimeoutError):
            one.accept()
    finally:
        ended.set()
        thread.join()
        one.close()
        stranger.close()
