"""Syncing several nodes: the laptop sends each byte once, and a node that fails does not hold up the
others."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.agentnode import free_port, until
from support.localsync import LocalCluster

from agent.node.link import Link
from agent.sync import relay
from cloudddp.agent.protocol.manifest import Entry
from cloudddp.agent.protocol.transfer import (
    ALIVE,
    BATCH,
    DONE,
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
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.job import sync, transfer


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
    sent = {}
    for count in (1, 2, 5):
        cluster = LocalCluster(tmp_path / f"nodes{count}", count)
        cluster.sync(here)
        assert all(same(here, node.project) for node in cluster.nodes)
        sent[count] = cluster.sent
    assert max(sent.values()) < 1.02 * min(sent.values())
    assert sent[1] < 1.02 * size_of(here)


def test_transfer_that_lasts_is_reported_in_bytes(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "REPORT", 0.0)
    cluster = LocalCluster(tmp_path / "nodes", 2)
    lines = [line for line in cluster.sync(here) if line.startswith("sent ")]
    assert lines[0].endswith("/s")
    assert "of 11.4 MiB" in lines[-2]
    assert lines[-1] == "sent all of 11.4 MiB"


def test_listing_is_passed_on_before_this_node_has_compared_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other nodes begin to compare when the first one has finished."""
    monkeypatch.setattr(relay, "ALIVE", 0.05)
    secret = "s" * 64
    (tmp_path / "a").write_text("1")
    listing = Listing({"": {"a": Entry("f", 0o644, 1, 1, "")}})
    with closing(relay.Relay(tmp_path, secret, 1)) as one, connected(one, secret) as link:
        one.listed(frame_of(listing), listing)
        assert next_kind(link) == LISTING
        link.write_all(Wants(everything=True).frame(secret.encode()))
        assert next_kind(link) == ALIVE  # what it has is not yet known
        one.present([0])
        one.complete()
        while (kind := next_kind(link)) == ALIVE:
            pass
        assert (kind, next_kind(link)) == (BATCH, DONE)


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


def test_new_node_gets_the_files_from_another_one(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 2)
    cluster.sync(here)
    before = cluster.sent
    new = cluster.add()
    cluster.sync(here)
    assert same(here, new.project)
    assert cluster.sent - before < 0.01 * size_of(here)


def test_node_that_lacks_less_is_sent_less(here: Path, tmp_path: Path) -> None:
    """One node has everything but a file; a new one has nothing: only that file leaves the laptop."""
    cluster = LocalCluster(tmp_path / "nodes", 1)
    cluster.sync(here)
    before = cluster.sent
    (here / "changed").write_bytes(os.urandom(200_000))
    cluster.add()
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 250_000


def kill_once(cluster: LocalCluster, node: int, after: int) -> None:
    """Kill the agent of a node once the laptop has sent so many bytes to the first one."""

    def killed(to: int, sent: int) -> None:
        processes = cluster.runner.nodes[node].processes
        if to == 0 and sent >= after and processes[-1].poll() is None:
            processes[-1].kill()

    cluster.runner.on_sent = killed


@pytest.mark.parametrize("lost", [1, 2])
def test_lost_node_does_not_stop_the_others(here: Path, tmp_path: Path, lost: int) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 4)
    kill_once(cluster, lost, 5_000_000)
    with pytest.raises(NodeError, match=f"node {lost}: the connection broke"):
        cluster.sync(here)
    assert [same(here, node.project) for node in cluster.nodes] == [node != lost for node in range(4)]
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


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_slow_disk_of_the_first_node_does_not_hold_up_the_others(here: Path, tmp_path: Path) -> None:
    """They have all files, also on their disks, while the first one waits for its own."""
    cluster = LocalCluster(tmp_path / "nodes", 3)
    slow = "-e trace=syncfs,sync -e inject=syncfs,sync:delay_enter=20000000"
    cluster.runner.wrap[0] = f"strace -f -qq -o {tmp_path / 'trace'} {slow}"
    recorded = [node.home / ".cloudddp" / f"manifest-{PROJECT}.json" for node in cluster.nodes]
    thread = threading.Thread(target=cluster.sync, args=(here,))
    thread.start()
    until(lambda: recorded[1].exists() and recorded[2].exists())
    assert not recorded[0].exists()
    assert [same(here, node.project) for node in cluster.nodes] == [True] * 3
    thread.join()
    assert recorded[0].exists()
    assert cluster.sent < 1.02 * size_of(here)


