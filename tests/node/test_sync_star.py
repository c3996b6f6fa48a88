"""Syncing several nodes: the laptop sends each byte once, and a node that fails does not hold up the others.
A sync that follows one that was interrupted sends what is missing, and leaves nothing that is not wanted.
What a job wrote where a sync writes is kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from support.localsync import UP_TO_DATE, LocalCluster, put, same, tree

from agent.node import processes
from cloudddp.agent import client
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.jobs import StateFile
from cloudddp.agent.protocol.phases import JobPhase, Peer
from cloudddp.agent.protocol.results import PulledRequest
from cloudddp.agent.protocol.stacks import TOOLS
from cloudddp.agent.protocol.start import StartReply
from cloudddp.agent.protocol.transfer import FETCH
from cloudddp.cluster.connect import PROJECT
from cloudddp.config.spec import Config
from cloudddp.errors import NodeError
from cloudddp.job import py_spy, sync
from cloudddp.job.project_files import of_config
from cloudddp.job.ranks import LaunchNode
from cloudddp.job.results.restore import restore


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A project of 12 MB: small files, one that comes in parts, a link."""
    folder = tmp_path / "large"
    put(folder, {f"package{number % 6}/file{number}": os.urandom(50_000) for number in range(60)})
    put(folder, {"large.bin": os.urandom(9_000_000)})
    (folder / "link").symlink_to("large.bin")
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def begins(piece: bytes, kind: int) -> bool:
    """Return whether a frame begins here, with a head below 64 KiB. The rest of a large frame, in a piece of
    its own, may begin with any byte."""
    return piece.startswith(bytes((kind, 0, 0)))


def test_laptop_sends_each_byte_once_for_any_number_of_nodes(large: Path, tmp_path: Path) -> None:
    """A stranger gets nothing from a node that serves others. A node that is added gets the files from
    another one: only what is new leaves the laptop."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    cluster.runner.wrap |= dict.fromkeys((0, 1), "prlimit --nofile=40:40")  # fewer than there are files
    answers: list[bytes] = []

    def look(to: int, piece: bytes) -> None:
        if to != 1 or not begins(piece, FETCH):
            return
        peer = decode(piece[29:], Peer)  # after what begins a frame
        with socket.create_connection((peer.address, peer.port), 10) as stranger:
            stranger.sendall(b'{"nonce": "0"}\n')
            answers.append(stranger.makefile("rb").readline())
            stranger.sendall(b'{"seal": "0"}\n')
            answers.append(stranger.makefile("rb").read())

    cluster.runner.on_piece = look
    cluster.sync(large)
    assert b'"seal"' in answers[0]
    assert answers[1] == b""
    assert all(same(large, node.project) for node in cluster.nodes)
    assert cluster.sent < 1.02 * size_of(large)
    before = cluster.sent
    (large / "link").unlink()
    (large / "changed").write_bytes(os.urandom(200_000))
    cluster.add()
    assert "sending 1 file, 195.3 KiB, to 4 nodes; deleting 1 file" in cluster.sync(large)
    assert all(same(large, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 300_000
    before = cluster.sent
    (large / "large.bin").write_bytes(os.urandom(9_000_000))  # of the same size
    assert "sending 1 file, 8.6 MiB, to 4 nodes" in cluster.sync(large)
    assert cluster.sent - before < 1.02 * 9_000_000


def test_lost_node_does_not_stop_the_others(large: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)

    def kill_once(to: int, _piece: bytes) -> None:
        process = cluster.nodes[1].processes[-1]
        if to == 0 and cluster.nodes[0].sent >= 5_000_000 and process.poll() is None:
            process.kill()

    cluster.runner.on_piece = kill_once
    with pytest.raises(NodeError, match="node 1: the connection broke"):
        cluster.sync(large)
    assert [same(large, node.project) for node in cluster.nodes] == [True, False, True]
    assert cluster.sent < 1.1 * size_of(large)
    cluster.runner.on_piece = lambda _node, _piece: None
    before = cluster.sent
    cluster.sync(large)
    assert all(same(large, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 0.01 * size_of(large)


def test_full_disk_on_one_node_is_named_and_the_others_are_done(large: Path, tmp_path: Path) -> None:
    """No inode is left there: the disk is found to be full while files are written."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    full = cluster.nodes[1]
    (full.home / PROJECT).mkdir()
    mount = f"mount -t tmpfs -o size=900m,nr_inodes=20 tmpfs {full.home}/{PROJECT}"
    inside = shlex.quote(f'{mount} && exec "$@"')
    cluster.runner.wrap[1] = f"unshare --user --map-root-user --mount sh -c {inside} sh"
    with pytest.raises(NodeError, match=r"node 1: .*no space is left on this node's disk"):
        cluster.sync(large)
    assert [same(large, node.project) for node in cluster.nodes] == [True, False, True]


