"""Syncing a real folder to a real agent: the files on the node equal those on this computer."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node

from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.files import ApplyReply, ApplyRequest
from cloudddp.agent.protocol.manifest import manifest_from_wire
from cloudddp.job import sync
from cloudddp.job.project_files import Snapshot, snapshot

NOT_UTF8 = os.fsdecode(b"caf\xe9 \xff.bin")


def put(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


class SyncNode(Node):
    """A node that is synced as the laptop does."""

    def difference(self, project: Snapshot) -> sync.Difference:
        """Return how the node's files differ, by its reply."""
        manifest = self.probe(manifest_digest=project.digest).manifest
        if manifest is None:
            return sync.Difference((), (), 0)
        return sync.difference(project.manifest, manifest_from_wire(manifest))

    def sync(self, here: Path) -> sync.Difference:
        """Sync the node; return the difference that was sent."""
        project = snapshot(here, keep_out=("runs",))
        todo = self.difference(project)
        reply = self.call(sync.apply_request(project, todo, "p"), sync.stream(project, todo))
        assert reply == ApplyReply(len(todo.send), len(todo.delete))
        return todo


def stream(project: Snapshot, todo: sync.Difference) -> bytes:
    """Return the request and the tar stream."""
    return b"".join((encode(sync.apply_request(project, todo, "p")), b"\n", *sync.stream(project, todo)))


@pytest.fixture
def node(tmp_path: Path) -> SyncNode:
    return SyncNode(tmp_path / "home")