def test_only_the_first_node_listens(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)
    found: list[list[bool]] = []

    def look(to: int, sent: int) -> None:
        if to == 0 and sent >= 4_000_000 and not found:
            until(lambda: all(node.processes for node in cluster.nodes))
            found.append([bool(listening(node.processes[-1].pid)) for node in cluster.nodes])

    cluster.runner.on_sent = look
    cluster.sync(here)
    assert found == [[True, False, False]]


def test_stranger_gets_nothing_from_a_node(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 2)
    answers: list[bytes] = []

    def connect(to: int, sent: int) -> None:
        if to == 0 and sent >= 4_000_000 and not answers:
            port = until(lambda: listening(cluster.nodes[0].processes[-1].pid))
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                stranger.sendall(b'{"nonce": "0"}\n')
                answers.append(stranger.makefile("rb").readline())
                stranger.sendall(b'{"seal": "0"}\n')
                answers.append(stranger.makefile("rb").read())

    cluster.runner.on_sent = connect
    cluster.sync(here)
    assert b'"seal"' in answers[0]
    assert answers[1] == b""
    assert all(same(here, node.project) for node in cluster.nodes)


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


def test_file_that_cannot_be_read_ends_the_sync_on_all_nodes(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 3)

    def replace() -> None:
        if (path := here / "package3" / "file57").is_file():
            path.unlink()
            path.mkdir()

    cluster.runner.on_probed = replace
    with pytest.raises(CloudDDPError, match=r"cannot read package3/file57, which the nodes need"):
        cluster.sync(here)
    cluster.runner.on_probed = lambda: None
    (here / "package3" / "file57").rmdir()
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)


def test_node_that_takes_everything_and_reports_nothing_is_named(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SILENCE", 8.0)  # an agent reports every 5 s
    cluster = LocalCluster(tmp_path / "nodes", 2)
    cluster.sync(here)
    (here / "new").write_bytes(b"x")
    silent = shlex.quote('case "$3" in *receive*) exec cat > /dev/null;; *) exec "$@";; esac')
    cluster.runner.wrap[1] = f"sh -c {silent} sh"
    with pytest.raises(NodeError, match="node 1 sent an answer that cloudddp cannot read"):
        cluster.sync(here)
    assert same(here, cluster.nodes[0].project)


def codecs_over_a_slow_link(cluster: LocalCluster, here: Path) -> list[int]:
    """Sync over a link of at most 4 MB/s, less than any compressor takes; return the codecs of the frames
    with files, in order."""
    found: list[int] = []

    def piece(_node: int, data: bytes) -> None:
        if data[:1] in (bytes((BATCH,)), bytes((PART,))):
            found.append(data[29 if data[0] == BATCH else 41])
            time.sleep(0.3)

    cluster.runner.on_piece = piece
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    return found


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
    cluster = LocalCluster(tmp_path / "nodes", 3)
    used = codecs_over_a_slow_link(cluster, text)
    assert used[0] == PLAIN
    assert used[-1] == ZLIB
    assert cluster.sent < 0.5 * size_of(text)


def test_files_that_are_compressed_already_are_sent_as_they_are(here: Path, tmp_path: Path) -> None:
    assert set(codecs_over_a_slow_link(LocalCluster(tmp_path / "nodes", 1), here)) == {PLAIN}


def test_new_node_gets_renamed_files_from_another_one(here: Path, tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "nodes", 1)
    cluster.sync(here)
    before = cluster.sent
    for number in range(3):
        (here / f"package{number}").rename(here / f"module{number}")
    (here / "large.bin").rename(here / "weights.bin")
    (here / "link").unlink()
    cluster.add()
    cluster.sync(here)
    assert all(same(here, node.project) for node in cluster.nodes)
    assert cluster.sent - before < 0.01 * size_of(here)


@pytest.mark.parametrize("limited", [0, 1])
def test_more_large_files_than_a_process_may_open(tmp_path: Path, limited: int) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}").write_bytes(os.urandom((1 << 20) + 1))
    cluster = LocalCluster(tmp_path / "nodes", 3)
    cluster.runner.wrap[limited] = "prlimit --nofile=40:40"
    cluster.sync(folder)
    assert all(same(folder, node.project) for node in cluster.nodes)
    assert cluster.sent < 1.02 * size_of(folder)
