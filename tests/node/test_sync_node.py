"""Syncing a real folder to a real agent: the files on the node equal those on this computer."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.localsync import UP_TO_DATE, LocalCluster, put, tree

from cloudddp.config.spec import Config, SyncSpec
from cloudddp.errors import CloudDDPError, NodeError, UsageError

NOT_UTF8 = os.fsdecode(b"caf\xe9 \xff.bin")


def test_any_file_name_and_content_arrives(here: Path, synced: LocalCluster) -> None:
    names = ["with space/and more .txt", "new\nline", "-rf", "--", " leading", "trailing ", "back\\slash"]
    names += ["quote'\"$(id)`;", "\u65e5\u672c/\u00e9.txt", NOT_UTF8, "deep/" * 30 + "file"]
    put(here, dict.fromkeys((*names, "long-" + "n" * 240, "\u00e9" * 100), "x"))
    put(here, {"train.py": "print(1)\n", "empty": b"", "block": b"b" * 512, "big.bin": os.urandom(700_001)})
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
    said = synced.sync(here)
    assert tree(synced.project) == tree(here)
    for name, mode in (("run.sh", 0o755), ("big.bin", 0o755), ("empty", 0o644)):  # as git keeps them
        assert stat.S_IMODE((synced.project / name).stat().st_mode) == mode
    links = 5
    assert f"sending {len(tree(here)) - links} files" in said
    sent = synced.sent
    assert synced.sync(here) == f"{UP_TO_DATE} on every node ({len(tree(here))} files)"
    assert synced.sent == sent


def test_many_small_files_share_frames(here: Path, synced: LocalCluster) -> None:
    """A file costs its name in the listing, and a record beside those of hundreds of other files."""
    many, sizes = 3000, list[int]()
    put(here, {f"{number:06}.txt": "" for number in range(many)})
    synced.runner.on_piece = lambda _node, piece: sizes.append(len(piece))
    assert f"sending {many} files, 0 bytes" in synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert sum(size > 0 for size in sizes) < many / 100
    assert synced.sent < 100 * many


def test_only_changes_are_sent_and_files_of_jobs_are_kept(here: Path, synced: LocalCluster) -> None:
    """Also one with the name and time of a file that was synced, as a command of [job] setup extracts it from
    an archive."""
    put(here, {"a": "1", "b": "2", "c": "3", "pkg/b": "2", "gone/c": "3"})
    synced.sync(here)
    former = (here / "gone" / "c").stat()
    of_job = {"runs/1/model.pt": "weights", "pkg/cache": "x", "gone/log": "y"}
    put(synced.project, of_job)
    put(here, {"b": "changed", "d": "new"})
    (here / "c").unlink()
    shutil.rmtree(here / "gone")
    assert "sending 2 files, 10 bytes, to 1 node; deleting 2" in synced.sync(here)
    of_job["gone/c"] = "3"
    put(synced.project, of_job)
    os.utime(synced.project / "gone" / "c", ns=(former.st_mtime_ns, former.st_mtime_ns))
    (here / "a").chmod(0o755)
    said = "updating modes, times and links on 1 node; nothing is sent from this computer"
    assert synced.sync(here) == said
    (synced.project / "a").write_text("other")
    (synced.project / "b").unlink()
    assert "sending 2 files" in synced.sync(here)
    found = tree(synced.project)
    for name in ("pkg/cache", "gone/log", "gone/c"):
        found.pop(name)
    assert found == tree(here)
    assert {name: (synced.project / name).read_text() for name in of_job} == of_job


# A path, and what comes in its place: files, or the target of a link.
CHANGES: dict[str, tuple[str, dict[str, str | bytes] | str]] = {
    "file to folder": ("x", {"x/inner/y": "1"}),
    "folder to file": ("f", {"f": "now a file"}),
    "folder to link": ("f", "g"),
    "link to file": ("l", {"l": "now a file"}),
    "link to folder": ("lf", {"lf/g1": "not g's"}),
    "file to link": ("x", "g/g1"),
    "link moves": ("l", "g/g1"),
    "folder empties": ("f/deep", {}),
}


def test_path_may_change_its_kind(here: Path, synced: LocalCluster) -> None:
    for folder in map(here.joinpath, CHANGES):
        put(folder, {"x": "1", "f/a": "2", "f/deep/er/b": "3", "g/g1": "4"})
        (folder / "l").symlink_to("x")
        (folder / "lf").symlink_to("g")
    synced.sync(here)
    for case, (name, new) in CHANGES.items():
        path = here / case / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if isinstance(new, str):
            path.symlink_to(new)
        else:
            put(here / case, new)
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert UP_TO_DATE in synced.sync(here)
    kept = {folder.relative_to(here) for folder in here.rglob("*") if folder.is_dir()}
    assert {f.relative_to(synced.project) for f in synced.project.rglob("*") if f.is_dir()} == kept


def test_files_that_changed_or_were_deleted_since_they_were_listed(here: Path, tmp_path: Path) -> None:
    """The probe takes time: a file that is saved meanwhile is neither cut nor padded. Temporary files of an
    editor, and what a build replaces, count as deleted."""
    cluster = LocalCluster(tmp_path / "nodes", 2)
    put(here, {"a": "1", "gone.tmp": "2", "d/large": b"3" * 2_000_000})
    cluster.sync(here)
    put(here, {"a": "changed", "gone.tmp": "22", "d/large": b"4" * 2_000_000, "d/e": "44"})
    put(here, {"grows": "1" * 2000, "shrinks": "2" * 2000, "large": b"3" * 3_000_000, "z": "last"})

    def change() -> None:
        (here / "gone.tmp").unlink(missing_ok=True)
        shutil.rmtree(here / "d", ignore_errors=True)
        put(here, {"grows": "1" * 9000, "shrinks": "2", "large": b"4" * 2_500_000})

    cluster.runner.on_probed = change
    said = cluster.sync(here)
    assert "warning" not in said
    cluster.runner.on_probed = lambda: None
    assert [tree(node.project) for node in cluster.nodes] == [tree(here)] * 2
    assert UP_TO_DATE in cluster.sync(here)


def test_file_that_changes_while_it_is_read_is_named_and_sent_again(here: Path, synced: LocalCluster) -> None:
    log = here / "train.log"
    put(here, {"a.py": "1", "train.log": os.urandom(2_000_000)})  # a slow machine would compress text

    def write(_node: int, _piece: bytes) -> None:
        with log.open("ab") as file:
            file.write(b"y")

    synced.runner.on_piece = write
    said = synced.sync(here)
    synced.runner.on_piece = lambda _node, _piece: None
    assert "warning: train.log was changing while it was sent; the next sync sends it again" in said
    assert (synced.project / "a.py").read_text() == "1"
    content = (synced.project / "train.log").read_bytes()
    assert log.read_bytes().startswith(content)
    assert len(content) >= 2_000_000
    assert "sending 1 file," in synced.sync(here)
    assert tree(synced.project) == tree(here)


def test_file_that_cannot_be_read_is_named(here: Path, synced: LocalCluster) -> None:
    put(here, {"a": "1", "b": "2"})

    def replaced() -> None:
        (here / "b").unlink()
        (here / "b").mkdir()

    synced.runner.on_probed = replaced
    with pytest.raises(CloudDDPError, match="cannot read b, which the nodes need"):
        synced.sync(here)


def test_second_sync_waits_for_the_first_one_and_then_refuses(here: Path, synced: LocalCluster) -> None:
    put(here, {"train.py": "1"})
    with (synced.home / ".cloudddp" / "sync-project.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NodeError, match="another sync writes to this node; wait for its end, and repeat"):
            synced.sync(here)
    synced.sync(here)
    assert tree(synced.project) == tree(here)


def test_file_that_was_touched_is_not_sent_again(here: Path, synced: LocalCluster) -> None:
    """As after `git checkout` of another branch and back, in a new clone, or where the records are lost."""
    put(here, {"data/large": os.urandom(3_000_000), "data/deep/small": os.urandom(300_000), "b": "1"})
    synced.sync(here)
    sent = synced.sent
    for name in ("data/large", "data/deep/small"):
        os.utime(here / name, ns=(1_700_000_000_000_000_001,) * 2)
    assert "nothing is sent from this computer" in synced.sync(here)
    assert tree(synced.project) == tree(here)
    put(here, {"b": "2"})
    assert "sending 1 file, 1 byte, to 1 node" in synced.sync(here)
    for record in (synced.home / ".cloudddp").glob("*-project.json"):
        record.unlink()
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert synced.sent - sent < 20_000
    (here / "data/large").write_bytes(os.urandom(3_000_000))
    with pytest.raises(UsageError, match=r"3 MiB to every node, more than sync\.max_mb = 1"):
        synced.sync(here, Config(sync=SyncSpec(max_mb=1)))
    os.utime(here / "b", ns=(0, 5 * 10**18))  # the year 2128, which no frame holds
    assert "sending 1 file, 2.9 MiB, to 1 node" in synced.sync(here)
    assert (synced.project / "data/large").read_bytes() == (here / "data/large").read_bytes()
    assert UP_TO_DATE in synced.sync(here)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_files_are_brought_to_the_disk_once_and_before_the_manifest(
    here: Path, synced: LocalCluster, tmp_path: Path
) -> None:
    """What a sync only deletes needs no record before, so that it makes room on a full disk."""
    put(here, {f"d{number % 5}/{number}": os.urandom(3000) for number in range(200)})
    trace = tmp_path / "trace"
    calls = "trace=fsync,fdatasync,sync,syncfs,/rename"
    synced.runner.wrap[0] = f"strace -f -qq -o {trace} -e {calls}"
    synced.sync(here)
    lines = trace.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if "sync" in line.split("(")[0]]
    files = [number for number, line in enumerate(lines) if '-begun"' in line]
    (manifest,) = [number for number, line in enumerate(lines) if "/manifest-" in line][-1:]
    assert len(files) == 200
    assert max(files) < at < manifest
    (here / "d0/0").unlink()
    synced.sync(here)
    assert "manifest-project" in trace.read_text()
    assert "pending-project" not in trace.read_text()
    assert tree(synced.project) == tree(here)