def test_nodes_that_cannot_reach_each_other_get_the_files_from_the_laptop(
    large: Path, tmp_path: Path
) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 2)
    alone = shlex.quote('ip link set lo up && exec "$@"')
    cluster.runner.wrap[1] = f"unshare --user --map-root-user --net sh -c {alone} sh"
    said = cluster.sync(large)
    assert all(same(large, node.project) for node in cluster.nodes)
    warning = said.partition("warning: nodes cannot copy files from each other")[2]
    assert "node 0 cannot be reached at 127.0.0.1:" in warning


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
    """It continues a large file, and deletes one that is no longer wanted; also one that is as the sync
    before has written it, and one that gets its former contents and another time. The manifest is written at
    the end; what is being written is recorded in a file of its own."""
    put(here, {"a": "1", "b/c": "2", "z": "1"})
    synced.sync(here)
    manifest, pending = (
        synced.home / ".cloudddp" / f"{name}-project.json" for name in ("manifest", "pending")
    )
    before, old = manifest.read_bytes(), tree(synced.project)
    assert not pending.exists()
    put(here, {"a": "3", "e": "4", "m": os.urandom(900_000), "n": os.urandom(8_000_000), "z": "22"})
    breaks(synced, here, 6_000_000)
    assert begun(synced)
    for name, found in tree(synced.project).items():  # a file is the old one or the new one
        assert found in (tree(here)[name], old.get(name))
    assert (synced.project / "e").exists()
    assert ((synced.project / "z").read_text(), manifest.read_bytes()) == ("1", before)
    assert set(json.loads(pending.read_text())["files"]) == {"a", "e", "m", "n", "z"}
    for name in ("e", "n", "z"):
        (here / name).unlink()
    put(here, {"a": "1", "large": os.urandom(8_000_000)})
    breaks(synced, here, 6_000_000)
    sent = synced.sent
    synced.sync(here)
    assert synced.sent - sent < 4_000_000
    assert tree(synced.project) == tree(here)
    assert not begun(synced)
    assert not pending.exists()
    assert UP_TO_DATE in synced.sync(here)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_killed_sync_leaves_nothing(here: Path, synced: LocalCluster, tmp_path: Path) -> None:
    """Killed while a file has a temporary name."""
    put(here, {name: name for name in ("top", "a/x", "a/b/y", "c/z", "c/y", "d/x", "d/y", "e", "f")})
    (here / "link").symlink_to("top")
    killed = "-e trace=utimensat -e inject=utimensat:signal=SIGKILL:when=8"
    synced.runner.wrap[0] = f"strace -f -qq -o {tmp_path / 'trace'} {killed}"
    with pytest.raises(NodeError):
        synced.sync(here)
    assert begun(synced)
    assert not {*tree(synced.project)} - {*tree(here)}
    synced.runner.wrap.clear()
    synced.sync(here)
    assert tree(synced.project) == tree(here)
    assert not begun(synced)


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


# -- what a job wrote where a sync writes: it is kept on the node, unless it was pulled ----------------------


OLD = dict[str, str | bytes](**{"model.pt": "old", "x/inner": "1", "big": b"3" * 1_500_000}, b="5", c="6")
OLD |= {"data": "2", "link": "7"}


@pytest.fixture
def used(tmp_path: Path, here: Path) -> LocalCluster:
    """A node that has the project, and on which a job was started."""
    put(here, OLD)
    used = LocalCluster(tmp_path / "nodes", 1)
    used.sync(here)
    put(used.home / ".cloudddp/jobs/20260101-000000-abcd", {"job.json": "{}", "began": ""})
    time.sleep(0.05)  # the file system's clock lags behind
    return used


def kept(used: LocalCluster) -> dict[str, bytes]:
    """Return what is kept, by its path in the project, and delete it."""
    found = {
        "/".join(path.relative_to(used.project / REPLACED).parts[1:]): path.read_bytes()
        for path in (used.project / REPLACED).rglob("*")
        if path.is_file()
    }
    shutil.rmtree(used.project / REPLACED, ignore_errors=True)
    return found