def tree(root: Path, *, leave_out: str = "runs") -> dict[str, Any]:
    """Return the properties of the files and links below a folder that a sync transfers."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != leave_out]
        for name in [*files, *(n for n in folders if (Path(folder) / n).is_symlink())]:
            path = Path(folder) / name
            info = path.lstat()
            key = str(path.relative_to(root))
            if stat.S_ISLNK(info.st_mode):
                found[key] = ("link", os.fspath(path.readlink()))
            else:
                found[key] = (path.read_bytes(), bool(info.st_mode & 0o100), info.st_mtime_ns)
    return found


def test_any_file_name_and_content_arrives(here: Path, node: SyncNode) -> None:
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
    took = node.sync(here)
    assert tree(node.project) == tree(here)
    assert len(took.send) == len(tree(here))


def test_second_sync_sends_nothing(here: Path, node: SyncNode) -> None:
    put(here, {"a": "1", "b/c": "2", NOT_UTF8: "3"})
    (here / "link").symlink_to("b")
    node.sync(here)
    project = snapshot(here)
    assert node.probe(manifest_digest=project.digest).manifest is None
    assert node.sync(here).empty


def test_only_changes_are_sent(here: Path, node: SyncNode) -> None:
    put(here, {"a": "1", "b": "2", "c": "3"})
    node.sync(here)
    put(here, {"b": "changed", "d": "new"})
    (here / "c").unlink()
    took = node.sync(here)
    assert (set(took.send), took.delete) == ({"b", "d"}, ("c",))
    assert tree(node.project) == tree(here)


def test_mode_alone_is_a_change(here: Path, node: SyncNode) -> None:
    put(here, {"run.sh": "x"})
    node.sync(here)
    (here / "run.sh").chmod(0o755)
    assert node.sync(here).send == ("run.sh",)
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
def test_path_may_change_its_kind(here: Path, node: SyncNode, change: Any) -> None:
    put(here, {"x": "1", "f/a": "2", "f/deep/er/b": "3", "g/g1": "4"})
    (here / "l").symlink_to("x")
    (here / "lf").symlink_to("g")
    node.sync(here)
    change(here)
    node.sync(here)
    assert tree(node.project) == tree(here)
    assert node.difference(snapshot(here)).empty
    kept = {folder.relative_to(here) for folder in here.rglob("*") if folder.is_dir()}
    assert {f.relative_to(node.project) for f in node.project.rglob("*") if f.is_dir()} == kept


def test_files_of_jobs_are_kept(here: Path, node: SyncNode) -> None:
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


def test_file_changed_or_removed_on_the_node_is_restored(here: Path, node: SyncNode) -> None:
    put(here, {"a": "1", "b": "2", "c": "3"})
    node.sync(here)
    (node.project / "a").write_text("other")
    (node.project / "b").unlink()
    assert set(node.sync(here).send) == {"a", "b"}
    assert tree(node.project) == tree(here)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9])
def test_next_sync_repairs_a_broken_one(here: Path, node: SyncNode, part: float) -> None:
    put(here, {"a": "old", "dropped": "x", **{f"many/{k}": os.urandom(3000) for k in range(40)}})
    node.sync(here)
    (here / "dropped").unlink()
    put(here, {"a": "new", "short-lived": "x" * 5000, **{f"many/{k}": os.urandom(3000) for k in range(40)}})
    project = snapshot(here)
    data = stream(project, node.difference(project))
    broken = node.send(ApplyRequest.STEP, data[: int(len(data) * part)])
    assert broken.returncode != 0
    (here / "short-lived").unlink()
    node.sync(here)
    assert tree(node.project) == tree(here)


def test_stream_cut_between_two_files_is_an_error(here: Path, node: SyncNode) -> None:
    put(here, {"a": "1", "b": "2"})
    project = snapshot(here)
    whole = sync.difference(project.manifest, {})
    assert whole.send == ("a", "b")
    data = stream(project, whole)
    of_b = 2 * 512 + 1024  # its header, its content, the end of the archive
    broken = node.send(ApplyRequest.STEP, data[:-of_b])
    assert broken.returncode != 0
    assert b"after 1 of 2 files" in broken.stderr
    assert node.sync(here).send == ("b",)


@pytest.mark.parametrize("name", ["../out", "a/../../out", "..", "/tmp/out", "a//b", ""])
@pytest.mark.parametrize("how", ["write", "delete"])
def test_name_that_leaves_the_project_is_refused(node: SyncNode, name: str, how: str) -> None:
    put(node.home, {"out": "precious"})
    writing = how == "write"
    manifest = {name: ["f", 0o644, 0, 0, ""]} if writing else {}
    delete = [] if writing else [name]
    request = {"project": "p", "delete": delete, "send": int(writing), "manifest": manifest}
    member = tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT) if writing else b""
    data = json.dumps(request).encode() + b"\n" + member + b"\0" * 1024
    done = node.send(ApplyRequest.STEP, data)
    assert done.returncode != 0
    assert b"outside the project" in done.stderr or b"a path is empty" in done.stderr
    assert (node.home / "out").read_text() == "precious"


def test_link_out_of_the_project_is_not_followed(here: Path, node: SyncNode, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(here, {"d/file": "inside"})
    (node.project / "d").symlink_to(outside)
    node.sync(here)
    assert list(outside.iterdir()) == []
    assert tree(node.project) == tree(here)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "p\n"])
def test_invalid_project_name_is_refused(node: SyncNode, name: str) -> None:
    request = {"project": name, "delete": [], "send": 0, "manifest": {}}
    done = node.send(ApplyRequest.STEP, json.dumps(request).encode())
    assert done.returncode != 0
    assert b"not a project name" in done.stderr


def test_file_that_changes_during_a_sync_is_sent_again(here: Path, node: SyncNode) -> None:
    put(here, {"grows": "1" * 2000, "shrinks": "2" * 2000, "z": "last"})
    project = snapshot(here)
    put(here, {"grows": "1" * 9000, "shrinks": "2"})
    todo = sync.difference(project.manifest, {})
    node.call(sync.apply_request(project, todo, "p"), sync.stream(project, todo))
    assert (node.project / "z").read_text() == "last"
    assert set(node.sync(here).send) == {"grows", "shrinks"}
    assert tree(node.project) == tree(here)


def test_stream_comes_in_pieces_of_useful_size(here: Path) -> None:
    put(here, {f"f{k}": b"x" * 300 for k in range(1500)})
    project = snapshot(here)
    pieces = list(sync.stream(project, sync.difference(project.manifest, {})))
    assert all(sync.PIECE <= len(piece) < 4 * sync.PIECE for piece in pieces[:-1])
    assert 1 < len(pieces) < 20
