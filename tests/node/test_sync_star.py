"""Syncing several nodes: the laptop sends each byte once, and a node that fails does not hold up the
others."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.localsync import LocalCluster, put, same

from cloudddp.agent.protocol.codec import decode
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.stacks import TOOLS
from cloudddp.agent.protocol.start import StartReply
from cloudddp.agent.protocol.transfer import END, FETCH, PART, PLAIN, ZLIB
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import NodeError
from cloudddp.job import py_spy


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project of 12 MB: small files, one that comes in parts, a link."""
    folder = tmp_path / "here"
    put(folder, {f"package{number % 6}/file{number}": os.urandom(50_000) for number in range(60)})
    put(folder, {"large.bin": os.urandom(9_000_000)})
    (folder / "link").symlink_to("large.bin")
    return folder


def size_of(here: Path) -> int:
    return sum(path.stat().st_size for path in here.rglob("*") if path.is_file() and not path.is_symlink())


def test_laptop_sends_each_byte_once_for_any_number_of_nodes(here: Path, tmp_path: Path) -> None:
    """A stranger gets nothing from a node that serves others. A node that is added gets the files from
    another one: only what is new leaves the laptop."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    cluster.runner.wrap |= dict.fromkeys((0, 1), "prlimit --nofile=40:40")  # fewer than there are files
    answers: list[bytes] = []

    def look(to: int, piece: bytes) -> None:
        if to != 1 or piece[:1] != bytes((FETCH,)):
            return
        peer = decode(piece[29:], Peer)  # after what begins a frame
        with socket.create_connection((peer.address, peer.port), 10) as stranger:
            stranger.sendall(b'{"nonce": "0"}\n')
            answers.append(stranger.makefile("rb").readline())
            stranger.sendall(b'{"seal": "0"}\n')
            answers.append(stranger.makefile("rb").read())

    cluster.runner.on_piece = look
    cluster.sync(here)
    assert b'"seal"' in answers[0]
    assert answers[1] == b""
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent < 1.02 * size_of(here)
    before = cluster.sent
    (here / "link").unlink()
    (here / "changed").write_bytes(os.urandom(200_000))
    cluster.add()
    assert "sending 1 file, 195.3 KiB, to 4 nodes; deleting 1 file" in cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 300_000


@pytest.mark.parametrize(
    ("lost", "has", "most"),
    [
        (1, [True, False, True], 1.1),
        (0, [False, True, True], 1.5),  # the next one gets the files from the laptop
    ],
)
def test_lost_node_does_not_stop_the_others(
    here: Path, tmp_path: Path, lost: int, has: list[bool], most: float
) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)

    def kill_once(to: int, sent: int) -> None:
        process = cluster.nodes[lost].processes[-1]
        if to == 0 and sent >= 5_000_000 and process.poll() is None:
            process.kill()

    cluster.runner.on_sent = kill_once
    with pytest.raises(NodeError, match=f"node {lost}: the connection broke"):
        cluster.sync(here)
    assert [same(here, node.project) for node in cluster.nodes] == has
    assert cluster.sent < most * size_of(here)
    cluster.runner.on_sent = lambda _node, _sent: None
    before = cluster.sent
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 0.01 * size_of(here)


def test_full_disk_on_one_node_is_named_and_the_others_are_done(here: Path, tmp_path: Path) -> None:
    """No inode is left there: the disk is found to be full while files are written."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    full = cluster.nodes[1]
    (full.home / PROJECT).mkdir()
    mount = f"mount -t tmpfs -o size=900m,nr_inodes=20 tmpfs {full.home}/{PROJECT}"
    inside = shlex.quote(f'{mount} && exec "$@"')
    cluster.runner.wrap[1] = f"unshare --user --map-root-user --mount sh -c {inside} sh"
    with pytest.raises(NodeError, match=r"node 1: .*no space is left on this node's disk"):
        cluster.sync(here)
    assert [same(here, node.project) for node in cluster.nodes] == [True, False, True]


def test_nodes_that_cannot_reach_each_other_get_the_files_from_the_laptop(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 2)
    alone = shlex.quote('ip link set lo up && exec "$@"')
    cluster.runner.wrap[1] = f"unshare --user --map-root-user --net sh -c {alone} sh"
    said = cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    warning = said.partition("warning: nodes cannot copy files from each other")[2]
    assert "node 0 cannot be reached at 127.0.0.1:" in warning


def test_files_are_compressed_where_the_link_is_slow(tmp_path: Path) -> None:
    """At most 4 MB/s, less than any compressor takes."""
    text, cluster = tmp_path / "text", LocalCluster(tmp_path / "nodes", 2)
    put(text, {f"{number}.csv": f"{number},0.5\n" * 10_000 for number in range(40)})
    put(text, {"large.csv": "0,1\n" * 1_500_000})
    used: list[int] = []

    def piece(_node: int, data: bytes) -> None:
        if data[:1] in (bytes((END,)), bytes((PART,))):
            used.append(data[66 if data[0] == END else 41])
            time.sleep(0.3)

    cluster.runner.on_piece = piece
    cluster.sync(text)
    assert all(same(text, node.project) for node in cluster.nodes)
    assert (used[0], used[-1]) == (PLAIN, ZLIB)
    assert cluster.sent < 0.5 * size_of(text)


# -- py-spy, which `launch` sends to the nodes that lack it --------------------------------------------------


@pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")
def test_py_spy_goes_to_nodes_of_the_same_kind_that_lack_it(tmp_path: Path) -> None:
    """One that cannot take it is a warning."""
    tool = py_spy.local()
    assert tool is not None
    cluster, lines = LocalCluster(tmp_path, 6), list[object]()
    (cluster.nodes[5].home / TOOLS).write_text("a file where the folder should be")
    started = {node: StartReply(platform=tool.platform) for node in (0, 4, 5)}
    started |= {
        1: StartReply(platform=tool.platform, tool=tool.digest),
        2: StartReply(platform=tool.platform, tool="0" * 64),
        3: StartReply(platform="linux-riscv64"),
    }
    py_spy.Sending(cluster.runner, cluster.cluster, started, lines.append).wait()
    assert str(lines[0]) == "sending py-spy to 4 nodes, to read the stacks of a job that stalls"
    warning = "warning: could not send py-spy; stacks may be less exact: node 5: "
    assert str(lines[-1]).startswith(warning)
    programs = [node.home / TOOLS / "py-spy" for node in cluster.nodes[:5]]
    assert [path.exists() for path in programs] == [True, False, True, False, True]
    assert programs[4].read_bytes() == tool.path.read_bytes()
    shown = subprocess.run([programs[4], "--version"], capture_output=True, check=True).stdout
    assert shown.startswith(b"py-spy")
    assert cluster.sent < 1.02 * tool.path.stat().st_size
