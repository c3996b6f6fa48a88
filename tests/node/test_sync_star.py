"""Syncing several nodes: the laptop sends each byte once, and a node that fails does not hold up the
others."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.agentnode import free_port, until
from support.localsync import LocalCluster

from agent.node.link import Link
from agent.sync import relay
from cloudddp.agent.protocol.transfer import (
    BATCH,
    LISTING,
    PART,
    PLAIN,
    ZLIB,
    Frame,
    Listing,
    Wants,
    read_frame,
)
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import NodeError


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project of 12 MB: small files, one that comes in parts, a link."""
    folder = tmp_path / "here"
    for number in range(60):
        path = folder / f"package{number % 6}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(50_000))
    (folder / "large.bin").write_bytes(os.urandom(9_000_000))
    (folder / "link").symlink_to("large.bin")
    return folder


def same(here: Path, there: Path) -> bool:
    return subprocess.run(["diff", "-r", here, there], check=False, capture_output=True).returncode == 0


def size_of(here: Path) -> int:
    return sum(path.stat().st_size for path in here.rglob("*") if path.is_file() and not path.is_symlink())


def test_laptop_sends_each_byte_once_for_any_number_of_nodes(here: Path, tmp_path: Path) -> None:
    """Only the first node listens, and a stranger gets nothing from it. A node that is added gets the files
    from another one, also renamed ones: only what is new leaves the laptop."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    found: list[list[bool]] = []
    answers: list[bytes] = []

    def look(to: int, sent: int) -> None:
        if to != 0 or sent < 4_000_000 or found:
            return
        port = until(lambda: listening(cluster.nodes[0].processes[-1].pid))
        until(lambda: all(node.processes for node in cluster.nodes))
        found.append([bool(listening(node.processes[-1].pid)) for node in cluster.nodes])
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.sendall(b'{"nonce": "0"}\n')
            answers.append(stranger.makefile("rb").readline())
            stranger.sendall(b'{"seal": "0"}\n')
            answers.append(stranger.makefile("rb").read())

    cluster.runner.on_sent = look
    cluster.sync(here)
    assert found == [[True, False, False]]
    assert b'"seal"' in answers[0]
    assert answers[1] == b""
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent < 1.02 * size_of(here)
    before = cluster.sent
    for number in range(3):
        (here / f"package{number}").rename(here / f"module{number}")
    (here / "large.bin").rename(here / "weights.bin")
    (here / "link").unlink()
    (here / "changed").write_bytes(os.urandom(200_000))
    cluster.add()
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 300_000


def test_node_that_ends_before_it_has_compared_the_listing_ends_the_connections_to_it(tmp_path: Path) -> None:
    secret = "s" * 64
    with closing(relay.Relay(tmp_path, secret, 1)) as one, connected(one, secret) as link:
        one.listed(frame_of(Listing({})), Listing({}))
        assert next_kind(link) == LISTING
        link.write_all(Wants(everything=True).frame(secret.encode()))
        one.close()
        with pytest.raises(EOFError):
            while True:
                next_kind(link)


@contextlib.contextmanager
def connected(one: relay.Relay, secret: str) -> Iterator[Link]:
    """Yield a connection of another node."""
    port = free_port()
    one.listen("127.0.0.1", port)
    with closing(Link(socket.create_connection(("127.0.0.1", port)), secret, relay.PURPOSE)) as link:
        link.connect()
        yield link


def frame_of(listing: Listing) -> Frame:
    return read_frame(io.BytesIO(listing.frame(("s" * 64).encode())).read, ("s" * 64).encode())


def next_kind(link: Link) -> int:
    return read_frame(link.read_all, ("s" * 64).encode()).kind


def kill_once(cluster: LocalCluster, node: int, after: int) -> None:
    """Kill the agent of a node once the laptop has sent so many bytes to the first one."""

    def killed(to: int, sent: int) -> None:
        processes = cluster.runner.nodes[node].processes
        if to == 0 and sent >= after and processes[-1].poll() is None:
            processes[-1].kill()

    cluster.runner.on_sent = killed


def test_lost_node_does_not_stop_the_others(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)
    kill_once(cluster, 1, 5_000_000)
    with pytest.raises(NodeError, match="node 1: the connection broke"):
        cluster.sync(here)
    assert [same(here, node.project) for node in cluster.nodes] == [True, False, True]
    assert cluster.sent < 1.1 * size_of(here)
    cluster.runner.on_sent = lambda _node, _sent: None
    before = cluster.sent
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 0.01 * size_of(here)


def test_first_node_lost_the_others_continue_from_the_laptop(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)
    kill_once(cluster, 0, 5_000_000)
    with pytest.raises(NodeError, match="node 0: the connection broke"):
        cluster.sync(here)
    assert [same(here, node.project) for node in cluster.nodes] == [False, True, True]
    assert any("sending from this computer" in line for line in cluster.lines)


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
    lines = cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    warning = next(
        line for line in lines if line.startswith("warning: nodes cannot copy files from each other")
    )
    assert "node 0 cannot be reached at 127.0.0.1:" in warning


def listening(pid: int) -> int:
    """Return a port on which a process listens, or 0."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].partition(":")[2], 16)
    return 0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A project of 8 MB that can be compressed to a tenth: small files, and one that comes in parts."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.csv").write_text("".join(f"{number},{row},0.5\n" for row in range(8_000)))
    (folder / "large.csv").write_text("".join(f"{row},{row % 7}\n" for row in range(400_000)))
    return folder


def test_files_are_compressed_where_the_link_is_slow(text: Path, tmp_path: Path) -> None:
    """At most 4 MB/s, less than any compressor takes."""
    cluster = LocalCluster(tmp_path / "nodes", 2)
    used: list[int] = []

    def piece(_node: int, data: bytes) -> None:
        if data[:1] in (bytes((BATCH,)), bytes((PART,))):
            used.append(data[29 if data[0] == BATCH else 41])
            time.sleep(0.3)

    cluster.runner.on_piece = piece
    cluster.sync(text)
    assert all(same(text, node.project) for node in cluster.nodes)
    assert (used[0], used[-1]) == (PLAIN, ZLIB)
    assert cluster.sent < 0.5 * size_of(text)


def test_more_large_files_than_a_process_may_open(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}").write_bytes(os.urandom((1 << 20) + 1))
    cluster = LocalCluster(tmp_path / "nodes", 3)
    cluster.runner.wrap |= dict.fromkeys((0, 1), "prlimit --nofile=40:40")
    cluster.sync(folder)
    assert all(same(folder, node.project) for node in cluster.nodes)
    assert cluster.sent < 1.02 * size_of(folder)