def test_what_a_job_wrote_is_kept_and_named(here: Path, used: LocalCluster) -> None:
    """A file that is synced, changed here, too, large, new or renamed here; a folder, a file and a link in
    the place of what it wrote."""
    of_job: dict[str, str | bytes] = dict.fromkeys(("b", "new", "name", "data", "link"), "of the job")
    of_job |= {"model.pt": "weights", "x/runs/1": "weights", "big": b"4" * 1_600_000}
    put(used.project, of_job)
    put(here, {"b": "also changed", "new": "of the laptop"})
    (here / "c").rename(here / "name")
    shutil.rmtree(here / "x")
    (here / "x").write_text("a file")
    (here / "data").unlink()
    put(here, {"data/inner": "x"})
    (here / "link").unlink()
    (here / "link").symlink_to("b")
    said = used.sync(here)
    of_job = {name: data if isinstance(data, bytes) else data.encode() for name, data in of_job.items()}
    assert kept(used) == of_job
    assert tree(used.project) == tree(here)
    named = r"warning: node 0: a job wrote [\w.]+, [\w.]+, [\w.]+, 5 more, which was not pulled"
    assert re.search(named, said), said
    assert f"{REPLACED}" in said


def test_files_that_are_no_loss_are_replaced_without_a_warning(here: Path, used: LocalCluster) -> None:
    """What was pulled, has the same contents, or is a cache. And what a job changed stays where it is deleted
    here."""
    put(used.project, {"model.pt": "weights"})
    time.sleep(0.05)
    client.call(used.runner, 0, PulledRequest("project", ("model.pt",), time.time_ns()))
    os.utime(used.project / "b")
    (used.project / "data").unlink()
    put(used.project, {"data/__pycache__/m.pyc": "x", "c": "changed"})
    (here / "c").unlink()
    assert "a job wrote" not in used.sync(here)
    assert kept(used) == {}
    assert (used.project / "c").read_text() == "changed"
    (used.project / "c").unlink()
    assert tree(used.project) == tree(here)


def test_what_a_job_writes_after_the_files_were_compared_is_kept(here: Path, used: LocalCluster) -> None:
    def write(text: object) -> None:
        if str(text).startswith("sending"):
            put(used.project, {"b": "of the job", "c": "of the job"})

    put(here, {"b": "also changed"})
    (here / "c").unlink()
    sync.sync(used.runner, used.cluster, Config(), files=of_config(here, Config()), progress=write)
    assert kept(used) == {"b": b"of the job"}
    assert (used.project / "c").read_text() == "of the job"


def test_results_are_not_put_back_while_a_job_runs(here: Path, used: LocalCluster) -> None:
    """Also where it has started since the first of them."""
    results = here / "results" / "20260101-000000-abcd"
    put(results, {"model.pt": "weights"})
    state = StateFile(
        "20260101-000000-abcd", 0, JobPhase.RUNNING, pid=os.getpid(), born=processes.born(os.getpid())
    )
    put(used.home / ".cloudddp/jobs/20260101-000000-abcd", {"state.json": encode(state)})
    with pytest.raises(NodeError, match="job 20260101-000000-abcd runs on this node"):
        restore(used.runner, used.cluster, [results], project=(), progress=lambda _: None)
    assert (used.project / "model.pt").read_text() == "old"


@pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")
def test_py_spy_goes_to_nodes_of_the_same_kind_that_lack_it(tmp_path: Path) -> None:
    """One that cannot take it is a warning."""
    tool = py_spy.local()
    assert tool is not None
    cluster, lines = LocalCluster(tmp_path, 6), list[object]()
    (cluster.nodes[5].home / TOOLS).write_text("a file where the folder should be")
    digests = {0: "", 1: tool.digest, 2: "0" * 64, 4: "", 5: ""}
    started = {node: StartReply(platform=tool.platform, tool=digest) for node, digest in digests.items()}
    started[3] = StartReply(platform="linux-riscv64")
    ips, probe = cluster.cluster.nodes, cast(Any, None)
    nodes = [
        LaunchNode(node, ips[node].private_ip, probe, start_reply=reply) for node, reply in started.items()
    ]
    py_spy.PySpyTransfer(cluster.runner, nodes, lines.append).wait()
    assert str(lines[0]) == "sending py-spy to 4 nodes, to read the stacks of a job that stalls"
    assert str(lines[-1]).startswith("warning: could not send py-spy; stacks may be less exact: node 5: ")
    programs = [node.home / TOOLS / "py-spy" for node in cluster.nodes[:5]]
    assert [path.exists() for path in programs] == [True, False, True, False, True]
    assert programs[4].read_bytes() == tool.path.read_bytes()
    shown = subprocess.run([programs[4], "--version"], capture_output=True, check=True).stdout
    assert shown.startswith(b"py-spy")
    assert cluster.sent < 1.02 * tool.path.stat().st_size
