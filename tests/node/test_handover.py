"""Before a node ends, its newest snapshot is sent to a node that stays, with nobody connected."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.agentnode import Node, gang_of, until
from support.gangs import Gangs, Make
from support.imds import Metadata

from agent.node import link
from agent.share import handover
from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.snapshots import SnapshotSearch
from cloudddp.agent.protocol.start import Deadline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

SNAPSHOTS = SnapshotSearch("p", ("runs/**/*.bin",), ("runs/base.bin",))
# As most scripts do, only rank 0 saves.
SAVES = """
import os, signal, sys, time
def save(*_):
    if os.environ['RANK'] == os.environ['SAVER']:
        os.makedirs('runs/a', exist_ok=True)
        with open('runs/a/step.tmp', 'wb') as file: file.write(os.urandom(int(os.environ['SIZE'])))
        os.replace('runs/a/step.tmp', 'runs/a/step.bin')
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open('ready', 'w').close()
while True: time.sleep(0.05)
"""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.close()


def announce(metadata: Metadata) -> None:
    ends = datetime.now(UTC) + timedelta(seconds=120)
    metadata.found["spot/instance-action"] = json.dumps(
        {"action": "terminate", "time": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}
    )


def preempted(job: Gangs, metadata: Metadata, ending: int = 0, **changes: object) -> None:
    """Run a job on all nodes until one of them gets a spot notice and the job has ended, with all that
    follows."""
    job[ending].metadata = metadata.address
    env = {"SAVER": str(changes.pop("saver", ending)), "SIZE": str(changes.pop("size", 5_000_000))}
    job.start(*[SAVES] * len(job.nodes), env=env, **{"snapshots": SNAPSHOTS, **changes})
    for node in job.nodes:
        until((node.project / "ready").exists)
    for number in range(len(job.nodes)):
        job.pid(number, number)  # its wrapper passes SIGTERM on
    announce(metadata)
    verdict = job.verdict()
    assert verdict.first is not None
    assert (verdict.first.cause, verdict.first.node) == (Cause.NOTICE, ending)
    job.gone()


def held(node: Node) -> list[str]:
    return sorted(path.name for path in (node.project / "runs").rglob("*") if path.is_file())


TEXTS = [
    b"",
    b"\n",
    b"{}\n",
    b"[" * 70_000,
    b'{"nonce": 5}\n{"seal": ""}\n',
    b'{"nonce": "x"}\n{"seal": "' + b"0" * 64 + b'"}\n',
]


@contextlib.contextmanager
def strangers(peer: Peer) -> Iterator[None]:
    """A rank of another job connects to a port again and again, and says what it likes."""
    done = threading.Event()

    def connect() -> None:
        while not done.is_set():
            for text in TEXTS:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((peer.address, peer.port), 1.0) as one,
                ):
                    one.sendall(text)
                    one.settimeout(0.05)
                    one.recv(1000)
            time.sleep(0.01)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_newest_snapshot_is_sent_to_the_first_node_that_stays(gangs: Make, metadata: Metadata) -> None:
    """Nor do strangers keep it from that."""
    job = gangs(3)
    for node in job.nodes:
        old = node.project / "runs" / "old.bin"
        old.parent.mkdir()
        old.write_bytes(b"old")
        os.utime(old, (1e9, 1e9))
    with strangers(job.gang.peers[1]):
        preempted(job, metadata, 0)
    saved, copy = (job[n].project / "runs/a/step.bin" for n in (0, 1))
    assert copy.exists(), [job.log(number, number) for number in range(3)]
    assert copy.read_bytes() == saved.read_bytes()
    assert copy.stat().st_mtime_ns == saved.stat().st_mtime_ns
    assert [held(node) for node in job.nodes] == [["old.bin", "step.bin"]] * 2 + [["old.bin"]]
    note = "--- cloudddp: runs/a/step.bin, the newest snapshot of node 0, was copied to node 1 ---"
    for number in range(2):
        assert note in job.log(number, number).decode()


def test_connection_that_the_end_of_the_job_closes_is_tried_again(tmp_path: Path) -> None:
    """The agent of the node that stays has not yet closed the port at which it served the other agents."""
    request = Node(tmp_path / "home").starting("", gang=gang_of(2))
    keeper, answers = request.gang.peers[1], []

    def keep() -> None:
        for is_over in (False, False, True):
            accepted, _ = listener.accept()
            with contextlib.closing(link.Link(accepted, request.gang.secret, handover.PURPOSE)) as one:
                if is_over:
                    one.accept()
                    answers.append(one.read("snapshot", 10.0))
                    one.write("answer", "no")
                    one.write("end", "")

    with socket.create_server((keeper.address, keeper.port)) as listener:
        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        assert handover._send(request, SNAPSHOTS, keeper) is None
        thread.join(10.0)
    assert len(answers) == 1


def test_older_snapshot_and_other_files_are_not_sent(gangs: Make, metadata: Metadata) -> None:
    """Node 1 saves, and node 0 ends: what it holds is older. Node 1 has that since the start of the job."""
    job = gangs(2)
    (job[0].project / "runs").mkdir()
    (job[0].project / "runs/old.bin").write_bytes(b"old")
    (job[0].project / "runs/base.bin").write_bytes(b"a file of the project")
    (job[0].project / "runs/log.txt").write_bytes(b"no snapshot")
    preempted(job, metadata, 0, saver=1)
    assert held(job[1]) == ["old.bin", "step.bin"]
    assert b"copied" not in job.log(1, 1) + job.log(0, 0)


def test_nothing_is_sent_at_the_deadline(gangs: Make) -> None:
    """It ends all nodes."""
    job = gangs(2)
    job.start(
        SAVES,
        SAVES,
        env={"SAVER": "0", "SIZE": "9"},
        snapshots=SNAPSHOTS,
        deadline=Deadline(20.0, "2030-01-01 12:00 UTC"),
        save=18.0,
    )
    assert (first := job.verdict().first) is not None
    assert first.cause is Cause.NOTICE
    assert held(job[0]) == ["step.bin"]
    assert held(job[1]) == []


def test_node_that_cannot_write_is_named(gangs: Make, metadata: Metadata) -> None:
    """`runs` is a folder there that is not the project's own."""
    job = gangs(2)
    (job[1].project / "runs").mkdir()
    (job[1].project / "runs" / "a").mkdir()
    (job[1].project / "runs" / "a" / "step.bin").mkdir()
    preempted(job, metadata, 0)
    for number in range(2):
        text = job.log(number, number).decode()
        assert "the newest snapshot of node 0 was not copied to node 1: " in text
        assert "Is a directory" in text
    assert [path.name for path in job[1].project.rglob("*tmp*")] == []


def test_path_that_is_no_snapshot_is_refused(gangs: Make, metadata: Metadata, tmp_path: Path) -> None:
    """A node that was taken over offers a file of the project: its own agent was asked for other patterns."""
    job = gangs(2)
    (job[1].project / "train.py").write_text("print('mine')")
    job[0].metadata = metadata.address
    evil = SnapshotSearch("p", ("train.py",))
    requests = {
        job[0]: job[0].starting(SAVES, gang=job.gang, env={"SAVER": "7", "SIZE": "1"}, snapshots=evil),
        job[1]: job[1].starting(
            SAVES, first_rank=1, gang=job.gang, env={"SAVER": "7", "SIZE": "1"}, snapshots=SNAPSHOTS
        ),
    }
    job.start_requests(requests)
    for number in range(2):
        until((job[number].project / "ready").exists)
        job.pid(number, number)
    (job[0].project / "train.py").write_text("print('evil')")
    os.utime(job[0].project / "train.py", (time.time() + 60, time.time() + 60))
    announce(metadata)
    job.verdict()
    assert (job[1].project / "train.py").read_text() == "print('mine')"
    assert "'train.py' is no snapshot of this job" in job.log(1, 1).decode()
